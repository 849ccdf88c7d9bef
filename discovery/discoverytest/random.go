package discoverytest

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// partsPerWhole is the number of slices in a physical device of a random host.
const partsPerWhole = 7

// RandomHost returns a snapshot of n random devices, or a few more. Some are plain, some Shareable,
// some shared by number or by memory, and some are physical devices with partitions. They are
// healthy or not, withheld or not, and their names and attributes reach the limits of the API. Some
// physical devices come from the recorded hosts, under other names. The serial number of each
// device equals its name, and its device nodes are unique.
//
// The snapshot follows the rules of [scan.ReadHost] and [scan.Settler].
func RandomHost(random *rand.Rand, n int, recorded ...*discovery.Snapshot) *rules.Snapshot {
	h := &randomHost{Rand: random}
	for len(h.devices) < n {
		name := fmt.Sprintf("dev-%04d", len(h.devices))
		if h.oneIn(8) {
			name += "-" + strings.Repeat("x", validation.DNS1123LabelMaxLength-len("-p-0")-len(name)-1)
		}
		if len(recorded) > 0 && h.oneIn(3) {
			h.addRecorded(name, recorded[h.IntN(len(recorded))])
			continue
		}
		h.addSilicon(name)
	}
	slices.SortFunc(h.devices, func(a, b rules.Offered) int { return strings.Compare(a.Name, b.Name) })
	return &rules.Snapshot{Devices: h.devices, Attributes: []resourceapi.QualifiedName{"uuid"}}
}

type randomHost struct {
	*rand.Rand
	devices []rules.Offered
}

func (h *randomHost) oneIn(n int) bool { return h.IntN(n) == 0 }

// addSilicon adds a device, or a physical device with its partitions.
func (h *randomHost) addSilicon(name string) {
	switch h.IntN(7) {
	case 0, 1:
		h.add(h.newDevice(name))
	case 2:
		d := h.newDevice(name)
		d.Shareable = true
		h.add(d)
	case 3:
		h.add(h.byNumber(name))
	case 4:
		h.add(h.byMemory(name))
	case 5:
		h.addParts(name)
	case 6: // partitions that do not compete
		for i := range 1 + h.IntN(4) {
			d := h.newDevice(fmt.Sprintf("%s-p-%d", name, i))
			d.PartOf = &discovery.Silicon{Name: name}
			h.add(d)
		}
	}
}

// addParts adds a physical device that can be allocated as a whole or in partitions.
func (h *randomHost) addParts(name string) {
	whole := &discovery.Silicon{Name: name, Counters: map[string]resource.Quantity{
		"slices": *resource.NewQuantity(partsPerWhole, resource.DecimalSI),
		"memory": *resource.NewQuantity(partsPerWhole<<30, resource.BinarySI),
	}}
	if h.oneIn(4) {
		for i := len(whole.Counters); i < resourceapi.ResourceSliceMaxCountersPerCounterSet; i++ {
			whole.Counters[fmt.Sprintf("engine-%02d", i)] = *resource.NewQuantity(partsPerWhole, resource.DecimalSI)
		}
	}
	all := h.newDevice(name)
	all.PartOf, all.Takes = whole, whole.Counters
	h.add(all)
	for i := range 1 + h.IntN(partsPerWhole) {
		d := h.newDevice(fmt.Sprintf("%s-p-%d", name, i))
		if h.oneIn(3) {
			d = h.byNumber(d.Name)
		}
		size := 1 + h.Int64N(3)
		d.PartOf, d.Takes = whole, make(map[string]resource.Quantity)
		for counter, quantity := range whole.Counters {
			d.Takes[counter] = *resource.NewQuantity(quantity.Value()/partsPerWhole*size, quantity.Format)
		}
		h.add(d)
	}
}

// newDevice returns a device for exclusive use.
func (h *randomHost) newDevice(name string) rules.Offered {
	d := rules.Offered{Device: discovery.Device{
		Name: name, Family: "random", Identity: "uuid-of-" + name,
		Attributes: discovery.Attributes{}, Capacity: discovery.Capacity{},
	}}
	d.Attributes.SetString("uuid", name)
	d.Attributes.SetString("resource.kubernetes.io/pcieRoot", fmt.Sprintf("pci0000:%02x", h.IntN(4)))
	if h.oneIn(4) {
		var peers []string // more than three are too long for a string
		for i := range 1 + h.IntN(8) {
			peers = append(peers, fmt.Sprintf("pci-0000-%02x-00-0", i))
		}
		d.SetNames("linkedTo", peers)
	}
	d.Edits.DeviceNodes = []*specs.DeviceNode{{Path: "/dev/" + name, HostPath: "/dev/" + name, Type: "c", Major: 226, Minor: int64(len(h.devices) + 1)}}
	if h.oneIn(6) {
		h.setLists(&d)
	}
	if h.oneIn(5) {
		d.Overhead = rules.HostResources{
			corev1.ResourceMemory: {PerPod: new(resource.MustParse("1Gi")), PerContainer: new(resource.MustParse("100Mi"))},
			corev1.ResourceCPU:    {PerContainer: new(resource.MustParse("100m"))},
		}
	}
	h.setHealth(&d)
	return d
}

// setLists gives the device a list in place of an attribute, and a list in addition to attributes.
func (h *randomHost) setLists(d *rules.Offered) {
	d.Attributes.SetInt("resource.kubernetes.io/numaNode", h.Int64N(8))
	var nodes []int64
	for i := range 1 + h.Int64N(8) {
		nodes = append(nodes, i)
	}
	var peers []string
	for i := range 1 + h.IntN(resourceapi.ResourceSliceMaxAttributeValuesPerDevice) {
		peers = append(peers, fmt.Sprintf("%s-peer-%02d", d.Name[:len("dev-0000")], i))
	}
	d.Lists = discovery.Lists{"resource.kubernetes.io/numaNode": {IntValues: nodes}, "linkedTo": {StringValues: peers}}
}

// setAttribute sets an attribute of any type, with a long name and value.
func (h *randomHost) setAttribute(attributes discovery.Attributes, i int) {
	id := fmt.Sprintf("a%02d", i)
	name := resourceapi.QualifiedName(strings.Repeat("d", resourceapi.DeviceMaxDomainLength) + "/" + id + strings.Repeat("i", resourceapi.DeviceMaxIDLength-len(id)))
	switch h.IntN(4) {
	case 0:
		attributes.SetString(name, strings.Repeat("v", resourceapi.DeviceAttributeMaxValueLength))
	case 1:
		attributes.SetInt(name, int64(h.Uint64()))
	case 2:
		attributes.SetBool(name, h.oneIn(2))
	case 3:
		version := "1.22.333-" + strings.Repeat("rc", 27)
		attributes[name] = discovery.Attribute{VersionValue: &version}
	}
}

// setHealth makes some devices unhealthy or unknown.
func (h *randomHost) setHealth(d *rules.Offered) {
	d.Health.Status = discovery.Healthy
	if !h.oneIn(10) {
		return
	}
	d.Health = discovery.Health{Status: discovery.Unknown, Reason: "cannot be read"}
	if !h.oneIn(3) {
		conditions := discovery.Conditions()
		d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: conditions[h.IntN(len(conditions))], Reason: "is broken"}
	}
	d.Health.Effect = []resourceapi.DeviceTaintEffect{
		resourceapi.DeviceTaintEffectNone, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute,
	}[h.IntN(3)]
	if !h.oneIn(3) {
		d.Health.Since = metav1.NewTime(time.Unix(1_700_000_000+h.Int64N(100_000_000), 0))
	}
}

// byNumber returns a device that several containers may share.
func (h *randomHost) byNumber(name string) rules.Offered {
	d := h.newDevice(name)
	shares := 1 + h.IntN(5)
	if h.oneIn(20) {
		shares = 101 + h.IntN(100) // three-digit numbers
	}
	d.Capacity.Set(discovery.Shares, int64(shares))
	one := *resource.NewQuantity(1, resource.DecimalSI)
	d.Sharing = &rules.Sharing{Capacity: discovery.Shares, Unit: one, Default: one}
	return d
}

// byMemory returns a device whose memory containers share in any amounts.
func (h *randomHost) byMemory(name string) rules.Offered {
	d := h.newDevice(name)
	unit := (1 + h.Int64N(3)) << 30
	units := 1 + h.Int64N(16)
	d.Capacity.Set("memory", unit*units+h.Int64N(unit)) // the remainder is too small for a unit
	d.Capacity.Set("cores", 100)
	d.Sharing = &rules.Sharing{
		Capacity: "memory",
		Unit:     *resource.NewQuantity(unit, resource.BinarySI),
		Default:  *resource.NewQuantity(unit*units, resource.BinarySI),
	}
	return d
}

// addRecorded adds a physical device of another host with all its devices, under new names.
func (h *randomHost) addRecorded(name string, from *discovery.Snapshot) {
	if len(from.Devices) == 0 {
		return
	}
	chosen := from.Devices[h.IntN(len(from.Devices))].Silicon()
	rename := func(old string) string { return name[:len("dev-0000")] + "-" + old }
	for _, d := range from.Devices {
		if d.Silicon() != chosen || len(rename(d.Name)) > validation.DNS1123LabelMaxLength {
			continue
		}
		d.Name = rename(d.Name)
		if d.PartOf != nil {
			d.PartOf = &discovery.Silicon{Name: rename(d.PartOf.Name), Counters: d.PartOf.Counters}
		}
		attributes := discovery.Attributes{"uuid": {StringValue: new(d.Name)}}
		for key, value := range d.Attributes {
			if key != "uuid" {
				attributes[key] = value
			}
		}
		d.Attributes = attributes
		if key := d.Health.Key(); key != "" {
			d.Health.Effect = discovery.Severity{}.EffectOf(key)
		}
		nodes := make([]*specs.DeviceNode, len(d.Edits.DeviceNodes))
		for i, node := range d.Edits.DeviceNodes {
			own := *node
			own.HostPath = "/dev/" + d.Name + cmp.Or(node.HostPath, node.Path)
			nodes[i] = &own
		}
		d.Edits.DeviceNodes = nodes
		h.add(rules.Offered{Device: d, Offers: d.PluginOffers})
	}
}

// add adds a device, sometimes with the maximum number of attributes.
func (h *randomHost) add(d rules.Offered) {
	if h.oneIn(8) {
		for i := len(d.Attributes) + len(d.Capacity); i < resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice; i++ {
			h.setAttribute(d.Attributes, i)
		}
	}
	h.devices = append(h.devices, d)
}
