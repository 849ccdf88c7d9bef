package web

import (
	"cmp"
	"fmt"
	"slices"

	"chandler.dev/internal/inventory"
)

// pod is a consumer in the list of allocations.
type pod struct {
	Namespace, Name string
	Mate            string // the pod's name as in the Mate of its devices
	Rows            []podRow
}

// podRow is a pod's devices by one request of a claim, or by one extended resource.
type podRow struct {
	Chips []chip
	Via   string // "claim" or "limits"
	By    string
	Small string // request
	API   string
	Since *stamp
}

// chip is a device in a row.
type chip struct {
	ID, Title string
	Glyph     glyph
	Code      string // address or name
	Text      string // for several devices together
	Small     string
}

// maxChips is the largest number of partitions of one physical device that get separate chips.
const maxChips = 4

// podRows returns the list of allocations, in the order of the consumers' names.
func (v *view) podRows() (pods []*pod) {
	byName := make(map[string]*pod)
	type rowKey struct{ pod, api, via, by, request string }
	rows := make(map[rowKey]int)
	devices := make(map[rowKey][]*device)
	var order []rowKey
	holders := v.inv.Holders
	for i := range holders {
		h := &holders[i]
		p := byName[h.Owner()]
		if p == nil {
			p = &pod{Mate: h.Owner(), Namespace: h.Namespace, Name: cmp.Or(h.Pod, h.Claim, "a starting container")}
			byName[h.Owner()] = p
			pods = append(pods, p)
		}
		row := podRow{Via: "limits", By: h.Resource, API: inventory.APIName(h.API), Since: stampOf(h.Since, v.inv.At)}
		if h.Resource == "" && h.Claim != "" {
			row.Via, row.By, row.Small = "claim", h.Claim, h.Request
		}
		key := rowKey{h.Owner(), row.API, row.Via, row.By, row.Small}
		at, known := rows[key]
		if !known {
			at = len(p.Rows)
			rows[key] = at
			p.Rows = append(p.Rows, row)
			order = append(order, key)
		}
		d := v.devices[h.Device]
		if d == nil {
			p.Rows[at].Chips = append(p.Rows[at].Chips, chip{Glyph: glyph{"bad", "g-bad-held", ""}, Code: callName(h.Device), Small: "gone"})
			continue
		}
		if !slices.Contains(devices[key], d) {
			devices[key] = append(devices[key], d)
		}
	}
	for _, key := range order {
		p := byName[key.pod]
		row := &p.Rows[rows[key]]
		row.Chips = append(v.deviceChips(devices[key]), row.Chips...)
	}
	return pods
}

// deviceChips returns chips for devices. Many partitions of one physical device share a chip.
func (v *view) deviceChips(devices []*device) (chips []chip) {
	bySilicon := make(map[string][]*device)
	for _, d := range devices {
		bySilicon[d.Silicon] = append(bySilicon[d.Silicon], d)
	}
	done := make(map[string]bool)
	for _, d := range devices {
		s, parts := v.of[d.Name], bySilicon[d.Silicon]
		if s == nil || !s.IsDivided() || len(parts) <= maxChips && !s.isVirtual() || len(parts) < 2 {
			chips = append(chips, chip{ID: d.ID, Title: d.Title, Glyph: d.Glyph(), Code: d.callIn(s)})
			continue
		}
		if done[s.Name] {
			continue
		}
		done[s.Name] = true
		numbers := make([]int, 0, len(parts))
		worst := parts[0]
		for _, part := range parts {
			numbers = append(numbers, part.Index)
			if compareLevels(part.Level, worst.Level) < 0 {
				worst = part
			}
		}
		chips = append(chips, chip{ID: s.ID, Glyph: worst.Glyph(), Text: fmt.Sprintf("%d %ss of %s", len(parts), s.Noun, s.Call()), Small: inventory.Ranges(numbers, "–")})
	}
	return chips
}

// callIn returns the name of a device outside its physical device.
func (d *device) callIn(s *silicon) string {
	switch {
	case s != nil && s.IsDivided() && d != s.Whole && !s.isVirtual():
		return s.Call() + " " + d.Label
	case d.Addr != "":
		return d.Addr
	case s != nil && s.Addr != "":
		return s.Addr
	}
	return d.Name
}
