package simulation

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/reclaim"
	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/machine"
)

// drawConfiguration draws a configuration: the API that offers the devices, their sharing, and the
// excluded devices.
func (w *World) drawConfiguration() {
	w.usage.Writes.SetApart(false) // the device plugin API may offer the disk
	mode := chance.PickOne(w.random, discovery.ModeDRA, discovery.ModeDRA, discovery.ModeDevicePlugin, discovery.ModeAuto)
	if w.minor < 34 {
		mode = chance.PickOne(w.random, discovery.ModeDevicePlugin, discovery.ModeAuto)
	}
	r := &rules.Rules{Mode: mode, Sharing: chance.PickOne(w.random, w.machine.Sharings...)}
	if len(w.machine.Exclude) > 1 && w.random.IntN(6) == 0 {
		r.Exclude = []rules.Selector{chance.PickOne(w.random, w.machine.Exclude...)}
	}
	r.Resources = w.machine.Named
	if w.machine.Joins && w.random.IntN(3) == 0 {
		r.Attributes = []resourceapi.QualifiedName{"channel", "vfIndex"}
	}
	host := w.machine.Host(nil)
	w.settings = agent.Settings{
		Rules: r, Passthrough: host.Passthroughs, VirtualFunctions: host.VirtualFunctions, Reclaim: w.drawReclaim(),
		SharingDaemons: w.machine.AllowDaemons(),
		IdleTime:       time.Duration(5+w.random.IntN(60)) * time.Second,
	}
	wanted := w.machine.ApplyRules(r)
	w.forms = append(w.forms, wanted)
	shared := "whole"
	for _, s := range r.Sharing {
		shared = "in units of " + s.Unit.String()
		if s.Replicas > 0 {
			shared = fmt.Sprintf("by number, %d of each", s.Replicas)
		}
	}
	excluded := slices.DeleteFunc(slices.Sorted(maps.Keys(w.machine.Devices)), func(name string) bool { _, kept := wanted[name]; return kept })
	var handover []string
	for _, rule := range w.settings.Reclaim {
		handover = append(handover, fmt.Sprintf("%s, reset %v", rule.Expression, rule.Value.Reset))
	}
	w.history.Log("the administrator wants mode %q, devices %s, excluded %v, reclaim %q, attributes %v", mode, shared, excluded, handover, r.Attributes)
}

// drawReclaim draws the reclaim rules. Only devices of machines made for simulations can be reset.
func (w *World) drawReclaim() (all []discovery.Selection[reclaim.Rule]) {
	reclaims := w.random.IntN(3) == 0
	w.usage.Processes.SetReclaim(reclaims)
	if !reclaims {
		return nil
	}
	if w.machine.Resets && w.random.IntN(2) == 0 {
		w.usage.Writes.AllowResets()
		rule := discovery.Selection[reclaim.Rule]{Expression: "functions", Value: reclaim.Rule{Reset: true}, Selects: func(d discovery.Device) (bool, error) {
			return d.Attributes.String("kind") != "nic" && d.Attributes.String("function") != "virtual", nil // their functions have no way to be reset
		}}
		if w.random.IntN(2) == 0 {
			rule.Value.Methods = []string{"flr"}
		}
		all = append(all, rule)
	}
	return append(all, reclaimsAll)
}

// reclaimsAll is the rule to reclaim all devices, without a reset.
var reclaimsAll = discovery.Selection[reclaim.Rule]{Expression: "true", Selects: func(discovery.Device) (bool, error) { return true, nil }}

// wantedForm returns the devices with the present configuration.
func (w *World) wantedForm() machine.Form { return w.forms[len(w.forms)-1] }

// offersDRA reports whether DRA may offer devices.
func (w *World) offersDRA() bool {
	return w.minor >= 34 && w.settings.Rules.Mode != discovery.ModeDevicePlugin
}

// pluginOnly reports whether only the device plugin API may offer devices.
func (w *World) pluginOnly() bool {
	return w.minor < 34 || w.settings.Rules.Mode == discovery.ModeDevicePlugin
}

// withoutAccelerators reports whether the device plugin API offers all devices, because the machine has only
// nodes for virtual machines and the mode is Auto.
func withoutAccelerators(w *World) bool {
	for _, d := range w.wantedForm() {
		if d.ModeReason == "" {
			return false
		}
	}
	return len(w.wantedForm()) > 0
}

// changeConfig changes the configuration while agents run.
func changeConfig(w *World) bool {
	w.agents.DropDead()
	if len(w.agents.LivingAgents()) == 0 {
		return false
	}
	w.drawConfiguration()
	w.usage.Parts.ForgetNumbers() // of an agent before its first scan
	w.tell(agent.Change{Settings: w.settings})
	w.history.CountFault("configChanged")
	return true
}

// wrongConfig writes an invalid configuration.
func wrongConfig(w *World) bool {
	w.agents.DropDead()
	if len(w.agents.LivingAgents()) == 0 {
		return false
	}
	w.tell(agent.Change{Err: errors.New("line 1: no such field")})
	w.history.CountFault("configWrong")
	return true
}

// tell sends a change of the configuration to all agents.
func (w *World) tell(c agent.Change) {
	for _, i := range w.agents.LivingAgents() {
		if wrong := i.Wrong.Load(); wrong && c.Err == nil {
			i.Wrong.Store(false)
			if !i.Tell(c) {
				i.Wrong.Store(true)
			}
			continue
		}
		i.Tell(c) // a waiting agent reads the newest configuration when it starts
	}
}

// restartChanged changes the configuration and restarts the agent.
func restartChanged(w *World) bool {
	w.agents.DropDead()
	if len(w.agents.LivingAgents()) != 1 {
		return false
	}
	w.drawConfiguration()
	w.replaceAgent(10 * time.Second)
	w.history.CountFault("configChangedAtStart")
	return true
}

// checkPublished describes missing or surplus devices in the slices of the node.
func checkPublished(w *World) string {
	if why := missingFile(w); why != "" {
		return why
	}
	if w.pluginOnly() {
		return checkListed(w)
	}
	if withoutAccelerators(w) {
		if why := checkUnpublished(w); why != "" {
			return why
		}
		return checkListed(w)
	}
	if why := checkPools(w); why != "" {
		return why
	}
	usable, shared, joined := make(map[string]bool), make(map[string]bool), make(map[string]int64)
	for _, s := range w.server.Slices() {
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			if alike := w.machine.DevicesNamed(d.Name); len(alike) > 0 {
				capacity := d.Capacity[discovery.Shares].Value
				joined[d.Name] = capacity.Value()
				continue
			}
			name, share := machine.ShareStem(d.Name)
			usable[name], shared[name] = len(taintsOf(d)) == 0, share
		}
	}
	if why := checkCompeting(w, usable); why != "" {
		return why
	}
	if w.open() > 0 {
		return "" // some pods may have devices that are to be offered differently
	}
	if why := checkJoined(w, joined); why != "" {
		return why
	}
	for _, name := range slices.Sorted(maps.Keys(usable)) {
		if _, known := w.machine.Devices[name]; !known {
			return "device " + name + " is published, and is none of the machine's" // such as what remained of a card
		}
	}
	for _, name := range slices.Sorted(maps.Keys(w.machine.Devices)) {
		d, wanted := w.wantedForm()[name]
		well, there := usable[name]
		switch {
		case !wanted && there:
			return "device " + name + " is published, and excluded"
		case wanted && joined[d.Interchangeable] > 0 && !there:
		case !wanted || d.PartOf != nil && !w.server.Features().Counters: // only some of these are
		case !there:
			return "device " + name + " is not published"
		case shared[name] && !d.Shareable && (d.Shares() == 0 || w.server.Features().Sharing):
			return "device " + name + " is published in shares, which no claim can have any more"
		case !well:
			return "device " + name + " is tainted"
		}
	}
	return ""
}

// checkPools describes pools that are incomplete, and devices in an unexpected pool.
func checkPools(w *World) string {
	pools, poolOf := make(map[string]*resourceapi.ResourcePool), make(map[string]string)
	count := make(map[string]int64) // slices of a pool
	for _, s := range w.server.Slices() {
		pool := &s.Spec.Pool
		if pools[pool.Name] == nil {
			pools[pool.Name] = pool
		}
		if pool.Generation != pools[pool.Name].Generation {
			return "there are slices of earlier generations"
		}
		count[pool.Name]++
		for i := range s.Spec.Devices {
			name := s.Spec.Devices[i].Name
			if other, twice := poolOf[name]; twice {
				return fmt.Sprintf("device %s is published in pool %s and in pool %s", name, other, pool.Name)
			}
			poolOf[name] = pool.Name
		}
	}
	if len(pools) == 0 {
		return "no slice is published"
	}
	for name, pool := range pools {
		if count[name] != pool.ResourceSliceCount {
			return fmt.Sprintf("%d slices of %d are published", count[name], pool.ResourceSliceCount)
		}
	}
	for name, pool := range poolOf {
		d, known := w.machine.Devices[name]
		if want := discovery.PoolName(discovery.NodeOfPool(pool), d.InMainPool()); known && w.open() == 0 && pool != want {
			return fmt.Sprintf("device %s is published in pool %s, and not in pool %s", name, pool, want)
		}
	}
	return ""
}

// checkJoined describes interchangeable devices that are not published together, by their common names
// with the published numbers, while no pod has any.
func checkJoined(w *World, published map[string]int64) string {
	want := make(map[string]int64)
	for _, d := range w.wantedForm() {
		if w.machine.Joins && d.Interchangeable != "" && d.Sharing == nil && len(w.settings.Rules.Attributes) == 0 && w.server.Features().Sharing {
			want[d.Interchangeable]++
		}
	}
	if !maps.Equal(published, want) {
		return fmt.Sprintf("of interchangeable devices, %v are published together, and not %v", published, want)
	}
	return ""
}

// checkUnpublished describes a device in the slices of a node whose devices the device plugin API offers,
// while no pod has any.
func checkUnpublished(w *World) string {
	if w.open() > 0 {
		return ""
	}
	for _, s := range w.server.Slices() {
		for i := range s.Spec.Devices {
			return "device " + s.Spec.Devices[i].Name + " is published, and the node has no accelerators"
		}
	}
	return ""
}

// checkCompeting describes published devices that together exceed their physical device on an API
// server without counters, where the scheduler allocates all of them.
func checkCompeting(w *World, published map[string]bool) string {
	if w.server.Features().Counters {
		return ""
	}
	left := make(map[string]map[string]resource.Quantity) // by physical device
	for _, name := range slices.Sorted(maps.Keys(published)) {
		d := w.machine.Devices[name]
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

// checkListed describes missing or surplus device plugin IDs in the kubelet, while no pod has any.
func checkListed(w *World) string {
	if w.open() > 0 {
		return ""
	}
	want := make(map[string]map[string]bool)
	for _, d := range w.wantedForm() {
		for _, offer := range d.Offers {
			if want[offer.Resource] == nil {
				want[offer.Resource] = make(map[string]bool)
			}
			for _, id := range offer.IDs {
				want[offer.Resource][id] = true
			}
		}
	}
	got := w.kubelet.AllocatableDevices()
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
