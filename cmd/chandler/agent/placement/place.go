package placement

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
)

// Placement is the decision which API offers each physical device. It is never modified.
type Placement struct {
	// API is by physical device. Physical devices that no API offers yet are missing.
	API map[string]discovery.Mode

	// Moving is, by physical device, why the device is withheld: it must be free before it moves to
	// the other API or changes, or its first API is still unknown.
	Moving map[string]string

	// To is the next API of each physical device in Moving. Devices that change in another way are
	// missing.
	To map[string]discovery.Mode

	// Free contains the physical devices of Facts.Changing that are free and may change now.
	Free map[string]bool

	// NeedsPublished contains the physical devices that wait only because Facts.Published is missing.
	NeedsPublished map[string]bool
}

// Facts are the other inputs of a placement.
type Facts struct {
	// AutoMode is the API for devices in mode Auto, and "" while the API is undecided.
	AutoMode discovery.Mode

	// Published is the API server's answer, nil without a request.
	Published *Published

	// Changing contains the physical devices whose devices still follow earlier settings, because
	// the present settings exclude a device or change how it is shared.
	Changing map[string]bool

	// Unknown is why the wanted configuration is unknown, or that an administrator wants no device
	// offered, and "" otherwise.
	Unknown string
}

// Published is what keeps physical devices in DRA, according to the API server.
type Published struct {
	// BySilicon is, by physical device, the ResourceSlice or ResourceClaim that names the device, or
	// why a claim may still be allocated the device.
	BySilicon map[string]string

	// Err is why the request failed. Then no physical device leaves DRA.
	Err error
}

// concerns reports whether the answer keeps each of the physical devices in DRA.
func (p *Published) concerns(silicon map[string]bool) bool {
	for name := range silicon {
		if p.Err == nil && p.BySilicon[name] == "" {
			return false
		}
	}
	return true
}

// PlaceDevices decides which API offers each physical device. One API at a time offers a physical
// device. The device moves to the other API only while it is free and cannot be allocated, and is
// withheld until then. For example, a GPU whose mode changed from DRA to the device plugin API is
// withheld until no claim has the GPU, no ResourceSlice has named it for a while, and no claim of a
// pod that is bound to the node is allocated it. While the API server does not answer, a free device
// stays with DRA and is not withheld.
//
// A physical device that changes in another way stays with its API, and is withheld until it is
// free. For example, a GPU that was shared in units of memory and will be shared by number is
// withheld until no claim has any share of the GPU.
//
// While facts.Unknown is set, all physical devices stay with their API and are withheld, except
// that pods keep the devices that the device plugin API has allocated.
//
// PlaceDevices is pure.
func PlaceDevices(before map[string]discovery.Mode, devices []rules.Offered, view *ledger.View, facts Facts) Placement {
	p := Placement{API: maps.Clone(before), Moving: make(map[string]string), To: make(map[string]discovery.Mode), Free: make(map[string]bool), NeedsPublished: make(map[string]bool)}
	if p.API == nil {
		p.API = make(map[string]discovery.Mode)
	}
	all := siliconOf(devices, view.Grants(), p.API)
	for silicon := range facts.Changing {
		if _, there := all[silicon]; !there {
			all[silicon] = wantedMode{} // the earlier settings exclude all present devices
		}
	}
	for silicon, s := range all {
		p.placeSilicon(silicon, s, view, facts)
	}
	return p
}

// wantedMode is the wanted configuration of a physical device.
type wantedMode struct {
	mode      discovery.Mode // the same for all devices of one physical device: see rules.Rules
	open      bool           // all devices have unlimited sharing
	viaPlugin bool           // a container has one of the devices by the device-plugin API
	members   []string       // the devices that have been physical devices of their own, such as the functions of a card
}

func siliconOf(devices []rules.Offered, grants []*allocation.Grant, before map[string]discovery.Mode) map[string]wantedMode {
	had := make(map[string]bool)
	for _, g := range grants {
		for _, name := range g.Devices {
			had[name] = true
		}
	}
	all := make(map[string]wantedMode)
	for i := range devices {
		d := &devices[i]
		s, seen := all[d.Silicon()]
		if _, apart := before[d.Name]; apart && d.Name != d.Silicon() {
			s.members = append(s.members, d.Name)
		}
		all[d.Silicon()] = wantedMode{d.Mode, d.Shareable && (s.open || !seen), s.viaPlugin || had[d.Name], s.members}
	}
	return all
}

// placeSilicon decides about one physical device.
func (p *Placement) placeSilicon(silicon string, s wantedMode, view *ledger.View, facts Facts) {
	now, wanted := p.API[silicon], s.mode
	if wanted == discovery.ModeAuto {
		wanted = facts.AutoMode
	}
	if slices.ContainsFunc(s.members, func(name string) bool { return p.API[name] != now }) {
		now = discovery.ModeAuto // it is not known which of the decisions is the last one
	}
	if now == discovery.ModeAuto && !s.open {
		now = holdingAPI(silicon, view)
	}
	reason := ""
	switch {
	case facts.Unknown != "" && s.viaPlugin && now != discovery.ModeDRA:
		// After a reboot the kubelet starts a pod only if the IDs of its devices are healthy
		// (pkg/kubelet/cm/devicemanager/manager.go, devicesToAllocate, in 1.28 to 1.37).
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
		reason = "it is not yet decided which API offers it"
	case wanted == now || wanted == discovery.ModeAuto:
	case s.open:
		now = wanted
	default:
		who, known := p.obstacle(silicon, wanted, view, facts)
		switch {
		case who == "":
			now = wanted
		case !known && now != discovery.ModeAuto: // stays
		default:
			reason = fmt.Sprintf("moves to API %s once it is free of %s", wanted, who)
			p.To[silicon] = wanted
			if known && (wanted == discovery.ModeDevicePlugin || view.KnownOwner(discovery.ModeDevicePlugin, silicon) != "") {
				now = cmp.Or(now, otherAPI(wanted))
			}
		}
	}
	if reason != "" {
		p.Moving[silicon] = reason
	}
	if now != discovery.ModeAuto {
		p.API[silicon] = now
		for _, name := range s.members {
			p.API[name] = now
		}
	}
}

// obstacle returns the consumer or API object that keeps a physical device from moving to an API,
// or "". known is false if the API server has not answered, so that the obstacle is unknown.
func (p *Placement) obstacle(silicon string, to discovery.Mode, view *ledger.View, facts Facts) (who string, known bool) {
	if who := view.OwnerOf(otherAPI(to), silicon); who != "" || to == discovery.ModeDRA {
		return who, true
	}
	switch said := facts.Published; {
	case said == nil:
		p.NeedsPublished[silicon] = true
		return "whatever the API server names", false
	case said.Err != nil:
		return fmt.Sprintf("unknown: %v", said.Err), false
	default:
		return said.BySilicon[silicon], true
	}
}

// owner returns the consumer of a physical device. For a free device of DRA, owner returns the API
// object that could still lead to an allocation. If there is neither, owner returns "".
func (p *Placement) owner(silicon string, api discovery.Mode, view *ledger.View, facts Facts) string {
	if who := view.OwnerOf(discovery.ModeDevicePlugin, silicon); who != "" || api == discovery.ModeDevicePlugin {
		return cmp.Or(who, view.OwnerOf(discovery.ModeDRA, silicon))
	}
	who, _ := p.obstacle(silicon, discovery.ModeDevicePlugin, view, facts)
	return who
}

func otherAPI(api discovery.Mode) discovery.Mode {
	if api == discovery.ModeDRA {
		return discovery.ModeDevicePlugin
	}
	return discovery.ModeDRA
}

// holdingAPI returns the API that has allocated the physical device, or "".
func holdingAPI(silicon string, view *ledger.View) discovery.Mode {
	for _, api := range []discovery.Mode{discovery.ModeDRA, discovery.ModeDevicePlugin} {
		if view.KnownOwner(api, silicon) != "" {
			return api
		}
	}
	return discovery.ModeAuto
}

// OfDRA returns, by physical device, why DRA withholds the device. The driver keeps withheld
// devices in its snapshot, so that claims whose device moved after their allocation can still be
// prepared.
func (p Placement) OfDRA() map[string]string {
	withheld := maps.Clone(p.Moving)
	for silicon, api := range p.API {
		if api == discovery.ModeDevicePlugin && withheld[silicon] == "" {
			withheld[silicon] = "offered by the device-plugin API"
		}
	}
	return withheld
}

// ListedDevices returns the devices that the device plugin API lists.
func (p Placement) ListedDevices(devices []rules.Offered) (listed []rules.Offered) {
	for _, d := range devices {
		if p.API[d.Silicon()] == discovery.ModeDevicePlugin {
			listed = append(listed, d)
		}
	}
	return listed
}
