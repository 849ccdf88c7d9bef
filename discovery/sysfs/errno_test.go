package sysfs

import (
	"fmt"
	"io/fs"
	"syscall"
	"testing"
)

func TestErrnoName(t *testing.T) {
	for want, err := range map[string]error{
		"EBUSY": fmt.Errorf("write: %w", syscall.EBUSY),
		"EPERM": &fs.PathError{Op: "write", Err: syscall.EPERM},
		"":      fs.ErrNotExist,
	} {
		if got := ErrnoName(err); got != want {
			t.Errorf("%v is %q, want %q", err, got, want)
		}
	}
}
