package page

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"chandler.dev/internal/inventory"
)

// A glyph stands for the state of a device. Its colour is the health, its fill
// how much is held, its shape trouble.
type glyph struct {
	Class string // of the colour: ok, warn, bad, unk or move
	Shape string // the symbol
	Words string
}

// device is a device with all that a page says of it.
type device struct {
	*inventory.Device
	ID    string // in the document
	Level string // as the Class of a glyph
	Addr  string // short PCI address, "" if it has none
	Title string // all of it in words

	HeldSince *stamp // nil if that is not known
	Unasked   bool   // it is not known who has it
}

// Mate names the pod that alone has the device, "" if none has.
func (d *device) Mate() string {
	if owners := d.Owners(); len(owners) == 1 && !d.Open {
		return owners[0]
	}
	return ""
}

// levels in the order in which they need attention.
var levels = []string{"bad", "unk", "warn", "move", "ok"}

func worse(a, b string) int { return cmp.Compare(slices.Index(levels, a), slices.Index(levels, b)) }

// troubles are the levels of what can be wrong with a device.
var troubles = map[inventory.State]string{
	inventory.Unhealthy: "bad", inventory.Unread: "unk", inventory.Degraded: "warn", inventory.Moving: "move",
}

// levelOf returns the level of a device.
func levelOf(d *inventory.Device) string {
	return cmp.Or(troubles[d.State], "ok")
}

// notKnown is said of devices in place of who has them.
const notKnown = "not known who has it"

// Why says what is wrong with the device, "" if nothing is.
func (d *device) Why() string { return d.Health.Reason }

// Sub tells the device from others of its model, if its label does not.
func (d *device) Sub() string { return d.Detail }

// Glyph of the device.
func (d *device) Glyph() glyph {
	fill, words := "free", "free"
	if d.Unasked {
		words = notKnown
	}
	switch d.Holding {
	case inventory.Held:
		fill, words = "held", "held"
	case inventory.Partly:
		words = "partly held"
	case inventory.Taken:
		words = "held with the whole"
	}
	if d.Holding == inventory.Partly && d.Level != "ok" {
		fill = "held"
	}
	if d.Open {
		return d.openGlyph()
	}
	switch d.Level {
	case "move":
		if fill == "held" {
			return glyph{"move", "g-move-held", "held, then moves to the other API"}
		}
		return glyph{"move", "g-move", "moves to the other API"}
	case "warn":
		return glyph{"warn", "g-warn-" + fill, "degraded, " + words}
	case "bad":
		return glyph{"bad", "g-bad-" + fill, "unhealthy, " + words}
	case "unk":
		return glyph{"unk", "g-unk-" + fill, "not readable, " + words}
	}
	switch d.Holding {
	case inventory.Partly:
		return glyph{"ok", fmt.Sprintf("g-part-%d", d.third()), words}
	case inventory.Taken:
		return glyph{"ok", "g-taken", words}
	}
	return glyph{"ok", "g-" + fill, words}
}

func (d *device) openGlyph() glyph {
	used := len(d.Holders) > 0
	switch {
	case d.Level == "bad" || d.Level == "warn" || d.Level == "unk":
		words := map[string]string{"bad": "unhealthy", "warn": "degraded", "unk": "not readable"}[d.Level]
		if used {
			return glyph{d.Level, "g-" + d.Level + "-held", words + ", held"}
		}
		if d.Unasked {
			return glyph{d.Level, "g-" + d.Level + "-free", words + ", " + notKnown}
		}
		return glyph{d.Level, "g-" + d.Level + "-free", words + ", free"}
	case used:
		return glyph{"ok", "g-open-held", "for any number, in use"}
	}
	return glyph{"ok", "g-open", "for any number of pods"}
}

// third says how full a device is that is partly held.
func (d *device) third() int {
	if d.Shares.All > 0 {
		return min(3, max(1, 4*d.Shares.Held/(d.Shares.All+1)))
	}
	return 2
}

// unmade is said of devices that are not there yet.
const unmade = "made when somebody gets it"

// Words say the state.
func (d *device) Words() string {
	if d.Open && d.Level == "ok" {
		return "for any number"
	}
	var words []string
	switch d.Level {
	case "bad":
		words = append(words, "unhealthy")
	case "warn":
		words = append(words, "degraded")
	case "unk":
		words = append(words, "not readable")
	}
	held := d.Holding == inventory.Held || d.Holding == inventory.Partly || d.Open && len(d.Holders) > 0
	switch {
	case held && d.Holding == inventory.Partly:
		words = append(words, "partly held")
	case held:
		words = append(words, "held")
	case d.Holding == inventory.Taken:
		words = append(words, "held with the whole")
	case d.Move != nil:
		words = append(words, "waiting")
	case d.Open:
		words = append(words, "for any number")
	case d.Unasked:
		words = append(words, notKnown)
	default:
		words = append(words, "free")
	}
	if d.Awaits() {
		words = append(words, unmade)
	}
	if d.Move != nil {
		words = append(words, movingTo(d.Move))
	}
	return strings.Join(words, ", ")
}

func movingTo(m *inventory.Move) string {
	if m.To == "" {
		return "about to change"
	}
	return "moving to " + inventory.APIName(m.To)
}

// ShortModel is the model without the vendor's name.
func (d *device) ShortModel() string {
	first, rest, found := strings.Cut(d.Model, " ")
	if found && rest != "" && strings.EqualFold(first, d.Offered.Attributes.String("vendor")) && d.Offered.Attributes.String("model") != "" {
		return rest
	}
	return d.Model
}

// arrow says from which API to which silicon moves.
func arrow(m *inventory.Move) string {
	if m.To == "" {
		return "changes"
	}
	return otherAPI(m.To) + " → " + inventory.APIName(m.To)
}
