package agent

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/podevents"
)

// sendPodEvents reports the health of devices to their pods by Events.
func (a *agent) sendPodEvents(ctx context.Context) {
	notifier := podevents.Notifier{
		Client: a.StatusClient,
		Node:   a.NodeName,
		File:   filepath.Join(a.StateDir, "events.json"),
		Files:  a.files(),
		InUse: func() ([]podevents.Device, bool) {
			settled, placed := a.watch.settled.Load(), a.placedDevices.Load()
			if settled == nil || placed == nil || !a.isReady() {
				return nil, false
			}
			health := func(c *allocation.Claim, r *allocation.Result) discovery.Health {
				device, found := settled.Lookup(r.Source)
				return a.driver.HealthOf(&device, found, settled.Gone, c, r)
			}
			view := a.ledger.View(&exclusion.Present{Snapshot: placed.Snapshot})
			return devicesInUse(settled, a.settings.goneEffect(), view, health), true
		},
		Pods: a.cluster.Pods,
	}
	notifier.Run(ctx, a.watch.settledChanged)
}

// devicesInUse returns the allocated devices with their health, sorted by name: devices of claims,
// and devices of grants whose pod PodResources has named. If a device is gone for one consumer and
// present for another, the gone device comes first. A device that is gone has no model. Devices
// with admin access and devices of claims that are still being configured are left out.
func devicesInUse(settled *discovery.Snapshot, gone resourceapi.DeviceTaintEffect, view *ledger.View, health func(*allocation.Claim, *allocation.Result) discovery.Health) []podevents.Device {
	var devices []podevents.Device
	at := func(name string, health discovery.Health) *podevents.Device {
		i := slices.IndexFunc(devices, func(d podevents.Device) bool { return d.Name == name && d.Health == health })
		if i < 0 {
			i, devices = len(devices), append(devices, podevents.Device{Name: name, Health: health})
		}
		return &devices[i]
	}
	for _, c := range view.Claims() {
		for i := range c.Results {
			if r := &c.Results[i]; !r.Admin && !c.Configuring {
				d := at(r.Source, health(c, r))
				d.Claims = with(d.Claims, c.Named())
			}
		}
	}
	for _, g := range view.Grants() {
		pod := g.Owner()
		if pod.Name == "" {
			continue
		}
		renumbered := view.RenumberedNodes(g)
		for _, name := range g.Devices {
			health := settled.Gone.HealthOf(name, gone)
			if d, found := settled.Lookup(name); found {
				health = d.Health
			}
			if renumbered != "" && health.Status != discovery.Unknown {
				health = discovery.GoneHealth(gone)
				health.Reason = fmt.Sprintf("device %s has other nodes: %s", name, renumbered)
			}
			d := at(name, health)
			d.Pods = with(d.Pods, types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name})
		}
	}
	slices.SortStableFunc(devices, func(a, b podevents.Device) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(conditionOrder(a.Health), conditionOrder(b.Health)))
	})
	for i := range devices {
		of := &devices[i]
		if d, found := settled.Lookup(of.Name); found && of.Health.Key() != discovery.ConditionGone {
			of.Model = d.Attributes.String("model")
		}
	}
	return devices
}

// with appends a name unless names contains it.
func with(names []types.NamespacedName, name types.NamespacedName) []types.NamespacedName {
	if slices.Contains(names, name) {
		return names
	}
	return append(names, name)
}

// conditionOrder sorts the state "gone" of a device before its other state.
func conditionOrder(h discovery.Health) int {
	if h.Key() == discovery.ConditionGone {
		return 0
	}
	return 1
}
