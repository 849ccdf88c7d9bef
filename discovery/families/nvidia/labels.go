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

// labels are the labels of gpu-feature-discovery (internal/lm in the repository of the NVIDIA
// device plugin). The label gpu.present of the GPU operator is left out: the NVIDIA device plugin
// is scheduled to nodes with that label (affinity in the values of its chart).
//
// On a host with several GPU models, gpu-feature-discovery labels an arbitrary model; Chandler
// labels the model with the most GPUs. The labels of the MIG strategy "single" are set where
// instances are offered as nvidia.com/gpu, and the labels of "mixed" where instances have other
// names.
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
	{ // whole or partitioned
		Where: map[string]string{"kind": "gpu"},
		Main:  "model",
		Set: map[string]string{
			"nvidia.com/gpu.count":            "{silicon}",
			"nvidia.com/gpu.product":          "{model}",
			"nvidia.com/gpu.memory":           "{gpuMemory}",
			"nvidia.com/gpu.family":           "{architecture}",
			"nvidia.com/gpu.compute.major":    "{cudaComputeCapability.major}",
			"nvidia.com/gpu.compute.minor":    "{cudaComputeCapability.minor}",
			"nvidia.com/gpu.replicas":         "0", // the value for a GPU that is not available as a whole
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
	instanceLabels("nvidia.com/mig-{mig}", "!nvidia.com/gpu", "false", "{model}-MIG-{profile}", "none"),
	instanceLabels("nvidia.com/mig-{mig}", "!nvidia.com/gpu", "true", "{model}-MIG-{profile}-SHARED", "time-slicing"),
	instanceLabels("nvidia.com/gpu", "nvidia.com/gpu", "false", "{model}-MIG-{profile}", "none"),
	instanceLabels("nvidia.com/gpu", "nvidia.com/gpu", "true", "{model}-MIG-{profile}-SHARED", "time-slicing"),
}

// instanceLabels returns the labels of MIG instances whose names begin with prefix.
func instanceLabels(prefix, resource, shared, product, strategy string) discovery.Labels {
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

// facts returns the facts of a GPU for labels: the host's model, the purpose of the GPU by its PCI
// class, the versions of the driver and of CUDA, the memory in MiB (also of a partitioned GPU),
// whether the GPU supports MIG, the clique of its NVLink domain, and whether MPS is used when the
// GPU is shared.
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
	if told.UUID != "" { // NVML described the GPU
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

// index is the fact with the number of a device in NVIDIA tools: "0" for a GPU, "0:1" for a MIG
// instance.
const index = "index"

// setVersion sets the components of a version as the vendor writes them: "07" keeps its zero.
func setVersion(known map[string]string, name, version string) {
	if version == "" {
		return
	}
	known[name+".full"] = version
	for i, part := range strings.Split(version, ".") {
		known[fmt.Sprintf("%s.%d", name, i)] = part
	}
}

// instanceFacts returns the facts of a MIG instance for labels. They add to the facts of the GPU
// the profile, in the form of resource names, and the size of the instance.
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

// plainProfile returns a profile in the form of resource names.
func plainProfile(profile string) string { return strings.ReplaceAll(profile, "+", ".") }
