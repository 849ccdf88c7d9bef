package page

import (
	"strings"

	"chandler.dev/internal/inventory"
)

// machine writes the devices at their positions.
func (w *writer) machine(doc *document) {
	m := doc.Machine
	w.f(`<section class="machine" id="machine" tabindex="-1" aria-labelledby="h-mach"><div class="bar-h"><h2 id="h-mach">The machine</h2><ul class="legend" aria-label="Legend">`)
	for _, g := range doc.Legend {
		w.f(`<li>`)
		w.glyph(g)
		w.f(` %s</li>`, g.Words)
	}
	for _, name := range doc.LinkNames {
		w.f(`<li><i class="wire"></i> %s</li>`, name)
	}
	w.f(`</ul></div>`)
	if len(m.NUMA) > 0 {
		w.f(`<div class="wires"><div class="numas c%d%s">`, len(m.NUMA), when(m.Rails, " rails"))
		for _, n := range m.NUMA {
			w.numa(n)
		}
		w.f(`</div>`)
		w.buses(m.Buses)
		w.f(`</div>`)
	}
	for i := range m.Rings {
		w.ring(&m.Rings[i])
	}
	if len(m.Loose) > 0 {
		w.f(`<section class="loose"><h3>Of the host itself</h3><ul class="devs flat">`)
		for _, d := range m.Loose {
			w.f(`<li class="dev %s%s" data-key="%s"><a href="#%s" title="%s">`, d.Level, when(d.Open, " open"), d.ID, d.ID, d.Title)
			w.glyph(d.Glyph())
			w.f(`<span class="l"><span class="what">%s</span></span><span class="l"><span class="who">%s</span><span class="rt"></span></span></a></li>`, d.Label, d.Second())
		}
		w.f(`</ul></section>`)
	}
	w.f("</section>\n")
}

func when(holds bool, text string) string {
	if holds {
		return text
	}
	return ""
}

func (w *writer) numa(n *numa) {
	w.f(`<section class="numa%s">`, when(n.Title == "", " bare"))
	w.maybe(`<h3>%s</h3>`, n.Title)
	w.f(`<ul class="roots n%d%s">`, len(n.Roots), when(n.Wide(), " wide"))
	for _, r := range n.Roots {
		w.f(`<li class="root%s%s">`, when(len(r.Lanes) > 0, " lkd"), when(r.Solo(), " solo"))
		if r.Name != "" && !r.Solo() {
			w.f(`<h4>root <code>%s</code>`, r.Name)
			w.maybe(` <span class="arrow" aria-hidden="true">›</span> switch <code>%s</code>`, r.Switch)
			w.f(`</h4>`)
		}
		w.f(`<ul class="devs">`)
		for _, s := range r.Silicon {
			if s.Divided() {
				w.divided(s)
			} else {
				w.device(s)
			}
		}
		w.f(`</ul>`)
		for _, lane := range r.Lanes {
			w.f(`<i class="rail lane%d%s" aria-hidden="true"></i>`, lane, when(r.Local, " loc"))
		}
		w.f(`</li>`)
	}
	w.f(`</ul>`)
	w.buses(n.Buses)
	w.f(`</section>`)
}

func (w *writer) buses(buses []bus) {
	for _, b := range buses {
		w.f(`<p class="bus lane%d"><span><b>%s</b> %s</span></p>`, b.Lane, b.Name, b.Text)
	}
}

func (w *writer) address(s *silicon) {
	switch {
	case s.Addr == "":
		w.f(`<span></span>`)
	case s.Solo():
		w.f(`<code class="addr" title="PCIe root %s">%s<i> › </i>%s</code>`, s.Root, s.ShortRoot(), s.Addr)
	default:
		w.f(`<code class="addr">%s</code>`, s.Addr)
	}
}

// lane writes the classes of a physical device with private links.
func (w *writer) lane(s *silicon) {
	if s.Lane > 0 {
		w.f(` lk lane%d`, s.Lane)
	}
}

// heldClass returns the class for whether the device is allocated.
func heldClass(d *device) string {
	if len(d.Holders) > 0 || d.Holding == inventory.Taken {
		return "held"
	}
	return "free"
}

// device writes a physical device without partitions.
func (w *writer) device(s *silicon) {
	d := s.First()
	w.f(`<li class="dev %s %s%s`, d.Level, heldClass(d), when(d.Open, " open"))
	w.lane(s)
	w.f(`" data-key="%s"`, d.ID)
	w.maybe(` data-pod="%s"`, d.Mate())
	w.f(`><a href="#%s" title="%s">`, d.ID, d.Title)
	w.glyph(d.Glyph())
	w.f(`<span class="l"><span class="what"><span class="kind">%s</span> %s`, d.Kind, d.Label)
	w.maybe(` <small>%s</small>`, d.Sub())
	w.f(`</span>`)
	w.address(s)
	w.f(`</span>`)
	w.maybe(`<span class="l why">%s</span>`, d.Why())
	w.f(`<span class="l"><span class="who%s">%s</span><span class="rt">`, when(len(d.Holders) == 0, " none"), d.Second())
	switch {
	case d.Move != nil:
		w.f(`<span class="api mv">%s</span>`, arrow(d.Move))
	case len(d.Holders) > 0:
		w.f(`<span class="api">%s</span>`, inventory.APIName(d.Holders[0].API))
	}
	if d.HeldSince != nil {
		w.f(` `)
		w.ago(d.HeldSince, inShort)
	}
	w.f(`</span></span></a></li>`)
}

// divided writes a physical device with its partitions.
func (w *writer) divided(s *silicon) {
	w.f(`<li class="sil %s`, s.Level())
	w.lane(s)
	w.f(`" data-key="%s"><div class="hd"><a href="#%s" class="what" title="%s · %s · %s">`, s.ID, s.ID, s.Kind, strings.TrimSpace(s.Head()+" "+s.Addr), s.Size())
	if s.Whole != nil {
		w.glyph(s.Whole.Glyph())
		w.f(` `)
	}
	w.f(`<span class="kind">%s</span> %s`, s.Kind, s.Head())
	w.maybe(` <small>%s</small>`, s.Sub())
	w.f(`</a>`)
	w.address(s)
	w.f(`<span class="cnt">%s`, s.Size())
	if whole := s.HeldWhole(); whole != "" {
		w.f(`: allocated whole to <b>%s</b>`, whole)
	} else {
		separator := ": "
		for _, c := range s.Count() {
			w.f(`%s<b class="%s">%d</b> %s`, separator, c.Class, c.N, c.Word)
			separator = ", "
		}
	}
	w.f(`</span></div>`)
	if s.Tiles() {
		w.tiles(s)
	} else {
		w.cells(s)
	}
	w.maybe(`<p class="mvnote">%s</p>`, s.WaitNote())
	w.maybe(`<p class="badnote">%s</p>`, s.Note())
	w.f(`</li>`)
}

func (w *writer) tiles(s *silicon) {
	w.f(`<ul class="tiles">`)
	for _, d := range s.Parts() {
		w.f(`<li class="tile %s %s" data-key="%s"`, d.Level, heldClass(d), d.ID)
		w.maybe(` data-pod="%s"`, d.Mate())
		w.f(`><a href="#%s" title="%s">`, d.ID, d.Title)
		w.glyph(d.Glyph())
		who := d.Second()
		if len(d.Holders) > 0 {
			who = d.Pods()
		}
		w.f(`<b>%s</b><span class="who%s">%s</span></a></li>`, d.Label, when(len(d.Holders) == 0, " none"), who)
	}
	w.f(`</ul>`)
}

func (w *writer) cells(s *silicon) {
	w.f(`<div class="mxr%s"><div class="mx%s">`, when(s.Few(), " few"), when(s.Big(), " big"))
	parts := s.Parts()
	if s.Big() {
		w.f(`<ol class="axis" aria-hidden="true">`)
		for n := 0; n < len(parts); n += 16 {
			w.f(`<li>%d</li>`, n)
		}
		w.f(`</ol>`)
	}
	w.f(`<ol class="cells">`)
	for _, d := range parts {
		w.f(`<li data-key="%s"`, d.ID)
		w.maybe(` data-pod="%s"`, d.Mate())
		w.f(`><a href="#%s" title="%s" aria-label="%s">`, d.ID, d.Title, d.Title)
		w.glyph(d.Glyph())
		w.f(`</a></li>`)
	}
	w.f(`</ol></div>`)
	if len(s.Runs) > 0 {
		w.f(`<table class="runs"><tbody>`)
		for i := range s.Runs {
			w.run(&s.Runs[i])
		}
		w.f(`</tbody></table>`)
	}
	w.f(`</div>`)
}

func (w *writer) run(r *run) {
	if r.Bad != "" {
		w.f(`<tr class="bad"><td class="num">%d</td><td colspan="4">%s</td></tr>`, r.N, r.Bad)
		return
	}
	who := r.Who
	if who == "" {
		who = "free"
	}
	w.f(`<tr class="%s"><td class="num">%d</td><td class="pod">%s</td><td class="vf">%s</td><td>%s</td><td class="num">`, when(r.Who == "", "none"), r.N, who, r.Parts, r.API)
	w.ago(r.Since, inLong)
	w.f(`</td></tr>`)
}

func (w *writer) ring(r *ring) {
	w.f(`<figure class="ring"><figcaption><b>%s</b> %s</figcaption><svg viewBox="-20 0 340 300" role="group" aria-label="%s, %s"><g class="chords" aria-hidden="true">`, r.Name, r.Text, r.Name, r.Text)
	for _, chord := range r.Chords {
		w.f(`<path d="%s"/>`, chord)
	}
	w.f(`</g>`)
	for i := range r.Nodes {
		n := &r.Nodes[i]
		w.f(`<a href="#%s" aria-label="%s"><rect class="bgd" x="%s" y="%s" width="14" height="14" rx="3"/><svg class="g %s" x="%s" y="%s" width="14" height="14" aria-hidden="true"><use href="#%s"/></svg><text x="%s" y="%s">%s</text></a>`,
			n.ID, n.Title, n.X, n.Y, n.Glyph.Class, n.X, n.Y, n.Glyph.Shape, n.TextX, n.TextY, n.Label)
	}
	w.f(`</svg></figure>`)
}
