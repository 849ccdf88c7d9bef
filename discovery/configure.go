package discovery

import (
	"context"
	"errors"
	"fmt"
)

// Work changes a host so that a device becomes what was asked of it. It may
// take longer than a caller can wait, and is begun by whoever holds the device
// alone. If its context ends before anything is changed, nothing is; later it
// goes on to its end.
type Work func(ctx context.Context) error

// Configurer returns a device as it is described now, and what is to be done to
// the host before it is as the parameters want it: nil if it is so already. It
// changes nothing itself. The error says why the device cannot be made so, or
// that it cannot be seen whether it is; that of the work, also that the device
// is not so after it. The consumer is the key of the ledger's entry for which the device is
// changed.
type Configurer func(d Device, want Parameters, consumer string) (Device, Work, error)

// ErrPassing is in the error of a [Configurer], or of whoever gives devices out, that refuses a device only for the
// moment, as a rule for seconds.
var ErrPassing = errors.New("for the moment")

// Passing returns an error that is [ErrPassing] and has the text of another.
func Passing(err error) error { return passingError{err} }

type passingError struct{ error }

func (e passingError) Unwrap() []error { return []error{e.error, ErrPassing} }

// Configurers joins the Configures of families. A device whose family
// has no Configure is as it should be.
func Configurers(host *Host, families []*Family) Configurer {
	return func(d Device, want Parameters, _ string) (Device, Work, error) {
		for _, f := range families {
			if f.Name == d.Family && f.Configure != nil && len(want) > 0 {
				return f.configured(host, d, want)
			}
		}
		return d, nil, nil
	}
}

// configured asks the family, and takes over what it describes anew. The rest
// stays, such as its health, which is a matter of more than one reading.
func (f *Family) configured(host *Host, d Device, want Parameters) (Device, Work, error) {
	now, work, err := f.Configure(host, d, want)
	if err != nil {
		return d, nil, fmt.Errorf("device %s: %w", d.Name, err)
	}
	if now.Attributes == nil {
		now.Attributes = Attributes{}
	}
	now.Attributes.SetString("family", f.Name)
	d.Identity, d.Source, d.Includes = now.Identity, now.Source, now.Includes
	d.Attributes, d.Edits = now.Attributes, now.Edits
	if err := d.Validate(); err != nil {
		return d, nil, fmt.Errorf("device %s: described anew: %w", d.Name, err)
	}
	if work == nil {
		return d, nil, nil
	}
	return d, func(ctx context.Context) error {
		err := work(ctx)
		if err == nil {
			err = f.confirm(host, d, want)
		}
		if err != nil {
			return fmt.Errorf("device %s: %w", d.Name, err)
		}
		return nil
	}, nil
}

// confirm reports why a device is not as it is wanted after the work.
func (f *Family) confirm(host *Host, d Device, want Parameters) error {
	_, work, err := f.Configure(host, d, want)
	if err != nil {
		return fmt.Errorf("look at it after the work: %w", err)
	}
	if work != nil {
		return errors.New("it is not as it was wanted, though the work was done")
	}
	return nil
}
