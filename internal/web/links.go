package web

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"chandler.dev/internal/inventory"
)

// bus is the line of a fabric with links between all devices.
type bus struct {
	Name string
	Text string
	Lane int
}

// ring is the drawing of a fabric with some links missing.
type ring struct {
	Name, Text string
	Nodes      []ringNode
	Chords     []string // SVG paths
}

type ringNode struct {
	ID           string
	Title        string
	Glyph        glyph
	X, Y         string // position of the glyph
	TextX, TextY string
	Label        string
}

// link lays out the private links. Fabrics with all links become buses, others become rings. At
// most two buses can be distinguished at the right side of the machine.
func (v *view) link() {
	const lanes = 2
	m, lane := v.machine, 0
	for i := range v.inv.Tree.Fabrics {
		f := &v.inv.Tree.Fabrics[i]
		members := make([]*silicon, len(f.Members))
		for i, name := range f.Members {
			members[i] = v.bySilicon[name]
			members[i].linkName = sentenceCase(f.Name)
		}
		for _, pair := range f.Links {
			a, b := v.bySilicon[pair[0]], v.bySilicon[pair[1]]
			a.links, b.links = append(a.links, b), append(b.links, a)
		}
		if !f.Complete || lane == lanes {
			m.Rings = append(m.Rings, v.ringOf(f, members))
			continue
		}
		b := bus{Name: sentenceCase(f.Name), Text: fmt.Sprintf("%s, %s", inventory.CountNoun(len(members), nounOf(members)), linkText(f))}
		if n := m.onlyNUMA(members); n != nil {
			b.Lane = len(n.Buses) + 1
			n.Buses = append(n.Buses, b)
		} else {
			lane++
			b.Lane = lane
			m.Buses = append(m.Buses, b)
		}
		for _, s := range members {
			s.Lane = b.Lane
		}
		m.addRail(members, b.Lane)
	}
}

// linkText describes the links of a fabric.
func linkText(f *inventory.Fabric) string {
	if len(f.Links) > 0 {
		return "each to each"
	}
	return "one fabric"
}

func nounOf(members []*silicon) string {
	kind := members[0].Kind
	for _, s := range members {
		if s.Kind != kind {
			return "device"
		}
	}
	switch kind {
	case "gpu", "npu", "fpga", "nic":
		return strings.ToUpper(kind)
	}
	return "device"
}

// onlyNUMA returns the NUMA node that contains all members, or nil.
func (m *machine) onlyNUMA(members []*silicon) *numa {
	if len(m.NUMA) < 2 {
		return nil
	}
	for _, n := range m.NUMA {
		here := 0
		for _, r := range n.Roots {
			for _, s := range r.Silicon {
				if slices.Contains(members, s) {
					here++
				}
			}
		}
		if here == len(members) {
			return n
		}
	}
	return nil
}

// addRail adds the lines from the roots of physical devices to their bus.
func (m *machine) addRail(members []*silicon, lane int) {
	local := m.onlyNUMA(members) != nil
	if !local {
		m.Rails = true
	}
	for _, n := range m.NUMA {
		for _, r := range n.Roots {
			if slices.ContainsFunc(r.Silicon, func(s *silicon) bool { return slices.Contains(members, s) }) {
				r.Lanes = append(r.Lanes, lane)
				r.Local = local
			}
		}
	}
}

// ringOf places physical devices on a circle, with a chord for each link.
func (v *view) ringOf(f *inventory.Fabric, members []*silicon) ring {
	const centre, radius, label = 150.0, 108.0, 136.0
	text := linkText(f)
	if len(f.Links) > 0 {
		text = inventory.CountNoun(len(f.Links), "link")
	}
	r := ring{Name: sentenceCase(f.Name), Text: fmt.Sprintf("%s, %s", inventory.CountNoun(len(members), nounOf(members)), text)}
	at := func(i int, radius float64) (x, y float64) {
		angle := 2*math.Pi*float64(i)/float64(len(members)) - math.Pi/2
		return centre + radius*math.Cos(angle), centre + radius*math.Sin(angle)
	}
	prefix := commonPrefix(members)
	for i, s := range members {
		x, y := at(i, radius)
		tx, ty := at(i, label)
		r.Nodes = append(r.Nodes, ringNode{
			ID: s.ID, Title: s.FirstDevice().Title, Glyph: s.Glyph(), X: trimZero(x - 7), Y: trimZero(y - 7),
			TextX: trimZero(tx), TextY: trimZero(ty + 3), Label: strings.TrimPrefix(s.Call(), prefix),
		})
	}
	for _, pair := range f.Links {
		x, y := at(slices.Index(f.Members, pair[0]), radius)
		x2, y2 := at(slices.Index(f.Members, pair[1]), radius)
		r.Chords = append(r.Chords, fmt.Sprintf("M%s %sL%s %s", trimZero(x), trimZero(y), trimZero(x2), trimZero(y2)))
	}
	return r
}

// commonPrefix returns the common beginning of names without addresses, before their numbers, such
// as "neuron". It returns "" if the names differ.
func commonPrefix(members []*silicon) string {
	prefix := strings.TrimRight(members[0].Name, "0123456789")
	for _, s := range members {
		if s.Addr != "" || strings.TrimRight(s.Name, "0123456789") != prefix || s.Name == prefix {
			return ""
		}
	}
	return prefix
}

// Glyph returns the glyph of the whole device or of the worst partition.
func (s *silicon) Glyph() glyph {
	worst := s.FirstDevice()
	if s.Whole != nil {
		return worst.Glyph()
	}
	for _, d := range s.Devices {
		if compareLevels(d.Level, worst.Level) < 0 {
			worst = d
		}
	}
	return worst.Glyph()
}
