// Package guesthost is the host of a guest, as programs that do an agent's work there have it.
package guesthost

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"chandler.dev/discovery/hostfs"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/provision"
)

// Host is what an agent has of its host.
type Host struct {
	FS    fs.FS
	Write func(name, value string) error // writes an attribute, as of FS
	Boot  string                         // the kernel's boot ID

	// Ledger has no entry but the leases of the program.
	Ledger *ledger.Ledger
}

// Stock returns what the ledger knows of the devices of the host: nothing.
func Stock() ledger.Stock { return &ledger.Present{} }

// Open opens the host. The program says "dies" and ends with status 9 in place of the write after so
// many, and never if the number is negative.
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
