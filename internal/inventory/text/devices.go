package text

import (
	"fmt"
	"strings"
	"time"

	"chandler.dev/internal/inventory"
	"chandler.dev/internal/terminal"
)

// columns are the widths of the columns of devices.
type columns struct {
	head   int // tree, glyph, kind and address
	label  int // model, and the text that distinguishes devices of the model
	memory int
	holder int // consumer, or the link if the consumers are unknown
	by     int // claim, or the extended resources
}

// The width of "plugin 1d", and of the gap between columns.
const (
	tailWidth = 11
	gap       = 2
)

// Minimum widths for the columns of memory and of claims.
const (
	wideMemory = 100
	wideBy     = 110
)

// computeWidths computes the widths of the columns.
func (p *printer) computeWidths() {
	p.layLanes()
	c := &p.cols
	longest := func(width *int, text string) { *width = max(*width, terminal.Columns(text)) }
	for i := range p.inv.Tree.Nodes {
		for _, b := range p.inv.Tree.Nodes[i].Branch {
			for j := range b.Silicon {
				s := &b.Silicon[j]
				indent := 6
				if isSolo(&b) {
					indent = 3
				}
				longest(&c.head, strings.Repeat(" ", indent+2)+p.call(s))
				if len(s.Parts) > 0 {
					continue
				}
				d := p.inv.Device(s.FirstName())
				longest(&c.label, labelOf(d))
				longest(&c.memory, inventory.Bytes(d.Memory))
				if !p.inv.ConsumersKnown {
					longest(&c.holder, d.Place.Link())
					longest(&c.by, pluginLimits(d))
					continue
				}
				longest(&c.holder, p.holdingText(d))
				if len(d.Holders) > 0 {
					longest(&c.by, d.Holders[0].ResourceOrClaim())
				}
			}
		}
	}
	width := p.contentWidth()
	c.head = min(c.head, width*2/5)
	if p.inv.ConsumersKnown && p.style.Width < wideMemory {
		c.memory = 0
	}
	if p.inv.ConsumersKnown && p.style.Width < wideBy {
		c.by = 0
	}
	others := c.head + gap // the width that the other columns need
	for _, column := range []int{c.memory, c.holder, c.by} {
		if column > 0 {
			others += gap + column
		}
	}
	if p.inv.ConsumersKnown {
		others += 1 + tailWidth
	}
	c.label = min(c.label, max(12, width/4, width-others))
	used := c.head + gap + c.label
	if c.memory > 0 {
		used += gap + c.memory
	}
	if p.inv.ConsumersKnown {
		used += 1 + tailWidth
	}
	rest := max(0, width-used-gap)
	if c.by > 0 {
		c.by = min(c.by, max(0, rest-gap-min(c.holder, rest/2)))
		rest = max(0, rest-c.by-gap)
	}
	c.holder = min(c.holder, rest)
}

// isSolo reports whether there is a single device below a root. The device then takes the place of
// the root.
func isSolo(b *inventory.Branch) bool { return len(b.Silicon) == 1 || b.Root == "" }

// call returns the kind and address of a physical device, or otherwise its name.
func (p *printer) call(s *inventory.Silicon) string {
	if s.Address != "" {
		return s.Kind + " " + inventory.ShortAddress(s.Address)
	}
	return s.Kind + " " + strings.TrimPrefix(s.Name, s.Kind+"-")
}

// labelOf returns the model of a device and what distinguishes it from others of its model. A device
// without a known model has its name there, which repeats the address.
func labelOf(d *inventory.Device) string {
	label := d.Label
	if label == d.Name && d.Place.Address != "" {
		label = ""
	}
	return terminal.SafeText(strings.TrimSpace(label + " " + d.Detail))
}

func pluginLimits(d *inventory.Device) string { return strings.Join(d.Ask.Limits, ",") }

// holdingText returns a short text about the consumers of a device.
func (p *printer) holdingText(d *inventory.Device) string {
	switch owners := d.Owners(); {
	case d.Shares.All > 0:
		return fmt.Sprintf("%d of %d shares allocated", d.Shares.Held, d.Shares.All)
	case len(owners) > 1:
		return fmt.Sprintf("%s +%d", owners[0], len(owners)-1)
	case len(owners) == 1:
		return owners[0]
	case d.Open:
		return "unlimited sharing"
	case d.Holding == inventory.Taken:
		return "allocated with the whole device"
	case d.Holding == inventory.Partly:
		return "partly allocated"
	case d.Move != nil:
		return "waiting"
	}
	return string(inventory.Free)
}

// node prints a NUMA node.
func (p *printer) node(n *inventory.Node) {
	title := ""
	switch {
	case n.Number != nil:
		title = fmt.Sprintf("NUMA node %d", *n.Number)
	case !n.Placed && len(p.inv.Tree.Nodes) > 1:
		title = "no PCIe position"
	case len(p.inv.Tree.Nodes) > 1 && p.inv.Tree.Nodes[0].Number != nil:
		title = "unknown NUMA node"
	}
	if title != "" {
		l := line{}
		l.add(title, terminal.Strong)
		p.lines = append(p.lines, l)
	}
	for i := range n.Branch {
		b := &n.Branch[i]
		last := i == len(n.Branch)-1
		if isSolo(b) {
			for j := range b.Silicon {
				p.printSilicon(&b.Silicon[j], "", last && j == len(b.Silicon)-1)
			}
			continue
		}
		head := "root " + inventory.ShortRoot(b.Root)
		if b.Switch != "" {
			head += " › switch " + inventory.ShortAddress(b.Switch)
		}
		l := line{}
		l.add(p.style.Cut(branchGlyph(last)+terminal.SafeText(head), p.contentWidth()), "")
		p.lines = append(p.lines, l)
		for j := range b.Silicon {
			p.printSilicon(&b.Silicon[j], indentBelow(last), j == len(b.Silicon)-1)
		}
	}
}

func branchGlyph(last bool) string {
	if last {
		return "└─ "
	}
	return "├─ "
}

func indentBelow(last bool) string {
	if last {
		return "   "
	}
	return "│  "
}

// printSilicon prints a physical device, with its partitions.
func (p *printer) printSilicon(s *inventory.Silicon, tree string, last bool) {
	under := tree + indentBelow(last)
	if len(s.Parts) > 0 {
		p.printDivided(s, tree+branchGlyph(last), under)
		return
	}
	d := p.inv.Device(s.FirstName())
	l := line{fabric: s.Fabric}
	l.add(tree+branchGlyph(last), "")
	glyph := glyphOf(d)
	l.add(p.style.BareGlyph(glyph), glyph.Colour())
	l.add(" "+p.style.PadText(terminal.SafeText(p.call(s)), p.cols.head-l.width()-1), "")
	p.addColumns(&l, d)
	p.lines = append(p.lines, trimLine(l))
	if d.Shares.Held > 0 && p.inv.ConsumersKnown {
		p.printBelow(under, strings.Join(p.sharers(d), ", "), "")
	}
	p.printTroubles(under, d)
}

// addColumns adds the columns of a device after its head.
func (p *printer) addColumns(l *line, d *inventory.Device) {
	c := &p.cols
	add := func(text string, width int) {
		if width > 0 {
			l.add(strings.Repeat(" ", gap)+p.style.PadText(terminal.SafeText(text), width), "")
		}
	}
	add(labelOf(d), c.label)
	if c.memory > 0 {
		memory := inventory.Bytes(d.Memory)
		add(strings.Repeat(" ", max(0, c.memory-len(memory)))+memory, c.memory)
	}
	if !p.inv.ConsumersKnown {
		add(d.Place.Link(), c.holder)
		add(pluginLimits(d), c.by)
		return
	}
	add(p.holdingText(d), c.holder)
	if c.by > 0 {
		by := ""
		if len(d.Holders) > 0 && d.Shares.All == 0 {
			by = d.Holders[0].ResourceOrClaim()
		}
		add(by, c.by)
	}
	if len(d.Holders) > 0 && d.Shares.All == 0 {
		l.add(" "+p.holderTail(&d.Holders[0]), "")
	}
}

// holderTail returns the API of an allocation and its age.
func (p *printer) holderTail(h *inventory.Holder) string {
	return fmt.Sprintf("%-6s%5s", inventory.APIName(h.API), p.ageText(h.Since))
}

// ageText returns how long ago a time was, or "" if it is unknown.
func (p *printer) ageText(since time.Time) string {
	if since.IsZero() {
		return ""
	}
	return terminal.FormatAge(p.inv.At.Sub(since))
}

// sharers returns the consumers of shares.
func (p *printer) sharers(d *inventory.Device) (names []string) {
	for _, who := range d.Owners() {
		for i := range d.Holders {
			if d.Holders[i].Owner() == who {
				names = append(names, strings.TrimSpace(who+" "+p.ageText(d.Holders[i].Since)))
				break
			}
		}
	}
	return names
}

// printTroubles prints the problems and the pending move of a device below it.
func (p *printer) printTroubles(under string, d *inventory.Device) {
	if d.Health.Condition != "" {
		p.printBelow(under, p.reasonText(&d.Health), troubleColour(d))
	}
	if d.Move != nil {
		p.printBelow(under, moveText(d.Move), terminal.Moving)
	}
	if d.AwaitsCreation() {
		p.printBelow(under, "does not exist yet: created on demand", "")
	}
}

func troubleColour(d *inventory.Device) terminal.Colour {
	switch d.Health.TroubleState() {
	case inventory.Degraded:
		return terminal.Warning
	case inventory.Unread:
		return terminal.Unknown
	}
	return terminal.Bad
}

// reasonText returns the text of a problem, with its condition.
func (p *printer) reasonText(h *inventory.Health) string {
	if !p.inv.ConsumersKnown {
		return h.Reason
	}
	words := []string{string(h.Condition), string(h.Effect)}
	if age := p.ageText(h.Since); age != "" {
		words = append(words, age)
	}
	return fmt.Sprintf("%s (%s)", h.Reason, strings.Join(words, ", "))
}

// moveText returns the text of a move with the consumers for whom it waits.
func moveText(m *inventory.Move) string {
	if m.To == "" || len(m.For) == 0 {
		return m.Reason
	}
	who := m.For[0] + " releases it"
	switch n := len(m.For) - 1; {
	case n == 1:
		who = m.For[0] + " and one more release it"
	case n > 1:
		who = fmt.Sprintf("%s and %d more release it", m.For[0], n)
	}
	return fmt.Sprintf("moves to %s once %s", inventory.APIName(m.To), who)
}

// printBelow prints text below a device.
func (p *printer) printBelow(under, text string, colour terminal.Colour) {
	indent := under + "    "
	for _, text := range p.wrapText(text, p.contentWidth()-terminal.Columns(indent), "") {
		l := line{}
		l.add(indent, "")
		l.add(text, colour)
		p.lines = append(p.lines, l)
	}
}

// trimLine removes the spaces at the end of a line.
func trimLine(l line) line {
	for n := len(l.segments) - 1; n >= 0; n-- {
		s := &l.segments[n]
		if s.text = strings.TrimRight(s.text, " "); s.text != "" {
			break
		}
	}
	return l
}

// glyphOf returns the glyph of a device.
func glyphOf(d *inventory.Device) terminal.Glyph {
	switch d.State {
	case inventory.Held, inventory.Taken:
		return terminal.Held
	case inventory.Partly:
		return terminal.Partly
	case inventory.Moving:
		return terminal.Moves
	case inventory.Degraded:
		return terminal.Degraded
	case inventory.Unhealthy:
		return terminal.Unhealthy
	case inventory.Unread:
		return terminal.Unread
	case inventory.Open:
		if len(d.Holders) > 0 {
			return terminal.OpenHeld
		}
		return terminal.Open
	case inventory.Present:
		return terminal.Asis
	}
	return terminal.Free
}
