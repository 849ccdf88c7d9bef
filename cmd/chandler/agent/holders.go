package agent

import (
	"cmp"
	"slices"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
)

// holder is a container that has a device, as far as it is known.
type holder struct {
	Device    string
	API       discovery.Mode
	Namespace string
	Pod       string // "" while the kubelet has not named it
	Container string // likewise
	Claim     string // the claim's name, or its UID where no more is known; "" of the device-plugin API
	Request   string // of the claim
	Resource  string // of the device-plugin API
}

// container is a container as the kubelet names it.
type container struct{ pod, name string }

// holdersOf returns who has what, each once, in a fixed order. The containers that have
// claims are those that the kubelet said last, which may be nil. A claim that
// the kubelet does not know of a container has no pod.
func holdersOf(view *ledger.View, said *kubeletapi.Listing) []holder {
	var holders []holder
	named := containersByCDI(said)
	for _, c := range view.Claims() {
		for i := range c.Results {
			r := &c.Results[i]
			if r.Admin {
				continue
			}
			h := holder{Device: r.Source, API: discovery.ModeDRA, Namespace: c.Namespace, Claim: c.Name, Request: r.Request}
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
	for _, s := range view.Sealed() {
		for _, d := range s.Devices {
			holders = append(holders, holder{Device: d.Name, API: discovery.ModeDRA, Claim: string(s.UID)})
		}
	}
	for _, g := range view.Grants() {
		owner := g.Owner()
		for _, device := range g.Devices {
			holders = append(holders, holder{
				Device: device, API: discovery.ModeDevicePlugin,
				Namespace: owner.Namespace, Pod: owner.Name, Container: owner.Container, Resource: g.Resource,
			})
		}
	}
	slices.SortFunc(holders, func(a, b holder) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.API, b.API), cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container), cmp.Compare(a.Claim, b.Claim),
			cmp.Compare(a.Request, b.Request), cmp.Compare(a.Resource, b.Resource))
	})
	return slices.Compact(holders) // several shares of one device look the same
}

// containersByCDI returns which containers have the CDI devices of claims, by their names.
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
						by[device.Name] = append(by[device.Name], container{pod.Name, c.Name})
					}
				}
			}
		}
	}
	return by
}
