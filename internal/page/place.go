package page

import (
	"cmp"
	"fmt"
	"slices"

	"chandler.dev/internal/inventory"
)

// silicon is what stands in one place of the machine: a device, or the parts of one.
type silicon struct {
	*inventory.Silicon
	ID      string    // in the document
	Devices []*device // one, or the whole and its parts in order
	Whole   *device   // the device that is all of it, nil if there is none
	Addr    string    // short PCI address, "" if it has none
	Root    string    // PCIe root, such as "pci0000:17"
	Lane    int       // of its rail, 0 for none
	Runs    []run     // who has how many parts, of many

	linkName string // of the private links that it has
	links    []*silicon
	solo     bool // it stands alone below its root
	crowded  bool // so much is divided that parts have no room for names
}

// Parts are the devices besides the whole.
func (s *silicon) Parts() []*device {
	if !s.Divided() {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(s.Devices), func(d *device) bool { return d == s.Whole })
}

// First is the whole, or the first of the parts.
func (s *silicon) First() *device { return s.Devices[0] }

// Divided reports whether the silicon is shown by its parts.
func (s *silicon) Divided() bool { return len(s.Silicon.Parts) > 0 }

// virtual reports whether the parts are virtual functions.
func (s *silicon) virtual() bool { return s.Noun == "VF" }

// Call is how the silicon is called beside others.
func (s *silicon) Call() string { return cmp.Or(s.Addr, s.Name) }

// root is what stands below one PCIe root, or below one switch of it.
type root struct {
	Name    string // short, "" if the devices have no PCIe place
	Switch  string // short address, "" if the tree does not fork below a bridge
	Silicon []*silicon
	Lanes   []int // of the rails down its right side
	Local   bool  // the rails end in a bus within the NUMA node
}

// Solo reports whether there is one thing only.
func (r *root) Solo() bool { return len(r.Silicon) == 1 }

// numa is a NUMA node.
type numa struct {
	Title string
	Roots []*root
	Buses []bus
}

// Wide reports whether something in it needs room for its parts.
func (n *numa) Wide() bool {
	return slices.ContainsFunc(n.Roots, func(r *root) bool { return slices.ContainsFunc(r.Silicon, (*silicon).Divided) })
}

// machine is all devices in their places.
type machine struct {
	NUMA  []*numa
	Buses []bus
	Rings []ring
	Loose []*device // of the host itself
	Rails bool

	all []*silicon
}

// arrange shows the tree of an inventory.
func (v *view) arrange() {
	v.machine = &machine{}
	tree := v.inv.Tree
	for i := range tree.Nodes {
		node := &tree.Nodes[i]
		n := &numa{}
		switch {
		case !node.Placed:
			n.Title = "No PCIe place told"
		case node.Number != nil:
			n.Title = fmt.Sprintf("NUMA node %d", *node.Number)
		case len(tree.Nodes) > 1:
			n.Title = "No NUMA node told"
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
		if s.Divided() {
			divided++
		}
	}
	for _, s := range v.machine.all {
		s.crowded = divided >= manyDivided
		if s.Big() {
			s.Runs = s.runsAt(v.inv.At)
		}
	}
}

// rootsOf shows what stands below a root. Things without a PCIe place stand side by
// side.
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

// siliconOf shows silicon with its devices.
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

// documentID returns the ID of an element for a name. Elements of the page's own
// have others.
func documentID(name string) string {
	switch name {
	case "machine", "live", "q", "h-att", "h-stock", "h-mach", "h-who", "h-empty":
		return "device-" + name
	}
	return name
}
