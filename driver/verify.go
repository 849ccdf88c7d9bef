package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// verify returns an error if the device differs from the device that was allocated, as far as this
// can be determined. It compares the device with the claim's earlier record, also from before a
// reboot, and with its nodes on the host, which verify stores in the result.
func verify(r *allocation.Result, host fs.FS, earlier *allocation.Result) error {
	if earlier != nil {
		if err := sameSilicon(r, earlier); err != nil {
			return err
		}
	}
	r.Nodes = nil
	for _, edit := range r.Edits.DeviceNodes {
		found, err := nodeOnHost(host, edit)
		if err != nil {
			return fmt.Errorf("device %s: %w", r.Device, err)
		}
		r.Nodes = append(r.Nodes, found)
	}
	return nil
}

// sameSilicon returns an error that describes how the device differs from the prepared device.
func sameSilicon(r, earlier *allocation.Result) error {
	if earlier.Identity != "" && r.Identity != "" && earlier.Identity != r.Identity {
		return fmt.Errorf("device %s was swapped: it is %s now and was %s when the claim was prepared", r.Device, r.Identity, earlier.Identity)
	}
	if earlier.Driver != "" && earlier.Driver != r.Driver {
		return fmt.Errorf("device %s has changed drivers: %q is bound to it now and %q was when the claim was prepared", r.Device, r.Driver, earlier.Driver)
	}
	return nil
}

// sameSince returns an error if the device was replaced after its allocation to the claim. It
// recognises a later allocation by its timestamp, which only servers since Kubernetes 1.36 store.
func (v *view) sameSince(claim *resourceapi.ResourceClaim, r *allocation.Result) error {
	seen, allocated := v.identities[r.Source], claim.Status.Allocation.AllocationTimestamp
	if seen.promisedTo == nil || allocated == nil {
		return nil
	}
	promised := seen.promisedTo.Load()
	if promised == nil {
		return fmt.Errorf("device %s was swapped: it is %s now and was %s; it is not yet known whether it was allocated to the claim before the swap", r.Device, seen.now, seen.before)
	}
	if at, was := (*promised)[claim.UID]; was && at.Equal(allocated) {
		return fmt.Errorf("device %s was swapped: it is %s now and was %s when the claim was allocated", r.Device, seen.now, seen.before)
	}
	return nil
}

// requireDriver returns an error for a device that has no driver and provides nothing to a
// container, such as a virtual function that its driver refused. The error is temporary, since a
// driver may bind to the device soon.
func requireDriver(device *rules.Offered) error {
	driver, edits := device.Attributes.String("driver"), &device.Edits
	switch {
	case device.Health.Condition != discovery.ConditionDriverUnbound, driver != "" && !pci.IsIdleDriver(driver):
		return nil
	case len(edits.DeviceNodes) > 0 || len(edits.NetDevices) > 0:
		return nil
	}
	return discovery.TransientError(fmt.Errorf("device %s: %s", device.Name, device.Health.Reason))
}

// verifyInterfaces returns a temporary error if a network interface for the container no longer has
// its name or belongs to another device. Shortly after the kernel creates an interface, udev
// renames it, and the agent scans only later. Meanwhile another device may have the name. An
// interface is in the directory of its device, or of a child such as a virtio device.
func verifyInterfaces(r *allocation.Result, device *discovery.Device, host fs.FS) error {
	for _, edit := range r.Edits.NetDevices {
		name := edit.HostInterfaceName
		if _, err := fs.Stat(host, path.Join(device.Source, "net", name)); err == nil {
			continue
		}
		const class = "sys/class/net"
		target, err := fs.ReadLink(host, path.Join(class, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("device %s: %w", r.Device, err)
		}
		if err != nil || !strings.HasPrefix(path.Join(class, target), device.Source+"/") {
			return discovery.TransientError(fmt.Errorf("device %s: its network interface is not called %s any more", r.Device, name))
		}
	}
	return nil
}

// replacedBy returns an error if another device has replaced the prepared one, or if the claim was
// given other device nodes. A device without a driver is not an error here, since its health shows
// this.
func replacedBy(r *allocation.Result, device *discovery.Device, stock exclusion.Stock) error {
	now := allocation.Result{Device: r.Device, Identity: device.Identity, Driver: device.Attributes.String("driver")}
	if now.Driver == "" {
		now.Driver = r.Driver
	}
	if err := sameSilicon(&now, r); err != nil {
		return err
	}
	if why := exclusion.RenumberedNodes(r.LastNodes(), []string{device.Name}, stock); why != "" {
		return fmt.Errorf("device %s has other nodes: %s", r.Device, why)
	}
	return nil
}

// nodeOnHost returns the device node of an edit as found on the host. It returns an error if the
// node does not match the edit.
func nodeOnHost(host fs.FS, edit *specs.DeviceNode) (allocation.Node, error) {
	name := edit.HostPath
	if name == "" {
		name = edit.Path
	}
	info, err := fs.Stat(host, strings.TrimPrefix(name, "/"))
	if errors.Is(err, fs.ErrNotExist) {
		return allocation.Node{}, fmt.Errorf("device node %s is missing", name)
	}
	if err != nil {
		return allocation.Node{}, fmt.Errorf("device node %s: %w", name, err)
	}
	found, err := discovery.CheckNode(edit, info)
	if err != nil {
		return allocation.Node{}, err
	}
	return allocation.NodesIn([]*specs.DeviceNode{found})[0], nil
}
