package discovery

import "fmt"

// Write is one attribute that is to be written, and what changes by it. It is
// data: a family says what is to be written, and writes nothing.
type Write struct {
	Path  string // of the attribute, as of fs.FS: "sys/bus/pci/drivers_probe"
	Value string // what is written

	// NameOf is a link whose target's last element is written in place of Value:
	// the address of a virtual function that does not exist yet when this is
	// planned.
	NameOf string

	// Shows is where the change is seen, the attribute itself or the "driver"
	// link of a device, and From and To what is seen there; From is empty
	// where nothing is, or nobody knows what the kernel leaves there.
	Shows, From, To string

	// Always is set where the write is to be made even if one before it could
	// not be, since it ends what an earlier one began.
	Always bool
}

// String returns what changes: "/sys/…/sriov_numvfs: 0 -> 16".
func (w Write) String() string {
	return fmt.Sprintf("/%s: %s -> %s", w.Shows, orNone(w.From), orNone(w.To))
}

func orNone(value string) string {
	if value == "" {
		return "none"
	}
	return value
}

// Set returns the write of an attribute that shows what was written to it.
func Set(path, from, to string) Write {
	return Write{Path: path, Value: to, Shows: path, From: from, To: to}
}
