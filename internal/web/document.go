// Package web is the web UI: it shows a machine's devices with their position, health and
// consumers, and how to request them. It renders an inventory as one self-contained HTML document
// and serves the document. It has no vendor-specific code and makes no calls to other services.
package web

import (
	"crypto/sha256"
	_ "embed" // style, script and glyphs
	"encoding/base64"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"chandler.dev/internal/inventory"
)

//go:embed glyphs.svg
var glyphs string

//go:embed style.css
var style string

//go:embed script.js
var script string

// Policy is the Content-Security-Policy of the document. It allows only the document's own style
// and script.
var Policy = "default-src 'none'; style-src " + contentHash(style) + "; script-src " + contentHash(script) +
	"; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

func contentHash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// document is the content of the web UI.
type document struct {
	*inventory.Inventory
	Title    string
	Env      string
	Live     string // text while the document is live
	Events   string // path of the stream of revisions, "" if nothing is live
	Revision string
	AsOf     stamp

	Alarms           []attention
	Stock            []*stock
	ShowsUnavailable bool // shows a column for unavailable devices
	Machine          *machine
	Legend           []glyph
	LinkNames        []string
	Pods             []*pod
	PodCount         string
	Panels           []panel
	Unread           bool // something could not be read
	Solid            bool // there are devices
}

// view is an inventory with the data for a document.
type view struct {
	inv       *inventory.Inventory
	list      []*device
	devices   map[string]*device  // by name
	of        map[string]*silicon // by device
	bySilicon map[string]*silicon
	machine   *machine
}

// Live is how a document receives changes.
type Live struct {
	Events   string // path of the stream of revisions, or ""
	Revision string
	Changed  time.Time // time of the last change of the host
}

// RenderPage writes the document of a machine.
func RenderPage(w io.Writer, inv *inventory.Inventory, live Live) error {
	var out writer
	out.writeDocument(documentOf(inv, live))
	_, err := out.WriteTo(w)
	return err
}

// newView makes a view of an inventory.
func newView(inv *inventory.Inventory) *view {
	v := &view{inv: inv, devices: make(map[string]*device), of: make(map[string]*silicon), bySilicon: make(map[string]*silicon)}
	for _, of := range inv.Devices {
		d := &device{Device: of, ID: documentID(of.Name), Level: levelOf(of), Addr: inventory.ShortAddress(of.Place.Address), ConsumersUnknown: !inv.ConsumersKnown}
		if len(of.Holders) > 0 {
			d.HeldSince = stampOf(of.Holders[0].Since, inv.At)
		}
		v.list = append(v.list, d)
		v.devices[d.Name] = d
	}
	v.arrangeTree()
	v.link()
	return v
}

// titleOf returns a summary of a device in words.
func titleOf(d *device, s *silicon) string {
	name := strings.TrimSpace(d.Label + " " + d.Addr)
	switch {
	case s.isVirtual() && d != s.Whole:
		name = d.Label + ", " + d.Addr
	case s.IsDivided() && d != s.Whole:
		name = d.Label
		if d.Label != s.Addr {
			name += " of " + s.Call()
		}
	}
	words := []string{d.Kind, name, d.StateWords()}
	if owners := d.Owners(); len(owners) > 0 {
		words = append(words, "by "+strings.Join(owners, ", "))
	}
	if why := d.ProblemText(); why != "" {
		words = append(words, why)
	}
	return strings.Join(words, " · ")
}

func documentOf(inv *inventory.Inventory, live Live) *document {
	v := newView(inv)
	doc := &document{
		Inventory: inv,
		Env:       "Chandler " + inv.Version,
		Events:    live.Events,
		Revision:  live.Revision,
		Alarms:    v.attentionItems(),
		Stock:     stockOf(v.machine.all),
		Machine:   v.machine,
		Pods:      v.podRows(),
		Panels:    v.devicePanels(),
		Unread:    len(inv.Problems) > 0,
		Solid:     len(v.list) > 0,
	}
	if at := stampOf(inv.At, inv.At); at != nil {
		doc.AsOf = *at
		doc.AsOf.Exact = inv.At.UTC().Format("15:04:05") + " UTC"
	}
	if inv.Kubernetes != "" {
		doc.Env = "Kubernetes " + strings.TrimPrefix(inv.Kubernetes, "v") + " · " + doc.Env
	}
	for _, row := range doc.Stock {
		doc.ShowsUnavailable = doc.ShowsUnavailable || row.Out > 0
	}
	doc.PodCount = inventory.CountNoun(len(doc.Pods), "pod")
	doc.Live = "Live"
	if changed := stampOf(live.Changed, inv.At); changed != nil {
		doc.Live = "Live, last change " + changed.Short + " ago"
		if changed.Short == short(0) {
			doc.Live = "Live, last change just now"
		}
	}
	doc.Title = inv.Host + " · " + v.summaryText()
	doc.Legend, doc.LinkNames = v.legendGlyphs()
	return doc
}

// summaryText returns the number of devices as text.
func (v *view) summaryText() string {
	if len(v.list) == 0 {
		return "no accelerators"
	}
	text, bad := inventory.CountNoun(len(v.list), "accelerator"), 0
	for _, d := range v.list {
		if d.healthLevel() == "bad" {
			bad++
		}
	}
	if bad > 0 {
		text += fmt.Sprintf(", %d unhealthy", bad)
	}
	return text
}

// legendGlyphs returns the glyphs of the document without duplicates, and the names of links.
func (v *view) legendGlyphs() (glyphs []glyph, links []string) {
	for _, d := range v.list {
		g := d.Glyph()
		if strings.HasPrefix(g.Shape, "g-part") {
			g.Shape = "g-part-2"
		}
		if !slices.Contains(glyphs, g) {
			glyphs = append(glyphs, g)
		}
	}
	order := []string{"g-held", "g-part-2", "g-taken", "g-free"}
	rank := func(g glyph) int {
		if i := slices.Index(order, g.Shape); i >= 0 {
			return i
		}
		return len(order)
	}
	slices.SortStableFunc(glyphs, func(a, b glyph) int { return rank(a) - rank(b) })
	for _, s := range v.machine.all {
		if s.Lane > 0 && !slices.Contains(links, s.linkName) {
			links = append(links, s.linkName)
		}
	}
	return glyphs, links
}

// ScannedText returns the text for a host without devices.
func (doc *document) ScannedText() string {
	if doc.Unread {
		return "The devices above could not be read. Each scan tries again."
	}
	return fmt.Sprintf("None of the %d families has found a device on this host.", doc.Families)
}
