package text

import (
	"fmt"
	"strings"

	"chandler.dev/internal/terminal"
)

// maxLanes is the largest number of rails side by side.
const maxLanes = 4

// lane is the rail of one fabric.
type lane struct {
	fabric int // number, from 1
	text   string
	begun  bool
}

// layLanes assigns a rail to each fabric with all links.
func (p *printer) layLanes() {
	for i := range p.inv.Tree.Fabrics {
		f := &p.inv.Tree.Fabrics[i]
		if !f.Complete || len(p.lanes) == maxLanes {
			continue
		}
		how := "one fabric"
		if len(f.Links) > 0 {
			how = "each to each"
		}
		p.lanes = append(p.lanes, lane{fabric: i + 1, text: fmt.Sprintf("%s, %s, %s", f.Name, memberText(p.inv.Tree, f), how)})
	}
}

// margin returns the number of columns of the rails.
func (p *printer) margin() int {
	if len(p.lanes) == 0 {
		return 0
	}
	return 1 + 2*len(p.lanes)
}

// contentWidth returns the number of columns left of the rails.
func (p *printer) contentWidth() int { return p.style.Width - p.margin() }

// printRails prints the lines with their rails, followed by the buses.
func (p *printer) printRails() {
	for _, l := range p.lines {
		p.addRail(&l)
		p.printLine(l)
	}
	for i := range p.lanes {
		p.printBus(i)
	}
}

// addRail adds the rails at the right of a line.
func (p *printer) addRail(l *line) {
	at := -1
	for i, lane := range p.lanes {
		if l.fabric == lane.fabric && l.fabric > 0 {
			at = i
		}
	}
	var rail strings.Builder
	for i := range p.lanes {
		lane := &p.lanes[i]
		dash, junction := " ", " "
		if lane.begun {
			junction = "│"
		}
		switch {
		case i < at && lane.begun:
			dash, junction = "─", "┼"
		case i < at:
			dash, junction = "─", "─"
		case i == at && lane.begun:
			dash, junction = "─", "┤"
		case i == at:
			dash, junction = "─", "┐"
			lane.begun = true
		}
		rail.WriteString(dash + junction)
	}
	if text := strings.TrimRight(rail.String(), " "); text != "" {
		l.add(strings.Repeat(" ", max(0, p.contentWidth()-l.width())+1), "")
		l.add(text, "")
	}
}

// printBus prints the line at the end of a rail.
func (p *printer) printBus(i int) {
	l := line{}
	width := p.contentWidth() + 2 + 2*i // columns before the corner
	text := p.style.Cut(terminal.SafeText(p.lanes[i].text), width-3)
	l.add(" "+strings.Repeat("─", max(0, width-terminal.Columns(text)-3))+" "+text+" ┘", "")
	for range p.lanes[i+1:] {
		l.add(" │", "")
	}
	p.printLine(l)
}
