package list

import (
	"fmt"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

const memoryResource = "aliyun.com/gpu-mem"

// inUnits returns a device whose memory is offered in n units.
func inUnits(id string, n int) rules.Offered {
	d := gpu(id)
	offer := discovery.Offer{Resource: memoryResource, Counts: "memory"}
	for i := range n {
		offer.IDs = append(offer.IDs, fmt.Sprintf("%s-_-%d", id, i))
	}
	d.Offers = []discovery.Offer{offer}
	d.Sharing = &rules.Sharing{Capacity: "memory", Unit: resource.MustParse("1Gi")}
	return d
}

func units(id string, from, to int) []string {
	var ids []string
	for i := from; i < to; i++ {
		ids = append(ids, fmt.Sprintf("%s-_-%d", id, i))
	}
	return ids
}

func TestPreferAmounts(t *testing.T) {
	l := first(memoryResource, inUnits("a", 8), inUnits("b", 8))
	for name, test := range map[string]struct {
		available, include []string
		size               int
		want               []string
	}{
		"the fullest that has enough": {slices.Concat(units("a", 0, 8), units("b", 5, 8)), nil, 3, units("b", 5, 8)},
		"not the one with too little": {slices.Concat(units("a", 0, 8), units("b", 5, 8)), nil, 4, units("a", 0, 4)},
		"beside what is included":     {slices.Concat(units("a", 0, 8), units("b", 5, 8)), units("a", 7, 8), 2, []string{"a-_-0", "a-_-7"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := l.Prefer(test.available, test.include, test.size)
			if err != nil || !slices.Equal(got, test.want) {
				t.Errorf("got %v, %v; want %v", got, err, test.want)
			}
		})
	}
	if got, err := l.Prefer(slices.Concat(units("a", 0, 2), units("b", 0, 2)), nil, 3); err != nil || len(got) != 3 {
		t.Errorf("where none has enough: %v, %v; Allocate is to say so", got, err)
	}
}
