package agent

import (
	"cmp"
	"fmt"
	"maps"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
)

// Placement says which API offers which silicon. It is never modified.
type Placement struct {
	// API is by silicon. Silicon that no API offers yet is missing.
	API map[string]discovery.Mode

	// Moving says, by silicon, why it waits: for its owners to end before it moves to
	// the other API, or for the first API. It is withheld meanwhile.
	Moving map[string]string

	// To is the API to which silicon moves that is among Moving. It is missing there if the
	// silicon changes in another way.
	To map[string]discovery.Mode

	// Free is the silicon of Facts.Changing that nobody has: it may change now.
	Free map[string]bool

	// Ask says that silicon waits only because the API server was not asked.
	Ask bool
}

// Facts are what else decides a placement.
type Facts struct {
	// Auto is the API for devices whose mode leaves the choice, and "" while that is
	// not known.
	Auto discovery.Mode

	// Published is what the API server says, nil if it was not asked.
	Published *Published

	// Changing is the silicon whose devices are still as earlier settings wanted
	// them, because the present settings exclude a device or share it otherwise.
	Changing map[string]bool

	// Unknown says why it is not known what the administrator wants, or that the
	// administrator wants nothing offered, "" if it is known.
	Unknown string
}

// Published is what the API server has of a node's devices.
type Published struct {
	// By says, by silicon, which ResourceSlice or ResourceClaim names it.
	By map[string]string

	// Err is why the API server could not be asked. All silicon counts as named then.
	Err error
}

// Place decides which API offers which silicon. Silicon is offered by one API at a
// time. It moves to another only while nobody has it and nobody could get it, and is
// withheld until then. For example, a GPU whose mode changed from DRA to the
// device-plugin API is withheld until no claim has it and no ResourceSlice names it.
//
// Silicon that changes in another way stays where it is, and is withheld, until
// nobody has it. For example, a GPU that was shared in units of memory and is to be
// shared by number is withheld until no claim has any of it.
//
// While it is not known what the administrator wants, all silicon stays where it is and
// is withheld, except that pods keep what they have by the device-plugin API.
//
// Place is pure.
func Place(before map[string]discovery.Mode, devices []rules.Offered, view *ledger.View, facts Facts) Placement {
	p := Placement{API: maps.Clone(before), Moving: make(map[string]string), To: make(map[string]discovery.Mode), Free: make(map[string]bool)}
	if p.API == nil {
		p.API = make(map[string]discovery.Mode)
	}
	all := siliconOf(devices, view.Grants())
	for silicon := range facts.Changing {
		if _, there := all[silicon]; !there {
			all[silicon] = wish{} // the earlier settings exclude all that it is now
		}
	}
	for silicon, s := range all {
		p.place(silicon, s, view, facts)
	}
	return p
}

// wish is what the administrator wants of silicon.
type wish struct {
	mode discovery.Mode // the same for all of its devices: see rules.Rules
	open bool           // any number of containers may have all of its devices
	had  bool           // a container has one of its devices by the device-plugin API
}

func siliconOf(devices []rules.Offered, grants []*ledger.Grant) map[string]wish {
	had := make(map[string]bool)
	for _, g := range grants {
		for _, name := range g.Devices {
			had[name] = true
		}
	}
	all := make(map[string]wish)
	for i := range devices {
		d := &devices[i]
		s, seen := all[d.Silicon()]
		all[d.Silicon()] = wish{d.Mode, d.Open && (s.open || !seen), s.had || had[d.Name]}
	}
	return all
}

// place places one piece of silicon.
func (p *Placement) place(silicon string, s wish, view *ledger.View, facts Facts) {
	now, wanted := p.API[silicon], s.mode
	if wanted == discovery.ModeAuto {
		wanted = facts.Auto
	}
	if now == discovery.ModeAuto && !s.open {
		now = holding(silicon, view)
	}
	reason := ""
	switch {
	case facts.Unknown != "" && s.had && now != discovery.ModeDRA:
		// After a reboot the kubelet starts a pod only if the IDs that it has are
		// healthy (pkg/kubelet/cm/devicemanager/manager.go, devicesToAllocate, in
		// 1.28 to 1.37).
		now = cmp.Or(now, discovery.ModeDevicePlugin)
	case facts.Unknown != "":
		reason = facts.Unknown
	case facts.Changing[silicon]:
		if who := p.owner(silicon, now, view, facts); who != "" {
			reason = fmt.Sprintf("is otherwise in the configuration, and changes once it is free of %s", who)
		} else {
			p.Free[silicon] = true
		}
	case wanted == now && now == discovery.ModeAuto:
		reason = "it is not known yet which API offers it"
	case wanted == now || wanted == discovery.ModeAuto:
	case s.open:
		now = wanted
	default:
		if reason = p.obstacle(silicon, wanted, view, facts); reason == "" {
			now = wanted
		} else {
			reason = fmt.Sprintf("moves to API %s once it is free of %s", wanted, reason)
			now = cmp.Or(now, other(wanted))
			p.To[silicon] = wanted
		}
	}
	if reason != "" {
		p.Moving[silicon] = reason
	}
	if now != discovery.ModeAuto {
		p.API[silicon] = now
	}
}

// obstacle returns who keeps silicon from moving to an API, "" if nobody does.
func (p *Placement) obstacle(silicon string, to discovery.Mode, view *ledger.View, facts Facts) string {
	if who := view.OwnerOf(other(to), silicon); who != "" || to == discovery.ModeDRA {
		return who
	}
	switch said := facts.Published; {
	case said == nil:
		p.Ask = true
		return "whatever the API server names"
	case said.Err != nil:
		return fmt.Sprintf("unknown: %v", said.Err)
	default:
		return said.By[silicon]
	}
}

// owner returns who has silicon, or could still get it from the API where it is, ""
// if nobody has.
func (p *Placement) owner(silicon string, api discovery.Mode, view *ledger.View, facts Facts) string {
	if who := view.OwnerOf(discovery.ModeDevicePlugin, silicon); who != "" || api == discovery.ModeDevicePlugin {
		return cmp.Or(who, view.OwnerOf(discovery.ModeDRA, silicon))
	}
	return p.obstacle(silicon, discovery.ModeDevicePlugin, view, facts)
}

func other(api discovery.Mode) discovery.Mode {
	if api == discovery.ModeDRA {
		return discovery.ModeDevicePlugin
	}
	return discovery.ModeDRA
}

// holding returns the API by which somebody has the silicon, "" if nobody has.
func holding(silicon string, view *ledger.View) discovery.Mode {
	for _, api := range []discovery.Mode{discovery.ModeDRA, discovery.ModeDevicePlugin} {
		if view.OwnerOf(api, silicon) != "" {
			return api
		}
	}
	return discovery.ModeAuto
}

// OfDRA returns, by silicon, why DRA withholds it. DRA knows all devices, so that a
// claim which was allocated a device before the device moved can still be prepared.
func (p Placement) OfDRA() map[string]string {
	withheld := maps.Clone(p.Moving)
	for silicon, api := range p.API {
		if api == discovery.ModeDevicePlugin && withheld[silicon] == "" {
			withheld[silicon] = "offered by the device-plugin API"
		}
	}
	return withheld
}

// Classic returns the devices that the device-plugin API lists.
func (p Placement) Classic(devices []rules.Offered) (listed []rules.Offered) {
	for _, d := range devices {
		if p.API[d.Silicon()] == discovery.ModeDevicePlugin {
			listed = append(listed, d)
		}
	}
	return listed
}
