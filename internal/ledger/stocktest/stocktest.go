// Package stocktest has devices of a host and claims for them, for tests of the ledger.
package stocktest

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
)

// Stock is the devices of a host, by name.
type Stock map[string]rules.Offered

// Device returns a device by its name.
func (s Stock) Device(name string) (rules.Offered, bool) {
	d, found := s[name]
	return d, found
}

// Names returns the names of all devices.
func (s Stock) Names() []string { return slices.Sorted(maps.Keys(s)) }

// Parts returns the names of the partitions of a physical device.
func (s Stock) Parts(silicon string) []string {
	return slices.DeleteFunc(s.Names(), func(name string) bool { d := s[name]; return d.PartOf == nil || d.PartOf.Name != silicon })
}

// WithID returns the grant for an ID, which is the name of a device. The agent serves the resources
// that begin with "ours/".
func (s Stock) WithID(resource, id string) (*allocation.Grant, bool) {
	ours := strings.HasPrefix(resource, "ours/")
	d, found := s[id]
	if !found {
		return nil, ours
	}
	return &allocation.Grant{Devices: []string{id}, Silicon: []string{d.Silicon()}, Exclusive: true}, ours
}

// NewGPU returns a GPU with its own node and a common node.
func NewGPU(name string, minor int64) rules.Offered {
	d := rules.Offered{Device: discovery.Device{Name: name, Identity: "uuid-of-" + name, Attributes: discovery.Attributes{}}}
	d.CommonNodes = []string{"/dev/kfd"}
	d.Edits.DeviceNodes = []*specs.DeviceNode{
		{Path: "/dev/kfd", Type: "c", Major: 511},
		{Path: fmt.Sprintf("/dev/dri/renderD%d", minor), Type: "c", Major: 226, Minor: minor},
	}
	return d
}

// New returns a stock of devices.
func New(devices ...rules.Offered) Stock {
	s := make(Stock)
	for _, d := range devices {
		s[d.Name] = d
	}
	return s
}

// NewPart returns a partition that takes an amount of a physical device of eight slices.
func NewPart(silicon, name string, takes int64) rules.Offered {
	return rules.Offered{Device: discovery.Device{Name: name, Takes: Quantities(takes), PartOf: &discovery.Silicon{Name: silicon, Counters: Quantities(8)}}}
}

// Quantities returns an amount of slices.
func Quantities(n int64) map[string]resource.Quantity {
	return map[string]resource.Quantity{"slices": *resource.NewQuantity(n, resource.DecimalSI)}
}

// Claim returns a claim for devices of the node "node".
func Claim(name string, devices ...rules.Offered) *allocation.Claim {
	c := &allocation.Claim{Version: allocation.Version, UID: types.UID("uid-" + name), Namespace: "default", Name: name, Boot: "boot-1"}
	for i, d := range devices {
		r := allocation.Result{
			Request: "r", Pool: discovery.PoolName("node", d.InMainPool()), Device: d.Name, Source: d.Name, Silicon: d.Silicon(), Whole: d.PartOf == nil,
			Takes: d.Takes, Shared: d.Shareable, Identity: d.Identity, CDI: fmt.Sprintf("uid-%s-%d-%s", name, i, d.Name),
		}
		for _, n := range d.Edits.DeviceNodes {
			r.Nodes = append(r.Nodes, allocation.Node{Path: n.Path, Type: n.Type, Major: uint32(n.Major), Minor: uint32(n.Minor)})
		}
		for _, f := range d.Files {
			r.Files = append(r.Files, allocation.HostFile(f))
		}
		c.Results = append(c.Results, r)
	}
	return c
}

// AddFile gives a device a file of the host.
func (s Stock) AddFile(name string) {
	d := s[name]
	d.Offers = []discovery.Offer{{Resource: "ours/gpu", IDs: []string{name}}}
	d.Files = []discovery.HostFile{{Path: "/run/info/" + name + ".json", Text: "text"}}
	s[name] = d
}

// Amount returns an amount of a capacity.
func Amount(name string, value string) allocation.Amounts {
	return allocation.Amounts{resourceapi.QualifiedName(name): resource.MustParse(value)}
}

// NewShared returns a device with memory and a number of shares.
func NewShared(name string) rules.Offered {
	return rules.Offered{Device: discovery.Device{Name: name, Capacity: discovery.Capacity{
		"memory": {Value: resource.MustParse("16Gi")}, "shares": {Value: resource.MustParse("4")},
	}}}
}
