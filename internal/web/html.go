package web

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

// printf writes a format with %s for strings and %d for numbers. All strings are escaped.
func (w *writer) printf(format string, values ...any) {
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

// writeNonEmpty writes a format with a text unless the text is empty.
func (w *writer) writeNonEmpty(format, text string) {
	if text != "" {
		w.printf(format, text) //nolint:govet // the caller's format is a constant
	}
}

// allowBreaks returns an expression with possible line breaks at readable places.
func allowBreaks(expression string) trusted {
	escaped := html.EscapeString(expression)
	for _, at := range []string{"[&#34;", ".?", ".orValue"} {
		escaped = strings.ReplaceAll(escaped, at, "<wbr>"+at)
	}
	return trusted(escaped)
}

func (w *writer) writeGlyph(g glyph) {
	w.printf(`<svg class="g %s" aria-hidden="true"><use href="#%s"/></svg>`, g.Class, g.Shape)
}

// writeAge writes how long ago a moment was. It writes nothing for nil.
func (w *writer) writeAge(s *stamp, words func(*stamp) string) {
	if s != nil {
		w.printf(`<time datetime="%s" title="since %s">%s</time>`, s.Machine, s.Exact, words(s))
	}
}

func inShort(s *stamp) string { return s.Short }

func inLong(s *stamp) string { return s.Long }

// writeDocument writes the document.
func (w *writer) writeDocument(doc *document) {
	w.printf("<!doctype html>\n<html lang=\"en\"")
	if !doc.Solid {
		w.printf(` class="nodev"`)
	}
	w.printf(">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n<title>%s</title>\n<link rel=\"icon\" href=\"data:,\">\n", doc.Title)
	if doc.Events != "" {
		w.printf("<noscript><meta http-equiv=\"refresh\" content=\"30\"></noscript>\n")
	}
	w.printf("<style>%s</style>\n</head>\n<body>\n<a class=\"skip\" href=\"#machine\">Skip to the machine</a>", trusted(style))
	if len(doc.Pods) > 0 {
		w.printf(`<a class="skip" href="#h-who">Skip to the consumers</a>`)
	}
	w.printf("\n%s<div class=\"page\">\n", trusted(glyphs))
	w.writeTop(doc)
	w.printf("<main>\n")
	if len(doc.Alarms) > 0 {
		w.writeAttention(doc.Alarms)
	}
	if doc.Solid {
		w.writeStock(doc)
		w.writeMachine(doc)
		if len(doc.Pods) > 0 {
			w.writePods(doc)
		}
	} else {
		w.empty(doc)
	}
	w.printf("</main>\n</div>\n<div class=\"panels\">")
	for i := range doc.Panels {
		w.writePanel(&doc.Panels[i])
	}
	w.printf("</div>\n<script>%s</script>\n</body>\n</html>\n", trusted(script))
}

func (w *writer) writeTop(doc *document) {
	w.printf(`<header class="top"><div class="id"><h1>%s</h1><p class="env">%s</p></div>`, doc.Host, doc.Env)
	if doc.Solid {
		w.printf(`<form class="filter" role="search" hidden><label for="q" class="vh">Filter devices and pods</label><input id="q" name="q" type="search" placeholder="Filter devices and pods" autocomplete="off" spellcheck="false"><kbd>/</kbd><output for="q"></output></form>`)
	}
	w.printf(`<nav class="meta" aria-label="This page">`)
	switch {
	case doc.Recorded != "":
		w.printf(`<p class="live"><span>Recorded host <code>%s</code>, not live</span></p>`, doc.Recorded)
	default:
		w.printf(`<p class="live" id="live" role="status" data-live="%s" data-events="%s" data-revision="%s"><span class="dot"></span><span>As of <time datetime="%s">%s</time></span></p>`,
			doc.Live, doc.Events, doc.Revision, doc.AsOf.Machine, doc.AsOf.Exact)
	}
	w.printf("<a href=\"inventory.json\">JSON</a></nav></header>\n")
}

func (w *writer) writeAttention(alarms []attention) {
	w.printf(`<section class="attention" aria-labelledby="h-att"><h2 id="h-att">Attention <span class="n">%d</span></h2><ul>`, len(alarms))
	for i := range alarms {
		a := &alarms[i]
		w.printf(`<li class="att %s" data-key="%s%s%s"><div>`, a.Glyph.Class, a.Href, a.Cond, a.Name)
		w.writeGlyph(a.Glyph)
		if a.Href != "" {
			w.printf(`<a href="#%s">`, a.Href)
			w.writeNonEmpty("%s ", a.Kind)
			w.printf(`<b>%s</b></a>`, a.Name)
		} else {
			w.printf(`<b>%s</b>`, a.Name)
		}
		w.printf(` <code class="cond">`)
		if a.Code != "" {
			w.printf(`<span title="chandler explain %s">%s</span> `, a.Code, a.Code)
		}
		w.printf(`%s</code><p><span class="why">%s`, a.Cond, a.Why)
		if a.Owner != "" {
			w.printf(` <span class="pod">%s</span> %s go.`, a.Owner, a.Lets)
		}
		w.printf(`</span> `)
		w.writeNonEmpty(`<span class="pod">%s</span> `, a.Who)
		w.printf(`%s</p></div>`, a.Then)
		w.writeAge(a.Since, inLong)
		w.printf(`</li>`)
	}
	w.printf("</ul></section>\n")
}

func (w *writer) writeStock(doc *document) {
	w.printf(`<section class="stock" aria-labelledby="h-stock"><h2 id="h-stock">Devices by model</h2>`)
	if !doc.ConsumersKnown {
		w.printf(`<p class="quiet">The consumers of devices are unknown.</p>`)
	}
	w.printf(`<table><thead><tr><th scope="col"><span class="vh">Kind and model</span></th><th scope="col" class="num">free</th><th scope="col" class="num">allocated</th>`)
	columns := 3
	if doc.ShowsUnavailable {
		columns++
		w.printf(`<th scope="col" class="num" title="neither free nor allocated: unhealthy, not readable, or about to move to the other API">unavailable</th>`)
	}
	w.printf(`<th scope="col" class="num">total</th><th scope="col"><span class="vh">each</span></th></tr></thead><tbody>`)
	for _, row := range doc.Stock {
		w.printf(`<tr><th scope="row"><span class="kind">%s</span> %s<span class="names">`, row.Kind, row.Model)
		w.writeNonEmpty(`<small>%s</small>`, row.Small)
		for _, name := range row.Names {
			w.printf(`<code>%s</code>`, name)
		}
		w.printf(`</span></th>`)
		shared := ""
		if row.Open {
			shared = " sh"
			w.printf(`<td class="num any" colspan="%d">unlimited sharing</td>`, columns)
		} else {
			if doc.ConsumersKnown {
				w.printf(`<td class="num free">%d</td><td class="num">%d</td>`, row.Free, row.Held)
			} else {
				w.printf(`<td class="num free">?</td><td class="num">?</td>`)
			}
			if doc.ShowsUnavailable {
				w.printf(`<td class="num out">%d</td>`, row.Out)
			}
			w.printf(`<td class="num">%d</td>`, row.All)
		}
		w.printf(`<td class="st%s">`, shared)
		if len(row.Glyphs) > 0 {
			w.printf(`<span class="strip">`)
			for _, g := range row.Glyphs {
				w.writeGlyph(g)
			}
			w.printf(`</span>`)
		} else {
			w.printf(`<svg class="bar" aria-hidden="true">`)
			for _, s := range row.Bar {
				w.printf(`<rect class="%s f" x="%s" width="%s" height="100%%"/>`, s.Class, s.X, s.Width)
			}
			w.printf(`</svg>`)
		}
		w.printf(`</td></tr>`)
	}
	w.printf("</tbody></table></section>\n")
}

func (w *writer) writePods(doc *document) {
	w.printf(`<section class="holders" aria-labelledby="h-who"><h2 id="h-who" tabindex="-1">Consumers <span class="n">%s</span></h2><table><thead><tr><th scope="col">Pod</th><th scope="col">Devices</th><th scope="col">Claim or resource</th><th scope="col">API</th><th scope="col" class="num">Since</th></tr></thead><tbody>`, doc.PodCount)
	for _, p := range doc.Pods {
		for i := range p.Rows {
			row := &p.Rows[i]
			w.printf(`<tr data-pod="%s">`, p.Mate)
			if i == 0 {
				w.printf(`<th scope="rowgroup" rowspan="%d">`, len(p.Rows))
				w.writeNonEmpty(`<small>%s/</small>`, p.Namespace)
				w.printf(`<b>%s</b></th>`, p.Name)
			}
			w.printf(`<td class="dv">`)
			for j := range row.Chips {
				w.writeChip(&row.Chips[j])
			}
			w.printf(`</td><td class="by"><span class="via">%s</span> %s`, row.Via, row.By)
			w.writeNonEmpty(` <small>%s</small>`, row.Small)
			w.printf(`</td><td class="ap">%s</td><td class="num">`, row.API)
			w.writeAge(row.Since, inLong)
			w.printf(`</td></tr>`)
		}
	}
	w.printf("</tbody></table></section>\n")
}

func (w *writer) writeChip(c *chip) {
	if c.ID != "" {
		w.printf(`<a class="ch" href="#%s"`, c.ID)
		w.writeNonEmpty(` title="%s"`, c.Title)
		w.printf(`>`)
	} else {
		w.printf(`<span class="ch">`)
	}
	w.writeGlyph(c.Glyph)
	w.printf(` `)
	w.writeNonEmpty(`<code>%s</code>`, c.Code)
	w.printf(`%s`, c.Text)
	w.writeNonEmpty(` <small>%s</small>`, c.Small)
	if c.ID != "" {
		w.printf(`</a> `)
	} else {
		w.printf(`</span> `)
	}
}

func (w *writer) empty(doc *document) {
	title := "No accelerators."
	if doc.Unread {
		title = "No accelerators found. Some data of the host could not be read."
	}
	w.printf(`<section class="empty" id="machine" tabindex="-1" aria-labelledby="h-empty"><svg viewBox="0 0 120 64" aria-hidden="true"><rect x="1" y="1" width="118" height="62" rx="6"/><path d="M14 20h26M14 32h36M14 44h18"/><rect x="73" y="14" width="32" height="15" rx="3"/><rect x="73" y="35" width="32" height="15" rx="3"/></svg><h2 id="h-empty">%s</h2><p>%s</p><dl><dt>To see what the kernel sees</dt><dd><code>lspci -nn -d ::0300 ; lspci -nn -d ::1200</code></dd><dt>To find the fault of this node</dt><dd><code>chandler doctor</code></dd><dt>To share it</dt><dd><code>chandler record -o %s.host</code></dd></dl></section>`,
		title, doc.ScannedText(), doc.Host)
}
