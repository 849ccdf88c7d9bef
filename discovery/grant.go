package discovery

import (
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Consumed is how much is given of devices that several containers have together:
// an amount of each capacity, by the devices' names. A device that is not in it is
// given whole, and of a capacity that is not in it nothing is said.
type Consumed map[string]map[resourceapi.QualifiedName]resource.Quantity

// Add adds amounts of a device: who has two shares of it may use both.
func (c Consumed) Add(device string, amounts map[resourceapi.QualifiedName]resource.Quantity) {
	for capacity, amount := range amounts {
		if c[device] == nil {
			c[device] = make(map[resourceapi.QualifiedName]resource.Quantity)
		}
		sum := c[device][capacity].DeepCopy()
		sum.Add(amount)
		c[device][capacity] = sum
	}
}

// Granter returns what a container needs because of the set of devices it is
// given, beyond the devices' own Edits.
type Granter func(given []Device, grant Grant) specs.ContainerEdits

// Granters joins the Grants of families: each is asked about the devices of
// its own that are in the set, in the order in which they are in it.
func Granters(families []*Family) Granter {
	return func(given []Device, grant Grant) specs.ContainerEdits {
		var edits specs.ContainerEdits
		for _, f := range families {
			own := slices.DeleteFunc(slices.Clone(given), func(d Device) bool { return d.Family != f.Name })
			if f.Grant != nil && len(own) > 0 {
				edits = Join(edits, f.Grant(own, grant))
			}
		}
		return edits
	}
}

// Join returns what both edits make of a container.
func Join(a, b specs.ContainerEdits) specs.ContainerEdits {
	return specs.ContainerEdits{
		DeviceNodes:    slices.Concat(a.DeviceNodes, b.DeviceNodes),
		NetDevices:     slices.Concat(a.NetDevices, b.NetDevices),
		Mounts:         slices.Concat(a.Mounts, b.Mounts),
		Env:            slices.Concat(a.Env, b.Env),
		Hooks:          slices.Concat(a.Hooks, b.Hooks),
		AdditionalGIDs: slices.Concat(a.AdditionalGIDs, b.AdditionalGIDs),
		IntelRdt:       a.IntelRdt,
	}
}

// Variable returns a name as part of a variable's: "my-gpu/big" is MY_GPU_BIG.
func Variable(name string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z':
			return r - 'a' + 'A'
		case 'A' <= r && r <= 'Z', '0' <= r && r <= '9':
			return r
		}
		return '_'
	}, name)
}

// ResourceVariable returns the name of a resource as part of a variable's, as
// the SR-IOV network device plugin and KubeVirt write it: dots and slashes become
// underscores, and hyphens stay.
func ResourceVariable(resource string) string {
	return strings.ToUpper(strings.NewReplacer("/", "_", ".", "_").Replace(resource))
}
