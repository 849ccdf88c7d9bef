// Package text prints an inventory in a terminal: PCIe on the left, private links on the right, and
// one glyph for each device. It makes no decisions about devices.
package text

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"chandler.dev/internal/inventory"
	"chandler.dev/internal/terminal"
)

// Print prints an inventory. If the consumers are unknown, it shows properties of the devices
// instead. No line is wider than the style allows.
func Print(out io.Writer, inv *inventory.Inventory, style terminal.Style) error {
	p := &printer{inv: inv, style: style}
	p.print()
	_, err := io.WriteString(out, p.out.String())
	return err
}

// printer prints one inventory.
type printer struct {
	inv   *inventory.Inventory
	style terminal.Style
	out   strings.Builder
	lines []line
	lanes []lane
	cols  columns
}

// segment is text of one colour.
type segment struct {
	text   string
	colour terminal.Colour
}

// line is a line without the rails of private links at its right.
type line struct {
	segments []segment
	fabric   int // of the physical device in the line, or 0
}

func (l *line) add(text string, colour terminal.Colour) {
	l.segments = append(l.segments, segment{text, colour})
}

func (l *line) width() (n int) {
	for _, s := range l.segments {
		n += terminal.Columns(s.text)
	}
	return n
}

func (p *printer) print() {
	inv := p.inv
	if len(inv.Devices) == 0 && len(inv.Gone) == 0 {
		p.empty()
		return
	}
	p.computeWidths()
	for _, text := range p.wrapText(p.title(), p.style.Width, "   ") {
		p.write(text)
	}
	if len(inv.Tree.Nodes) > 0 {
		p.write("")
	}
	for i := range inv.Tree.Nodes {
		p.node(&inv.Tree.Nodes[i])
	}
	p.printRails()
	p.printPartial()
	p.printNotes()
	p.printHost()
	p.printGone()
}

// printNotes prints the problems of the node as a whole.
func (p *printer) printNotes() {
	for _, note := range p.inv.Notes {
		text := note.Name + ": " + note.Reason
		if note.Code != "" {
			text += "; chandler explain " + note.Code
		}
		for _, line := range p.wrapText(text, p.style.Width, "   ") {
			p.write(line)
		}
	}
}

// empty prints that there are no devices, and how many families examined the host.
func (p *printer) empty() {
	for _, text := range terminal.WrapText(p.inv.DescribeEmpty(), p.style.Width) {
		p.write(text)
	}
}

// title returns the name of the machine and the number of devices of each kind.
func (p *printer) title() string {
	return strings.TrimRight(p.inv.Host+"   "+p.inv.CountText(), " ")
}

// wrapText breaks text into lines and indents the lines after the first. It breaks words that are too
// long, such as paths, and returns a text that fits into one line unchanged. The causes of a problem,
// which have a line each, are joined.
func (p *printer) wrapText(text string, width int, indent string) (lines []string) {
	text = terminal.SafeText(strings.ReplaceAll(text, "\n", "; "))
	if terminal.Columns(text) <= width {
		return []string{text}
	}
	width -= terminal.Columns(indent)
	var words []string
	for word := range strings.FieldsSeq(text) {
		words = append(words, breakWord(word, width)...)
	}
	for i, l := range terminal.WrapText(strings.Join(words, " "), width) {
		if i > 0 {
			l = indent + l
		}
		lines = append(lines, l)
	}
	return lines
}

// breakWord breaks a word into parts of at most the given columns, after a slash if possible. No two
// parts fit into one line.
func breakWord(word string, columns int) (parts []string) {
	columns = max(columns, 2) // the width of the widest character
	for terminal.Columns(word) > columns {
		end, slash, used := 0, 0, 0
		for i, r := range word {
			if used += terminal.Columns(string(r)); used > columns {
				break
			}
			if end = i + utf8.RuneLen(r); r == '/' {
				slash = end
			}
		}
		if slash > 1 {
			end = slash
		}
		parts = append(parts, word[:end])
		word = word[end:]
	}
	return append(parts, word)
}

// write prints a line without rails.
func (p *printer) write(text string) {
	p.out.WriteString(p.toASCII(strings.TrimRight(text, " ")) + "\n")
}

// toASCII replaces non-ASCII characters if the style requires ASCII.
func (p *printer) toASCII(text string) string {
	if !p.style.ASCII {
		return text
	}
	return strings.Map(func(r rune) rune {
		if r < 0x80 {
			return r
		}
		if as, known := asciiFor[r]; known {
			return as
		}
		return '?'
	}, text)
}

var asciiFor = map[rune]rune{
	'›': '>', '×': 'x', '…': '~', '│': '|', '├': '|', '└': '`', '─': '-', '┐': '+', '┤': '+', '┼': '+', '┘': '+',
}

// printPartial prints the fabrics in which some links are missing.
func (p *printer) printPartial() {
	for i := range p.inv.Tree.Fabrics {
		f := &p.inv.Tree.Fabrics[i]
		if f.Complete {
			continue
		}
		pairs := make([]string, len(f.Links))
		for j, link := range f.Links {
			pairs[j] = shortName(p.inv.Tree, link[0]) + "-" + shortName(p.inv.Tree, link[1])
		}
		text := fmt.Sprintf("%s, %s, %s: %s", f.Name, memberText(p.inv.Tree, f), inventory.CountNoun(len(f.Links), "link"), strings.Join(pairs, ", "))
		for _, text := range p.wrapText(text, p.style.Width, "   ") {
			p.write(text)
		}
	}
}

// shortName returns the address of a physical device, or otherwise its name.
func shortName(tree *inventory.Tree, silicon string) string {
	for _, s := range tree.Silicon() {
		if s.Name == silicon && s.Address != "" {
			return inventory.ShortAddress(s.Address)
		}
	}
	return silicon
}

// memberText returns the number and kind of a fabric's members.
func memberText(tree *inventory.Tree, f *inventory.Fabric) string {
	kind := ""
	for _, s := range tree.Silicon() {
		if s.Fabric > 0 && &tree.Fabrics[s.Fabric-1] == f {
			if kind == "" {
				kind = s.Kind
			}
			if kind != s.Kind {
				kind = "device"
			}
		}
	}
	if kind == "gpu" || kind == "npu" || kind == "fpga" {
		kind = strings.ToUpper(kind)
	}
	return inventory.CountNoun(len(f.Members), kind)
}

// printHost prints the devices of the host itself.
func (p *printer) printHost() {
	if len(p.inv.Tree.Host) == 0 {
		return
	}
	const title = "of the host itself"
	l := line{}
	l.add(title, "")
	empty := true
	var notes []string
	labels := make(map[string]int)
	for i := range p.inv.Tree.Host {
		for _, name := range p.inv.Tree.Host[i].All() {
			labels[p.inv.Device(name).Label]++
		}
	}
	for i := range p.inv.Tree.Host {
		for _, name := range p.inv.Tree.Host[i].All() {
			d := p.inv.Device(name)
			label := d.Label
			if labels[label] > 1 {
				label = d.Name
			}
			text := terminal.SafeText(label)
			if len(d.Holders) > 0 {
				text += fmt.Sprintf(" (%s)", inventory.CountNoun(len(d.Owners()), "pod"))
			}
			text = p.style.Cut(text, p.style.Width-8)
			if !empty && l.width()+3+2+terminal.Columns(text) > p.style.Width || empty && l.width()+5+terminal.Columns(text) > p.style.Width {
				p.printLine(l)
				l = line{}
			}
			l.add("   ", "")
			l.add(p.style.BareGlyph(glyphOf(d)), glyphOf(d).Colour())
			l.add(" "+text, "")
			empty = false
			if d.Health.Condition != "" {
				notes = append(notes, label+": "+p.reasonText(&d.Health))
			}
		}
	}
	p.printLine(l)
	for _, note := range notes {
		for _, text := range p.wrapText(note, p.style.Width-3, "   ") {
			p.write("   " + text)
		}
	}
}

// printGone prints the allocated devices that have vanished.
func (p *printer) printGone() {
	for _, g := range p.inv.Gone {
		text := fmt.Sprintf("%s is gone, and %s", g.Device, strings.Join(g.Hit, ", "))
		if len(g.Hit) == 1 {
			text += " has it"
		} else {
			text += " have it"
		}
		for i, text := range p.wrapText(text, p.style.Width-2, "") {
			l := line{}
			if i == 0 {
				l.add(p.style.BareGlyph(terminal.Unhealthy), terminal.Bad)
				l.add(" ", "")
			} else {
				l.add("  ", "")
			}
			l.add(text, terminal.Bad)
			p.printLine(l)
		}
	}
}

// printLine prints a line.
func (p *printer) printLine(l line) {
	for _, s := range l.segments {
		p.out.WriteString(p.style.PaintText(s.colour, p.toASCII(s.text)))
	}
	p.out.WriteString("\n")
}
