package kubectl

import (
	"cmp"
	"slices"
	"strings"

	"chandler.dev/internal/fleet"
	"chandler.dev/internal/terminal"
)

// stripLength limits the glyphs for the devices of a model.
const stripLength = 16

// order is the order of glyphs in a strip.
var order = []terminal.Glyph{
	terminal.Held, terminal.Partly, terminal.Moves, terminal.Unhealthy, terminal.Unread,
	terminal.Free, terminal.Degraded, terminal.OpenHeld, terminal.Open,
}

// deviceGlyph returns the glyph of a device. An unhealthy device has the glyph for its health, even
// while allocated.
func deviceGlyph(d *fleet.Device) terminal.Glyph {
	worst := terminal.Glyph(-1)
	for _, taint := range d.Taints {
		switch {
		case !fleet.BlocksPods(taint.Effect):
			worst = max(worst, terminal.Degraded)
		case taint.Condition == "unknown":
			return terminal.Unread
		default:
			return terminal.Unhealthy
		}
	}
	switch {
	case worst >= 0:
		return worst
	case d.State == fleet.Open && len(d.Holders) > 0:
		return terminal.OpenHeld
	case d.State == fleet.Open:
		return terminal.Open
	case d.Partly:
		return terminal.Partly
	case d.State == fleet.Held:
		return terminal.Held
	}
	return terminal.Free
}

// drawStrip draws glyphs to scale, at most the given number. Every glyph with a count above 0
// appears.
func drawStrip(style terminal.Style, counts map[terminal.Glyph]int64, most int) terminal.Cell {
	var total int64
	for _, n := range counts {
		total += n
	}
	if total == 0 {
		return terminal.Cell{}
	}
	shown := scaleCounts(counts, total, most)
	var text, painted strings.Builder
	for _, g := range order {
		text.WriteString(strings.Repeat(style.BareGlyph(g), shown[g]))
		painted.WriteString(strings.Repeat(style.Glyph(g), shown[g]))
	}
	return terminal.Cell{Text: text.String(), Painted: painted.String()}
}

// scaleCounts returns the number of glyphs of each kind: the counts if there is room, otherwise a
// proportion of at least one each. The remainder goes to the glyphs that lose most by rounding.
func scaleCounts(counts map[terminal.Glyph]int64, total int64, most int) map[terminal.Glyph]int {
	shown := make(map[terminal.Glyph]int)
	if total <= int64(most) {
		for g, n := range counts {
			shown[g] = int(n)
		}
		return shown
	}
	sum := 0
	for g, n := range counts {
		if n > 0 {
			shown[g] = max(1, int(n*int64(most)/total))
			sum += shown[g]
		}
	}
	lacks := func(g terminal.Glyph) int64 { return counts[g]*int64(most) - int64(shown[g])*total }
	for ; sum < most; sum++ {
		shown[slices.MaxFunc(order, func(a, b terminal.Glyph) int { return cmp.Compare(lacks(a), lacks(b)) })]++
	}
	for ; sum > most; sum-- {
		shown[slices.MaxFunc(order, func(a, b terminal.Glyph) int { return cmp.Compare(int64(shown[a]), int64(shown[b])) })]--
	}
	return shown
}
