package driver

import (
	"context"
	"errors"
	"io/fs"

	"chandler.dev/internal/ledger"
)

// Refusal is why a claim was not prepared, as one of a few words, so that refusals
// can be counted.
type Refusal string

// The reasons.
const (
	RefusedHeld        Refusal = "held"        // somebody else has the device
	RefusedGone        Refusal = "gone"        // the device is not on this node, or not any more
	RefusedChanged     Refusal = "changed"     // another device, driver or device node is in its place
	RefusedParameters  Refusal = "parameters"  // the claim's parameters are wrong, or the device cannot do what they say
	RefusedConfiguring Refusal = "configuring" // the device is not yet what the claim wants, or could not be made so
	RefusedWaiting     Refusal = "waiting"     // for another agent, another call, the first scan, or containers that go on
	RefusedDisk        Refusal = "disk"        // a file could not be written or read
	RefusedOther       Refusal = "other"
)

// Refusals returns all reasons.
func Refusals() []Refusal {
	return []Refusal{
		RefusedHeld, RefusedGone, RefusedChanged, RefusedParameters,
		RefusedConfiguring, RefusedWaiting, RefusedDisk, RefusedOther,
	}
}

// RefusalOf returns the reason for which a claim was not prepared, or devices were not
// allocated, from the error.
func RefusalOf(err error) Refusal {
	var because *refusedError
	var blocked *ledger.Blocked
	var file *fs.PathError
	switch {
	case errors.As(err, &because):
		return because.reason
	case errors.As(err, &blocked):
		return RefusedHeld
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, errStopping):
		return RefusedWaiting
	case errors.As(err, &file):
		return RefusedDisk
	}
	return RefusedOther
}

// refusedError is an error with its reason.
type refusedError struct {
	error
	reason Refusal
}

// Unwrap implements the interface of package errors.
func (r *refusedError) Unwrap() error { return r.error }

// because gives an error a reason, unless it has one or is nil. The text stays.
func because(reason Refusal, err error) error {
	if err == nil || RefusalOf(err) != RefusedOther && RefusalOf(err) != RefusedDisk {
		return err
	}
	return &refusedError{err, reason}
}
