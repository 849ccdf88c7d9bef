package web

import (
	"cmp"
	"fmt"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/inventory"
)

// panel contains the details of a physical device.
type panel struct {
	ID    string
	Title string
	Kind  string
	Addr  string
	State string // state, or number of partitions

	Glyph *glyph // nil if the partitions are shown
	Says  []statement
	Do    []string // commands
	Code  string   // code of chandler doctor

	Owners     []owner
	FreeReason string // why the device is not allocated

	Ask        ask
	ThisByPart bool // each partition has an expression of its own
	Parts      []part
	PartsTitle string
	Crumbs     []string
	NUMA       string
	Link       string
	LinkName   string
	Links      []chip
	IOMMU      string
	Path       string // in /sys
	Nodes      []string
	Attributes []attribute
}

// statement is a sentence at the top of a panel.
type statement struct {
	Glyph        glyph
	Strong, Rest string
	Taint        string
	Effect       string
}

// owner is a consumer of the panel's device.
type owner struct {
	*inventory.Holder
	API   string
	Since *stamp
}

// part is a row of a panel.
type part struct {
	*device
	Glyph  glyph
	Second string // address or size
	Owner  *owner
	Others int // number of further consumers
	This   string
	Detail string
}

func (v *view) devicePanels() (panels []panel) {
	for _, s := range v.machine.all {
		panels = append(panels, v.devicePanel(s))
	}
	return panels
}

func (v *view) devicePanel(s *silicon) panel {
	d := s.FirstDevice()
	p := panel{
		ID: s.ID, Title: d.Model, Kind: d.Kind, State: d.StateWords(),
		Ask: askOf(d), Attributes: attributesOf(d), Links: v.linksOf(s), LinkName: cmp.Or(s.linkName, "Private links"),
	}
	if p.Addr = s.Address; p.Addr == "" && len(d.Offered.Edits.DeviceNodes) > 0 {
		p.Addr = d.Offered.Edits.DeviceNodes[0].Path
	}
	if s.IsDivided() {
		v.addParts(&p, s)
	} else {
		g := d.Glyph()
		p.Glyph = &g
	}
	if !s.IsDivided() || s.Whole != nil {
		p.Owners = v.ownerDetails(d)
		p.FreeReason = v.freeReason(d)
	}
	v.sayOf(&p, s)
	v.placeOf(&p, s)
	return p
}

// addParts adds rows for the partitions.
func (v *view) addParts(p *panel, s *silicon) {
	first, parts := s.FirstDevice(), s.Parts()
	p.PartsTitle, p.State = "Parts", inventory.CountNoun(len(parts), "partition")
	if s.isVirtual() {
		p.PartsTitle, p.State = "Virtual functions", inventory.CountNoun(len(parts), "virtual function")
		p.Title = cmp.Or(first.Offered.Attributes.String("pfName"), p.Title)
	}
	if profile := first.Offered.Attributes.String("profile"); profile != "" {
		p.State += " · " + profile
	}
	if s.Whole == nil {
		p.Ask.This, p.ThisByPart = "", true
	}
	for _, d := range parts {
		row := part{device: d, Glyph: d.Glyph(), Second: d.Addr, This: d.Ask.This}
		if !s.isVirtual() {
			row.Second = partitionSize(d)
		}
		if owners := v.ownerDetails(d); len(owners) > 0 {
			row.Owner, row.Others = &owners[0], len(owners)-1
			row.Detail = ownerDetail(&owners[0])
		}
		p.Parts = append(p.Parts, row)
	}
}

// partitionSize returns the size of a partition.
func partitionSize(d *device) string {
	if cores, has := d.Offered.Capacity["cores"]; has {
		return inventory.CountNoun(int(cores.Value.Value()), "core")
	}
	return inventory.Bytes(d.Memory)
}

func ownerDetail(o *owner) string {
	words := []string{o.API}
	switch {
	case o.Resource != "":
		words = append(words, "limits "+o.Resource)
	case o.Claim != "":
		words = append(words, "claim "+o.Claim)
		if o.Request != "" {
			words = append(words, "request "+o.Request)
		}
	}
	if o.Container != "" {
		words = append(words, "container "+o.Container)
	}
	if o.Since != nil {
		words = append(words, "since "+o.Since.Exact)
	}
	if words[0] == "plugin" {
		words[0] = "device plugin"
	}
	return strings.Join(words, ", ")
}

func (v *view) ownerDetails(d *device) (owners []owner) {
	for i := range d.Holders {
		h := &d.Holders[i]
		owners = append(owners, owner{h, inventory.APIName(h.API), stampOf(h.Since, v.inv.At)})
	}
	return owners
}

// LongAPI returns the long name of the API.
func (o owner) LongAPI() string {
	if o.API == "plugin" {
		return "device plugin"
	}
	return "Dynamic Resource Allocation"
}

// freeReason returns the reason why a device is not allocated. It returns "" if the device is
// allocated or the allocations are unknown.
func (v *view) freeReason(d *device) string {
	switch {
	case len(d.Holders) > 0 || !v.inv.ConsumersKnown:
		return ""
	case d.Holding == inventory.Taken || d.Holding == inventory.Partly:
		return "No consumer of the whole device: its partitions are allocated."
	case d.API == discovery.ModeDevicePlugin:
		return "No consumer. Offered by the device plugin API."
	case d.API == discovery.ModeDRA:
		return "Nobody. Offered by DRA."
	}
	return "Nobody."
}

// sayOf adds the problems of the physical device and the commands that help.
func (v *view) sayOf(p *panel, s *silicon) {
	d := s.FirstDevice()
	for _, other := range s.Devices {
		if compareLevels(other.Level, d.Level) < 0 && other.Health.Condition != "" {
			d = other
		}
	}
	if key := d.Health.Condition; key != "" {
		one := statement{Glyph: d.Glyph(), Strong: strings.TrimSuffix(asSentence(d.ProblemText()), "."), Taint: "chandler.dev/" + string(key), Effect: string(d.Health.Effect)}
		if s.IsDivided() {
			one.Strong = d.Label + ": " + d.ProblemText()
		}
		if since := stampOf(d.Health.Since, v.inv.At); since != nil {
			one.Rest = fmt.Sprintf("Since %s, %s.", since.Exact, since.Long)
		}
		one.Glyph.Class = d.healthLevel()
		p.Says = append(p.Says, one)
		p.Code = codes.CodeOf(key)
		p.Do = append(p.Do, "chandler explain "+p.Code)
		if len(d.Holders) > 0 && d.Holders[0].Pod != "" && d.healthLevel() == "bad" {
			p.Do = append(p.Do, fmt.Sprintf("kubectl -n %s delete pod %s", d.Holders[0].Namespace, d.Holders[0].Pod))
		}
	}
	if reason := d.Offered.ModeReason; reason != "" {
		p.Says = append(p.Says, statement{Glyph: d.Glyph(), Strong: asSentence(reason)})
	}
	if move := s.FirstDevice().Move; move != nil {
		one := statement{Glyph: glyph{"move", "g-move", ""}, Strong: asSentence(move.Reason)}
		if owners := ownersOf(s.Devices); move.To != "" && len(owners) > 0 {
			one.Strong = "Moves to " + inventory.APIName(move.To)
			one.Rest = fmt.Sprintf("once %s %s go.", firstAndMore(owners), letGo(len(owners)))
		}
		if since := stampOf(move.Since, v.inv.At); since != nil {
			one.Rest = strings.TrimSpace(one.Rest + " Asked " + since.Long + " ago.")
		}
		p.Says = append(p.Says, one)
	}
}

// healthLevel returns the level of the health alone.
func (d *device) healthLevel() string { return cmp.Or(troubles[d.Health.TroubleState()], "ok") }

// placeOf adds the position of the physical device.
func (v *view) placeOf(p *panel, s *silicon) {
	d := s.FirstDevice()
	if d.Place.NUMA != nil {
		p.NUMA = fmt.Sprintf("NUMA node %d", *d.Place.NUMA)
	}
	if s.Root != "" {
		p.Crumbs = append(p.Crumbs, s.Root)
		for _, address := range d.Place.Bridges {
			if address != s.Address {
				p.Crumbs = append(p.Crumbs, inventory.ShortAddress(address))
			}
		}
		p.Crumbs = append(p.Crumbs, s.Addr)
	}
	p.Link, p.Path = d.Place.Link(), d.Place.Path
	if s.isVirtual() {
		p.Path = ""
		return
	}
	if iommu := d.Offered.Attributes["iommuGroup"].IntValue; iommu != nil {
		p.IOMMU = fmt.Sprint(*iommu)
	}
	for _, node := range d.Offered.Edits.DeviceNodes {
		p.Nodes = append(p.Nodes, node.Path)
	}
}

// linksOf returns the physical devices linked to s by private links.
func (v *view) linksOf(s *silicon) (links []chip) {
	for _, other := range s.links {
		links = append(links, chip{ID: other.ID, Code: other.Call()})
	}
	return links
}

// ask is how to request a device.
type ask struct {
	inventory.Ask
	Limits []string
}

func askOf(d *device) ask {
	a := ask{Ask: d.Ask}
	for _, name := range d.Ask.Limits {
		a.Limits = append(a.Limits, name+": 1")
	}
	return a
}
