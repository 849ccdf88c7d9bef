package provision

import (
	"fmt"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/inuse"
)

// uses tells whether a PCI function is in use: by a container that was given it, or
// by anybody else. If the files of the host do not tell, it counts as in use.
type uses struct {
	view  *inuse.View
	known []discovery.Device

	held    map[string]string // who holds a device, by its name
	heldErr error             // why that is not known
}

// readUses reads what is in use now.
func readUses(host *discovery.Host, known []discovery.Device, held Held) *uses {
	u := &uses{view: inuse.Look(host, inuse.Options{Known: known}), known: known}
	u.held, u.heldErr = held(known)
	return u
}

// of returns who uses a function, or nil if nobody does. If the function is to be
// unbound from its driver, an interface that is up counts as use too: it is
// prepared for use, and would be gone.
func (u *uses) of(function sysfs.Device, unbind bool) error {
	if err := u.holder(function); err != nil {
		return err
	}
	if unbind {
		return u.view.Of(function).Err()
	}
	return u.view.Bound(function).Err()
}

// holder tells whether a container has the function, or a part of it.
func (u *uses) holder(function sysfs.Device) error {
	if u.heldErr != nil {
		return fmt.Errorf("whether a container has it cannot be told: %w", u.heldErr)
	}
	name := discovery.DeviceName(function)
	for device, who := range u.held {
		if device == name || strings.HasPrefix(device, name+"-") || u.isOn(device, function) {
			return fmt.Errorf("in use: %s has %s", who, device)
		}
	}
	return nil
}

// isOn reports whether a device lies on the function, by whatever name: a mediated
// device is called by its UUID.
func (u *uses) isOn(device string, function sysfs.Device) bool {
	for i := range u.known {
		if d := &u.known[i]; d.Name == device && inuse.Within(d.Source, function) {
			return true
		}
	}
	uuid, mediated := strings.CutPrefix(device, "mdev-")
	return mediated && function.Exists(uuid)
}
