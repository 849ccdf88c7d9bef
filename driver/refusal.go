package driver

import (
	"context"
	"errors"
	"io/fs"

	"chandler.dev/internal/ledger/exclusion"
)

// Refusal is the category of the reason why a claim was not prepared, for metrics.
type Refusal string

// The reasons.
const (
	RefusedHeld        Refusal = "allocated"   // another consumer has the device
	RefusedGone        Refusal = "gone"        // the device is not on this node, or no longer
	RefusedChanged     Refusal = "changed"     // another device, driver or device node is in its place
	RefusedParameters  Refusal = "parameters"  // the claim's parameters are invalid, or the device does not support them
	RefusedConfiguring Refusal = "configuring" // the device is not configured yet, or its configuration failed
	RefusedWaiting     Refusal = "waiting"     // for another agent, another call, the first scan, or containers of an earlier allocation
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

// RefusalOf returns the reason in the error of a claim that was not prepared, or of devices that
// were not allocated.
func RefusalOf(err error) Refusal {
	var because *refusedError
	var blocked *exclusion.Blocked
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

// withRefusal adds a reason to an error. It returns nil and errors that have a reason unchanged.
// The text stays the same.
func withRefusal(reason Refusal, err error) error {
	if err == nil || RefusalOf(err) != RefusedOther && RefusalOf(err) != RefusedDisk {
		return err
	}
	return &refusedError{err, reason}
}
