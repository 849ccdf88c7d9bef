package web

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/natural"
)

// attention is a problem or a pending move.
type attention struct {
	Glyph glyph
	Href  string // link to the device's panel, or ""
	Kind  string
	Name  string
	Code  string // code of chandler doctor, or ""
	Cond  string
	Why   string
	Owner string // consumers for whom a move waits; emphasised after Why
	Lets  string // "lets" or "let", after Owner
	Who   string // affected consumers
	Then  string // consequence
	Since *stamp

	begin int64
}

const (
	codeProblem = "CH0309" // something of a device could not be read
	codeWaits   = "CH0502" // the device waits to move to the other API
)

// attentionItems returns the problems and pending moves, worst first.
func (v *view) attentionItems() (items []attention) {
	for _, s := range v.machine.all {
		items = append(items, v.healthItems(s)...)
		if move := s.FirstDevice().Move; move != nil {
			items = append(items, v.moveItem(s, move))
		}
	}
	items = append(items, v.goneItems()...)
	items = append(items, v.problemItems()...)
	items = append(items, v.noteItems()...)
	slices.SortStableFunc(items, func(a, b attention) int {
		return cmp.Or(compareLevels(a.Glyph.Class, b.Glyph.Class), cmp.Compare(b.begin, a.begin))
	})
	return items
}

// healthItems returns the problems of a physical device. Devices with the same problem are one
// item.
func (v *view) healthItems(s *silicon) (items []attention) {
	type reading struct {
		key    discovery.Condition
		reason string
	}
	same := make(map[reading][]*device)
	var order []reading
	for _, d := range s.Devices {
		if d.Health.Condition == "" {
			continue
		}
		r := reading{d.Health.Condition, d.Health.Reason}
		if same[r] == nil {
			order = append(order, r)
		}
		same[r] = append(same[r], d)
	}
	for _, r := range order {
		items = append(items, v.healthItem(s, same[r]))
	}
	return items
}

func (v *view) healthItem(s *silicon, devices []*device) attention {
	d := devices[0]
	effect := d.Health.Effect
	item := attention{
		Kind: d.Kind, Href: d.ID, Code: codes.CodeOf(d.Health.Condition), Cond: fmt.Sprintf("%s, %s", d.Health.Condition, effect),
		Why: asSentence(d.ProblemText()), Since: stampOf(d.Health.Since, v.inv.At), begin: d.Health.Since.Unix(),
	}
	it, has := "it", "has it"
	switch {
	case len(devices) > 1:
		item.Name, item.Href = fmt.Sprintf("%d %ss of %s", len(devices), s.Noun, s.Call()), s.ID
		it, has = "them", "has one"
	case s.isVirtual() && d != s.Whole:
		item.Name = fmt.Sprintf("%s, %s", d.Label, d.Addr)
	case s.IsDivided() && d != s.Whole:
		item.Name = fmt.Sprintf("%s of %s", d.Label, s.Call())
	default:
		item.Name = strings.TrimSpace(d.Label + " " + cmp.Or(s.Addr, d.Detail))
	}
	switch effect {
	case resourceapi.DeviceTaintEffectNone:
		item.Then = "It is still offered."
	case resourceapi.DeviceTaintEffectNoExecute:
		item.Then = fmt.Sprintf("No new pod gets %s, and pods that have %s are evicted.", it, it)
	default:
		item.Then = fmt.Sprintf("No new pod gets %s.", it)
	}
	owners := ownersOf(devices)
	item.Glyph = d.Glyph()
	for _, other := range devices {
		if len(other.Holders) > 0 {
			item.Glyph = other.Glyph()
		}
	}
	if v.inv.ConsumersKnown {
		item.Who = firstAndMore(owners)
		if len(owners) == 0 {
			item.Then += " Nobody " + has + "."
		} else if effect == resourceapi.DeviceTaintEffectNone {
			item.Then = has + ". " + item.Then
		} else {
			item.Then = has + " and received an Event. " + item.Then
		}
		if len(owners) > 1 {
			item.Then = strings.Replace(strings.Replace(item.Then, "has ", "have ", 1), " was ", " were ", 1)
		}
	}
	return item
}

// ownersOf returns the consumers of the devices, without duplicates.
func ownersOf(devices []*device) (owners []string) {
	for _, d := range devices {
		for _, owner := range d.Owners() {
			if !slices.Contains(owners, owner) {
				owners = append(owners, owner)
			}
		}
	}
	slices.SortFunc(owners, natural.CompareNames)
	return owners
}

// firstAndMore returns the first name and the number of the others.
func firstAndMore(names []string) string {
	switch len(names) {
	case 0:
		return ""
	case 1:
		return names[0]
	case 2:
		return names[0] + " and one more"
	}
	return fmt.Sprintf("%s and %d more", names[0], len(names)-1)
}

// moveItem returns the pending move of a physical device.
func (v *view) moveItem(s *silicon, move *inventory.Move) attention {
	d := s.FirstDevice()
	item := attention{
		Glyph: glyph{"move", "g-move", ""}, Kind: d.Kind, Href: s.ID, Code: codeWaits, Cond: "waits",
		Since: stampOf(move.Since, v.inv.At), begin: move.Since.Unix(), Then: "No new pod gets it until then.",
	}
	item.Name = strings.TrimSpace(d.ShortModel() + " " + cmp.Or(s.Addr, d.Detail))
	if s.isVirtual() {
		item.Name = fmt.Sprintf("%d VFs of %s", len(s.Parts()), s.Call())
	}
	owners := ownersOf(s.Devices)
	if len(owners) > 0 {
		item.Glyph.Shape = "g-move-held"
	}
	if move.To == "" || len(owners) == 0 {
		item.Why = asSentence(move.Reason)
		return item
	}
	item.Cond = otherAPI(move.To) + " → " + inventory.APIName(move.To)
	item.Why, item.Owner, item.Lets = "Moves to "+inventory.APIName(move.To)+" once", firstAndMore(owners), letGo(len(owners))
	return item
}

func otherAPI(to discovery.Mode) string {
	if to == discovery.ModeDRA {
		return "plugin"
	}
	return "DRA"
}

// WaitNote returns a short text about the pending move, or "".
func (s *silicon) WaitNote() string {
	move := s.FirstDevice().Move
	if move == nil {
		return ""
	}
	owners := ownersOf(s.Devices)
	if move.To == "" || len(owners) == 0 {
		return move.Reason
	}
	return fmt.Sprintf("%s → %s once %s %s go", otherAPI(move.To), inventory.APIName(move.To), firstAndMore(owners), letGo(len(owners)))
}

func letGo(owners int) string {
	if owners == 1 {
		return "lets"
	}
	return "let"
}

// goneItems returns the allocated devices that have vanished.
func (v *view) goneItems() (items []attention) {
	for _, gone := range v.inv.Gone {
		class := cmp.Or(troubles[gone.Health.TroubleState()], "bad")
		then := "have it."
		if len(gone.Hit) == 1 {
			then = "has it."
		}
		items = append(items, attention{
			Glyph: glyph{class, "g-" + class + "-held", ""}, Name: callName(gone.Device), Code: codes.CodeOf(discovery.ConditionGone),
			Cond: fmt.Sprintf("%s, %s", gone.Health.Condition, gone.Health.Effect), Why: asSentence(gone.Health.Reason),
			Who: firstAndMore(gone.Hit), Then: then, Since: stampOf(gone.Health.Since, v.inv.At), begin: gone.Health.Since.Unix(),
		})
	}
	return items
}

// callName returns the short PCI address in the name of a device, or the name.
func callName(name string) string {
	rest, is := strings.CutPrefix(name, "pci-")
	parts := strings.Split(rest, "-")
	if !is || len(parts) != 4 {
		return name
	}
	return inventory.ShortAddress(fmt.Sprintf("%s:%s:%s.%s", parts[0], parts[1], parts[2], parts[3]))
}

// noteItems returns the problems of the node as a whole.
func (v *view) noteItems() (items []attention) {
	for _, note := range v.inv.Notes {
		items = append(items, attention{
			Glyph: glyph{"bad", "g-bad-free", ""}, Name: note.Name, Code: note.Code, Cond: "node", Why: asSentence(note.Reason),
			Since: stampOf(note.Since, v.inv.At), begin: note.Since.Unix(),
		})
	}
	return items
}

// problemItems returns the read errors, one item for each device, without those that the device's
// health shows.
func (v *view) problemItems() (items []attention) {
	byName := make(map[string][]string)
	var names []string
	for _, problem := range v.inv.Problems {
		if byName[problem.Device] == nil {
			names = append(names, problem.Device)
		}
		text := problem.Error
		if d := v.devices[problem.Device]; d != nil && strings.Contains(text, d.Health.Reason) && d.Health.Reason != "" {
			continue
		}
		if s := asSentence(text); !slices.Contains(byName[problem.Device], s) {
			byName[problem.Device] = append(byName[problem.Device], s)
		}
	}
	for _, name := range names {
		texts := byName[name]
		if len(texts) == 0 {
			continue
		}
		item := attention{Glyph: glyph{"unk", "g-unk-free", ""}, Name: callName(name), Code: codeProblem, Cond: "problem", Why: strings.Join(texts, " ")}
		if d := v.devices[name]; d != nil {
			item.Href, item.Kind, item.Name = d.ID, d.Kind, strings.TrimSpace(d.Label+" "+cmp.Or(d.Addr, d.Detail))
		} else if callName(name) != name && v.bySilicon[name] == nil {
			item.Then = "Excluded: it is not offered."
		}
		items = append(items, item)
	}
	return items
}
