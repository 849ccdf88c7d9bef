package discovery

import (
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Consumed holds the allocated amounts of shared devices: an amount for each capacity, by device
// name. A device without an entry is allocated whole. A capacity without an entry has no defined
// amount.
type Consumed map[string]map[resourceapi.QualifiedName]resource.Quantity

// Add adds amounts of a device: a container with two shares may use the sum of both.
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

// Granter returns a container's edits for its whole set of devices, in addition to the Edits of
// each device.
type Granter func(given []Device, grant Grant) specs.ContainerEdits

// JoinGranters joins the Grant functions of families. Each family receives only its own devices, in
// the order of the set.
func JoinGranters(families []*Family) Granter {
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

// Join returns the edits of a followed by those of b.
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

// VariableName converts a name to a part of an environment variable's name: "my-gpu/big" becomes
// MY_GPU_BIG.
func VariableName(name string) string {
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

// ResourceVariable converts a resource name to a part of an environment variable's name, as the
// SR-IOV network device plugin and KubeVirt do: dots and slashes become underscores, and hyphens
// stay.
func ResourceVariable(resource string) string {
	return strings.ToUpper(strings.NewReplacer("/", "_", ".", "_").Replace(resource))
}
