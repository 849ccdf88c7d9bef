package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// The PCI addresses of the devices in the recorded hosts.
var (
	gpus = []string{"0000:23:00.0", "0000:24:00.0", "0000:43:00.0", "0000:44:00.0", "0000:a3:00.0", "0000:a4:00.0", "0000:c3:00.0", "0000:c4:00.0"}
	npus = []string{"0000:1a:00.0", "0000:1b:00.0", "0000:34:00.0", "0000:35:00.0", "0000:9b:00.0", "0000:9c:00.0", "0000:b4:00.0", "0000:b5:00.0"}
)

// recordSize is the size of a sector, which a disk writes as a whole or not at all.
const recordSize = 512

// A journal records calls and answers across losses of power. It is on a disk of its own, so that
// synchronizing it does not synchronize the agent's files.
type journal struct {
	file    *os.File
	records int64

	boot      int             // number of this boot of the machine, from 1
	asked     map[string]bool // IDs in calls of Allocate
	allocated map[string]bool // IDs in successful calls of Allocate
	claims    map[string]bool // UIDs of claims in calls of Prepare
}

func openJournal(device string) (*journal, error) {
	file, err := os.OpenFile(device, os.O_RDWR|unix.O_DSYNC, 0)
	if err != nil {
		return nil, err
	}
	j := &journal{file: file, asked: make(map[string]bool), allocated: make(map[string]bool), claims: make(map[string]bool)}
	record := make([]byte, recordSize)
	for {
		if _, err := file.ReadAt(record, j.records*recordSize); err != nil {
			return nil, fmt.Errorf("read the journal: %w", err)
		}
		kind, name, found := strings.Cut(string(bytes.TrimRight(record, "\x00")), " ")
		if !found {
			return j, j.write("boot", "")
		}
		j.records++
		j.note(kind, name)
	}
}

func (j *journal) note(kind, name string) {
	switch kind {
	case "boot":
		j.boot++
	case "asked":
		j.asked[name] = true
	case "allocated":
		j.allocated[name] = true
	case "claim":
		j.claims[name] = true
	}
}

// write appends a record and returns when the record is on the disk.
func (j *journal) write(kind, name string) error {
	record := make([]byte, recordSize)
	copy(record, kind+" "+name)
	if _, err := j.file.WriteAt(record, j.records*recordSize); err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	j.records++
	j.note(kind, name)
	return nil
}

// claim returns the name, which is also the UID, of a claim for a device. The stand-in API server
// derives the device from the name.
func (j *journal) claim(address, more string) string {
	device := "pci-" + strings.NewReplacer(":", "-", ".", "-").Replace(address)
	return fmt.Sprintf("%s.%d-%s", device, j.boot, more)
}
