package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
)

// verify reports why the device is not what it was when it was allocated, as
// far as can be known: by what an earlier record of the claim says, also one of
// before a reboot, and by its nodes on the host, which it writes down.
func verify(r *ledger.Result, host fs.FS, earlier *ledger.Result) error {
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

// driven reports a device that no driver has and that gives a container nothing, as a virtual function that was made
// and that its driver refused. A driver may be about to take it.
func driven(device *rules.Offered) error {
	driver, edits := device.Attributes.String("driver"), &device.Edits
	switch {
	case device.Health.Condition != discovery.ConditionDriverUnbound, driver != "" && !discovery.Idle(driver):
		return nil
	case len(edits.DeviceNodes) > 0 || len(edits.NetDevices) > 0:
		return nil
	}
	return discovery.Passing(fmt.Errorf("device %s: %s", device.Name, device.Health.Reason))
}

// verifyInterfaces reports a network interface to be moved into a container that does not have its name, or
// is not the device's, any more. udev gives interfaces other names a moment after the kernel has made them, and
// the agent looks only after that; the name may by now be another device's. An interface is in the directory
// of its device, or of one that the kernel made of it, such as a virtio device.
func verifyInterfaces(r *ledger.Result, device *discovery.Device, host fs.FS) error {
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
			return discovery.Passing(fmt.Errorf("device %s: its network interface is not called %s any more", r.Device, name))
		}
	}
	return nil
}

// sameSilicon reports how the device differs from the one that was prepared.
func sameSilicon(r, earlier *ledger.Result) error {
	if earlier.Identity != "" && r.Identity != "" && earlier.Identity != r.Identity {
		return fmt.Errorf("device %s was swapped: it is %s now and was %s when the claim was prepared", r.Device, r.Identity, earlier.Identity)
	}
	if earlier.Driver != "" && earlier.Driver != r.Driver {
		return fmt.Errorf("device %s has changed drivers: %q is bound to it now and %q was when the claim was prepared", r.Device, r.Driver, earlier.Driver)
	}
	return nil
}

// replacedBy reports how the device in the place of the one that was prepared is
// another, or has other nodes than the claim was given. Where it has no driver,
// its health says so.
func replacedBy(r *ledger.Result, device *discovery.Device, stock ledger.Stock) error {
	now := ledger.Result{Device: r.Device, Identity: device.Identity, Driver: device.Attributes.String("driver")}
	if now.Driver == "" {
		now.Driver = r.Driver
	}
	if err := sameSilicon(&now, r); err != nil {
		return err
	}
	if why := ledger.Renumbered(r.LastNodes(), []string{device.Name}, stock); why != "" {
		return fmt.Errorf("device %s has other nodes: %s", r.Device, why)
	}
	return nil
}

// nodeOnHost returns the device node that an edit is about, as it is on the
// host. One that is not as the edit says is an error.
func nodeOnHost(host fs.FS, edit *specs.DeviceNode) (ledger.Node, error) {
	name := edit.HostPath
	if name == "" {
		name = edit.Path
	}
	info, err := fs.Stat(host, strings.TrimPrefix(name, "/"))
	if errors.Is(err, fs.ErrNotExist) {
		return ledger.Node{}, fmt.Errorf("device node %s is missing", name)
	}
	if err != nil {
		return ledger.Node{}, fmt.Errorf("device node %s: %w", name, err)
	}
	found, err := discovery.CheckNode(edit, info)
	if err != nil {
		return ledger.Node{}, err
	}
	return ledger.NodesIn([]*specs.DeviceNode{found})[0], nil
}
