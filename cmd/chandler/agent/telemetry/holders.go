package telemetry

import (
	"cmp"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
)

// container identifies a container by the names in the kubelet's listing.
type container struct{ pod, name string }

// holdersOf returns the allocations of [Holders] without times and without duplicates.
func holdersOf(view *ledger.View, said *kubeletapi.Listing) []inventory.Holder {
	holders := Holders(view, said, nil)
	for i := range holders {
		holders[i].Since = time.Time{}
	}
	return slices.Compact(holders) // several shares of one device look alike
}

// Holders returns the allocations in a fixed order, with one element for each share. Containers
// with claims come from said, the kubelet's last listing, which may be nil. An allocation by a
// claim has no container if the kubelet lists none for the claim. since returns when the devices of
// a claim were allocated; since may be nil.
func Holders(view *ledger.View, said *kubeletapi.Listing, since func(types.UID) time.Time) []inventory.Holder {
	var holders []inventory.Holder
	if since == nil {
		since = func(types.UID) time.Time { return time.Time{} }
	}
	named := containersByCDI(said)
	for _, c := range view.Claims() {
		at := since(c.UID)
		for i := range c.Results {
			r := &c.Results[i]
			if r.Admin {
				continue
			}
			h := inventory.Holder{Device: r.Source, API: discovery.ModeDRA, Namespace: c.Namespace, Claim: cmp.Or(c.Name, string(c.UID)), Request: r.Request, Pod: c.Pod, Resource: r.Resource, Since: at}
			containers := named[cdi.ID(r.CDI)]
			for _, by := range containers {
				h.Pod, h.Container = by.pod, by.name
				holders = append(holders, h)
			}
			if len(containers) == 0 {
				holders = append(holders, h)
			}
		}
	}
	for _, s := range view.SealedEntries() {
		for _, d := range s.Devices {
			holders = append(holders, inventory.Holder{Device: d.Name, API: discovery.ModeDRA, Claim: string(s.UID), Since: since(s.UID)})
		}
	}
	for _, g := range view.Grants() {
		owner := g.Owner()
		for _, device := range g.Devices {
			holders = append(holders, inventory.Holder{
				Device: device, API: discovery.ModeDevicePlugin,
				Namespace: owner.Namespace, Pod: owner.Name, Container: owner.Container, Resource: g.Resource, Since: g.Since,
			})
		}
	}
	slices.SortFunc(holders, func(a, b inventory.Holder) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.API, b.API), cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container), cmp.Compare(a.Claim, b.Claim),
			cmp.Compare(a.Request, b.Request), cmp.Compare(a.Resource, b.Resource), a.Since.Compare(b.Since))
	})
	return holders
}

// containersByCDI returns the containers that have each CDI device of claims, by the device's name.
func containersByCDI(said *kubeletapi.Listing) map[string][]container {
	by := make(map[string][]container)
	if said == nil {
		return by
	}
	for _, pod := range said.Pods {
		for _, c := range pod.Containers {
			for _, claim := range c.DynamicResources {
				for _, resource := range claim.ClaimResources {
					for _, device := range resource.CdiDevices {
						// For each further device of a claim the kubelet lists the previous devices
						// again (GetDynamicResources in pkg/kubelet/cm/container_manager_linux.go,
						// 1.37).
						if has := (container{pod.Name, c.Name}); !slices.Contains(by[device.Name], has) {
							by[device.Name] = append(by[device.Name], has)
						}
					}
				}
			}
		}
	}
	return by
}
