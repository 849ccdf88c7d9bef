package inventory

import (
	"cmp"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pciids"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/natural"
)

// Make makes an inventory.
func Make(facts Facts) *Inventory {
	inv := &Inventory{
		Host: facts.Name, At: facts.At.UTC().Truncate(time.Second), Recorded: facts.Recorded, Version: facts.Version, Kubernetes: facts.Kubernetes,
		Families: facts.Families, Functions: facts.Functions, ConsumersKnown: facts.ConsumersKnown,
		Counts: []Count{}, Devices: []*Device{}, Holders: []Holder{}, Waiting: []Waiting{}, Attention: []Item{}, Gone: []Gone{}, Problems: []Problem{},
		byName: make(map[string]*Device),
	}
	snapshot := facts.Snapshot
	if snapshot == nil {
		snapshot = &rules.Snapshot{}
	}
	for i := range snapshot.Devices {
		d := describeDevice(&snapshot.Devices[i], facts.Products)
		d.API = facts.API[d.Silicon]
		if move, waits := facts.Moves[d.Silicon]; waits && facts.ConsumersKnown {
			d.Move = &move
		}
		inv.Devices = append(inv.Devices, d)
		inv.byName[d.Name] = d
	}
	if facts.ConsumersKnown {
		inv.Holders = append(inv.Holders, facts.Holders...)
		slices.SortStableFunc(inv.Holders, func(a, b Holder) int {
			return cmp.Or(natural.CompareNames(a.Owner(), b.Owner()), natural.CompareNames(a.ResourceOrClaim(), b.ResourceOrClaim()), natural.CompareNames(a.Request, b.Request), natural.CompareNames(a.Device, b.Device), cmp.Compare(a.Container, b.Container))
		})
		for _, h := range inv.Holders {
			if d := inv.byName[h.Device]; d != nil {
				d.Holders = append(d.Holders, h)
			}
		}
		setHoldings(inv.Devices)
		inv.tellMoves()
	}
	for _, d := range inv.Devices {
		d.State = d.computeState(facts.ConsumersKnown)
	}
	inv.Tree = treeOf(inv.Devices)
	inv.Devices = inv.Tree.orderDevices(inv.byName)
	askFor(inv.Devices, facts.installedClasses())
	inv.count()
	inv.wait()
	inv.addGone(snapshot.Gone)
	inv.setProblems()
	for _, p := range snapshot.Problems {
		inv.Problems = append(inv.Problems, Problem{p.Device, p.Setting, p.Text()})
	}
	return inv
}

// tellMoves sets the consumers for whom moves wait, unless the facts contain them.
func (inv *Inventory) tellMoves() {
	owners := make(map[string][]string)
	for _, d := range inv.Devices {
		for _, who := range d.Owners() {
			if !slices.Contains(owners[d.Silicon], who) {
				owners[d.Silicon] = append(owners[d.Silicon], who)
			}
		}
	}
	for _, d := range inv.Devices {
		if d.Move != nil && len(d.Move.For) == 0 {
			d.Move.For = owners[d.Silicon]
		}
	}
}

// describeDevice returns a device with the data that depends on it alone.
func describeDevice(o *rules.Offered, products pciids.Names) *Device {
	d := &Device{
		Name: o.Name, Kind: cmp.Or(o.Attributes.String("kind"), "other"), Family: o.Family,
		Model: Model(&o.Device, products), Profile: o.Attributes.String("profile"),
		Silicon: o.Silicon(), Open: o.Shareable, Uncreated: o.Creation != nil, Place: placeOf(&o.Device), Health: healthOf(o.Health), Offered: o,
	}
	if memory, known := o.Capacity["memory"]; known {
		d.Memory = memory.Value.Value()
	}
	d.Label, d.Detail = d.ShortModel(), Detail(&o.Device)
	if d.Detail == d.Label {
		d.Detail = ""
	}
	return d
}

// healthOf returns the health. If the snapshot has not been settled, its effects are missing, and
// healthOf sets the default effects.
func healthOf(h discovery.Health) Health {
	said := Health{Status: cmp.Or(h.Status, discovery.Healthy), Condition: h.Key(), Effect: h.Effect, Reason: h.Reason, Since: h.Since.Time, Stale: h.Stale}
	if said.Condition == "" {
		said.Reason, said.Effect = "", ""
		return said
	}
	said.Effect = cmp.Or(said.Effect, discovery.Severity{}.EffectOf(said.Condition))
	said.Reason = cmp.Or(said.Reason, string(said.Condition))
	return said
}

// TroubleState returns Degraded, Unhealthy or Unread, and "" for a healthy device. It depends on
// the effect of a condition, not on its name.
func (h *Health) TroubleState() State {
	switch {
	case h.Condition == "":
		return ""
	case h.Status == discovery.Unknown:
		return Unread
	case h.Effect == resourceapi.DeviceTaintEffectNone:
		return Degraded
	}
	return Unhealthy
}

// computeState returns the most important state of a device.
func (d *Device) computeState(asked bool) State {
	trouble := d.Health.TroubleState()
	switch {
	case trouble == Unread || trouble == Unhealthy:
		return trouble
	case d.Move != nil:
		return Moving
	case trouble != "":
		return trouble
	case d.Open:
		return Open
	case !asked:
		return Present
	}
	return d.Holding
}

// IsUnavailable reports whether the free part of the device is unavailable.
func (d *Device) IsUnavailable() bool {
	return d.State == Unhealthy || d.State == Unread || d.State == Moving
}

// AwaitsCreation reports whether the device does not exist yet, and is created on demand.
func (d *Device) AwaitsCreation() bool {
	return d.Uncreated && (d.State == Free || d.State == Present || d.State == Degraded && d.Holding != Taken && len(d.Holders) == 0)
}

// Units returns the number of units of the device, which are its shares or the device itself, and
// how many are allocated and unavailable.
func (d *Device) Units() (all, had, out int) {
	all = 1
	switch {
	case d.Shares.All > 0:
		all, had = d.Shares.All, min(d.Shares.Held, d.Shares.All)
	case d.Holding == Held || d.Holding == Taken || d.Holding == Partly:
		had = 1
	}
	if d.IsUnavailable() {
		out = all - had
	}
	return all, had, out
}

// count counts the devices by kind. A divided physical device counts by its partitions.
func (inv *Inventory) count() {
	index := make(map[string]int)
	all := inv.Tree.Silicon()
	for n, s := range all {
		i, known := index[s.Kind]
		if !known {
			i = len(inv.Counts)
			index[s.Kind] = i
			inv.Counts = append(inv.Counts, Count{Kind: s.Kind})
		}
		ofHost := n >= len(all)-len(inv.Tree.Host)
		inv.countSilicon(&inv.Counts[i], s, ofHost)
	}
	slices.SortStableFunc(inv.Counts, func(a, b Count) int {
		return cmp.Compare(kindRank(a.Kind), kindRank(b.Kind))
	})
}

// kindOrder is the order of the kinds in counts. Other kinds follow.
var kindOrder = []string{"gpu", "npu", "fpga", "crypto", "dma", "nic"}

func kindRank(kind string) int {
	if rank := slices.Index(kindOrder, kind); rank >= 0 {
		return rank
	}
	return len(kindOrder)
}

// countSilicon adds the devices of a physical device to the count of its kind.
func (inv *Inventory) countSilicon(c *Count, s *Silicon, ofHost bool) {
	before := c.Devices
	for _, name := range s.countedNames() {
		d := inv.byName[name]
		if d.Open {
			c.Open++
			if !ofHost {
				c.Devices++
			}
			continue
		}
		all, had, out := d.Units()
		c.All, c.Held, c.Out = c.All+all, c.Held+had, c.Out+out
		c.Devices++
		if inv.ConsumersKnown {
			c.Free += all - had - out
		}
		if inv.ConsumersKnown && had == 0 && out == 0 {
			c.FreeDevices++
		}
	}
	if c.Devices > before {
		c.Physical += s.physical
		c.Listed += c.Devices - before + len(s.All()) - len(s.countedNames())
	}
}

// wait sets the pending moves.
func (inv *Inventory) wait() {
	for _, s := range inv.Tree.Silicon() {
		if d := inv.byName[s.FirstName()]; d.Move != nil {
			inv.Waiting = append(inv.Waiting, Waiting{s.Name, s.All(), *d.Move})
		}
	}
}

// addGone sets the allocated devices that have vanished.
func (inv *Inventory) addGone(gone discovery.Missing) {
	names := make(map[string]int)
	for _, h := range inv.Holders {
		if inv.byName[h.Device] != nil {
			continue
		}
		i, known := names[h.Device]
		if !known {
			i = len(inv.Gone)
			names[h.Device] = i
			inv.Gone = append(inv.Gone, Gone{Device: h.Device, Health: healthOf(gone.HealthOf(h.Device, ""))})
		}
		if !slices.Contains(inv.Gone[i].Hit, h.Owner()) {
			inv.Gone[i].Hit = append(inv.Gone[i].Hit, h.Owner())
		}
	}
	slices.SortFunc(inv.Gone, func(a, b Gone) int { return natural.CompareNames(a.Device, b.Device) })
}

// setProblems sets the problems. Devices of one physical device with the same problem share an
// item.
func (inv *Inventory) setProblems() {
	type same struct {
		silicon string
		key     discovery.Condition
		reason  string
	}
	index := make(map[same]int)
	add := func(of same, item Item, hit ...string) {
		i, known := index[of]
		if !known {
			i = len(inv.Attention)
			index[of] = i
			inv.Attention = append(inv.Attention, item)
		}
		at := &inv.Attention[i]
		at.Devices++
		for _, who := range hit {
			if !slices.Contains(at.Hit, who) {
				at.Hit = append(at.Hit, who)
			}
		}
	}
	for _, d := range inv.Devices {
		if trouble := d.Health.TroubleState(); trouble != "" {
			add(same{d.Silicon, d.Health.Condition, d.Health.Reason}, Item{
				State: trouble, Device: d.Name, Reason: d.Health.Reason, Key: d.Health.Condition, Effect: string(d.Health.Effect), Since: d.Health.Since,
			}, d.Owners()...)
		}
		if d.Move != nil {
			add(same{silicon: d.Silicon}, Item{State: Moving, Device: d.Name, Reason: d.Move.Reason, Since: d.Move.Since}, d.Owners()...)
		}
	}
	for _, g := range inv.Gone {
		add(same{g.Device, discovery.ConditionGone, ""}, Item{
			State: Unhealthy, Device: g.Device, Reason: g.Health.Reason, Key: g.Health.Condition, Effect: string(g.Health.Effect), Since: g.Health.Since,
		}, g.Hit...)
	}
	order := []State{Unhealthy, Unread, Degraded, Moving}
	slices.SortStableFunc(inv.Attention, func(a, b Item) int {
		return cmp.Or(cmp.Compare(slices.Index(order, a.State), slices.Index(order, b.State)), b.Since.Compare(a.Since))
	})
}

// Owners returns the consumers of the device, without duplicates.
func (d *Device) Owners() (owners []string) {
	for i := range d.Holders {
		if who := d.Holders[i].Owner(); !slices.Contains(owners, who) {
			owners = append(owners, who)
		}
	}
	return owners
}
