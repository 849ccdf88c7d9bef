package web

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/internal/inventory"
)

// manyDivided is the number of divided physical devices from which partitions are drawn as cells.
const manyDivided = 9

// run is a pod's partitions of a physical device, or its free ones.
type run struct {
	N     int
	Who   string
	Parts string
	API   string
	Since *stamp
	Bad   string // the problem of a single partition, instead of all other fields
}

// HasTiles reports whether the partitions have room for a name and a consumer.
func (s *silicon) HasTiles() bool {
	return !s.isVirtual() && len(s.Parts()) <= maxGlyphs && !s.crowded
}

// IsBig reports whether the partitions need more than one row.
func (s *silicon) IsBig() bool { return len(s.Parts()) > maxGlyphs }

// FitsHalfRow reports whether the partitions fit into half a row.
func (s *silicon) FitsHalfRow() bool { return len(s.Parts()) <= 8 }

// Count returns the number of partitions by state.
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
	if !s.FirstDevice().ConsumersUnknown && (had > 0 || left > 0 || len(out) == 0) {
		words = append(words, counted{had, "allocated", ""})
		if left > 0 || out["move"] == 0 {
			words = append(words, counted{left, "free", ""})
		}
	}
	for _, kind := range []counted{{out["taken"], "allocated with the whole device", ""}, {out["move"], "waiting", ""}, {out["bad"], "unhealthy", "bad"}, {out["unk"], "not readable", "unk"}} {
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

// Size returns the number of partitions as text, with their size if all are alike.
func (s *silicon) Size() string {
	parts := s.Parts()
	text := inventory.CountNoun(len(parts), s.Noun)
	var sizes []string
	if memory := inventory.Bytes(parts[0].Memory); memory != "" {
		sizes = append(sizes, memory)
	}
	if cores, has := parts[0].Offered.Capacity["cores"]; has {
		sizes = append(sizes, inventory.CountNoun(int(cores.Value.Value()), "core"))
	}
	alike := !slices.ContainsFunc(parts, func(d *device) bool {
		return inventory.Bytes(d.Memory) != inventory.Bytes(parts[0].Memory) || partitionSize(d) != partitionSize(parts[0])
	})
	if alike && len(sizes) > 0 && !s.isVirtual() {
		text += " of " + strings.Join(sizes, ", ")
	}
	return text
}

// HeldWhole returns the consumers of the whole device, or "".
func (s *silicon) HeldWhole() string {
	if s.Whole == nil {
		return ""
	}
	return firstAndMore(s.Whole.Owners())
}

// Note returns the common problem of all devices, or "".
func (s *silicon) Note() string {
	note := ""
	for _, d := range s.Devices {
		if d.ProblemText() == "" {
			return ""
		}
		if note != "" && note != d.ProblemText() {
			return ""
		}
		note = d.ProblemText()
	}
	return note
}

// Head returns the name in the heading of the physical device.
func (s *silicon) Head() string {
	d := s.FirstDevice()
	if name := d.Offered.Attributes.String("pfName"); s.isVirtual() && name != "" {
		return name
	}
	return d.ShortModel()
}

// Sub returns the text after the name.
func (s *silicon) Sub() string {
	d := s.FirstDevice()
	if profile := s.Devices[len(s.Devices)-1].Offered.Attributes.String("profile"); profile != "" && s.isUniform("profile") {
		return profile
	}
	if s.Addr == "" && s.IsDivided() {
		return s.Name
	}
	if s.isVirtual() {
		return ""
	}
	return d.Detail
}

func (s *silicon) isUniform(name resourceapi.QualifiedName) bool {
	parts := s.Parts()
	for _, d := range parts {
		if d.Offered.Attributes.String(name) != parts[0].Offered.Attributes.String(name) {
			return false
		}
	}
	return true
}

// IsSolo reports whether the physical device is alone below its root.
func (s *silicon) IsSolo() bool { return s.solo && s.Root != "" }

// ShortRoot returns the short name of the root.
func (s *silicon) ShortRoot() string { return inventory.ShortRoot(s.Root) }

// Level returns the best level of the devices, so that the whole is bad only if all devices are.
func (s *silicon) Level() string {
	best := s.Devices[0].Level
	for _, d := range s.Devices {
		if compareLevels(d.Level, best) > 0 {
			best = d.Level
		}
	}
	return best
}

// runsAt returns the numbers of partitions by consumer.
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
	if !s.isVirtual() {
		prefix = ""
	}
	for _, d := range s.Parts() {
		if why := d.ProblemText(); why != "" {
			sick = append(sick, run{N: 1, Bad: d.Label + ": " + why})
		}
		if len(d.Holders) == 0 {
			if d.ProblemText() == "" {
				rest = append(rest, d.Index)
			}
			continue
		}
		k := key{firstAndMore(d.Owners()), inventory.APIName(d.Holders[0].API), d.Holders[0].Since}
		if numbers[k] == nil {
			order = append(order, k)
		}
		numbers[k] = append(numbers[k], d.Index)
	}
	slices.SortStableFunc(order, func(a, b key) int { return cmp.Compare(numbers[a][0], numbers[b][0]) })
	for _, k := range order {
		runs = append(runs, run{N: len(numbers[k]), Who: k.who, Parts: prefix + inventory.Ranges(numbers[k], "–"), API: k.api, Since: stampOf(k.since, at)})
	}
	if len(rest) > 0 && !s.FirstDevice().ConsumersUnknown {
		runs = append(runs, run{N: len(rest), Parts: prefix + inventory.Ranges(rest, "–")})
	}
	return append(runs, sick...)
}

// Second returns the last line of a device with its consumers.
func (d *device) Second() string {
	owners := d.Owners()
	switch {
	case d.Open && len(owners) == 0:
		return "any pod"
	case d.Open:
		return inventory.CountNoun(len(owners), "pod")
	case d.Shares.All > 0 && len(owners) > 0:
		return fmt.Sprintf("%d of %d shares: %s", d.Shares.Held, d.Shares.All, strings.Join(owners, ", "))
	case len(owners) > 0:
		return strings.Join(owners, ", ")
	case d.Holding == inventory.Taken || d.Holding == inventory.Partly:
		return "allocated with the whole device"
	case d.Move != nil:
		return "waiting"
	case d.ConsumersUnknown:
		return ""
	}
	return "free"
}

// VacantText returns the text for a partition without consumers in a panel.
func (d *device) VacantText() string {
	words := d.Second()
	if d.AwaitsCreation() {
		words = strings.TrimPrefix(words+", "+uncreatedText, ", ")
	}
	return words
}

// Pods returns the names of a partition's consumers without their namespaces.
func (d *device) Pods() string {
	var names []string
	for _, owner := range d.Owners() {
		_, name, _ := strings.Cut(owner, "/")
		names = append(names, cmp.Or(name, owner))
	}
	return strings.Join(names, ", ")
}
