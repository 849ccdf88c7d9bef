package allocation

import (
	"cmp"
	"fmt"

	"tags.cncf.io/container-device-interface/specs-go"
)

// Node is a device node of the host.
type Node struct {
	Path  string `json:"path"`
	Type  string `json:"type"` // "c", "b" or "p"
	Major uint32 `json:"major,omitempty"`
	Minor uint32 `json:"minor,omitempty"`
}

// HasNumbers reports whether the major and minor numbers of the node are known.
func (n *Node) HasNumbers() bool { return n.Major != 0 || n.Minor != 0 }

// String returns the path and the numbers of a node.
func (n Node) String() string {
	if !n.HasNumbers() {
		return n.Path
	}
	return fmt.Sprintf("%s (%d:%d)", n.Path, n.Major, n.Minor)
}

// NumberText returns the type and the numbers of the node.
func (n *Node) NumberText() string { return fmt.Sprintf("%s %d:%d", n.Type, n.Major, n.Minor) }

// NodesIn returns the host's nodes that CDI edits describe.
func NodesIn(edits []*specs.DeviceNode) (nodes []Node) {
	for _, edit := range edits {
		n := Node{Path: cmp.Or(edit.HostPath, edit.Path), Type: edit.Type, Major: uint32(edit.Major), Minor: uint32(edit.Minor)}
		if n.Type == "u" {
			n.Type = "c" // "u" is an unbuffered character device, the same as "c"
		}
		nodes = append(nodes, n)
	}
	return nodes
}
