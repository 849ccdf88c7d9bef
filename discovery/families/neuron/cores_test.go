package neuron

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
)

// devices returns devices with two cores each, and their cores, by name.
func devices(numbers ...int) map[string]discovery.Device {
	all := make(map[string]discovery.Device)
	for _, number := range numbers {
		d := discovery.Device{Name: fmt.Sprint("neuron", number), Attributes: discovery.Attributes{}, Capacity: discovery.Capacity{}}
		d.Capacity.Set("cores", 2)
		for _, core := range divideCores(&d) {
			all[core.Name] = core
		}
		all[d.Name] = d
	}
	return all
}

func TestGrant(t *testing.T) {
	all := devices(0, 2, 10)
	for name, test := range map[string]struct {
		given []string
		want  []string
	}{
		"whole devices":       {[]string{"neuron0", "neuron2"}, nil},
		"cores of one device": {[]string{"neuron2-core-1", "neuron2-core-0"}, []string{"NEURON_RT_VISIBLE_CORES=0,1"}},
		"numbered as given":   {[]string{"neuron10-core-1"}, []string{"NEURON_RT_VISIBLE_CORES=1"}},
		"cores of several":    {[]string{"neuron10-core-0", "neuron2-core-1"}, []string{"NEURON_RT_VISIBLE_CORES=1,2"}},
		"a device and a core": {[]string{"neuron0", "neuron10-core-1"}, []string{"NEURON_RT_VISIBLE_CORES=0,1,3"}},
	} {
		t.Run(name, func(t *testing.T) {
			var given []discovery.Device
			for _, name := range test.given {
				given = append(given, all[name])
			}
			if diff := cmp.Diff(test.want, grant(given, discovery.Grant{}).Env); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A device with an invalid number of cores is not divided.
func TestDivideBounds(t *testing.T) {
	for _, count := range []int64{0, -1, maxCores + 1, 1 << 62} {
		d := discovery.Device{Name: "neuron0", Capacity: discovery.Capacity{}}
		d.Capacity.Set("cores", count)
		if cores := divideCores(&d); len(cores) > 0 || d.PartOf != nil {
			t.Errorf("%d cores: %d devices, part of %v", count, len(cores), d.PartOf)
		}
	}
}
