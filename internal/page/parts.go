package page

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/internal/inventory"
)

// manyDivided is from how much divided silicon on its parts are drawn as cells.
const manyDivided = 9

// run is what one pod has of the parts of silicon, or what nobody has.
type run struct {
	N     int
	Who   string
	Parts string
	API   string
	Since *stamp
	Bad   string // what is wrong with one part, instead of all else
}

// Tiles reports whether the parts have room for a name and a holder.
func (s *silicon) Tiles() bool {
	return !s.virtual() && len(s.Parts()) <= maxGlyphs && !s.crowded
}

// Big reports whether there are more parts than a row has.
func (s *silicon) Big() bool { return len(s.Parts()) > maxGlyphs }

// Few reports whether the parts fill half a row at most.
func (s *silicon) Few() bool { return len(s.Parts()) <= 8 }

// Count says how many parts there are and how they are, as words and numbers.
func (s *silicon) Count() (words []counted) {
	parts := s.Parts()
	had, out := 0, make(map[string]int)
	left := 0
	for _, d := range parts {
		switch {
		case d.Level == "bad" || d.Level == "unk":
			out[d.Level]++
		case d.Holding == inventory.Held || d.Holding == inventory.Partly || d.Open && len(d.Holders) > 0:
			had++
		case d.Level == "move":
			out["move"]++
		case d.Holding == inventory.Taken:
			out["taken"]++
		default:
			left++
		}
	}
	if !s.First().Unasked && (had > 0 || left > 0 || len(out) == 0) {
		words = append(words, counted{had, "held", ""})
		if left > 0 || out["move"] == 0 {
			words = append(words, counted{left, "free", ""})
		}
	}
	for _, kind := range []counted{{out["taken"], "held with the whole", ""}, {out["move"], "waiting", ""}, {out["bad"], "unhealthy", "bad"}, {out["unk"], "not readable", "unk"}} {
		if kind.N > 0 {
			words = append(words, kind)
		}
	}
	return words
}

type counted struct {
	N     int
	Word  string
	Class string
}

// Size says how many parts there are, and of what size if they are alike.
func (s *silicon) Size() string {
	parts := s.Parts()
	text := inventory.Plural(len(parts), s.Noun)
	var sizes []string
	if memory := inventory.Bytes(parts[0].Memory); memory != "" {
		sizes = append(sizes, memory)
	}
	if cores, has := parts[0].Offered.Capacity["cores"]; has {
		sizes = append(sizes, inventory.Plural(int(cores.Value.Value()), "core"))
	}
	alike := !slices.ContainsFunc(parts, func(d *device) bool {
		return inventory.Bytes(d.Memory) != inventory.Bytes(parts[0].Memory) || takes(d) != takes(parts[0])
	})
	if alike && len(sizes) > 0 && !s.virtual() {
		text += " of " + strings.Join(sizes, ", ")
	}
	return text
}

// HeldWhole names who has all of the silicon, "" if nobody has.
func (s *silicon) HeldWhole() string {
	if s.Whole == nil {
		return ""
	}
	return some(s.Whole.Owners())
}

// Note is the reason that all sick parts have in common, "" if there is none.
func (s *silicon) Note() string {
	note := ""
	for _, d := range s.Devices {
		if d.Why() == "" {
			return ""
		}
		if note != "" && note != d.Why() {
			return ""
		}
		note = d.Why()
	}
	return note
}

// Name shown in the head of the silicon.
func (s *silicon) Head() string {
	d := s.First()
	if name := d.Offered.Attributes.String("pfName"); s.virtual() && name != "" {
		return name
	}
	return d.ShortModel()
}

// Sub is what stands behind the name.
func (s *silicon) Sub() string {
	d := s.First()
	if profile := s.Devices[len(s.Devices)-1].Offered.Attributes.String("profile"); profile != "" && s.uniform("profile") {
		return profile
	}
	if s.Addr == "" && s.Divided() {
		return s.Name
	}
	if s.virtual() {
		return ""
	}
	return d.Detail
}

func (s *silicon) uniform(name resourceapi.QualifiedName) bool {
	parts := s.Parts()
	for _, d := range parts {
		if d.Offered.Attributes.String(name) != parts[0].Offered.Attributes.String(name) {
			return false
		}
	}
	return true
}

// Solo reports whether it stands alone below its root.
func (s *silicon) Solo() bool { return s.solo && s.Root != "" }

// ShortRoot is the root as it is shown.
func (s *silicon) ShortRoot() string { return inventory.ShortRoot(s.Root) }

// Level of the silicon as a whole: bad if all of it is.
func (s *silicon) Level() string {
	best := s.Devices[0].Level
	for _, d := range s.Devices {
		if worse(d.Level, best) > 0 {
			best = d.Level
		}
	}
	return best
}

// runs returns who has how many of the parts.
func (s *silicon) runsAt(at time.Time) (runs []run) {
	type key struct {
		who, api string
		since    time.Time
	}
	numbers := make(map[key][]int)
	var order []key
	var sick []run
	var rest []int
	prefix := "VF "
	if !s.virtual() {
		prefix = ""
	}
	for _, d := range s.Parts() {
		if why := d.Why(); why != "" {
			sick = append(sick, run{N: 1, Bad: d.Label + ": " + why})
		}
		if len(d.Holders) == 0 {
			if d.Why() == "" {
				rest = append(rest, d.Index)
			}
			continue
		}
		k := key{some(d.Owners()), inventory.APIName(d.Holders[0].API), d.Holders[0].Since}
		if numbers[k] == nil {
			order = append(order, k)
		}
		numbers[k] = append(numbers[k], d.Index)
	}
	slices.SortStableFunc(order, func(a, b key) int { return cmp.Compare(numbers[a][0], numbers[b][0]) })
	for _, k := range order {
		runs = append(runs, run{N: len(numbers[k]), Who: k.who, Parts: prefix + inventory.Ranges(numbers[k], "–"), API: k.api, Since: stampOf(k.since, at)})
	}
	if len(rest) > 0 && !s.First().Unasked {
		runs = append(runs, run{N: len(rest), Parts: prefix + inventory.Ranges(rest, "–")})
	}
	return append(runs, sick...)
}

// Second is the last line of a device: who has it.
func (d *device) Second() string {
	owners := d.Owners()
	switch {
	case d.Open && len(owners) == 0:
		return "any pod"
	case d.Open:
		return inventory.Plural(len(owners), "pod")
	case d.Shares.All > 0 && len(owners) > 0:
		return fmt.Sprintf("%d of %d shares: %s", d.Shares.Held, d.Shares.All, strings.Join(owners, ", "))
	case len(owners) > 0:
		return strings.Join(owners, ", ")
	case d.Holding == inventory.Taken || d.Holding == inventory.Partly:
		return "held with the whole"
	case d.Move != nil:
		return "waiting"
	case d.Unasked:
		return ""
	}
	return "free"
}

// Vacant says in a panel that nobody has a part.
func (d *device) Vacant() string {
	words := d.Second()
	if d.Awaits() {
		words = strings.TrimPrefix(words+", "+unmade, ", ")
	}
	return words
}

// Pods are the names of who has a part, without their namespaces.
func (d *device) Pods() string {
	var names []string
	for _, owner := range d.Owners() {
		_, name, _ := strings.Cut(owner, "/")
		names = append(names, cmp.Or(name, owner))
	}
	return strings.Join(names, ", ")
}
