package web

import (
	"cmp"
	"fmt"
	"slices"

	"chandler.dev/internal/inventory"
)

// silicon is a physical device at its position: a single device, or a device with its partitions.
type silicon struct {
	*inventory.Silicon
	ID      string    // in the document
	Devices []*device // a single device, or the whole followed by its partitions in order
	Whole   *device   // the whole device, or nil
	Addr    string    // short PCI address, or ""
	Root    string    // PCIe root, such as "pci0000:17"
	Lane    int       // of its rail, or 0
	Runs    []run     // partitions by consumer, if there are many

	linkName string // of its private links
	links    []*silicon
	solo     bool // alone below its root
	crowded  bool // too many divided devices, so that partitions have no room for names
}

// Parts returns the devices without the whole.
func (s *silicon) Parts() []*device {
	if !s.IsDivided() {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(s.Devices), func(d *device) bool { return d == s.Whole })
}

// FirstDevice returns the whole, or the first partition.
func (s *silicon) FirstDevice() *device { return s.Devices[0] }

// IsDivided reports whether the partitions are shown.
func (s *silicon) IsDivided() bool { return len(s.Silicon.Parts) > 0 }

// isVirtual reports whether the partitions are virtual functions.
func (s *silicon) isVirtual() bool { return s.Noun == "VF" }

// Call returns the short name among other physical devices.
func (s *silicon) Call() string { return cmp.Or(s.Addr, s.Name) }

// root contains the devices below one PCIe root, or below one of its switches.
type root struct {
	Name    string // short name, "" without a PCIe position
	Switch  string // short address, "" if the tree does not fork below a bridge
	Silicon []*silicon
	Lanes   []int // of the rails at its right side
	Local   bool  // the rails end in a bus within the NUMA node
}

// IsSolo reports whether there is a single physical device.
func (r *root) IsSolo() bool { return len(r.Silicon) == 1 }

// numa is a NUMA node.
type numa struct {
	Title string
	Roots []*root
	Buses []bus
}

// IsWide reports whether the node contains a divided device.
func (n *numa) IsWide() bool {
	return slices.ContainsFunc(n.Roots, func(r *root) bool { return slices.ContainsFunc(r.Silicon, (*silicon).IsDivided) })
}

// machine contains all devices at their positions.
type machine struct {
	NUMA  []*numa
	Buses []bus
	Rings []ring
	Loose []*device // devices of the host itself
	Rails bool

	all []*silicon
}

// arrangeTree adds the tree of the inventory to the view.
func (v *view) arrangeTree() {
	v.machine = &machine{}
	tree := v.inv.Tree
	for i := range tree.Nodes {
		node := &tree.Nodes[i]
		n := &numa{}
		switch {
		case !node.Placed:
			n.Title = "No PCIe position known"
		case node.Number != nil:
			n.Title = fmt.Sprintf("NUMA node %d", *node.Number)
		case len(tree.Nodes) > 1:
			n.Title = "Unknown NUMA node"
		}
		for j := range node.Branch {
			n.Roots = append(n.Roots, v.rootsOf(&node.Branch[j])...)
		}
		v.machine.NUMA = append(v.machine.NUMA, n)
	}
	for i := range tree.Host {
		s := v.siliconOf(&tree.Host[i], "")
		v.machine.Loose = append(v.machine.Loose, s.Devices...)
	}
	divided := 0
	for _, s := range v.machine.all {
		if s.IsDivided() {
			divided++
		}
	}
	for _, s := range v.machine.all {
		s.crowded = divided >= manyDivided
		if s.IsBig() {
			s.Runs = s.runsAt(v.inv.At)
		}
	}
}

// rootsOf returns the roots of a branch. Devices without a PCIe position become roots of their own.
func (v *view) rootsOf(b *inventory.Branch) (roots []*root) {
	r := &root{Name: inventory.ShortRoot(b.Root), Switch: inventory.ShortAddress(b.Switch)}
	for i := range b.Silicon {
		s := v.siliconOf(&b.Silicon[i], b.Root)
		if b.Root == "" {
			roots = append(roots, &root{Silicon: []*silicon{s}})
			continue
		}
		s.solo = len(b.Silicon) == 1
		r.Silicon = append(r.Silicon, s)
	}
	if len(r.Silicon) > 0 {
		roots = append(roots, r)
	}
	return roots
}

// siliconOf adds a physical device with its devices to the view.
func (v *view) siliconOf(of *inventory.Silicon, root string) *silicon {
	s := &silicon{Silicon: of, ID: documentID(of.Name), Root: root, Addr: inventory.ShortAddress(of.Address)}
	for _, name := range of.All() {
		d := v.devices[name]
		s.Devices = append(s.Devices, d)
		if name == of.Whole {
			s.Whole = d
		}
		v.of[name] = s
	}
	for _, d := range s.Devices {
		d.Title = titleOf(d, s)
	}
	v.machine.all = append(v.machine.all, s)
	v.bySilicon[of.Name] = s
	return s
}

// documentID returns the element ID for a name. It avoids the IDs of the document's own elements.
func documentID(name string) string {
	switch name {
	case "machine", "live", "q", "h-att", "h-stock", "h-mach", "h-who", "h-empty":
		return "device-" + name
	}
	return name
}
