package text

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"chandler.dev/internal/inventory"
	"chandler.dev/internal/terminal"
)

// perRow is the number of partitions in a row of glyphs.
const perRow = 16

// manyParts is the number of partitions of a machine from which each physical device has only one
// line.
const manyParts = 128

// printDivided prints a physical device with its partitions.
func (p *printer) printDivided(s *inventory.Silicon, tree, under string) {
	parts := make([]*inventory.Device, len(s.Parts))
	for i, name := range s.Parts {
		parts[i] = p.inv.Device(name)
	}
	label := ""
	l := line{fabric: s.Fabric}
	l.add(tree, "")
	if whole := p.inv.Device(s.Whole); whole != nil {
		glyph := glyphOf(whole)
		l.add(p.style.BareGlyph(glyph), glyph.Colour())
		l.add(" ", "")
		label = labelOf(whole)
	} else {
		first := parts[0]
		if label = terminal.SafeText(commonModel(parts)); label == "" {
			label = terminal.SafeText(first.Kind)
		}
	}
	call := terminal.SafeText(p.call(s))
	call = p.style.PadText(call, max(terminal.Columns(call), p.callWidth(s, tree))) + "  "
	summary := p.summaryText(s, parts)
	if p.compact() && len(parts) <= perRow {
		l.add(call, "")
		room := p.contentWidth() - l.width() - len(parts) - 4 - terminal.Columns(summary)
		l.add(p.style.PadText(label, min(max(0, room), 18))+"  ", "")
		p.addGlyphs(&l, parts)
		l.add("  "+summary, "")
		p.lines = append(p.lines, p.fitLine(l))
		p.siliconTroubles(under, s, parts)
		return
	}
	if len(parts) > perRow {
		if label != "" {
			label += ", "
		}
		label += summary
	}
	l.add(p.style.Cut(call+label, max(0, p.contentWidth()-l.width())), "")
	p.lines = append(p.lines, l)
	p.lines = append(p.lines, p.partRows(under, s, parts, summary)...)
	p.siliconTroubles(under, s, parts)
}

// callWidth returns the width of a physical device's name, so that the following text is aligned.
func (p *printer) callWidth(s *inventory.Silicon, tree string) int {
	if !p.compact() {
		return 0
	}
	glyph := 2
	if s.Whole == "" {
		glyph = 0
	}
	return p.cols.head - terminal.Columns(tree) - glyph
}

// partRows returns the rows of glyphs and the runs of partitions, side by side if there is room.
func (p *printer) partRows(under string, s *inventory.Silicon, parts []*inventory.Device, summary string) (lines []line) {
	var rows []line
	for i := 0; i < len(parts); i += perRow {
		row := parts[i:min(i+perRow, len(parts))]
		l := line{}
		l.add(under, "")
		if len(parts) > perRow {
			l.add(fmt.Sprintf("%5d  ", row[0].Index), "")
		} else {
			l.add("      ", "")
		}
		p.addGlyphs(&l, row)
		if len(parts) <= perRow {
			l.add("  "+summary, "")
		}
		rows = append(rows, p.fitLine(l))
	}
	const beside = 27
	if len(rows) == 1 || p.style.Width < wideBy {
		return append(rows, p.runLines(under, s, parts, p.contentWidth()-terminal.Columns(under))...)
	}
	runs := p.runLines("", s, parts, p.contentWidth()-terminal.Columns(under)-beside)
	for i := range max(len(rows), len(runs)) {
		l := line{}
		l.add(under, "")
		if i < len(rows) {
			l = rows[i]
		}
		if i < len(runs) {
			l.add(strings.Repeat(" ", max(0, terminal.Columns(under)+beside-l.width())), "")
			l.segments = append(l.segments, runs[i].segments...)
		}
		lines = append(lines, trimLine(l))
	}
	return lines
}

// fitLine shortens the last segment of a line that is too wide.
func (p *printer) fitLine(l line) line {
	if over := l.width() - p.contentWidth(); over > 0 {
		last := &l.segments[len(l.segments)-1]
		last.text = p.style.Cut(last.text, max(0, terminal.Columns(last.text)-over))
	}
	return trimLine(l)
}

// compact reports whether the machine has so many partitions that each physical device has only one
// line.
func (p *printer) compact() bool {
	n := 0
	for _, s := range p.inv.Tree.Silicon() {
		n += len(s.Parts)
	}
	return n >= manyParts
}

// commonModel returns the common model and profile of all partitions.
func commonModel(parts []*inventory.Device) string {
	first := parts[0]
	if pf := first.Offered.Attributes.String("pfName"); pf != "" {
		return pf
	}
	text := first.ShortModel()
	if first.Profile != "" && first.Profile != text && !slices.ContainsFunc(parts, func(d *inventory.Device) bool { return d.Profile != first.Profile }) {
		text += " " + first.Profile
	}
	return text
}

// summaryText returns the numbers of partitions by state.
func (p *printer) summaryText(s *inventory.Silicon, parts []*inventory.Device) string {
	if p.compact() && len(parts) <= perRow && p.inv.ConsumersKnown {
		held := 0
		for _, d := range parts {
			if d.Holding == inventory.Held || d.Holding == inventory.Taken {
				held++
			}
		}
		return fmt.Sprintf("%d of %d allocated", held, len(parts))
	}
	text := inventory.CountNoun(len(parts), s.Noun)
	if memory := parts[0].Memory; memory > 0 && !slices.ContainsFunc(parts, func(d *inventory.Device) bool { return d.Memory != memory }) {
		text += " of " + inventory.Bytes(memory)
	}
	if !p.inv.ConsumersKnown {
		return text + functionNames(s, parts)
	}
	count := make(map[string]int)
	for _, d := range parts {
		count[tallyState(d)]++
	}
	var counts []string
	for _, word := range []string{"allocated", "partly allocated", "free", "waiting", "unhealthy", "not readable", "unlimited sharing"} {
		if count[word] > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", count[word], word))
		}
	}
	return text + ": " + strings.Join(counts, ", ")
}

// functionNames lists the functions of an IOMMU group or a card if they are not all alike. With known
// consumers, [printer.runLines] lists them.
func functionNames(s *inventory.Silicon, parts []*inventory.Device) string {
	if s.Noun != "function" || !slices.ContainsFunc(parts, func(d *inventory.Device) bool { return d.Model != parts[0].Model }) {
		return ""
	}
	names := make([]string, len(parts))
	for i, d := range parts {
		names[i] = terminal.SafeText(d.Label + " " + d.ShortModel())
	}
	return ": " + strings.Join(names, ", ")
}

// tallyState returns the state under which a partition is counted.
func tallyState(d *inventory.Device) string {
	switch {
	case d.Open:
		return "unlimited sharing"
	case d.Holding == inventory.Held || d.Holding == inventory.Taken:
		return "allocated"
	case d.Holding == inventory.Partly:
		return "partly allocated"
	case d.State == inventory.Moving:
		return "waiting"
	case d.State == inventory.Unhealthy:
		return "unhealthy"
	case d.State == inventory.Unread:
		return "not readable"
	}
	return "free"
}

// addGlyphs adds a glyph for each partition.
func (p *printer) addGlyphs(l *line, parts []*inventory.Device) {
	for i := 0; i < len(parts); {
		j, glyph := i, glyphOf(parts[i])
		for j < len(parts) && glyphOf(parts[j]) == glyph {
			j++
		}
		l.add(strings.Repeat(p.style.BareGlyph(glyph), j-i), glyph.Colour())
		i = j
	}
}

// run is a set of partitions with the same consumer, or of free ones.
type run struct {
	glyph  terminal.Glyph
	who    string
	holder *inventory.Holder
	parts  []*inventory.Device
}

// runLines returns lines with consumers and their partitions.
func (p *printer) runLines(under string, s *inventory.Silicon, parts []*inventory.Device, width int) (lines []line) {
	if !p.inv.ConsumersKnown {
		return nil
	}
	var runs []*run
	byKey := make(map[string]*run)
	for _, d := range parts {
		if d.Holding == inventory.Free && d.Health.TroubleState() != "" && d.State != inventory.Degraded {
			continue // printed on a line of its own
		}
		r := &run{glyph: glyphOf(d), who: p.holdingText(d)}
		key := fmt.Sprintf("%d %s", r.glyph, r.who)
		if len(d.Holders) > 0 {
			r.holder = &d.Holders[0]
			key += fmt.Sprintf(" %s %s %s", r.holder.API, r.holder.ResourceOrClaim(), r.holder.Since)
		}
		if byKey[key] == nil {
			byKey[key], runs = r, append(runs, r)
		}
		byKey[key].parts = append(byKey[key].parts, d)
	}
	slices.SortStableFunc(runs, func(a, b *run) int { return runRank(a) - runRank(b) })
	who := 0
	for _, r := range runs {
		who = max(who, terminal.Columns(r.who))
	}
	const head = 8 // count, glyph and spaces
	who = min(who, max(8, (width-head-tailWidth)*3/5))
	names := max(4, width-head-who-2-1-tailWidth)
	for _, r := range runs {
		l := line{}
		l.add(under+fmt.Sprintf("%5d ", len(r.parts)), "")
		l.add(p.style.BareGlyph(r.glyph), r.glyph.Colour())
		text := partNames(s, r.parts)
		l.add(" "+p.style.PadText(terminal.SafeText(r.who), who)+" ", "")
		if r.holder == nil {
			l.add(p.style.Cut(text, max(0, width-head-who-1)), "")
		} else {
			l.add(p.style.PadText(text, min(names, 26))+" "+p.holderTail(r.holder), "")
		}
		lines = append(lines, trimLine(l))
	}
	return lines
}

func runRank(r *run) int {
	switch {
	case r.holder != nil:
		return 0
	case r.glyph == terminal.Free:
		return 1
	}
	return 2
}

// partNames returns the names of partitions as ranges of numbers: "VF 24-27, 32", "xcp 0-3".
func partNames(s *inventory.Silicon, parts []*inventory.Device) string {
	word := ""
	var numbers []int
	var names []string
	for _, d := range parts {
		name := terminal.SafeText(d.Label)
		names = append(names, name)
		at := strings.LastIndexAny(name, "- ")
		number, err := strconv.Atoi(name[at+1:])
		if err != nil || at < 0 || word != "" && word != name[:at] {
			word = "?"
			continue
		}
		if word == "" {
			word = name[:at]
		}
		numbers = append(numbers, number)
	}
	if len(numbers) < len(parts) || word == "?" || strings.Contains(word, "-") { // such as gi-4-ci-0
		return strings.Join(names, ", ")
	}
	return word + " " + inventory.Ranges(numbers, "-")
}

// siliconTroubles prints the problems of a physical device with partitions, each once, and its pending
// move.
func (p *printer) siliconTroubles(under string, s *inventory.Silicon, parts []*inventory.Device) {
	ofWhole := ""
	if whole := p.inv.Device(s.Whole); whole != nil {
		p.printTroubles(under, whole)
		ofWhole = p.reasonText(&whole.Health)
	}
	var reasons []string
	byReason := make(map[string][]*inventory.Device)
	for _, d := range parts {
		reason := p.reasonText(&d.Health)
		if d.Health.Condition == "" || reason == ofWhole {
			continue
		}
		if byReason[reason] == nil {
			reasons = append(reasons, reason)
		}
		byReason[reason] = append(byReason[reason], d)
	}
	for _, reason := range reasons {
		of := byReason[reason]
		text := reason
		if len(of) < len(parts) {
			text = partNames(s, of) + ": " + reason
		}
		p.printBelow(under, text, troubleColour(of[0]))
	}
	p.printUncreated(under, parts)
	if move := parts[0].Move; move != nil && s.Whole == "" {
		p.printBelow(under, moveText(move), terminal.Moving)
	}
}

// printUncreated prints the number of partitions that are created on demand.
func (p *printer) printUncreated(under string, parts []*inventory.Device) {
	n := 0
	for _, d := range parts {
		if d.AwaitsCreation() {
			n++
		}
	}
	text := "does not exist yet: created on demand"
	switch {
	case n == 0:
		return
	case n == 1 && len(parts) > 1:
		text = fmt.Sprintf("1 of %d %s", len(parts), text)
	case n < len(parts):
		text = fmt.Sprintf("%d of %d do not exist yet: created on demand", n, len(parts))
	}
	p.printBelow(under, text, "")
}
