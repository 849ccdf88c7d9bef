package web

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"chandler.dev/internal/inventory"
	"chandler.dev/internal/natural"
)

// stock is a row of equivalent devices.
type stock struct {
	Kind, Model string
	Small       string   // size, profile, or kind of partition
	Names       []string // extended resources and the DeviceClass
	Open        bool     // with unlimited sharing

	Free, Held, Out, All int

	Glyphs []glyph // of up to 16 devices
	Bar    []segment
}

// segment is a part of a bar, in percent.
type segment struct{ Class, X, Width string }

// maxGlyphs is the largest number of devices with glyphs of their own.
const maxGlyphs = 16

var kinds = []string{"gpu", "npu", "fpga", "crypto", "dma", "nic", "virtualization", "enclave", "other"}

// stockOf groups the devices into rows.
func stockOf(all []*silicon) (rows []*stock) {
	byKey := make(map[string]*stock)
	of := make(map[*stock][]*device)
	for _, s := range all {
		for _, d := range s.Devices {
			row := rowOf(s, d)
			key := strings.Join(append([]string{row.Kind, row.Model, row.Small, strconv.FormatBool(row.Open)}, row.Names...), "\x00")
			if row.Open {
				key = row.Kind + "\x00open"
			}
			known := byKey[key]
			if known == nil {
				known = row
				byKey[key] = row
				rows = append(rows, row)
			} else if row.Open {
				known.Names = nil
				if !slices.Contains(strings.Split(known.Model, ", "), row.Model) {
					known.Model += ", " + row.Model
				}
			}
			known.count(d)
			of[known] = append(of[known], d)
		}
	}
	for _, row := range rows {
		row.draw(of[row])
	}
	slices.SortStableFunc(rows, func(a, b *stock) int {
		return cmp.Or(cmp.Compare(slices.Index(kinds, a.Kind), slices.Index(kinds, b.Kind)), natural.CompareNames(a.Model, b.Model), natural.CompareNames(a.Small, b.Small))
	})
	return rows
}

// rowOf returns the row for a device.
func rowOf(s *silicon, d *device) *stock {
	row := &stock{Kind: d.Kind, Model: d.ShortModel(), Open: d.Open}
	var small []string
	part := s.IsDivided() && d != s.Whole
	if d.Profile != "" {
		small = append(small, d.Profile)
	}
	switch memory := inventory.Bytes(d.Memory); {
	case part && memory != "":
		small = append(small, memory+" "+s.Noun+"s")
	case part:
		small = append(small, s.Noun+"s")
	case memory != "":
		small = append(small, memory)
	}
	if d.Shares.All > 0 {
		small = append(small, "counted in shares")
	} else if d.Offered.Sharing != nil {
		small = append(small, "shared by "+string(d.Offered.Sharing.Capacity))
	}
	row.Small = strings.Join(small, ", ")
	for _, name := range append(slices.Clone(d.Ask.Limits), d.Ask.Class) {
		if name != "" && !slices.Contains(row.Names, name) {
			row.Names = append(row.Names, name)
		}
	}
	return row
}

func (row *stock) count(d *device) {
	if d.Open {
		return
	}
	all, had, out := d.Units()
	row.All += all
	row.Held += had
	row.Out += out
	row.Free += all - had - out
}

// draw adds glyphs for a few devices, or a bar for many.
func (row *stock) draw(devices []*device) {
	rank := func(d *device) int {
		r := slices.Index([]string{"ok", "warn", "move", "bad", "unk"}, d.Level)
		if d.Holding == inventory.Free || d.Holding == "" {
			r += 10
		}
		return 10*r + slices.Index([]inventory.State{inventory.Held, inventory.Partly, inventory.Taken}, d.Holding)
	}
	devices = slices.Clone(devices)
	slices.SortStableFunc(devices, func(a, b *device) int { return cmp.Compare(rank(a), rank(b)) })
	if len(devices) <= maxGlyphs {
		for _, d := range devices {
			row.Glyphs = append(row.Glyphs, d.Glyph())
		}
		return
	}
	units := make(map[string]int)
	for _, d := range devices {
		all, had, _ := d.Units()
		switch d.Level {
		case "ok", "warn":
			units[d.Level] += had
		default:
			units[d.Level] += all
		}
	}
	x := 0
	for _, class := range []string{"ok", "warn", "move", "bad", "unk"} {
		if n := units[class]; n > 0 && row.All > 0 {
			row.Bar = append(row.Bar, segment{class, formatPercent(x, row.All), formatPercent(n, row.All)})
			x += n
		}
	}
}

func formatPercent(n, of int) string {
	return strconv.FormatFloat(100*float64(n)/float64(of), 'f', 2, 64) + "%"
}
