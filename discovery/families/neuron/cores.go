package neuron

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// maxCores is the highest plausible number of cores of a device. Trainium2 has 8.
const maxCores = 64

// coreInfix separates the name of a device from the number of a core.
const coreInfix = "-core-"

// divideCores returns the cores of a device, and makes the device take all of the cores.
func divideCores(d *discovery.Device) []discovery.Device {
	capacity := d.Capacity["cores"]
	count := capacity.Value.Value()
	number, numberErr := strconv.ParseInt(strings.TrimPrefix(d.Name, prefix), 10, 32)
	if count < 1 || count > maxCores || numberErr != nil {
		return nil
	}
	all := map[string]resource.Quantity{"cores": *resource.NewQuantity(count, resource.DecimalSI)}
	d.PartOf, d.Takes = &discovery.Silicon{Name: d.Name, Counters: all}, all
	cores := make([]discovery.Device, count)
	for i := range cores {
		core := *d
		core.Name = d.Name + coreInfix + strconv.Itoa(i)
		core.Attributes = maps.Clone(d.Attributes)
		core.Attributes.SetString("function", "partition")
		core.Attributes.SetString("parent", d.Name)
		delete(core.Attributes, "linkedTo") // belongs to the device
		core.Lists = nil
		core.Capacity = discovery.Capacity{}
		core.Capacity.Set("cores", 1)
		core.Takes = map[string]resource.Quantity{"cores": resource.MustParse("1")}
		// The cores of a node have consecutive numbers. By default the plugin offers the whole
		// device.
		id := strconv.FormatInt(number*count+int64(i), 10)
		core.PluginOffers = []discovery.Offer{{Resource: "aws.amazon.com/neuroncore", IDs: []string{id}, Optional: true}}
		cores[i] = core
	}
	return cores
}

// grant returns the environment variable with the cores that a container may use. The runtime
// numbers the cores consecutively, in the order of the container's devices. A container with only
// whole devices may use all cores and needs no variable.
func grant(given []discovery.Device, _ discovery.Grant) specs.ContainerEdits {
	held := make(map[string][]int64) // by device: the number of cores, then the allocated cores
	divided := false
	for i := range given {
		d := &given[i]
		if d.PartOf == nil {
			return specs.ContainerEdits{} // the number of cores is unknown
		}
		all := d.PartOf.Counters["cores"]
		device := d.PartOf.Name
		if held[device] == nil {
			held[device] = []int64{all.Value()}
		}
		digits, part := strings.CutPrefix(d.Name, device+coreInfix)
		core, err := strconv.ParseInt(digits, 10, 32)
		switch {
		case !part:
			for core := range all.Value() {
				held[device] = append(held[device], core)
			}
		case err == nil:
			divided = true
			held[device] = append(held[device], core)
		}
	}
	if !divided {
		return specs.ContainerEdits{}
	}
	var visible []string
	var before int64
	for _, device := range slices.SortedFunc(maps.Keys(held), byNumber) {
		cores := held[device][1:]
		slices.Sort(cores)
		for _, core := range slices.Compact(cores) {
			visible = append(visible, strconv.FormatInt(before+core, 10))
		}
		before += held[device][0]
	}
	return specs.ContainerEdits{Env: []string{fmt.Sprintf("NEURON_RT_VISIBLE_CORES=%s", strings.Join(visible, ","))}}
}

// byNumber orders "neuron9" before "neuron10".
func byNumber(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b))
}
