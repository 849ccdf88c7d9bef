package web

import (
	"strings"

	"chandler.dev/internal/inventory"
)

// writeMachine writes the devices at their positions.
func (w *writer) writeMachine(doc *document) {
	m := doc.Machine
	w.printf(`<section class="machine" id="machine" tabindex="-1" aria-labelledby="h-mach"><div class="bar-h"><h2 id="h-mach">The machine</h2><ul class="legend" aria-label="Legend">`)
	for _, g := range doc.Legend {
		w.printf(`<li>`)
		w.writeGlyph(g)
		w.printf(` %s</li>`, g.Words)
	}
	for _, name := range doc.LinkNames {
		w.printf(`<li><i class="wire"></i> %s</li>`, name)
	}
	w.printf(`</ul></div>`)
	if len(m.NUMA) > 0 {
		w.printf(`<div class="wires"><div class="numas c%d%s">`, len(m.NUMA), textIf(m.Rails, " rails"))
		for _, n := range m.NUMA {
			w.writeNUMA(n)
		}
		w.printf(`</div>`)
		w.writeBuses(m.Buses)
		w.printf(`</div>`)
	}
	for i := range m.Rings {
		w.writeRing(&m.Rings[i])
	}
	if len(m.Loose) > 0 {
		w.printf(`<section class="loose"><h3>Of the host itself</h3><ul class="devs flat">`)
		for _, d := range m.Loose {
			w.printf(`<li class="dev %s%s" data-key="%s"><a href="#%s" title="%s">`, d.Level, textIf(d.Open, " open"), d.ID, d.ID, d.Title)
			w.writeGlyph(d.Glyph())
			w.printf(`<span class="l"><span class="what">%s</span></span><span class="l"><span class="who">%s</span><span class="rt"></span></span></a></li>`, d.Label, d.Second())
		}
		w.printf(`</ul></section>`)
	}
	w.printf("</section>\n")
}

func textIf(holds bool, text string) string {
	if holds {
		return text
	}
	return ""
}

func (w *writer) writeNUMA(n *numa) {
	w.printf(`<section class="numa%s">`, textIf(n.Title == "", " bare"))
	w.writeNonEmpty(`<h3>%s</h3>`, n.Title)
	w.printf(`<ul class="roots n%d%s">`, len(n.Roots), textIf(n.IsWide(), " wide"))
	for _, r := range n.Roots {
		w.printf(`<li class="root%s%s">`, textIf(len(r.Lanes) > 0, " lkd"), textIf(r.IsSolo(), " solo"))
		if r.Name != "" && !r.IsSolo() {
			w.printf(`<h4>root <code>%s</code>`, r.Name)
			w.writeNonEmpty(` <span class="arrow" aria-hidden="true">›</span> switch <code>%s</code>`, r.Switch)
			w.printf(`</h4>`)
		}
		w.printf(`<ul class="devs">`)
		for _, s := range r.Silicon {
			if s.IsDivided() {
				w.writeDivided(s)
			} else {
				w.writeDevice(s)
			}
		}
		w.printf(`</ul>`)
		for _, lane := range r.Lanes {
			w.printf(`<i class="rail lane%d%s" aria-hidden="true"></i>`, lane, textIf(r.Local, " loc"))
		}
		w.printf(`</li>`)
	}
	w.printf(`</ul>`)
	w.writeBuses(n.Buses)
	w.printf(`</section>`)
}

func (w *writer) writeBuses(buses []bus) {
	for _, b := range buses {
		w.printf(`<p class="bus lane%d"><span><b>%s</b> %s</span></p>`, b.Lane, b.Name, b.Text)
	}
}

func (w *writer) writeAddress(s *silicon) {
	switch {
	case s.Addr == "":
		w.printf(`<span></span>`)
	case s.IsSolo():
		w.printf(`<code class="addr" title="PCIe root %s">%s<i> › </i>%s</code>`, s.Root, s.ShortRoot(), s.Addr)
	default:
		w.printf(`<code class="addr">%s</code>`, s.Addr)
	}
}

// writeLane writes the classes of a physical device with private links.
func (w *writer) writeLane(s *silicon) {
	if s.Lane > 0 {
		w.printf(` lk lane%d`, s.Lane)
	}
}

// heldClass returns the class for whether the device is allocated.
func heldClass(d *device) string {
	if len(d.Holders) > 0 || d.Holding == inventory.Taken {
		return "held"
	}
	return "free"
}

// writeDevice writes a physical device without partitions.
func (w *writer) writeDevice(s *silicon) {
	d := s.FirstDevice()
	w.printf(`<li class="dev %s %s%s`, d.Level, heldClass(d), textIf(d.Open, " open"))
	w.writeLane(s)
	w.printf(`" data-key="%s"`, d.ID)
	w.writeNonEmpty(` data-pod="%s"`, d.OnlyPod())
	w.printf(`><a href="#%s" title="%s">`, d.ID, d.Title)
	w.writeGlyph(d.Glyph())
	w.printf(`<span class="l"><span class="what"><span class="kind">%s</span> %s`, d.Kind, d.Label)
	w.writeNonEmpty(` <small>%s</small>`, d.Sub())
	w.printf(`</span>`)
	w.writeAddress(s)
	w.printf(`</span>`)
	w.writeNonEmpty(`<span class="l why">%s</span>`, d.ProblemText())
	w.printf(`<span class="l"><span class="who%s">%s</span><span class="rt">`, textIf(len(d.Holders) == 0, " none"), d.Second())
	switch {
	case d.Move != nil:
		w.printf(`<span class="api mv">%s</span>`, moveText(d.Move))
	case len(d.Holders) > 0:
		w.printf(`<span class="api">%s</span>`, inventory.APIName(d.Holders[0].API))
	}
	if d.HeldSince != nil {
		w.printf(` `)
		w.writeAge(d.HeldSince, inShort)
	}
	w.printf(`</span></span></a></li>`)
}

// writeDivided writes a physical device with its partitions.
func (w *writer) writeDivided(s *silicon) {
	w.printf(`<li class="sil %s`, s.Level())
	w.writeLane(s)
	w.printf(`" data-key="%s"><div class="hd"><a href="#%s" class="what" title="%s · %s · %s">`, s.ID, s.ID, s.Kind, strings.TrimSpace(s.Head()+" "+s.Addr), s.Size())
	if s.Whole != nil {
		w.writeGlyph(s.Whole.Glyph())
		w.printf(` `)
	}
	w.printf(`<span class="kind">%s</span> %s`, s.Kind, s.Head())
	w.writeNonEmpty(` <small>%s</small>`, s.Sub())
	w.printf(`</a>`)
	w.writeAddress(s)
	w.printf(`<span class="cnt">%s`, s.Size())
	if whole := s.HeldWhole(); whole != "" {
		w.printf(`: allocated whole to <b>%s</b>`, whole)
	} else {
		separator := ": "
		for _, c := range s.Count() {
			w.printf(`%s<b class="%s">%d</b> %s`, separator, c.Class, c.N, c.Word)
			separator = ", "
		}
	}
	w.printf(`</span></div>`)
	if s.HasTiles() {
		w.writeTiles(s)
	} else {
		w.writeCells(s)
	}
	w.writeNonEmpty(`<p class="mvnote">%s</p>`, s.WaitNote())
	w.writeNonEmpty(`<p class="badnote">%s</p>`, s.Note())
	w.printf(`</li>`)
}

func (w *writer) writeTiles(s *silicon) {
	w.printf(`<ul class="tiles">`)
	for _, d := range s.Parts() {
		w.printf(`<li class="tile %s %s" data-key="%s"`, d.Level, heldClass(d), d.ID)
		w.writeNonEmpty(` data-pod="%s"`, d.OnlyPod())
		w.printf(`><a href="#%s" title="%s">`, d.ID, d.Title)
		w.writeGlyph(d.Glyph())
		who := d.Second()
		if len(d.Holders) > 0 {
			who = d.Pods()
		}
		w.printf(`<b>%s</b><span class="who%s">%s</span></a></li>`, d.Label, textIf(len(d.Holders) == 0, " none"), who)
	}
	w.printf(`</ul>`)
}

func (w *writer) writeCells(s *silicon) {
	w.printf(`<div class="mxr%s"><div class="mx%s">`, textIf(s.FitsHalfRow(), " few"), textIf(s.IsBig(), " big"))
	parts := s.Parts()
	if s.IsBig() {
		w.printf(`<ol class="axis" aria-hidden="true">`)
		for n := 0; n < len(parts); n += 16 {
			w.printf(`<li>%d</li>`, n)
		}
		w.printf(`</ol>`)
	}
	w.printf(`<ol class="cells">`)
	for _, d := range parts {
		w.printf(`<li data-key="%s"`, d.ID)
		w.writeNonEmpty(` data-pod="%s"`, d.OnlyPod())
		w.printf(`><a href="#%s" title="%s" aria-label="%s">`, d.ID, d.Title, d.Title)
		w.writeGlyph(d.Glyph())
		w.printf(`</a></li>`)
	}
	w.printf(`</ol></div>`)
	if len(s.Runs) > 0 {
		w.printf(`<table class="runs"><tbody>`)
		for i := range s.Runs {
			w.run(&s.Runs[i])
		}
		w.printf(`</tbody></table>`)
	}
	w.printf(`</div>`)
}

func (w *writer) run(r *run) {
	if r.Bad != "" {
		w.printf(`<tr class="bad"><td class="num">%d</td><td colspan="4">%s</td></tr>`, r.N, r.Bad)
		return
	}
	who := r.Who
	if who == "" {
		who = "free"
	}
	w.printf(`<tr class="%s"><td class="num">%d</td><td class="pod">%s</td><td class="vf">%s</td><td>%s</td><td class="num">`, textIf(r.Who == "", "none"), r.N, who, r.Parts, r.API)
	w.writeAge(r.Since, inLong)
	w.printf(`</td></tr>`)
}

func (w *writer) writeRing(r *ring) {
	w.printf(`<figure class="ring"><figcaption><b>%s</b> %s</figcaption><svg viewBox="-20 0 340 300" role="group" aria-label="%s, %s"><g class="chords" aria-hidden="true">`, r.Name, r.Text, r.Name, r.Text)
	for _, chord := range r.Chords {
		w.printf(`<path d="%s"/>`, chord)
	}
	w.printf(`</g>`)
	for i := range r.Nodes {
		n := &r.Nodes[i]
		w.printf(`<a href="#%s" aria-label="%s"><rect class="bgd" x="%s" y="%s" width="14" height="14" rx="3"/><svg class="g %s" x="%s" y="%s" width="14" height="14" aria-hidden="true"><use href="#%s"/></svg><text x="%s" y="%s">%s</text></a>`,
			n.ID, n.Title, n.X, n.Y, n.Glyph.Class, n.X, n.Y, n.Glyph.Shape, n.TextX, n.TextY, n.Label)
	}
	w.printf(`</svg></figure>`)
}
