package nvidia

import (
	"fmt"
	"maps"
	"strconv"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/sysfs"
)

// labels are those of NVIDIA's gpu-feature-discovery (internal/lm in its device plugin's
// repository). The label gpu.present of its operator is not among them: NVIDIA's device plugin
// comes to nodes that have it (affinity in the values of its chart).
//
// Of GPUs of several models it labels any one; here it is the one with most GPUs. The
// labels of its strategy "single" for MIG are set where instances are offered as
// nvidia.com/gpu, and those of "mixed" where they are offered otherwise.
var labels = []discovery.Labels{
	{
		Where: map[string]string{"kind": "gpu"},
		Set: map[string]string{
			"nvidia.com/gpu.machine": "{machine}",
			"nvidia.com/gpu.mode":    "{mode}",
			"nvidia.com/mps.capable": "false",

			"nvidia.com/cuda.driver.major": "{driver.0}",
			"nvidia.com/cuda.driver.minor": "{driver.1}",
			"nvidia.com/cuda.driver.rev":   "{driver.2}",

			"nvidia.com/cuda.driver-version.full":     "{driver.full}",
			"nvidia.com/cuda.driver-version.major":    "{driver.0}",
			"nvidia.com/cuda.driver-version.minor":    "{driver.1}",
			"nvidia.com/cuda.driver-version.revision": "{driver.2}",

			"nvidia.com/cuda.runtime.major": "{cuda.0}",
			"nvidia.com/cuda.runtime.minor": "{cuda.1}",

			"nvidia.com/cuda.runtime-version.full":  "{cuda.full}",
			"nvidia.com/cuda.runtime-version.major": "{cuda.0}",
			"nvidia.com/cuda.runtime-version.minor": "{cuda.1}",
		},
	},
	{
		Where: map[string]string{"migCapable": "false"},
		Set:   map[string]string{"nvidia.com/mig.capable": "false"},
	},
	{
		Where: map[string]string{"migCapable": "true"},
		Set:   map[string]string{"nvidia.com/mig.capable": "true"},
	},
	{
		If:  discovery.Agreed,
		Set: map[string]string{"nvidia.com/gpu.clique": "{clique}"},
	},
	{ // whole or divided
		Where: map[string]string{"kind": "gpu"},
		Main:  "model",
		Set: map[string]string{
			"nvidia.com/gpu.count":            "{silicon}",
			"nvidia.com/gpu.product":          "{model}",
			"nvidia.com/gpu.memory":           "{gpuMemory}",
			"nvidia.com/gpu.family":           "{architecture}",
			"nvidia.com/gpu.compute.major":    "{cudaComputeCapability.major}",
			"nvidia.com/gpu.compute.minor":    "{cudaComputeCapability.minor}",
			"nvidia.com/gpu.replicas":         "0", // as of a GPU that nobody can have whole
			"nvidia.com/gpu.sharing-strategy": "none",
		},
	},
	{
		Where: map[string]string{"kind": "gpu", "function": "physical"},
		Main:  "model",
		Set:   map[string]string{"nvidia.com/gpu.replicas": "{replicas}", "nvidia.com/gpu.product": "{model}"},
	},
	{
		Where: map[string]string{"kind": "gpu", "function": "physical", "shared": "true"},
		Main:  "model",
		Set:   map[string]string{"nvidia.com/gpu.sharing-strategy": "time-slicing"},
	},
	{
		Where: map[string]string{"kind": "gpu", "function": "physical", "shared": "true", "renamed": "false"},
		Main:  "model",
		Set:   map[string]string{"nvidia.com/gpu.product": "{model}-SHARED"},
	},
	{
		Where: map[string]string{"kind": "gpu", "function": "physical", "shared": "true", "mps": "true"},
		Main:  "model",
		Set:   map[string]string{"nvidia.com/gpu.sharing-strategy": "mps", "nvidia.com/mps.capable": "true"},
	},
	{
		Where: map[string]string{"function": "partition", "resource": "!nvidia.com/gpu"},
		Set:   map[string]string{"nvidia.com/mig.strategy": "mixed"},
	},
	{
		Where: map[string]string{"function": "partition", "resource": "nvidia.com/gpu"},
		Set:   map[string]string{"nvidia.com/mig.strategy": "single"},
	},
	instances("nvidia.com/mig-{mig}", "!nvidia.com/gpu", "false", "{model}-MIG-{profile}", "none"),
	instances("nvidia.com/mig-{mig}", "!nvidia.com/gpu", "true", "{model}-MIG-{profile}-SHARED", "time-slicing"),
	instances("nvidia.com/gpu", "nvidia.com/gpu", "false", "{model}-MIG-{profile}", "none"),
	instances("nvidia.com/gpu", "nvidia.com/gpu", "true", "{model}-MIG-{profile}-SHARED", "time-slicing"),
}

// instances returns the labels of MIG instances, by what their names begin with.
func instances(prefix, resource, shared, product, strategy string) discovery.Labels {
	l := discovery.Labels{
		Where: map[string]string{"function": "partition", "resource": resource, "shared": shared},
		Set: map[string]string{
			prefix + ".count":            "{count}",
			prefix + ".product":          product,
			prefix + ".replicas":         "{replicas}",
			prefix + ".sharing-strategy": strategy,
			prefix + ".memory":           "{memory.Mi}",
		},
	}
	for _, fact := range []string{
		"slices.gi", "slices.ci", "multiprocessors", "engines.copy", "engines.decoder", "engines.encoder", "engines.jpeg", "engines.ofa",
	} {
		l.Set[prefix+"."+fact] = "{" + fact + "}"
	}
	if prefix == "nvidia.com/gpu" {
		l.Main = "profile"
	}
	return l
}

// facts returns what labels say of a GPU: the model of its host, what it is for, by its PCI
// class, the versions of its driver and of CUDA, its memory in MiB, also where it is divided,
// whether it can be divided, the clique of its NVLink domain, and whether it is to be used by
// MPS where it is shared.
func (d *driver) facts(function sysfs.Device, told facts.GPU) map[string]string {
	known := map[string]string{"mode": "unknown"}
	if d.machine != "" {
		known["machine"] = d.machine
	}
	setVersion(known, "driver", d.version)
	setVersion(known, "cuda", told.CUDA)
	if id, err := function.PCIID(); err == nil {
		switch id.Class {
		case "030000":
			known["mode"] = "graphics"
		case "030200":
			known["mode"] = "compute"
		}
	}
	if told.MemoryBytes > 0 {
		known["gpuMemory"] = strconv.FormatInt(told.MemoryBytes>>20, 10)
	}
	if told.Index != nil {
		known[index] = strconv.Itoa(*told.Index)
	}
	if told.UUID != "" { // NVML has spoken of it
		known["migCapable"] = strconv.FormatBool(told.MIG != "")
	}
	if f := told.Fabric; f != nil {
		known["clique"] = fmt.Sprintf("%s.%d", f.Cluster, f.Clique)
	}
	if d.host.Roots[mpsRoot] != "" {
		known["mps"] = "true"
	}
	return known
}

// index is the fact by which NVIDIA's tools name a device beside its UUID: "0", or
// "0:1" of a MIG instance.
const index = "index"

// setVersion sets the parts of a version as its maker writes them, "07" with its zero.
func setVersion(known map[string]string, name, version string) {
	if version == "" {
		return
	}
	known[name+".full"] = version
	for i, part := range strings.Split(version, ".") {
		known[fmt.Sprintf("%s.%d", name, i)] = part
	}
}

// instanceFacts returns what labels say of a MIG instance: also its profile as it stands in
// names, and how much of the GPU it has.
func instanceFacts(gpu map[string]string, instance facts.Instance) map[string]string {
	known := maps.Clone(gpu)
	known["migCapable"] = "true"
	if whole := gpu[index]; whole != "" && instance.Index != nil {
		known[index] = fmt.Sprintf("%s:%d", whole, *instance.Index)
	} else {
		delete(known, index)
	}
	if compute, slices, ok := instance.Slices(); ok {
		known["mig"] = plainProfile(instance.Profile)
		known["slices.gi"], known["slices.ci"] = strconv.Itoa(slices), strconv.Itoa(compute)
	}
	if e := instance.Engines; e != nil {
		for word, n := range map[string]uint32{
			"multiprocessors": e.Multiprocessors,
			"engines.copy":    e.Copy,
			"engines.decoder": e.Decoder,
			"engines.encoder": e.Encoder,
			"engines.jpeg":    e.JPEG,
			"engines.ofa":     e.OFA,
		} {
			known[word] = strconv.FormatUint(uint64(n), 10)
		}
	}
	return known
}

// plainProfile returns a profile as it stands in the names of resources.
func plainProfile(profile string) string { return strings.ReplaceAll(profile, "+", ".") }
