package list

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/topology"
	"chandler.dev/internal/natural"
)

// maxCompared limits the total number of devices in sets for individual comparison. It allows all
// sets of 16 devices, which take some milliseconds. If there are more sets, only some are compared:
// a set for each first device, grown by the best device each time.
const maxCompared = 104_000

// PreferIDs chooses size of the available IDs, including all of include, by the resource's policy.
//
// If each device has one ID, sets of devices are compared by their weakest necessary link, since
// work on all devices waits for this link, and then by their nearness. Among equally near sets
// PreferIDs takes the set farthest from the remaining devices, so that later containers find near
// devices too, and then the first set.
//
// Shares come from the units with the most free shares, or with the fewest under
// [rules.PolicyPacked]. IDs of a capacity come from a single unit. The same arguments always give
// the same answer.
func (l *List) PreferIDs(available, include []string, size int) ([]string, error) {
	include = slices.Compact(slices.SortedFunc(slices.Values(include), natural.CompareNames))
	candidates := slices.Compact(slices.SortedFunc(slices.Values(slices.Concat(available, include)), natural.CompareNames))
	if size < len(include) || size > len(candidates) {
		return nil, fmt.Errorf("preferred allocation of %d devices: %d are available, %d must be included", size, len(candidates), len(include))
	}
	n := l.newCandidateSet(candidates, include)
	ids, enough := n.amountIDs(size)
	if !enough {
		ids = n.bestChoice(size).chosenIDs()
	}
	slices.SortFunc(ids, natural.CompareNames)
	return ids, nil
}

// candidate is a unit whose IDs the kubelet may choose.
type candidate struct {
	unit *Unit
	free []string // available IDs: first the IDs to include, then the others, each in natural order
	must int      // number of IDs to include
}

// candidateSet is a set of candidates with their nearness.
type candidateSet struct {
	policy rules.Policy
	units  []*candidate
	near   [][]int // by unit and unit
	crowd  []int   // by unit: sum of its nearness to all others
	must   int     // number of IDs to include

	joined, left []int // buffers for weakest
}

// newCandidateSet groups IDs by their unit. An ID no longer in the list becomes a unit of its own.
func (l *List) newCandidateSet(ids, include []string) *candidateSet {
	n := &candidateSet{policy: l.allocation.Policy, must: len(include)}
	must := make(map[string]bool, len(include))
	for _, id := range include {
		must[id] = true
	}
	byUnit := make(map[*Unit]*candidate)
	for _, id := range ids {
		u := l.rows[id].unit
		c := byUnit[u]
		if c == nil || u == nil {
			c = &candidate{unit: u}
			byUnit[u] = c
			n.units = append(n.units, c)
		}
		if must[id] {
			c.free = slices.Insert(c.free, c.must, id)
			c.must++
		} else {
			c.free = append(c.free, id)
		}
	}
	n.near, n.crowd = make([][]int, len(n.units)), make([]int, len(n.units))
	n.joined, n.left = make([]int, len(n.units)), make([]int, len(n.units))
	for i := range n.units {
		n.near[i] = make([]int, len(n.units))
		for j := range i {
			near := nearness(n.units[i].unit, n.units[j].unit)
			n.near[i][j], n.near[j][i] = near, near
			n.crowd[i] += near
			n.crowd[j] += near
		}
	}
	return n
}

func nearness(a, b *Unit) int {
	if a == nil || b == nil {
		return 0
	}
	return topology.Nearness(a.place, b.place)
}

// bestChoice returns the best choice of size IDs.
func (n *candidateSet) bestChoice(size int) *choice {
	start := n.empty()
	for i, c := range n.units {
		for range c.must {
			start.add(i)
		}
	}
	if start.size == size {
		return start
	}
	single := !slices.ContainsFunc(n.units, func(c *candidate) bool { return len(c.free) > 1 })
	if single && combinations(len(n.units)-start.size, size-start.size) <= maxCompared/size {
		var best *choice
		var free []int
		for i := range n.units {
			if start.taken[i] == 0 {
				free = append(free, i)
			}
		}
		start.compare(free, size, &best)
		return best
	}
	if start.size > 0 {
		start.grow(size)
		return start
	}
	var best *choice
	first := start.next(make([]int, len(n.units)))
	for i := range n.units {
		if n.byLeft(start.leftIn(i), start.leftIn(first)) != 0 {
			continue
		}
		c := n.empty()
		c.add(i)
		c.grow(size)
		if best == nil || c.isBetter(best) {
			best = c
		}
	}
	return best
}

// combinations returns the number of sets of k among n elements, or a number above maxCompared.
func combinations(n, k int) int {
	sets := 1
	for i := range min(k, n-k) {
		if sets = sets * (n - i) / (i + 1); sets > maxCompared {
			break
		}
	}
	return sets
}

// compare sets best to the best choice of size units with the units of c and others from free. It
// stops where too few units are left. Otherwise a choice of nearly all units would take as long as
// a comparison of all smaller sets.
func (c *choice) compare(free []int, size int, best **choice) {
	if c.size == size {
		if *best == nil || c.isBetter(*best) {
			*best = c.clone()
		}
		return
	}
	for i := 0; len(free)-i >= size-c.size; i++ {
		c.add(free[i])
		c.compare(free[i+1:], size, best)
		c.remove()
	}
}

// byLeft compares two numbers of free IDs. The unit with the first number is preferred if the
// result is positive.
func (n *candidateSet) byLeft(a, b int) int {
	if n.policy == rules.PolicyPacked {
		return cmp.Compare(b, a)
	}
	return cmp.Compare(a, b)
}

// byNearness compares two values of nearness. The first is preferred if the result is positive.
func (n *candidateSet) byNearness(a, b int) int {
	if n.policy == rules.PolicySpread {
		return cmp.Compare(b, a)
	}
	return cmp.Compare(a, b)
}

// choice is a growing set of IDs.
type choice struct {
	n     *candidateSet
	size  int
	units []int // units with chosen IDs, in the order of their first choice
	taken []int // by unit: number of chosen IDs
	pull  []int // by unit: its nearness to the chosen units
	near  int   // nearness of the chosen units to each other
	crowd int   // nearness of the chosen units to all others
	weak  int   // weakest link among the chosen units, or -1 if not computed
}

func (n *candidateSet) empty() *choice {
	return &choice{n: n, taken: make([]int, len(n.units)), pull: make([]int, len(n.units))}
}

func (c *choice) clone() *choice {
	clone := *c
	clone.units, clone.taken, clone.pull = slices.Clone(c.units), slices.Clone(c.taken), slices.Clone(c.pull)
	return &clone
}

// leftIn returns the number of a unit's free IDs.
func (c *choice) leftIn(unit int) int { return len(c.n.units[unit].free) - c.taken[unit] }

// add chooses the next ID of a unit.
func (c *choice) add(unit int) {
	if c.taken[unit] == 0 {
		c.units = append(c.units, unit)
	}
	c.count(unit, 1)
}

// remove removes the last unit, which has a single chosen ID.
func (c *choice) remove() {
	last := len(c.units) - 1
	c.count(c.units[last], -1)
	c.units = c.units[:last]
}

func (c *choice) count(unit, by int) {
	c.size += by
	c.weak = -1
	c.taken[unit] += by
	c.near += by * c.pull[unit]
	c.crowd += by * c.n.crowd[unit]
	for i, near := range c.n.near[unit] {
		c.pull[i] += by * near
	}
}

// grow adds the best unit for each missing ID.
func (c *choice) grow(size int) {
	nearest := make([]int, len(c.n.units)) // by unit: its nearness to the nearest chosen unit
	join := func(chosen int) {
		for i, near := range c.n.near[chosen] {
			nearest[i] = max(nearest[i], near)
		}
	}
	for _, chosen := range c.units {
		join(chosen)
	}
	for c.size < size {
		next := c.next(nearest)
		c.add(next)
		join(next)
	}
}

// next returns the best unit with a free ID. The caller ensures the existence of such a unit. The
// argument is each unit's nearness to the nearest chosen unit.
func (c *choice) next(nearest []int) int {
	best := -1
	for i := range c.n.units {
		if c.leftIn(i) > 0 && (best < 0 || cmp.Or(
			c.n.byLeft(c.leftIn(i), c.leftIn(best)),
			c.n.byLeft(-c.taken[i], -c.taken[best]), // a second share of the same device adds no performance
			c.n.byNearness(nearest[i], nearest[best]),
			c.n.byNearness(c.pull[i], c.pull[best]),
			cmp.Compare(c.n.crowd[best], c.n.crowd[i]),
		) > 0) {
			best = i
		}
	}
	return best
}

// weakestLink returns the nearness of the weakest link needed to connect all chosen units: the
// smallest edge of a maximum spanning tree.
func (c *choice) weakestLink() int {
	if c.weak >= 0 || len(c.units) < 2 {
		return max(c.weak, 0)
	}
	c.weak = math.MaxInt
	near := c.n.joined[:len(c.units)] // to the nearest joined unit
	left := c.n.left[:len(c.units)]
	copy(left, c.units)
	clear(near)
	for joined := left[0]; ; {
		next := -1
		left, near = left[1:], near[1:]
		for i, unit := range left {
			near[i] = max(near[i], c.n.near[joined][unit])
			if next < 0 || near[i] > near[next] {
				next = i
			}
		}
		if next < 0 {
			return c.weak
		}
		c.weak, joined = min(c.weak, near[next]), left[next]
		left[0], left[next] = left[next], left[0]
		near[0], near[next] = near[next], near[0]
	}
}

// isBetter reports whether c is better than a choice of the same size.
func (c *choice) isBetter(than *choice) bool {
	order := 0
	if c.n.policy != rules.PolicySpread {
		order = cmp.Compare(c.weakestLink(), than.weakestLink())
	}
	return cmp.Or(order, c.n.byNearness(c.near, than.near), cmp.Compare(than.crowd, c.crowd)) > 0
}

// chosenIDs returns the chosen IDs.
func (c *choice) chosenIDs() (ids []string) {
	for i, unit := range c.n.units {
		ids = append(ids, unit.free[:c.taken[i]]...)
	}
	return ids
}
