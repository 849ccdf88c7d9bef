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

// maxCores bounds how many cores a device is believed to have. Trainium2 has 8.
const maxCores = 64

// coreInfix stands between the name of a device and the number of a core of it.
const coreInfix = "-core-"

// divide returns the cores of a device, and makes the device one that takes all
// of them.
func divide(d *discovery.Device) []discovery.Device {
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
		delete(core.Attributes, "linkedTo") // the device's
		core.Lists = nil
		core.Capacity = discovery.Capacity{}
		core.Capacity.Set("cores", 1)
		core.Takes = map[string]resource.Quantity{"cores": resource.MustParse("1")}
		// The cores of a node are numbered through. The silicon is already
		// offered whole.
		id := strconv.FormatInt(number*count+int64(i), 10)
		core.Classic = []discovery.Offer{{Resource: "aws.amazon.com/neuroncore", IDs: []string{id}, Named: true}}
		cores[i] = core
	}
	return cores
}

// grant says which cores of its devices a container may use. The runtime numbers
// the cores through, in the order of the container's devices. A container that has
// whole devices only may use all cores, and is told nothing.
func grant(given []discovery.Device, _ discovery.Grant) specs.ContainerEdits {
	held := make(map[string][]int64) // by device, whose number of cores comes first
	divided := false
	for i := range given {
		d := &given[i]
		if d.PartOf == nil {
			return specs.ContainerEdits{} // how many cores there are is not known
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
