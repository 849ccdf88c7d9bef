package discovery

import (
	"context"
	"errors"
	"fmt"

	"chandler.dev/discovery/sysfs"
)

// Making says how a device that is not there yet is made when somebody gets it: a virtual
// function, or a partition. Families describe such devices where the administrator allows
// it, in [Host], and only such as can be made at that moment.
//
// The device is described under the name, with the Silicon and what it Takes of it, that it
// will have once it is made, and with such attributes as are known beforehand. It has no
// nodes, and is healthy if it could be made. Once it is there, the family describes it like
// any other device, without Making. Nobody needs to remember which was which.
//
// The agent makes a device when a claim gets it, or as long as a classic resource that the
// administrator wrote has it, by [Family.Make]. When nobody has had any device of the Unit
// for a while, it undoes that by [Family.Unmake]. It undoes only what it has made itself.
type Making struct {
	// Unit names what is made in one step, and undone in one: all virtual functions of a
	// physical one, or one partition alone. It is a DNS label, and unique on the host.
	Unit string `json:"unit"`

	// Of is the kernel's directory of what the device is made of, as [Device.Source].
	Of string `json:"of"`

	// How is what the family has to know to make the unit and to undo it, in its own words.
	// It is written down before the unit is made, so that a later agent can undo it.
	How map[string]string `json:"how,omitempty"`
}

// Tools are what the work of [Family.Make] and [Family.Unmake] changes the host with. Each
// returns an error if the agent may not change the host.
type Tools struct {
	// Write writes an attribute, as of fs.FS. It does not wait for a kernel that does not
	// come back.
	Write func(name, value string) error

	// Busy returns why PCI functions cannot be changed, nil if no process and no part of the host uses one of them. The
	// error begins with the name of the function. All functions are looked up in one scan of the open files of all
	// processes, so a caller asks once for all. An interface that is up counts as a use unless the functions keep their
	// drivers.
	Busy func(keep bool, functions ...sysfs.Device) error

	// Note adds to [Making.How] of a unit that was made, or is being made or undone, what has come of
	// it. Where the unit is not written down any more, it does nothing.
	Note func(unit string, how map[string]string) error

	// Forget says that nothing of a unit is left to undo: somebody else has made it meanwhile, or it
	// could not be made.
	Forget func(unit string) error

	// Run runs the family's [Program] that Changes devices once, with arguments besides its own that have it
	// change a device, and returns what it writes.
	Run func(ctx context.Context, args ...string) ([]byte, error)
}

// Makes reports whether the family makes devices for those who get them.
func (f *Family) Makes() bool { return f.Make != nil && f.Unmake != nil }

// home is the kernel's directory without which the device is gone.
func (d *Device) home() string {
	if d.Making != nil {
		return d.Making.Of
	}
	return d.Source
}

// validate reports what is wrong with a device that is not there yet.
func (m *Making) validate(d *Device) error {
	switch {
	case m == nil:
		return nil
	case !plainLabel(m.Unit):
		return fmt.Errorf("it is made in unit %q, which is no DNS label", m.Unit)
	case m.Of == "":
		return errors.New("it is made of nothing")
	case len(d.Edits.DeviceNodes) > 0:
		return errors.New("it has nodes, and is not made yet")
	}
	return nil
}
