package provision

import (
	"fmt"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/inuse"
)

// uses determines whether a PCI function is in use by a container or by the host. If the
// host's files are inconclusive, the function counts as in use.
type uses struct {
	view  *inuse.View
	known []discovery.Device

	held    map[string]string // consumers by device name
	heldErr error             // the reason why held is unknown
}

// readUses reads the current uses.
func readUses(host *discovery.Host, known []discovery.Device, held Held) *uses {
	u := &uses{view: inuse.FindUsers(host, inuse.Options{Known: known}), known: known}
	u.held, u.heldErr = held(known)
	return u
}

// useOf returns an error that describes the use of a function, or nil for an unused function. If
// the function is to be unbound from its driver, an interface that is up counts as use too: it
// was configured for use, and would disappear.
func (u *uses) useOf(function sysfs.Device, unbind bool) error {
	if err := u.consumerOf(function); err != nil {
		return err
	}
	if unbind {
		return u.view.UsesOf(function).Err()
	}
	return u.view.UsesOf(function).BoundUses().Err()
}

// consumerOf returns an error if the function, or a part of it, is allocated to a container.
func (u *uses) consumerOf(function sysfs.Device) error {
	if u.heldErr != nil {
		return fmt.Errorf("it is unknown whether a container has it: %w", u.heldErr)
	}
	name := discovery.DeviceName(function)
	for device, who := range u.held {
		if device == name || strings.HasPrefix(device, name+"-") || u.isOn(device, function) {
			return fmt.Errorf("in use: %s has %s", who, device)
		}
	}
	return nil
}

// isOn reports whether a device belongs to the function regardless of the device's name. A
// mediated device, for example, is named by its UUID.
func (u *uses) isOn(device string, function sysfs.Device) bool {
	for i := range u.known {
		if d := &u.known[i]; d.Name == device && inuse.IsWithin(d.Source, function) {
			return true
		}
	}
	uuid, mediated := strings.CutPrefix(device, "mdev-")
	return mediated && function.HasEntry(uuid)
}
