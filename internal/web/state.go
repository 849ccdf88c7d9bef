package web

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"chandler.dev/internal/inventory"
)

// A glyph represents the state of a device. The colour shows the health, the fill the allocated
// amount, and the shape a problem.
type glyph struct {
	Class string // colour: ok, warn, bad, unk or move
	Shape string // symbol
	Words string
}

// device is a device with its data for a document.
type device struct {
	*inventory.Device
	ID    string // in the document
	Level string // like the Class of a glyph
	Addr  string // short PCI address, or ""
	Title string // summary in words

	HeldSince        *stamp // nil if unknown
	ConsumersUnknown bool   // the consumers are unknown
}

// OnlyPod returns the only pod that has the device, or "".
func (d *device) OnlyPod() string {
	if owners := d.Owners(); len(owners) == 1 && !d.Open {
		return owners[0]
	}
	return ""
}

// levels are ordered by urgency.
var levels = []string{"bad", "unk", "warn", "move", "ok"}

func compareLevels(a, b string) int {
	return cmp.Compare(slices.Index(levels, a), slices.Index(levels, b))
}

// troubles maps the problems of a device to levels.
var troubles = map[inventory.State]string{
	inventory.Unhealthy: "bad", inventory.Unread: "unk", inventory.Degraded: "warn", inventory.Moving: "move",
}

// levelOf returns the level of a device.
func levelOf(d *inventory.Device) string {
	return cmp.Or(troubles[d.State], "ok")
}

// notKnown replaces the consumers of a device if they are unknown.
const notKnown = "consumer unknown"

// ProblemText returns the problem of the device, or "".
func (d *device) ProblemText() string { return d.Health.Reason }

// Sub returns a text that distinguishes the device from others of its model, unless its label does.
func (d *device) Sub() string { return d.Detail }

// Glyph returns the glyph of the device.
func (d *device) Glyph() glyph {
	fill, words := "free", "free"
	if d.ConsumersUnknown {
		words = notKnown
	}
	switch d.Holding {
	case inventory.Held:
		fill, words = "held", "allocated"
	case inventory.Partly:
		words = "partly allocated"
	case inventory.Taken:
		words = "allocated with the whole device"
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
			return glyph{"move", "g-move-held", "allocated, then moves to the other API"}
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
		return glyph{"ok", fmt.Sprintf("g-part-%d", d.partlyThird()), words}
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
			return glyph{d.Level, "g-" + d.Level + "-held", words + ", allocated"}
		}
		if d.ConsumersUnknown {
			return glyph{d.Level, "g-" + d.Level + "-free", words + ", " + notKnown}
		}
		return glyph{d.Level, "g-" + d.Level + "-free", words + ", free"}
	case used:
		return glyph{"ok", "g-open-held", "unlimited sharing, in use"}
	}
	return glyph{"ok", "g-open", "unlimited sharing"}
}

// partlyThird returns the fill of a partly allocated device, from 1 to 3.
func (d *device) partlyThird() int {
	if d.Shares.All > 0 {
		return min(3, max(1, 4*d.Shares.Held/(d.Shares.All+1)))
	}
	return 2
}

// uncreatedText is the text for devices that do not exist yet.
const uncreatedText = "created on demand"

// StateWords returns the state in words.
func (d *device) StateWords() string {
	if d.Open && d.Level == "ok" {
		return "unlimited sharing"
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
		words = append(words, "partly allocated")
	case held:
		words = append(words, "allocated")
	case d.Holding == inventory.Taken:
		words = append(words, "allocated with the whole device")
	case d.Move != nil:
		words = append(words, "waiting")
	case d.Open:
		words = append(words, "unlimited sharing")
	case d.ConsumersUnknown:
		words = append(words, notKnown)
	default:
		words = append(words, "free")
	}
	if d.AwaitsCreation() {
		words = append(words, uncreatedText)
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

// moveText returns the old and the new API of a moving physical device.
func moveText(m *inventory.Move) string {
	if m.To == "" {
		return "changes"
	}
	return otherAPI(m.To) + " → " + inventory.APIName(m.To)
}
