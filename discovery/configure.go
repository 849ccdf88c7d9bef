package discovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
)

// Work changes the host so that a device gets the requested configuration. Work may take longer
// than a caller can wait, so the caller allocates the device exclusively first. If ctx ends before
// the first change, Work changes nothing. After the first change, Work runs to its end.
type Work func(ctx context.Context) error

// Configurer returns the current description of a device, and the Work that gives the device the
// wanted parameters. Work is nil if the device already has them. A Configurer changes nothing
// itself. The error gives the reason why the device cannot be configured, or why its state cannot
// be read. Work also fails if the device does not have the parameters afterwards. consumer is the
// key of the consumer's entry in the ledger.
type Configurer func(d Device, want Parameters, consumer string) (Device, Work, error)

// ErrTransient marks the error of a temporary refusal by a [Configurer] or an allocation, usually
// for seconds.
var ErrTransient = errors.New("for the moment")

// TransientError returns an error with the text of err, wrapping [ErrTransient] too.
func TransientError(err error) error { return transientError{err} }

type transientError struct{ error }

func (e transientError) Unwrap() []error { return []error{e.error, ErrTransient} }

// JoinConfigurers joins the Configure functions of families. A device whose family has no Configure
// needs no work.
func JoinConfigurers(host *Host, families []*Family) Configurer {
	return func(d Device, want Parameters, _ string) (Device, Work, error) {
		for _, f := range families {
			if f.Name == d.Family && f.Configure != nil && len(want) > 0 {
				return f.configureDevice(host, d, want)
			}
		}
		return d, nil, nil
	}
}

// configureDevice calls the family's Configure and takes over the new description. The other fields
// of the device stay, such as its health, which takes several readings.
func (f *Family) configureDevice(host *Host, d Device, want Parameters) (Device, Work, error) {
	now, work, err := f.Configure(host, d, want)
	if err != nil {
		return d, nil, fmt.Errorf("device %s: %w", d.Name, err)
	}
	now.Attributes = maps.Clone(now.Attributes) // the family may return the device of a snapshot
	if now.Attributes == nil {
		now.Attributes = Attributes{}
	}
	now.Attributes.SetString("family", f.Name)
	d.Identity, d.Source, d.Includes = now.Identity, now.Source, now.Includes
	d.Attributes, d.Edits = now.Attributes, now.Edits
	if err := d.Validate(); err != nil {
		return d, nil, fmt.Errorf("device %s: read again: %w", d.Name, err)
	}
	if work == nil {
		return d, nil, nil
	}
	return d, func(ctx context.Context) error {
		err := work(ctx)
		if err == nil {
			err = f.confirmParameters(host, d, want)
		}
		if err != nil {
			return fmt.Errorf("device %s: %w", d.Name, err)
		}
		return nil
	}, nil
}

// confirmParameters returns an error if the device does not have the wanted parameters after the
// work.
func (f *Family) confirmParameters(host *Host, d Device, want Parameters) error {
	_, work, err := f.Configure(host, d, want)
	if err != nil {
		return fmt.Errorf("look at it after the work: %w", err)
	}
	if work != nil {
		return errors.New("it is not as it was wanted, though the work was done")
	}
	return nil
}

// Write describes one write to an attribute and its effect. A Write is data: a family returns
// Writes and does not write anything itself.
type Write struct {
	Path  string // of the attribute, as in fs.FS: "sys/bus/pci/drivers_probe"
	Value string // the written text

	// NameOf is a link. If set, the last element of its target is written instead of Value: the
	// address of a virtual function that does not exist yet at planning time.
	NameOf string

	// Shows is the path that shows the change: the attribute itself or the "driver" link of a device.
	// From and To are the values before and after. From is empty without a value, or if the kernel's
	// value is not predictable.
	Shows, From, To string

	// Always is set if the write must be made even after a failed write, because it completes an
	// earlier write.
	Always bool
}

// String describes the change: "/sys/…/sriov_numvfs: 0 -> 16".
func (w Write) String() string {
	return fmt.Sprintf("/%s: %s -> %s", w.Shows, orNone(w.From), orNone(w.To))
}

func orNone(value string) string {
	if value == "" {
		return "none"
	}
	return value
}

// Set returns the write of an attribute that reads back the written value.
func Set(path, from, to string) Write {
	return Write{Path: path, Value: to, Shows: path, From: from, To: to}
}
