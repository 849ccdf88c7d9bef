package list

import (
	"fmt"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/discovery"
)

// maxList is how many bytes of IDs a list may have. The kubelet takes messages up
// to gRPC's default of 4 MiB (pkg/kubelet/cm/devicemanager/plugin/v1beta1/
// client.go, dial, in 1.25 to 1.37), and drops the plugin that sends a longer one.
// Some room is left for IDs that are not offered any more and that containers have.
const maxList = 4<<20 - 256<<10

// fit leaves out the last units of a resource if its list would be too long.
func fit(resource string, units []*Unit) ([]*Unit, []discovery.Problem) {
	size, ids, fitting := 0, 0, len(units)
	for i, u := range units {
		size += u.size()
		ids += len(u.IDs)
		if size > maxList && fitting == len(units) {
			fitting = i
		}
	}
	if fitting == len(units) {
		return units, nil
	}
	return units[:fitting], []discovery.Problem{{Device: units[fitting].Name, Err: fmt.Errorf(
		"resource %s: its list of %d IDs has %.1f MiB, and the kubelet takes %.1f: %s and those after it are left out; share by larger units, or under several names",
		resource, ids, mebibytes(size), mebibytes(maxList), units[fitting].Name)}}
}

// size returns how many bytes of the list the unit's IDs take, or a few more.
func (u *Unit) size() int {
	const lengths = 4 // tag and length of an ID, and a longer length around it
	without := proto.Size(&pluginapi.ListAndWatchResponse{Devices: []*pluginapi.Device{{Health: pluginapi.Unhealthy, Topology: u.topology()}}})
	size := 0
	for _, id := range u.IDs {
		size += without + lengths + len(id)
	}
	return size
}

func mebibytes(bytes int) float64 { return float64(bytes) / (1 << 20) }
