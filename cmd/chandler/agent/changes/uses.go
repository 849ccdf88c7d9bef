package changes

import (
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/overdue"
)

// useChecker finds the users of PCI functions, within a time limit.
type useChecker struct {
	host     *discovery.Host
	finder   inuse.Finder
	snapshot func() *discovery.Snapshot // the devices of the host, nil before the first scan
	checks   overdue.Calls              // checks in progress, by the functions' directories
}

// checkUse returns the users of the functions as an error, nil if all are free; see
// [discovery.Tools].
func (c *useChecker) checkUse(keep bool, functions ...sysfs.Device) error {
	return c.checkLimited(functions[0], func(options inuse.Options) error { return inuse.CheckFree(c.finder, options, keep, functions...) })
}

// vfioUser returns the process that has a device under vfio open, or another function of the
// device's IOMMU group. vfioUser ignores the consumer's own pods, and returns "" if no such process
// is visible. VFIO lets one process at a time open a group (vfio_group_fops_open in drivers/vfio,
// EBUSY, Linux 5.16 to 6.18) or bind a device to its iommufd, and a group belongs to one iommufd
// (iommu_device_claim_dma_owner in drivers/iommu/iommu.c, since Linux 6.2).
func (c *useChecker) vfioUser(d *discovery.Device, own []types.UID) string {
	function := sysfs.At(c.host.FS, d.Source)
	if !sysfs.IsPCIAddress(function.Name()) || !discovery.IsVFIO(function.Driver()) {
		return ""
	}
	functions := []sysfs.Device{function}
	others, _ := pci.GroupOthers(c.host, function) // an error means that the function has no group
	for _, other := range others {
		if sibling := sysfs.At(c.host.FS, other); discovery.IsVFIO(sibling.Driver()) {
			functions = append(functions, sibling)
		}
	}
	err := c.checkLimited(function, func(options inuse.Options) error {
		options.Except = own
		for _, uses := range c.finder.FunctionUses(options, functions...) {
			if err := uses.KnownUses().Err(); err != nil {
				return err
			}
			if err := uses.Err(); errors.Is(err, inuse.ErrUnanswered) {
				return err
			}
		}
		return nil
	})
	if err == nil || errors.Is(err, overdue.Err) {
		return ""
	}
	return "an earlier consumer or a program of the host: " + err.Error()
}

// useCheckLimit is the time limit of a check for the users of a function. A process that hangs in the
// kernel can block the check for as long.
const useCheckLimit = 10 * time.Second

// checkLimited returns the result of a check for the users of a function, or an error if the check
// takes too long. No check starts while another check of the function hangs.
func (c *useChecker) checkLimited(function sysfs.Device, look func(inuse.Options) error) error {
	var options inuse.Options
	if s := c.snapshot(); s != nil {
		options.Known = s.Devices
	}
	err := c.checks.OverdueCall(function.Path)
	if err == nil {
		err = c.checks.Do(useCheckLimit, function.Path, "looking at what processes have open", func() error { return look(options) })
	}
	if errors.Is(err, overdue.Err) {
		return fmt.Errorf("%s: the agent cannot find out who uses it: %w", function.Name(), err)
	}
	return err
}
