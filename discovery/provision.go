package discovery

import "fmt"

// Write describes one write to an attribute and its effect. A Write is data: a family returns
// Writes and does not write anything itself.
type Write struct {
	Path  string // of the attribute, as in fs.FS: "sys/bus/pci/drivers_probe"
	Value string // the written text

	// NameOf is a link. If set, the last element of its target is written instead of Value: the
	// address of a virtual function that does not exist yet at planning time.
	NameOf string

	// Shows is the path that shows the change: the attribute itself or the "driver" link of a device.
	// From and To are the values before and after. From is empty without a value, or if the kernel's
	// value is not predictable.
	Shows, From, To string

	// Always is set if the write must be made even after a failed write, because it completes an
	// earlier write.
	Always bool
}

// String describes the change: "/sys/…/sriov_numvfs: 0 -> 16".
func (w Write) String() string {
	return fmt.Sprintf("/%s: %s -> %s", w.Shows, orNone(w.From), orNone(w.To))
}

func orNone(value string) string {
	if value == "" {
		return "none"
	}
	return value
}

// Set returns the write of an attribute that reads back the written value.
func Set(path, from, to string) Write {
	return Write{Path: path, Value: to, Shows: path, From: from, To: to}
}
