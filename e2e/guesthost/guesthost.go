// Package guesthost opens the host of a guest for test programs that do an agent's work there.
package guesthost

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"chandler.dev/discovery/hostfs"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/provision"
)

// A Host is an agent's view of its host.
type Host struct {
	FS    fs.FS
	Write func(name, value string) error // writes an attribute; names are as in FS
	Boot  string                         // the kernel's boot ID

	// Ledger contains no allocations. It only holds leases of the test program.
	Ledger *ledger.Ledger
}

// Stock returns the ledger's view of the devices of the host, which is empty.
func Stock() exclusion.Stock { return &exclusion.Present{} }

// Open opens the host. After the given number of writes, the next write prints "dies" instead and
// ends the program with status 9. If the number is negative, all writes succeed.
func Open(writes int) (*Host, error) {
	fsys, err := hostfs.Open("/")
	if err != nil {
		return nil, err
	}
	write, err := provision.Writer("/")
	if err != nil {
		return nil, err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, err
	}
	dying := func(name, value string) error {
		if writes == 0 {
			fmt.Println("dies")
			os.Exit(9)
		}
		writes--
		return write(name, value)
	}
	dir, err := os.MkdirTemp("/run", "ledger")
	if err != nil {
		return nil, err
	}
	h := &Host{FS: fsys, Write: dying, Boot: strings.TrimSpace(string(boot))}
	h.Ledger = ledger.New(ledger.Config{Dir: dir, Boot: h.Boot})
	_, err = h.Ledger.Open(context.Background())
	return h, err
}
