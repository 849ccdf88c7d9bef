package inventory

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/natural"
)

// Attributes defined by Kubernetes.
const (
	attrBusID = deviceattribute.StandardDeviceAttributePCIBusID
	attrRoot  = deviceattribute.StandardDeviceAttributePCIeRoot
	attrNUMA  = deviceattribute.StandardDeviceAttributeNUMANode
)

// placeOf returns the position of a device, from its directory in /sys and its attributes.
func placeOf(d *discovery.Device) Place {
	p := Place{Address: d.Attributes.String(attrBusID), Root: d.Attributes.String(attrRoot)}
	if strings.HasPrefix(d.Source, "sys/") {
		p.Path = "/" + d.Source
	}
	var path []string
	for element := range strings.SplitSeq(d.Source, "/") {
		switch {
		case sysfs.IsPCIAddress(element):
			path = append(path, element)
		case strings.HasPrefix(element, "pci") && strings.Contains(element, ":"):
			p.Root = element
		}
	}
	if n := len(path); n > 0 {
		p.Address, p.Bridges = cmp.Or(p.Address, path[n-1]), path[:n-1]
	}
	if node := d.Attributes[attrNUMA].IntValue; node != nil {
		number := int(*node)
		p.NUMA = &number
	}
	if speed := d.Attributes["linkSpeed"].IntValue; speed != nil {
		p.Speed = *speed
	}
	if width := d.Attributes["linkWidth"].IntValue; width != nil {
		p.Width = *width
	}
	return p
}

// Link returns the maximum speed and width of the PCIe link, such as "Gen 5 ×16", or "" if they are
// unknown.
func (p *Place) Link() string {
	// The rates of the generations (PCI Express Base Specification 6.0, 4.2).
	generation := map[int64]int{2500: 1, 5000: 2, 8000: 3, 16000: 4, 32000: 5, 64000: 6}[p.Speed]
	if generation == 0 || p.Width == 0 {
		return ""
	}
	return fmt.Sprintf("Gen %d ×%d", generation, p.Width)
}

// addressIn returns the PCI address in a name such as "pci-0000-16-00-0".
func addressIn(name string) string {
	rest, is := strings.CutPrefix(name, "pci-")
	parts := strings.Split(rest, "-")
	if !is || len(parts) != 4 {
		return ""
	}
	address := fmt.Sprintf("%s:%s:%s.%s", parts[0], parts[1], parts[2], parts[3])
	if !sysfs.IsPCIAddress(address) {
		return ""
	}
	return address
}

// ShortAddress removes the PCI domain 0000, like lspci.
func ShortAddress(address string) string { return strings.TrimPrefix(address, "0000:") }

// ShortRoot returns the short name of a PCIe root: "17" for "pci0000:17".
func ShortRoot(root string) string { return ShortAddress(strings.TrimPrefix(root, "pci")) }

// Tree is the structure of the machine: NUMA nodes with the devices below their PCIe roots, devices
// without a position, and private links.
type Tree struct {
	Nodes   []Node    `json:"numaNodes"`
	Host    []Silicon `json:"host"` // devices of the host itself, such as /dev/kvm
	Fabrics []Fabric  `json:"fabrics"`
}

// Node is a NUMA node, or the group of devices without one.
type Node struct {
	Number *int     `json:"number,omitempty"` // nil without a NUMA node
	Placed bool     `json:"hasPosition"`      // whether the devices have a PCIe position
	Branch []Branch `json:"branches"`
}

// Branch contains the devices below one PCIe root, or below one of its switches.
type Branch struct {
	Root    string    `json:"root,omitempty"`   // "pci0000:17", "" without a PCIe position
	Switch  string    `json:"switch,omitempty"` // the bridge below which the devices are, "" for the root
	Silicon []Silicon `json:"physicalDevices"`
}

// Silicon is a physical device at its position: a single device, or a device with its partitions.
type Silicon struct {
	Name    string   `json:"name"`
	Kind    string   `json:"kind"`
	Address string   `json:"pciAddress,omitempty"`
	Whole   string   `json:"wholeDevice,omitempty"`   // the whole device, or ""
	Parts   []string `json:"partitions,omitempty"`    // the other devices, in order
	Noun    string   `json:"partitionKind,omitempty"` // usual name of the partitions: "VF", "function" or "partition"
	Fabric  int      `json:"-"`                       // number of its fabric in [Tree], from 1; 0 for none

	place    Place
	apart    bool // the whole is allocated independently of the partitions, like a physical function
	physical int  // number of physical devices, more than one for the FPGAs of a card
}

// All returns the names of all devices on the physical device.
func (s *Silicon) All() []string {
	if s.Whole == "" {
		return s.Parts
	}
	return append([]string{s.Whole}, s.Parts...)
}

// FirstName returns the whole, or the first partition.
func (s *Silicon) FirstName() string { return s.All()[0] }

// countedNames returns the devices for counts: the partitions, if there are any.
func (s *Silicon) countedNames() []string {
	if len(s.Parts) == 0 || s.apart {
		return s.All()
	}
	return s.Parts
}

// Silicon returns all physical devices, in the order of the tree.
func (t *Tree) Silicon() (all []*Silicon) {
	for n := range t.Nodes {
		for b := range t.Nodes[n].Branch {
			for s := range t.Nodes[n].Branch[b].Silicon {
				all = append(all, &t.Nodes[n].Branch[b].Silicon[s])
			}
		}
	}
	for s := range t.Host {
		all = append(all, &t.Host[s])
	}
	return all
}

// orderDevices returns the devices in the order of the tree.
func (t *Tree) orderDevices(byName map[string]*Device) []*Device {
	devices := []*Device{}
	for _, s := range t.Silicon() {
		for _, name := range s.All() {
			devices = append(devices, byName[name])
		}
	}
	return devices
}

// treeOf arranges devices by position.
func treeOf(devices []*Device) *Tree {
	t := &Tree{Nodes: []Node{}, Host: []Silicon{}, Fabrics: []Fabric{}}
	of := make(map[string]*Device)
	for _, d := range devices {
		of[d.Name] = d
	}
	byNode := make(map[int][]Silicon)
	for _, s := range group(devices) {
		if s.ofHost(of[s.FirstName()]) {
			t.Host = append(t.Host, s)
			continue
		}
		byNode[s.node()] = append(byNode[s.node()], s)
	}
	numbers := make([]int, 0, len(byNode))
	for number := range byNode {
		numbers = append(numbers, number)
	}
	slices.Sort(numbers)
	for _, number := range numbers {
		n := Node{Placed: number != noPlace, Branch: groupBranches(byNode[number])}
		if number < noNUMA {
			n.Number = &number
		}
		t.Nodes = append(t.Nodes, n)
	}
	t.link(of)
	return t
}

// noNUMA is the number of the group without a NUMA node, and noPlace of the group without a PCIe
// position either.
const (
	noNUMA  = 1 << 30
	noPlace = noNUMA + 1
)

func (s *Silicon) node() int {
	switch {
	case s.place.NUMA != nil:
		return *s.place.NUMA
	case s.place.Root == "":
		return noPlace
	}
	return noNUMA
}

// ofHost reports whether a device belongs to the host itself and has no position.
func (s *Silicon) ofHost(d *Device) bool {
	if s.place.Root != "" || s.place.NUMA != nil || len(s.Parts) > 0 && s.Whole != "" {
		return false
	}
	return d.Open || d.Kind == "virtualization" || d.Kind == "enclave" || d.Kind == "other"
}

// group joins the devices of each physical device, in the order of their positions.
func group(devices []*Device) []Silicon {
	byName := make(map[string][]*Device)
	var names []string
	for _, d := range devices {
		if byName[d.Silicon] == nil {
			names = append(names, d.Silicon)
		}
		byName[d.Silicon] = append(byName[d.Silicon], d)
	}
	all := make([]Silicon, 0, len(names))
	for _, name := range names {
		all = append(all, siliconOf(name, byName[name]))
	}
	slices.SortStableFunc(all, func(a, b Silicon) int {
		return cmp.Or(cmp.Compare(a.place.Root, b.place.Root), slices.Compare(a.place.Bridges, b.place.Bridges), cmp.Compare(a.Address, b.Address), natural.CompareNames(a.Name, b.Name))
	})
	return all
}

// siliconOf returns the physical device with its position and the names of its partitions.
func siliconOf(name string, devices []*Device) Silicon {
	s := Silicon{Name: name, physical: countPhysical(devices)}
	slices.SortStableFunc(devices, func(a, b *Device) int {
		return cmp.Or(cmp.Compare(vfIndex(a), vfIndex(b)), natural.CompareNames(a.Name, b.Name))
	})
	first := devices[0]
	for _, d := range devices {
		if d.Name == name {
			s.Whole, first = d.Name, d
		}
	}
	s.Kind, s.place, s.Address = first.Kind, first.Place, first.Place.Address
	own := addressIn(name)
	if len(devices) == 1 && first.Name == name && s.place.Root == "" {
		own = ""
	}
	// A partition is a function of its own, or belongs to one. The physical device has the position
	// of its physical function.
	if own != "" {
		s.Address = own
	}
	if s.Whole != "" && len(devices) == 1 || len(devices) == 1 && first.Offered.PartOf == nil {
		return s
	}
	s.Noun = "partition"
	for _, d := range devices {
		if d.Name == s.Whole {
			s.apart = d.Offered.PartOf != nil && len(d.Offered.PartOf.Counters) == 0
			continue
		}
		d.Index = len(s.Parts)
		s.Parts = append(s.Parts, d.Name)
		virtual := d.Offered.Attributes.String("function") == "virtual"
		switch {
		case virtual:
			s.Noun = "VF"
		case d.Offered.PhysicalName() != name:
			s.Noun = "function"
		}
		suffix, isPart := strings.CutPrefix(d.Name, name+"-")
		switch index := vfIndex(d); {
		case index >= 0 && virtual:
			d.Index = int(index)
			d.Label = fmt.Sprintf("VF %d", index)
		case isPart:
			d.Label = suffix
		case addressIn(d.Name) != "":
			d.Label = ShortAddress(addressIn(d.Name))
		default: // such as a mediated device, which has the address of its parent

			d.Label = d.Name
		}
	}
	return s
}

// countPhysical counts the physical devices.
func countPhysical(devices []*Device) int {
	names := make(map[string]bool)
	for _, d := range devices {
		names[d.Offered.PhysicalName()] = true
	}
	return len(names)
}

func vfIndex(d *Device) int64 {
	if index := d.Offered.Attributes["vfIndex"].IntValue; index != nil {
		return *index
	}
	return -1
}

// groupBranches groups physical devices by PCIe root, or by the nearest switch that has several of
// them and not all devices of the root.
func groupBranches(all []Silicon) (branches []Branch) {
	var roots []string
	byRoot := make(map[string][]Silicon)
	for _, s := range all {
		if byRoot[s.place.Root] == nil {
			roots = append(roots, s.place.Root)
		}
		byRoot[s.place.Root] = append(byRoot[s.place.Root], s)
	}
	for _, root := range roots {
		branches = append(branches, forkBelow(byRoot[root], 2)...) // the first bridge is a port of the root
	}
	for i := range branches {
		branches[i].Switch = branches[i].forkBridge()
	}
	return branches
}

// forkBelow groups the devices that have their first bridges in common, except the last of depth
// bridges. Devices that are alone below their bridge, or in one slot, stay together.
func forkBelow(all []Silicon, depth int) (branches []Branch) {
	below := make(map[string][]Silicon)
	key := func(s *Silicon) string {
		if len(s.place.Bridges) < depth {
			return ""
		}
		return s.place.Bridges[depth-1]
	}
	for _, s := range all {
		below[key(&s)] = append(below[key(&s)], s)
	}
	rest := -1 // index of the branch with the other devices
	for _, s := range all {
		group := below[key(&s)]
		switch {
		case key(&s) != "" && !inOneSlot(group):
			if group[0].Name == s.Name {
				branches = append(branches, forkBelow(group, depth+1)...)
			}
			continue
		case rest < 0:
			rest = len(branches)
			branches = append(branches, Branch{Root: s.place.Root})
		}
		branches[rest].Silicon = append(branches[rest].Silicon, s)
	}
	return branches
}

// inOneSlot reports whether all physical devices are functions of one PCI device.
func inOneSlot(all []Silicon) bool {
	slot := func(s *Silicon) string {
		before, _, _ := strings.Cut(s.Address, ".")
		return before
	}
	return !slices.ContainsFunc(all, func(s Silicon) bool { return slot(&s) != slot(&all[0]) })
}

// forkBridge returns the bridge at which the tree forks, "" for the root.
func (b *Branch) forkBridge() string {
	if inOneSlot(b.Silicon) {
		return ""
	}
	common := b.Silicon[0].place.Bridges
	for _, s := range b.Silicon[1:] {
		n := 0
		for other := s.place.Bridges; n < min(len(common), len(other)) && common[n] == other[n]; n++ {
		}
		common = common[:n]
	}
	if len(common) < 2 { // the first bridge is a port of the root
		return ""
	}
	return common[len(common)-1]
}
