package pool

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
)

// SliceObjects returns the ResourceSlices of a node's pools as the library's controller first writes
// them (resourceslicecontroller.go, syncPool, of k8s.io/dynamic-resource-allocation 0.37), without
// the owner. Their names end with the name of the pool, and not with random characters.
func SliceObjects(node string, pools resourceslice.DriverResources) *resourceapi.ResourceSliceList {
	list := &resourceapi.ResourceSliceList{TypeMeta: metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSliceList"}}
	for _, name := range slices.Sorted(maps.Keys(pools.Pools)) {
		p := pools.Pools[name]
		for i := range p.Slices {
			slice := &p.Slices[i]
			list.Items = append(list.Items, resourceapi.ResourceSlice{
				TypeMeta:   metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"},
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%05x-%s-%s", i, discovery.Domain, strings.ReplaceAll(name, "/", "-"))},
				Spec: resourceapi.ResourceSliceSpec{
					Driver:                 discovery.Domain,
					NodeName:               &node,
					Pool:                   resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: int64(len(p.Slices))},
					Devices:                slice.Devices,
					SharedCounters:         slice.SharedCounters,
					PartitionTypeAttribute: slice.PartitionTypeAttribute,
				},
			})
		}
	}
	return list
}
