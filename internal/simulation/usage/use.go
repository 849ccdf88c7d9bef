package usage

import (
	"fmt"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/simulation/kubelet"
)

// use is the use of one device by a container.
type use struct {
	container *kubelet.Container
	classic   bool
	id        string    // of the device plugin API
	back      bool      // the kubelet has released the ID while the container still runs
	claim     types.UID // of DRA
	device    string    // of the machine
	silicon   string
	whole     bool
	open      bool
	takes     map[string]resource.Quantity // of the silicon's counters
	has       map[string]resource.Quantity // the silicon's counters
	part      part                         // of the device
	portion   portion                      // the record of the part, in the device plugin API
	share     types.UID                    // by DRA
	stranger  bool                         // another plugin allocated the device
	forgotten bool                         // no record of the use remains
	replaced  bool                         // another card with another UUID has replaced the card since
	vfio      bool                         // the device is under vfio
	group     []string                     // the functions of its IOMMU group at the container's start
	address   string                       // of its PCI function, at the container's start
	nodes     []string                     // numbers of its own device nodes, at the container's start
}

func (u *use) String() string {
	api := "DRA"
	if u.classic {
		api = "classic"
	}
	return fmt.Sprintf("pod %s has %s of %s (%s)", u.container.Pod, u.part, u.device, api)
}

// inGroup reports whether the container has a function of an IOMMU group. A function that left its
// group was removed from the container's open files.
func (u *use) inGroup() bool { return u.vfio && len(u.group) > 0 }

// belongsTogether reports whether two uses belong together: several pods share the claim, or one
// container has both.
func (u *use) belongsTogether(other *use) bool {
	return u.claim != "" && u.claim == other.claim || u.container == other.container
}

// count adds the counters that a use takes from its silicon, and returns an error text if a counter
// is exceeded.
func (u *use) count(counters map[string]map[string]resource.Quantity) string {
	if counters[u.silicon] == nil {
		counters[u.silicon] = make(map[string]resource.Quantity)
	}
	for counter, q := range u.takes {
		sum := counters[u.silicon][counter]
		sum.Add(q)
		counters[u.silicon][counter] = sum
		if limit := u.has[counter]; sum.Cmp(limit) > 0 {
			return fmt.Sprintf("%s has %s %s and %s are in use", u.silicon, limit.String(), counter, sum.String())
		}
	}
	return ""
}
