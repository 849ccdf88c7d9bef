package pool

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
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
		devices []resourceapi.Device
		selects string
	}{
		{"example", exampleDevices(), `true`},
		{"nvidia", nvidiaDevices(), `device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == "gpu"`},
		{"h100x8", publishedAs(b, nil, gpus), isGPU},
		{"h100x8-nvml", publishedAs(b, nil, withNVML), isGPU},
		{"h100x8-nvml-all-attributes", publishedAs(b, slices.Concat(discovery.OptionalAttributes, discovery.ReplacedByModel), withNVML), isGPU},
		{"h100x8-nvml-rdma", publishedAs(b, nil, withNVML, adapters), isGPU},
		{"h100x8-nvml-rdma-128vf", publishedAs(b, nil, withNVML, adapters, functions), isGPU},
		{"h100x8-nvml-rdma-128vf-apart", publishedAs(b, []resourceapi.QualifiedName{"vfIndex"}, withNVML, adapters, functions), isGPU},
		{"gb200-2048imex", publishedAs(b, nil, superchips, imex), isGPU},
		{"gb200-2048imex-apart", publishedAs(b, []resourceapi.QualifiedName{"channel"}, superchips, imex), isGPU},
	} {
		driver := discovery.Domain
		if node.name == "nvidia" {
			driver = "gpu.nvidia.com"
		}
		for _, full := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/full=%t", node.name, full), func(b *testing.B) { measureNode(b, driver, node.devices, node.selects, full) })
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

// publishedAs returns the devices of the ResourceSlices of a node, with additional attributes.
func publishedAs(b *testing.B, attributes []resourceapi.QualifiedName, groups ...[]rules.Offered) (devices []resourceapi.Device) {
	b.Helper()
	snapshot := &rules.Snapshot{Attributes: attributes}
	for _, group := range groups {
		snapshot.Devices = append(snapshot.Devices, group...)
	}
	made, problems := BuildPool(Input{Snapshot: snapshot, Features: without("DRAPartitionableDevicesType", "DRAListTypeAttributes")})
	if len(problems) > 0 {
		b.Fatal(problems)
	}
	for _, slice := range made.Slices {
		devices = append(devices, slice.Devices...)
	}
	return devices
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

// measureNode allocates one device that an expression selects.
func measureNode(b *testing.B, driver string, devices []resourceapi.Device, selects string, full bool) {
	s := pooltest.NewScheduler(b, features.All())
	pool := resourceslice.Pool{}
	for _, chunk := range spreadDevices(devices) {
		pool.Slices = append(pool.Slices, resourceslice.Slice{Devices: chunk})
	}
	s.Publish(pool)
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
