// Package page shows a machine's devices to people: where they are, how they are,
// who has them, and how to ask for one. It turns an inventory into one HTML document that
// needs nothing else, and serves it. It knows no vendor and asks nobody.
package page

import (
	"crypto/sha256"
	_ "embed" // its style, script and glyphs
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

// Policy is the Content-Security-Policy of the document: its own style and its own
// script, and nothing else.
var Policy = "default-src 'none'; style-src " + hash(style) + "; script-src " + hash(script) +
	"; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// document is all that the page shows.
type document struct {
	*inventory.Inventory
	Title    string
	Env      string
	Live     string // what to say while the page is live
	Events   string // where revisions are told, "" if nothing is live
	Revision string
	AsOf     stamp

	Alarms    []attention
	Stock     []*stock
	OutTold   bool // a column for what is out
	Machine   *machine
	Legend    []glyph
	LinkNames []string
	Pods      []*pod
	PodCount  string
	Panels    []panel
	Unread    bool // something could not be read
	Solid     bool // there are devices
}

// view is an inventory on its way to a document.
type view struct {
	inv       *inventory.Inventory
	list      []*device
	devices   map[string]*device  // by name
	of        map[string]*silicon // by device
	bySilicon map[string]*silicon
	machine   *machine
}

// Live says how a page hears of changes.
type Live struct {
	Events   string // path of the stream of revisions, "" if there is none
	Revision string
	Changed  time.Time // when the host last changed
}

// Render writes the page of a machine.
func Render(w io.Writer, inv *inventory.Inventory, live Live) error {
	var out writer
	out.document(documentOf(inv, live))
	_, err := out.WriteTo(w)
	return err
}

// look makes a view of an inventory.
func look(inv *inventory.Inventory) *view {
	v := &view{inv: inv, devices: make(map[string]*device), of: make(map[string]*silicon), bySilicon: make(map[string]*silicon)}
	for _, of := range inv.Devices {
		d := &device{Device: of, ID: documentID(of.Name), Level: levelOf(of), Addr: inventory.ShortAddress(of.Place.Address), Unasked: !inv.Asked}
		if len(of.Holders) > 0 {
			d.HeldSince = stampOf(of.Holders[0].Since, inv.At)
		}
		v.list = append(v.list, d)
		v.devices[d.Name] = d
	}
	v.arrange()
	v.link()
	return v
}

// titleOf says all of a device in words.
func titleOf(d *device, s *silicon) string {
	name := strings.TrimSpace(d.Label + " " + d.Addr)
	switch {
	case s.virtual() && d != s.Whole:
		name = d.Label + ", " + d.Addr
	case s.Divided() && d != s.Whole:
		name = d.Label
		if d.Label != s.Addr {
			name += " of " + s.Call()
		}
	}
	words := []string{d.Kind, name, d.Words()}
	if owners := d.Owners(); len(owners) > 0 {
		words = append(words, "by "+strings.Join(owners, ", "))
	}
	if why := d.Why(); why != "" {
		words = append(words, why)
	}
	return strings.Join(words, " · ")
}

func documentOf(inv *inventory.Inventory, live Live) *document {
	v := look(inv)
	doc := &document{
		Inventory: inv,
		Env:       "Chandler " + inv.Version,
		Events:    live.Events,
		Revision:  live.Revision,
		Alarms:    v.attention(),
		Stock:     stockOf(v.machine.all),
		Machine:   v.machine,
		Pods:      v.pods(),
		Panels:    v.panels(),
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
		doc.OutTold = doc.OutTold || row.Out > 0
	}
	doc.PodCount = inventory.Plural(len(doc.Pods), "pod")
	doc.Live = "Live"
	if changed := stampOf(live.Changed, inv.At); changed != nil {
		doc.Live = "Live, last change " + changed.Short + " ago"
		if changed.Short == short(0) {
			doc.Live = "Live, last change just now"
		}
	}
	doc.Title = inv.Host + " · " + v.summary()
	doc.Legend, doc.LinkNames = v.legend()
	return doc
}

// summary counts the devices.
func (v *view) summary() string {
	if len(v.list) == 0 {
		return "no accelerators"
	}
	text, bad := inventory.Plural(len(v.list), "accelerator"), 0
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

// legend returns the glyphs that are on the page, each once, and the names of links.
func (v *view) legend() (glyphs []glyph, links []string) {
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

// Looked says who looked at a host that has nothing.
func (doc *document) Looked() string {
	if doc.Unread {
		return "Above is what was found and could not be read. It is tried again with every scan."
	}
	return fmt.Sprintf("All %d families looked at this host, and none knows a device of it.", doc.Families)
}
