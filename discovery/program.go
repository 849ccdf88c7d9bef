package discovery

import "time"

// Program is a separate program for facts from a vendor's library that no file of the kernel has.
// The library needs cgo and may hang or crash, which must not affect the agent. The program is
// optional: without it the agent uses only the kernel's files.
//
// The agent keeps the program running and lays its output over the host's file system. The family
// reads the output like any other file, and host recordings contain it. The program writes one line
// of text to its standard output after each scan. It scans again after a line on its standard
// input, and exits when the input is closed. Called in another way, the program may change a device
// and exit; see [Tools].
type Program struct {
	Name    string // "chandler-host": in the directory of the agent's executable, or on the PATH
	Library string // name of the library, for messages: "NVML"

	// Provides lists the facts that only the program has, for people; "" if the family has other
	// sources for them.
	Provides string

	// File is the path of the program's output on the host, for the family. No host has such a file on
	// its disk.
	File string

	// Driver is a path on the host, present while the vendor's kernel driver is loaded. The program
	// runs only then.
	Driver string

	// NeedsRoot limits the program to hosts with a configured driver root of the family.
	NeedsRoot bool

	// Service is the program's name in a host service, which runs the program for the agent; see
	// package hostservice. An agent without a host service runs the program itself.
	Service string

	// ChangeArgs is set if the family changes partitions with this program; see [Tools]. It returns the
	// program's additional arguments for a change, or an error if a value does not have the form of
	// the program's values. The agent runs a single change of a PCI function at a time.
	ChangeArgs func(c PartitionChange) ([]string, error)

	// Args returns the program's arguments. hostRoot is the directory of the host's files, and root
	// the configured driver root of the family, or ""; see [Host.Roots].
	Args func(hostRoot, root string) []string

	// Interval is the time between two scans of the program, 10 s if 0.
	Interval time.Duration

	// MaxSize is the maximum size of a text, in bytes.
	MaxSize int

	// Check returns an error if a text is invalid. The agent then stops the program.
	Check func(text string) error

	// Lost returns a replacement for the output of a program that will not run again soon: its earlier
	// output is no longer valid. With nil there is no such text.
	Lost func(reason error) []byte
}
