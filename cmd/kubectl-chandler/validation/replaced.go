package validation

import (
	"fmt"
	"slices"
	"strings"
)

// ReplacedClasses are the classes of Chandler by the DeviceClasses that they replace, which other
// drivers install.
var ReplacedClasses = map[string]string{
	"gpu.nvidia.com": "nvidia.chandler.dev", "mig.nvidia.com": "nvidia-mig.chandler.dev", "vfio.gpu.nvidia.com": "nvidia.chandler.dev",
	"gpu.amd.com": "amdgpu.chandler.dev", "vfio.gpu.amd.com": "amdgpu.chandler.dev",
	"gpu.intel.com": "gpu.chandler.dev", "gpu-vfio.intel.com": "gpu.chandler.dev", "gaudi.intel.com": "gaudi.chandler.dev", "qat.intel.com": "qat.chandler.dev",
	"tpu.google.com": "tpu.chandler.dev", "neuron.aws.com": "neuron.chandler.dev",
}

const intelGPU = `device.attributes["chandler.dev"].family == "intelgpu"`

// replacedConditions are the selectors that a request needs if the class of Chandler has more
// devices than the class that it replaces.
var replacedConditions = map[string]string{"gpu.intel.com": intelGPU, "gpu-vfio.intel.com": intelGPU}

// passthroughClasses are the replaced classes for VFIO passthrough, which is a parameter in Chandler.
var passthroughClasses = []string{"vfio.gpu.nvidia.com", "vfio.gpu.amd.com", "gpu-vfio.intel.com"}

// replacedDrivers are the DRA drivers whose devices Chandler offers. The last name is the domain of the
// attributes of neuron.aws.com.
var replacedDrivers = []string{
	"gpu.nvidia.com", "gpu.amd.com", "gpu.intel.com", "gaudi.intel.com", "qat.intel.com", "tpu.google.com", "dra.net",
	"sriovnetwork.k8snetworkplumbingwg.io", "neuron.aws.com", "resource.aws.com",
}

// warnReplacedClass warns about a request for the class of a driver that Chandler replaces.
func (v *validator) warnReplacedClass(at place, class any) {
	name, _ := class.(string)
	own := ReplacedClasses[name]
	if own == "" {
		return
	}
	var more []string
	if condition := replacedConditions[name]; condition != "" {
		more = append(more, "the selector "+condition)
	}
	if slices.Contains(passthroughClasses, name) {
		more = append(more, "the parameter driver: vfio")
	}
	if len(more) > 0 {
		own += " with " + strings.Join(more, " and ")
	}
	v.addFindings(at, severityWarning, fmt.Errorf("%s is the class of a driver that Chandler replaces; the class of Chandler is %s", name, own))
}

// warnReplacedDriver warns about the name of a driver that Chandler replaces.
func (v *validator) warnReplacedDriver(at place, name string) {
	if slices.Contains(replacedDrivers, name) {
		v.addFindings(at, severityWarning, fmt.Errorf("%s is a driver that Chandler replaces; kubectl chandler import translates objects for it", name))
	}
}
