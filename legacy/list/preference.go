package list

import (
	"cmp"
	"fmt"
	"slices"

	"k8s.io/dynamic-resource-allocation/deviceattribute"
)

// place is a unit among those that the kubelet may choose from.
type place struct {
	unit *Unit
	free []string // its IDs that may be chosen, in natural order

	names, silicon []string
	linked         []string // names of the devices at the other ends of its private links
	fabric, root   string
	numa           []int64
}

// Prefer chooses size of the available IDs, all of include among them: shares
// from the units that have most of them left, else units that are near to each
// other. Of equals it takes from the smaller neighbourhood, to keep the larger
// one whole, and then the first. IDs that count a capacity come from one unit.
// The answer is the same for the same question.
func (l *List) Prefer(available, include []string, size int) ([]string, error) {
	include = slices.Compact(slices.SortedFunc(slices.Values(include), Natural))
	candidates := slices.Compact(slices.SortedFunc(slices.Values(slices.Concat(available, include)), Natural))
	if size < len(include) || size > len(candidates) {
		return nil, fmt.Errorf("preferred allocation of %d devices: %d are available, %d must be included", size, len(candidates), len(include))
	}
	n := l.neighbourhood(candidates)
	if n.counts() != "" {
		if ids, found := n.amount(include, size); found {
			return ids, nil
		}
	}
	if len(include) > 0 || size == 0 {
		return n.choose(include, size).ids, nil
	}
	var best *choice
	for _, p := range n.places {
		if len(p.free) < n.most {
			continue
		}
		if c := n.choose(p.free[:1], size); best == nil || c.better(best) {
			best = c
		}
	}
	return best.ids, nil
}

// neighbourhood is the places to choose from, and how near they are.
type neighbourhood struct {
	places []*place
	near   [][]int // by place and place
	crowd  []int   // by place: how near all others are
	most   int     // free IDs of the place that has most of them
}

func (l *List) neighbourhood(ids []string) *neighbourhood {
	n := &neighbourhood{places: l.places(ids)}
	n.near, n.crowd = make([][]int, len(n.places)), make([]int, len(n.places))
	for i, p := range n.places {
		n.most = max(n.most, len(p.free))
		n.near[i] = make([]int, len(n.places))
		for j, other := range n.places {
			if i != j {
				n.near[i][j] = p.nearness(other)
				n.crowd[i] += n.near[i][j]
			}
		}
	}
	return n
}

// choice is a set of IDs that grows.
type choice struct {
	n     *neighbourhood
	ids   []string
	left  [][]string // by place: the IDs that are not chosen
	pull  []int      // by place: how near it is to what is chosen
	near  int        // how near the chosen are to each other
	crowd int        // how near they are to all others
}

// choose returns the IDs of include and the best others to make up size.
func (n *neighbourhood) choose(include []string, size int) *choice {
	c := &choice{n: n, left: make([][]string, len(n.places)), pull: make([]int, len(n.places))}
	for i, p := range n.places {
		c.left[i] = p.free
	}
	for i, p := range n.places {
		for _, id := range p.free {
			if slices.Contains(include, id) {
				c.add(i, id)
			}
		}
	}
	for len(c.ids) < size {
		next := c.next()
		c.add(next, c.left[next][0])
	}
	slices.SortFunc(c.ids, Natural)
	return c
}

// next returns the best place that has an ID left. There is one.
func (c *choice) next() int {
	best := -1
	for i, left := range c.left {
		if len(left) == 0 {
			continue
		}
		if best < 0 || cmp.Or(
			cmp.Compare(len(left), len(c.left[best])),
			cmp.Compare(c.pull[i], c.pull[best]),
			cmp.Compare(c.n.crowd[best], c.n.crowd[i]),
		) > 0 {
			best = i
		}
	}
	return best
}

// add chooses an ID of a place.
func (c *choice) add(place int, id string) {
	c.ids = append(c.ids, id)
	c.left[place] = slices.DeleteFunc(slices.Clone(c.left[place]), func(other string) bool { return other == id })
	c.near += c.pull[place]
	c.crowd += c.n.crowd[place]
	for i := range c.pull {
		c.pull[i] += c.n.near[place][i]
	}
}

// better reports whether a choice of as many IDs is to be preferred.
func (c *choice) better(than *choice) bool {
	return cmp.Or(cmp.Compare(c.near, than.near), cmp.Compare(than.crowd, c.crowd)) > 0
}

// places groups IDs by the unit that they stand for. One that is not listed,
// since the list has changed meanwhile, is a place of its own.
func (l *List) places(ids []string) []*place {
	var places []*place
	byUnit := make(map[*Unit]*place)
	for _, id := range ids {
		u := l.rows[id].unit
		p := byUnit[u]
		if p == nil || u == nil {
			p = newPlace(u)
			byUnit[u] = p
			places = append(places, p)
		}
		p.free = append(p.free, id)
	}
	return places
}

func newPlace(u *Unit) *place {
	if u == nil {
		return &place{}
	}
	return &place{
		unit:    u,
		names:   u.names,
		silicon: u.silicon,
		linked:  u.linkedTo(),
		fabric:  u.attribute("fabric"),
		root:    u.attribute(deviceattribute.StandardDeviceAttributePCIeRoot),
		numa:    u.numa,
	}
}

// nearness is more the nearer two places are: parts of one piece of silicon beat
// a private link of their own, which beats a common fabric of such links, which
// beats a common PCIe root, which beats a common NUMA node.
func (p *place) nearness(other *place) int {
	near := 0
	if common(p.silicon, other.silicon) {
		near += 16
	}
	if common(p.linked, other.names) || common(other.linked, p.names) {
		near += 8
	}
	if p.fabric != "" && p.fabric == other.fabric {
		near += 4
	}
	if p.root != "" && p.root == other.root {
		near += 2
	}
	if common(p.numa, other.numa) {
		near++
	}
	return near
}

// common reports whether two lists have an element in common.
func common[T comparable](a, b []T) bool {
	return slices.ContainsFunc(a, func(element T) bool { return slices.Contains(b, element) })
}
