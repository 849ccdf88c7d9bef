package discovery

import "time"

// Program is a program of its own that says what no file of the kernel does,
// since only a vendor's library knows it. The library needs cgo and may hang or
// crash, neither of which is to happen to the agent. Nothing needs the program:
// without it the host is as the kernel's files tell.
//
// The agent keeps it running and lays what it says over the host's file system,
// where the family reads it like any other file, and recorded hosts have it. The
// program writes a text to its standard output whenever it has looked, each on a
// line. It looks again when it reads a line from its standard input, and ends when that is
// closed. Called otherwise, it may change a device, and end; see [Tools].
type Program struct {
	Name    string // "chandler-nvml": beside the agent's own program, or on the PATH
	Library string // what it asks, in words for messages: "NVML"

	// File is the path on the host at which the family finds what the program
	// says. No such file lies on a host's disk.
	File string

	// Driver is a path on the host that is there while the vendor's kernel
	// driver is loaded, without which there is nothing to ask.
	Driver string

	// NeedsRoot says that there is something to ask only where the administrator named a
	// root for the family.
	NeedsRoot bool

	// Changes is set if this is the program that the family changes devices with; see
	// [Tools]. It returns which device arguments change, in words of the program. One change of a
	// device is made at a time.
	Changes func(args []string) (device string)

	// Args are the program's arguments, for a host whose files it sees below
	// hostRoot. Root is what the administrator named for the family, "" if
	// nothing; see [Host.Roots].
	Args func(hostRoot, root string) []string

	// Interval is how often the program looks, 0 for every ten seconds.
	Interval time.Duration

	// MaxSize is how long a text may be, in bytes.
	MaxSize int

	// Check reports why a text makes no sense. The program is ended then.
	Check func(text string) error

	// Lost returns the text that is said in place of one of a program which will
	// not be back soon: nothing is known any more of what was. Nil means that none is.
	Lost func(reason error) []byte
}
