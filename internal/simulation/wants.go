package simulation

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// form is devices by name, as the administrator wants or wanted them.
type form map[string]rules.Offered

// want draws what the administrator wants: which API offers the devices, how they
// are shared, and which are offered to nobody.
func (w *World) want() {
	w.mode = pick(w.random, discovery.ModeDRA, discovery.ModeDRA, discovery.ModeDevicePlugin, discovery.ModeAuto)
	if w.minor < 34 {
		w.mode = pick(w.random, discovery.ModeDevicePlugin, discovery.ModeAuto)
	}
	r := &rules.Rules{Mode: w.mode, Sharing: pick(w.random, w.machine.sharings...)}
	if len(w.machine.exclude) > 1 && w.random.IntN(6) == 0 {
		r.Exclude = []rules.Selector{pick(w.random, w.machine.exclude...)}
	}
	r.Resources = w.machine.named
	host := w.machine.host(nil)
	w.settings = agent.Settings{
		Rules: r, Rebind: host.Rebind, VirtualFunctions: host.VirtualFunctions, Handover: w.handovers(),
		KeepMade: time.Duration(5+w.random.IntN(60)) * time.Second,
	}
	wanted := make(form)
	for _, d := range r.Apply(w.machine.snapshot).Devices {
		wanted[d.Name] = d
	}
	w.forms = append(w.forms, wanted)
	shared := "whole"
	for _, s := range r.Sharing {
		shared = "in units of " + s.Unit.String()
		if s.Replicas > 0 {
			shared = fmt.Sprintf("by number, %d of each", s.Replicas)
		}
	}
	excluded := slices.DeleteFunc(slices.Sorted(maps.Keys(w.machine.devices)), func(name string) bool { _, kept := wanted[name]; return kept })
	w.log("the administrator wants mode %q, devices %s, excluded %v", w.mode, shared, excluded)
}

// wanted is how the administrator wants devices at present.
func (w *World) wanted() form { return w.forms[len(w.forms)-1] }

// dra reports whether devices may be offered by DRA.
func (w *World) dra() bool { return w.minor >= 34 && w.mode != discovery.ModeDevicePlugin }

// classic reports whether devices may be offered by the device-plugin API, at
// last.
func (w *World) classic() bool { return w.minor < 34 || w.mode == discovery.ModeDevicePlugin }

// changeConfig changes the configuration while agents run.
func (w *World) changeConfig() bool {
	w.clean()
	if len(w.living) == 0 {
		return false
	}
	w.want()
	w.forgetNumbers() // of an agent that has not looked at the host yet
	w.tell(agent.Change{Settings: w.settings})
	w.saw("configChanged")
	return true
}

// wrongConfig has the administrator write what no agent understands.
func (w *World) wrongConfig() bool {
	w.clean()
	if len(w.living) == 0 {
		return false
	}
	w.tell(agent.Change{Err: errors.New("line 1: no such field")})
	w.saw("configWrong")
	return true
}

// tell tells all agents of a change of the configuration.
func (w *World) tell(c agent.Change) {
	for _, i := range w.living {
		if wrong := i.wrong.Load(); wrong && c.Err == nil {
			i.wrong.Store(false)
			if !i.tell(c) {
				i.wrong.Store(true)
			}
			continue
		}
		i.tell(c) // or it waits for something, and reads the newest when it starts
	}
}

// tell tells an agent of a change of the configuration, and reports whether it has heard.
func (i *incarnation) tell(c agent.Change) bool {
	select {
	case i.changes <- c:
		return true
	case <-i.done:
	case <-time.After(time.Second):
	}
	return false
}

// restartChanged changes the configuration and restarts the agent.
func (w *World) restartChanged() bool {
	w.clean()
	if len(w.living) != 1 {
		return false
	}
	w.want()
	w.replaceAgent()
	w.saw("configChangedAtStart")
	return true
}

// published says what is missing in the slices of the node, or is too much.
func (w *World) published() string {
	if why := w.missing(); why != "" {
		return why
	}
	if w.classic() {
		return w.listed()
	}
	var newest, want, there int64
	usable, shared := make(map[string]bool), make(map[string]bool)
	for _, s := range w.server.Slices() {
		newest = max(newest, s.Spec.Pool.Generation)
	}
	for _, s := range w.server.Slices() {
		if s.Spec.Pool.Generation != newest {
			return "there are slices of earlier generations"
		}
		there++
		want = s.Spec.Pool.ResourceSliceCount
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			name, share := stem(d.Name)
			usable[name], shared[name] = len(taintsOf(d)) == 0, share
		}
	}
	if there != want || want == 0 {
		return fmt.Sprintf("%d slices of %d are published", there, want)
	}
	if why := w.competing(usable); why != "" {
		return why
	}
	if w.open() > 0 {
		return "" // some may have what is to be offered otherwise
	}
	for _, name := range slices.Sorted(maps.Keys(w.machine.devices)) {
		d, wanted := w.wanted()[name]
		well, there := usable[name]
		switch {
		case !wanted && there:
			return "device " + name + " is published, and excluded"
		case !wanted || d.PartOf != nil && !w.server.Features().Counters: // of those only some are
		case !there:
			return "device " + name + " is not published"
		case shared[name] && !d.Open && (d.Shares() == 0 || w.server.Features().Sharing):
			return "device " + name + " is published in shares, which nobody can have any more"
		case !well:
			return "device " + name + " is tainted"
		}
	}
	return ""
}

// competing says which published devices take more of their silicon than there is, where
// the API server keeps no counters: the scheduler gives all of them.
func (w *World) competing(published map[string]bool) string {
	if w.server.Features().Counters {
		return ""
	}
	left := make(map[string]map[string]resource.Quantity) // by silicon
	for _, name := range slices.Sorted(maps.Keys(published)) {
		d := w.machine.devices[name]
		for counter, takes := range d.Takes {
			if left[d.PartOf.Name] == nil {
				left[d.PartOf.Name] = maps.Clone(d.PartOf.Counters)
			}
			rest := left[d.PartOf.Name][counter]
			rest.Sub(takes)
			left[d.PartOf.Name][counter] = rest
			if rest.Sign() < 0 {
				return fmt.Sprintf("device %s is published without counters beside others of %s", name, d.PartOf.Name)
			}
		}
	}
	return ""
}

// stem returns of which device a name in slices is, and whether it is that of a
// share.
func stem(name string) (device string, share bool) {
	device, _, share = strings.Cut(name, "-share-")
	return device, share
}

// listed says which classic IDs the kubelet does not have, or has too many, while no
// pod has any.
func (w *World) listed() string {
	if w.open() > 0 {
		return ""
	}
	want := make(map[string]map[string]bool)
	for _, d := range w.wanted() {
		for _, offer := range d.Offers {
			if want[offer.Resource] == nil {
				want[offer.Resource] = make(map[string]bool)
			}
			for _, id := range offer.IDs {
				want[offer.Resource][id] = true
			}
		}
	}
	got := w.kubelet.Allocatable()
	for resource := range want {
		if _, listed := got[resource]; !listed {
			got[resource] = 0
		}
	}
	for resource, n := range got {
		if n != len(want[resource]) {
			return fmt.Sprintf("%d devices of %s are allocatable, and not %d", n, resource, len(want[resource]))
		}
	}
	return ""
}

func taintsOf(d *resourceapi.Device) (keys []string) {
	for _, taint := range d.Taints {
		if taint.Effect != resourceapi.DeviceTaintEffectNone {
			keys = append(keys, taint.Key)
		}
	}
	return keys
}
