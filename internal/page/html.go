package page

import (
	"bytes"
	"fmt"
	"html"
	"strings"
)

// writer writes HTML. The package does not use html/template, since the linker would then keep
// every method of the program, which makes the agent half as large again, on disk and in memory.
//
// All formats are constants of this package. Their values are only between tags or in quoted
// attributes. There, escaping &, <, >, ' and " is enough (WHATWG HTML, 13.1.2.3 and 13.1.3). No
// value is in a script, a style or the scheme of a link.
type writer struct{ bytes.Buffer }

// f writes a format with %s for strings and %d for numbers. All strings are escaped.
func (w *writer) f(format string, values ...any) {
	escaped := make([]any, len(values))
	for i, value := range values {
		switch value := value.(type) {
		case int, trusted:
			escaped[i] = value
		case string:
			escaped[i] = html.EscapeString(value)
		default:
			escaped[i] = html.EscapeString(fmt.Sprint(value))
		}
	}
	fmt.Fprintf(w, format, escaped...)
}

// trusted is HTML from the program itself.
type trusted string

// maybe writes a format with a text unless the text is empty.
func (w *writer) maybe(format, text string) {
	if text != "" {
		w.f(format, text) //nolint:govet // the caller's format is a constant
	}
}

// breaks returns an expression with possible line breaks at readable places.
func breaks(expression string) trusted {
	escaped := html.EscapeString(expression)
	for _, at := range []string{"[&#34;", ".?", ".orValue"} {
		escaped = strings.ReplaceAll(escaped, at, "<wbr>"+at)
	}
	return trusted(escaped)
}

func (w *writer) glyph(g glyph) {
	w.f(`<svg class="g %s" aria-hidden="true"><use href="#%s"/></svg>`, g.Class, g.Shape)
}

// ago writes how long ago a moment was. It writes nothing for nil.
func (w *writer) ago(s *stamp, words func(*stamp) string) {
	if s != nil {
		w.f(`<time datetime="%s" title="since %s">%s</time>`, s.Machine, s.Exact, words(s))
	}
}

func inShort(s *stamp) string { return s.Short }

func inLong(s *stamp) string { return s.Long }

// document writes the document.
func (w *writer) document(doc *document) {
	w.f("<!doctype html>\n<html lang=\"en\"")
	if !doc.Solid {
		w.f(` class="nodev"`)
	}
	w.f(">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n<title>%s</title>\n<link rel=\"icon\" href=\"data:,\">\n", doc.Title)
	if doc.Events != "" {
		w.f("<noscript><meta http-equiv=\"refresh\" content=\"30\"></noscript>\n")
	}
	w.f("<style>%s</style>\n</head>\n<body>\n<a class=\"skip\" href=\"#machine\">Skip to the machine</a>", trusted(style))
	if len(doc.Pods) > 0 {
		w.f(`<a class="skip" href="#h-who">Skip to the consumers</a>`)
	}
	w.f("\n%s<div class=\"page\">\n", trusted(glyphs))
	w.top(doc)
	w.f("<main>\n")
	if len(doc.Alarms) > 0 {
		w.attention(doc.Alarms)
	}
	if doc.Solid {
		w.stock(doc)
		w.machine(doc)
		if len(doc.Pods) > 0 {
			w.pods(doc)
		}
	} else {
		w.empty(doc)
	}
	w.f("</main>\n</div>\n<div class=\"panels\">")
	for i := range doc.Panels {
		w.panel(&doc.Panels[i])
	}
	w.f("</div>\n<script>%s</script>\n</body>\n</html>\n", trusted(script))
}

func (w *writer) top(doc *document) {
	w.f(`<header class="top"><div class="id"><h1>%s</h1><p class="env">%s</p></div>`, doc.Host, doc.Env)
	if doc.Solid {
		w.f(`<form class="filter" role="search" hidden><label for="q" class="vh">Filter devices and pods</label><input id="q" name="q" type="search" placeholder="Filter devices and pods" autocomplete="off" spellcheck="false"><kbd>/</kbd><output for="q"></output></form>`)
	}
	w.f(`<nav class="meta" aria-label="This page">`)
	switch {
	case doc.Recorded != "":
		w.f(`<p class="live"><span>Recorded host <code>%s</code>, not live</span></p>`, doc.Recorded)
	default:
		w.f(`<p class="live" id="live" role="status" data-live="%s" data-events="%s" data-revision="%s"><span class="dot"></span><span>As of <time datetime="%s">%s</time></span></p>`,
			doc.Live, doc.Events, doc.Revision, doc.AsOf.Machine, doc.AsOf.Exact)
	}
	w.f("<a href=\"inventory.json\">JSON</a></nav></header>\n")
}

func (w *writer) attention(alarms []attention) {
	w.f(`<section class="attention" aria-labelledby="h-att"><h2 id="h-att">Attention <span class="n">%d</span></h2><ul>`, len(alarms))
	for i := range alarms {
		a := &alarms[i]
		w.f(`<li class="att %s" data-key="%s%s%s"><div>`, a.Glyph.Class, a.Href, a.Cond, a.Name)
		w.glyph(a.Glyph)
		if a.Href != "" {
			w.f(`<a href="#%s">`, a.Href)
			w.maybe("%s ", a.Kind)
			w.f(`<b>%s</b></a>`, a.Name)
		} else {
			w.f(`<b>%s</b>`, a.Name)
		}
		w.f(` <code class="cond">`)
		if a.Code != "" {
			w.f(`<span title="chandler explain %s">%s</span> `, a.Code, a.Code)
		}
		w.f(`%s</code><p><span class="why">%s`, a.Cond, a.Why)
		if a.Owner != "" {
			w.f(` <span class="pod">%s</span> %s go.`, a.Owner, a.Lets)
		}
		w.f(`</span> `)
		w.maybe(`<span class="pod">%s</span> `, a.Who)
		w.f(`%s</p></div>`, a.Then)
		w.ago(a.Since, inLong)
		w.f(`</li>`)
	}
	w.f("</ul></section>\n")
}

func (w *writer) stock(doc *document) {
	w.f(`<section class="stock" aria-labelledby="h-stock"><h2 id="h-stock">Devices by model</h2>`)
	if !doc.Asked {
		w.f(`<p class="quiet">The consumers of devices are unknown.</p>`)
	}
	w.f(`<table><thead><tr><th scope="col"><span class="vh">Kind and model</span></th><th scope="col" class="num">free</th><th scope="col" class="num">allocated</th>`)
	columns := 3
	if doc.OutTold {
		columns++
		w.f(`<th scope="col" class="num" title="neither free nor allocated: unhealthy, not readable, or about to move to the other API">unavailable</th>`)
	}
	w.f(`<th scope="col" class="num">total</th><th scope="col"><span class="vh">each</span></th></tr></thead><tbody>`)
	for _, row := range doc.Stock {
		w.f(`<tr><th scope="row"><span class="kind">%s</span> %s<span class="names">`, row.Kind, row.Model)
		w.maybe(`<small>%s</small>`, row.Small)
		for _, name := range row.Names {
			w.f(`<code>%s</code>`, name)
		}
		w.f(`</span></th>`)
		shared := ""
		if row.Open {
			shared = " sh"
			w.f(`<td class="num any" colspan="%d">unlimited sharing</td>`, columns)
		} else {
			if doc.Asked {
				w.f(`<td class="num free">%d</td><td class="num">%d</td>`, row.Free, row.Held)
			} else {
				w.f(`<td class="num free">?</td><td class="num">?</td>`)
			}
			if doc.OutTold {
				w.f(`<td class="num out">%d</td>`, row.Out)
			}
			w.f(`<td class="num">%d</td>`, row.All)
		}
		w.f(`<td class="st%s">`, shared)
		if len(row.Glyphs) > 0 {
			w.f(`<span class="strip">`)
			for _, g := range row.Glyphs {
				w.glyph(g)
			}
			w.f(`</span>`)
		} else {
			w.f(`<svg class="bar" aria-hidden="true">`)
			for _, s := range row.Bar {
				w.f(`<rect class="%s f" x="%s" width="%s" height="100%%"/>`, s.Class, s.X, s.Width)
			}
			w.f(`</svg>`)
		}
		w.f(`</td></tr>`)
	}
	w.f("</tbody></table></section>\n")
}

func (w *writer) pods(doc *document) {
	w.f(`<section class="holders" aria-labelledby="h-who"><h2 id="h-who" tabindex="-1">Consumers <span class="n">%s</span></h2><table><thead><tr><th scope="col">Pod</th><th scope="col">Devices</th><th scope="col">Claim or resource</th><th scope="col">API</th><th scope="col" class="num">Since</th></tr></thead><tbody>`, doc.PodCount)
	for _, p := range doc.Pods {
		for i := range p.Rows {
			row := &p.Rows[i]
			w.f(`<tr data-pod="%s">`, p.Mate)
			if i == 0 {
				w.f(`<th scope="rowgroup" rowspan="%d">`, len(p.Rows))
				w.maybe(`<small>%s/</small>`, p.Namespace)
				w.f(`<b>%s</b></th>`, p.Name)
			}
			w.f(`<td class="dv">`)
			for j := range row.Chips {
				w.chip(&row.Chips[j])
			}
			w.f(`</td><td class="by"><span class="via">%s</span> %s`, row.Via, row.By)
			w.maybe(` <small>%s</small>`, row.Small)
			w.f(`</td><td class="ap">%s</td><td class="num">`, row.API)
			w.ago(row.Since, inLong)
			w.f(`</td></tr>`)
		}
	}
	w.f("</tbody></table></section>\n")
}

func (w *writer) chip(c *chip) {
	if c.ID != "" {
		w.f(`<a class="ch" href="#%s"`, c.ID)
		w.maybe(` title="%s"`, c.Title)
		w.f(`>`)
	} else {
		w.f(`<span class="ch">`)
	}
	w.glyph(c.Glyph)
	w.f(` `)
	w.maybe(`<code>%s</code>`, c.Code)
	w.f(`%s`, c.Text)
	w.maybe(` <small>%s</small>`, c.Small)
	if c.ID != "" {
		w.f(`</a> `)
	} else {
		w.f(`</span> `)
	}
}

func (w *writer) empty(doc *document) {
	title := "No accelerators."
	if doc.Unread {
		title = "No accelerator could be described."
	}
	w.f(`<section class="empty" id="machine" tabindex="-1" aria-labelledby="h-empty"><svg viewBox="0 0 120 64" aria-hidden="true"><rect x="1" y="1" width="118" height="62" rx="6"/><path d="M14 20h26M14 32h36M14 44h18"/><rect x="73" y="14" width="32" height="15" rx="3"/><rect x="73" y="35" width="32" height="15" rx="3"/></svg><h2 id="h-empty">%s</h2><p>%s</p><dl><dt>To see what the kernel sees</dt><dd><code>lspci -nn -d ::0300 ; lspci -nn -d ::1200</code></dd><dt>To find the fault of this node</dt><dd><code>chandler doctor</code></dd><dt>To share it</dt><dd><code>chandler record -o %s.host</code></dd></dl></section>`,
		title, doc.Looked(), doc.Host)
}
