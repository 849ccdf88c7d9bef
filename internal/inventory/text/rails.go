package text

import (
	"fmt"
	"strings"

	"chandler.dev/internal/terminal"
)

// maxLanes is how many rails are drawn beside each other.
const maxLanes = 4

// lane is the rail of one fabric.
type lane struct {
	fabric int // number, counted from 1
	text   string
	begun  bool
}

// layLanes gives each fabric that reaches from each to each a rail.
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
		p.lanes = append(p.lanes, lane{fabric: i + 1, text: fmt.Sprintf("%s, %s, %s", f.Name, p.members(f), how)})
	}
}

// margin is how many columns the rails take.
func (p *printer) margin() int {
	if len(p.lanes) == 0 {
		return 0
	}
	return 1 + 2*len(p.lanes)
}

// content is how many columns are left of the rails.
func (p *printer) content() int { return p.style.Width - p.margin() }

// rails writes the lines with their rails, and the buses at which these end.
func (p *printer) rails() {
	for _, l := range p.lines {
		p.rail(&l)
		p.emit(l)
	}
	for i := range p.lanes {
		p.bus(i)
	}
}

// rail draws the rails at the right of a line.
func (p *printer) rail(l *line) {
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
		l.add(strings.Repeat(" ", max(0, p.content()-l.width())+1), "")
		l.add(text, "")
	}
}

// bus draws the line at which a rail ends.
func (p *printer) bus(i int) {
	l := line{}
	width := p.content() + 2 + 2*i // columns before the corner
	text := p.style.Cut(terminal.Safe(p.lanes[i].text), width-3)
	l.add(" "+strings.Repeat("─", max(0, width-terminal.Columns(text)-3))+" "+text+" ┘", "")
	for range p.lanes[i+1:] {
		l.add(" │", "")
	}
	p.emit(l)
}
