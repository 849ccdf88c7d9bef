package pool

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
)

// BenchmarkFleet measures what the ResourceSlices of one node cost the scheduler: their size in
// Protobuf, their memory in its cache, and the time of its allocator to allocate a GPU on an empty
// node, and to find none on a full node. The other drivers' slices have the attributes and capacities
// that their sources name. docs/benchmarks.md has the results, as ratios to the example driver.
func BenchmarkFleet(b *testing.B) {
	gpus := devicesLike(b, "nvidia/testdata/h100x8.host", isWholeGPU, 8)
	withNVML := devicesLike(b, "nvidia/testdata/nvml-broken.host", isWholeGPU, 8)
	adapters := devicesLike(b, "rdma/testdata/connectx7.host", func(*rules.Offered) bool { return true }, 11)
	functions := devicesLike(b, "sriovnet/testdata/e810.host", isInterchangeable, 128)
	for i := range functions {
		functions[i].Attributes = maps.Clone(functions[i].Attributes)
		functions[i].Attributes.SetInt("vfIndex", int64(i))
	}
	superchips := devicesLike(b, "nvidia/testdata/gb200.host", isWholeGPU, 4)
	imex := devicesLike(b, "nvidia/testdata/gb200.host", isInterchangeable, 2048)
	for i := range imex {
		imex[i].Name, imex[i].Attributes = fmt.Sprintf("nvidia-imex-channel-%d", i), maps.Clone(imex[i].Attributes)
		imex[i].Attributes.SetInt("channel", int64(i))
	}
	for _, node := range []struct {
		name    string
		pools   resourceslice.DriverResources
		selects string
	}{
		{"example", separatePool(exampleDevices()), `true`},
		{"nvidia", separatePool(nvidiaDevices()), `device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == "gpu"`},
		{"h100x8", publishedAs(b, nil, gpus), isGPU},
		{"h100x8-nvml", publishedAs(b, nil, withNVML), isGPU},
		{"h100x8-nvml-all-attributes", publishedAs(b, slices.Concat(discovery.OptionalAttributes, discovery.ReplacedByModel), withNVML), isGPU},
		{"h100x8-nvml-rdma", publishedAs(b, nil, withNVML, adapters), isGPU},
		{"h100x8-nvml-rdma-bare", withoutAttributes(publishedAs(b, nil, withNVML, adapters)), `device.driver == "chandler.dev" && device.attributes["chandler.dev"].?kind.orValue("") == "gpu"`},
		{"h100x8-nvml-rdma-128vf", publishedAs(b, nil, withNVML, adapters, functions), isGPU},
		{"h100x8-nvml-rdma-128vf-apart", publishedAs(b, []resourceapi.QualifiedName{"vfIndex"}, withNVML, adapters, functions), isGPU},
		{"gb200-2048imex", publishedAs(b, nil, superchips, imex), isGPU},
		{"gb200-2048imex-apart", publishedAs(b, []resourceapi.QualifiedName{"channel"}, superchips, imex), isGPU},
		{"h100x8-mig", publishedAs(b, nil, partitionedGPUs(b)), isGPU + ` && device.attributes["chandler.dev"].?profile.orValue("") == "1g.10gb"`},
		{"nvidia-mig", nvidiaInstances(b), `device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == "mig" && device.attributes["gpu.nvidia.com"].profile == "1g.10gb"`},
	} {
		driver := discovery.Domain
		if strings.HasPrefix(node.name, "nvidia") {
			driver = "gpu.nvidia.com"
		}
		for _, full := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/full=%t", node.name, full), func(b *testing.B) { measureNode(b, driver, node.pools, node.selects, full) })
		}
	}
}

// isGPU is the expression of the DeviceClass of GPUs.
const isGPU = `device.driver == "chandler.dev" && device.attributes["chandler.dev"].kind == "gpu"`

func isWholeGPU(d *rules.Offered) bool {
	return d.Attributes.String("kind") == "gpu" && d.Silicon() == d.Name
}

func isInterchangeable(d *rules.Offered) bool { return d.Interchangeable != "" }

// devicesLike returns copies of the first matching device of a recorded host, with other names.
func devicesLike(b *testing.B, file string, matches func(*rules.Offered) bool, count int) (devices []rules.Offered) {
	b.Helper()
	snapshot := (&rules.Rules{}).ApplyTo(scan.ReadHost(discoverytest.ReadHost(b, "../../discovery/families/"+file), families.All))
	for i := range snapshot.Devices {
		if d := snapshot.Devices[i]; matches(&d) && d.Health.IsUsable() {
			for n := range count {
				d.Name = fmt.Sprintf("pci-%04x-%02x-00-0", len(file), n)
				d.PartOf = nil
				devices = append(devices, d)
			}
			return devices
		}
	}
	b.Fatalf("%s: no such device", file)
	return nil
}

// partitionedGPUs returns eight copies of a GPU in MIG mode whose instances are created on demand.
func partitionedGPUs(b *testing.B) (devices []rules.Offered) {
	b.Helper()
	const gpu = "pci-0000-52-00-0"
	host := discoverytest.ReadHost(b, "../../discovery/families/nvidia/testdata/h100-cut.host")
	host.Partitionings = []discovery.Selection[struct{}]{{Selects: func(discovery.Device) (bool, error) { return true, nil }}}
	for _, d := range (&rules.Rules{}).ApplyTo(scan.ReadHost(host, families.All)).Devices {
		if d.Silicon() != gpu {
			continue
		}
		for n := range 8 {
			copied, silicon := d, *d.PartOf
			name := fmt.Sprintf("pci-0000-%02x-00-0", 0x60+n)
			copied.Name, silicon.Name, copied.PartOf = strings.Replace(d.Name, gpu, name, 1), name, &silicon
			copied.Attributes = maps.Clone(d.Attributes)
			copied.Attributes.SetString("parent", name)
			devices = append(devices, copied)
		}
	}
	return devices
}

// withoutAttributes returns the pools with only the attributes and capacities of GPUs.
func withoutAttributes(pools resourceslice.DriverResources) resourceslice.DriverResources {
	for _, slice := range SlicesOf(pools) {
		for i := range slice.Devices {
			if d := &slice.Devices[i]; *d.Attributes["kind"].StringValue != "gpu" {
				d.Attributes, d.Capacity = nil, nil
			}
		}
	}
	return pools
}

// separatePool returns one pool of devices without counters.
func separatePool(devices []resourceapi.Device, counters ...resourceslice.Slice) resourceslice.DriverResources {
	made := resourceslice.Pool{Slices: counters}
	for _, chunk := range spreadDevices(devices) {
		made.Slices = append(made.Slices, resourceslice.Slice{Devices: chunk})
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{"node": made}}
}

// publishedAs returns the ResourceSlices of a node, with additional attributes.
func publishedAs(b *testing.B, attributes []resourceapi.QualifiedName, groups ...[]rules.Offered) resourceslice.DriverResources {
	b.Helper()
	snapshot := &rules.Snapshot{Attributes: attributes}
	for _, group := range groups {
		snapshot.Devices = append(snapshot.Devices, group...)
	}
	made, problems := BuildPools(Input{Node: "node", Snapshot: snapshot, Features: without("DRAPartitionableDevicesType", "DRAListTypeAttributes")})
	if len(problems) > 0 {
		b.Fatal(problems)
	}
	return made
}

// exampleDevices are eight GPUs of the example driver (kubernetes-sigs/dra-example-driver).
func exampleDevices() (devices []resourceapi.Device) {
	for i := range 8 {
		a := discovery.Attributes{}
		a.SetInt("index", int64(i))
		a.SetString("uuid", fmt.Sprintf("gpu-18db0e85-99e9-c746-8531-ffeb86328b%02x", i))
		a.SetString("model", "LATEST-GPU-MODEL")
		a["driverVersion"] = discovery.Attribute{VersionValue: new("1.0.0")}
		devices = append(devices, resourceapi.Device{Name: fmt.Sprintf("gpu-%d", i), Attributes: a.ForSlice(), Capacity: discovery.Capacity{"memory": {Value: resource.MustParse("80Gi")}}})
	}
	return devices
}

// nvidiaDevices are eight H100 of NVIDIA's driver (kubernetes-sigs/dra-driver-nvidia-gpu).
func nvidiaDevices() (devices []resourceapi.Device) {
	for i := range 8 {
		a := discovery.Attributes{}
		a.SetString("type", "gpu")
		a.SetString("uuid", fmt.Sprintf("GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c1%02x", i))
		a.SetString("productName", "NVIDIA H100 80GB HBM3")
		a.SetString("brand", "Nvidia")
		a.SetString("architecture", "Hopper")
		a["cudaComputeCapability"] = discovery.Attribute{VersionValue: new("9.0.0")}
		a["driverVersion"] = discovery.Attribute{VersionValue: new("570.86.15")}
		a["cudaDriverVersion"] = discovery.Attribute{VersionValue: new("12.8.0")}
		a.SetString("addressingMode", "HMM")
		a.SetString("resource.kubernetes.io/pciBusID", fmt.Sprintf("0000:%02x:00.0", i))
		a.SetString("resource.kubernetes.io/pcieRoot", fmt.Sprintf("pci0000:%02x", i))
		a.SetInt("resource.kubernetes.io/numaNode", int64(i/4))
		devices = append(devices, resourceapi.Device{Name: fmt.Sprintf("gpu-%d", i), Attributes: a.ForSlice(), Capacity: discovery.Capacity{"memory": {Value: resource.MustParse("81559Mi")}}})
	}
	return devices
}

// nvidiaInstances are the eight H100 and their MIG instances, as NVIDIA's driver publishes them with the
// feature gate DynamicMIG: a device for each placement, with seven capacities, which are also counters.
func nvidiaInstances(b *testing.B) resourceslice.DriverResources {
	b.Helper()
	var counters []resourceapi.CounterSet
	var devices []resourceapi.Device
	amounts := func(memory string, of int64) discovery.Capacity {
		c := discovery.Capacity{"memory": {Value: resource.MustParse(memory)}}
		for _, name := range []resourceapi.QualifiedName{"multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"} {
			c[name] = resourceapi.DeviceCapacity{Value: *resource.NewQuantity(of, resource.BinarySI)}
		}
		return c
	}
	consumed := func(c discovery.Capacity, start, size int) map[string]resourceapi.Counter {
		counters := make(map[string]resourceapi.Counter)
		for name, amount := range c {
			counters[strings.ToLower(string(name))] = resourceapi.Counter{Value: amount.Value}
		}
		for i := range size {
			counters[fmt.Sprintf("memory-slice-%d", start+i)] = resourceapi.Counter{Value: resource.MustParse("1")}
		}
		return counters
	}
	for i, gpu := range nvidiaDevices() {
		set := gpu.Name + "-counter-set"
		gpu.Capacity = amounts("81559Mi", 7)
		all := consumed(gpu.Capacity, 0, 8)
		counters = append(counters, resourceapi.CounterSet{Name: set, Counters: all})
		gpu.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: all}}
		devices = append(devices, gpu)
		for _, of := range []struct {
			profile, memory string
			share           int64
			size            int
			starts          []int
		}{
			{"1g.10gb", "9856Mi", 1, 1, []int{0, 1, 2, 3, 4, 5, 6}},
			{"1g.10gb+me", "9856Mi", 1, 1, []int{0, 1, 2, 3, 4, 5, 6}},
			{"1g.20gb", "19968Mi", 1, 2, []int{0, 2, 4, 6}},
			{"2g.20gb", "19968Mi", 2, 2, []int{0, 2, 4}},
			{"3g.40gb", "40448Mi", 3, 4, []int{0, 4}},
			{"4g.40gb", "40448Mi", 4, 4, []int{0}},
			{"7g.80gb", "81559Mi", 7, 8, []int{0}},
		} {
			for _, start := range of.starts {
				instance := resourceapi.Device{Name: fmt.Sprintf("%s-mig-%s-%d", gpu.Name, strings.NewReplacer(".", "", "+", "").Replace(of.profile), start), Attributes: maps.Clone(gpu.Attributes), Capacity: amounts(of.memory, of.share)}
				instance.Attributes["type"] = resourceapi.DeviceAttribute{StringValue: new("mig")}
				instance.Attributes["profile"] = resourceapi.DeviceAttribute{StringValue: &of.profile}
				instance.Attributes["parentUUID"] = instance.Attributes["uuid"]
				delete(instance.Attributes, "uuid")
				delete(instance.Attributes, "addressingMode")
				delete(instance.Attributes, "resource.kubernetes.io/numaNode")
				instance.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: consumed(instance.Capacity, start, of.size)}}
				devices = append(devices, instance)
			}
		}
		if i == 0 && len(devices) != 26 {
			b.Fatalf("a GPU has %d devices, want 26", len(devices))
		}
	}
	return separatePool(devices, resourceslice.Slice{SharedCounters: counters})
}

// measureNode allocates one device that an expression selects.
func measureNode(b *testing.B, driver string, pools resourceslice.DriverResources, selects string, full bool) {
	s := pooltest.NewScheduler(b, features.All())
	s.Publish(pools)
	size := 0
	for _, slice := range s.Slices {
		slice.Spec.Driver = driver
		size += slice.Size()
	}
	request := resourceapi.ExactDeviceRequest{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: selects}}}}
	for i := 0; full; i++ {
		if _, allocated := s.AllocateDevice(types.UID(fmt.Sprint("other-", i)), request); !allocated {
			break
		}
	}
	s.AllocateDevice("own", request) // compiles the expression
	delete(s.Claims, "own")
	for b.Loop() {
		if _, allocated := s.AllocateDevice("own", request); allocated == full {
			b.Fatalf("allocated: %t", allocated)
		}
		delete(s.Claims, "own")
	}
	b.ReportMetric(float64(size), "B/node")
	b.ReportMetric(heapOf(b, s.Slices), "heap-B/node")
}

// heapOf returns the memory of decoded slices, in bytes.
func heapOf(b *testing.B, published []*resourceapi.ResourceSlice) float64 {
	b.Helper()
	const copies = 100
	var encoded [][]byte
	for _, slice := range published {
		data, err := slice.Marshal()
		if err != nil {
			b.Fatal(err)
		}
		encoded = append(encoded, data)
	}
	inUse := func() uint64 {
		runtime.GC()
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return stats.HeapAlloc
	}
	before := inUse()
	kept := make([]resourceapi.ResourceSlice, copies*len(encoded))
	for i := range kept {
		if err := kept[i].Unmarshal(encoded[i%len(encoded)]); err != nil {
			b.Fatal(err)
		}
	}
	after := inUse()
	runtime.KeepAlive(kept)
	return float64(after-before) / copies
}
