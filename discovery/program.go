package discovery

import "time"

// Program is a separate program that reports facts that only a vendor's library has, and no file of
// the kernel. The library needs cgo and may hang or crash, which must not affect the agent. The
// program is optional: without it the agent uses only the kernel's files.
//
// The agent keeps the program running and lays its output over the host's file system. The family
// reads the output like any other file, and host recordings contain it. The program writes one line
// of text to its standard output after each scan. It scans again when it reads a line from its
// standard input, and exits when that is closed. Called in another way, it may change a device and
// exit; see [Tools].
type Program struct {
	Name    string // "chandler-nvml": in the directory of the agent's executable, or on the PATH
	Library string // name of the library, for messages: "NVML"

	// File is the path on the host at which the family finds the program's output. No host has such a
	// file on its disk.
	File string

	// Driver is a path on the host that exists while the vendor's kernel driver is loaded. The program
	// runs only then.
	Driver string

	// NeedsRoot limits the program to hosts for which the administrator configured a driver root of
	// the family.
	NeedsRoot bool

	// Changes is set if the family changes devices with this program; see [Tools]. It returns the name
	// of the device that a call with args changes. The agent runs one change of a device at a time.
	Changes func(args []string) (device string)

	// Args returns the program's arguments. hostRoot is the directory of the host's files, and root
	// the driver root that the administrator configured for the family, or ""; see [Host.Roots].
	Args func(hostRoot, root string) []string

	// Interval is the time between two scans of the program, 10 s if 0.
	Interval time.Duration

	// MaxSize is the maximum size of a text, in bytes.
	MaxSize int

	// Check returns an error if a text is invalid. The agent then stops the program.
	Check func(text string) error

	// Lost returns the text that replaces the output of a program that will not run again soon: its
	// earlier output is no longer valid. With nil there is no such text.
	Lost func(reason error) []byte
}
