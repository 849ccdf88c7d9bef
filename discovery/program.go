package discovery

// Program is a program of its own that says what no file of the kernel does,
// since only a vendor's library knows it. The library needs cgo and may hang or
// crash, neither of which is to happen to the agent. Nothing needs the program:
// without it the host is as the kernel's files tell.
//
// The agent keeps it running and lays what it says over the host's file system,
// where the family reads it like any other file, and recorded hosts have it. The
// program writes a text to its standard output whenever it has looked, each on a
// line, and ends when its standard input is closed.
type Program struct {
	Name    string // "chandler-nvml": beside the agent's own program, or on the PATH
	Library string // what it asks, in words for messages: "NVML"

	// File is the path on the host at which the family finds what the program
	// says. No such file lies on a host's disk.
	File string

	// Driver is a path on the host that is there while the vendor's kernel
	// driver is loaded, without which there is nothing to ask.
	Driver string

	// Args are the program's arguments, for a host whose files it sees below
	// hostRoot. Root is what the administrator named for the family, "" if
	// nothing; see [Host.Roots].
	Args func(hostRoot, root string) []string

	// MaxSize is how long a text may be, in bytes.
	MaxSize int

	// Check reports why a text makes no sense. The program is ended then.
	Check func(text string) error

	// Lost returns the text that is said in place of one of a program which will
	// not be back soon: nothing is known any more of what was.
	Lost func(reason error) []byte
}
