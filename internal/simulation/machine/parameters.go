package machine

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
)

// AsVFIO is the parameter of claims that request functions under vfio.
const AsVFIO = `{"driver":"vfio"}`

// AsMPS is the parameter of claims that request an MPS daemon.
const AsMPS = `{"mps":"true"}`

// ReadParameters decodes the parameters of claims.
func ReadParameters(raw []byte) (discovery.Parameters, error) {
	switch string(raw) {
	case AsVFIO:
		return discovery.Parameters{discovery.Driver: discovery.DriverVFIO}, nil
	case AsMPS:
		return discovery.Parameters{nvidia.MPS: "true"}, nil
	}
	return nil, fmt.Errorf("no parameters: %s", raw)
}

// ConfigWith returns the configuration of a claim with parameters.
func ConfigWith(parameters string) []resourceapi.DeviceClaimConfiguration {
	return []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: discovery.Domain, Parameters: runtime.RawExtension{Raw: []byte(parameters)}},
	}}}
}

// RequestsMPS reports whether a claim requests a daemon.
func RequestsMPS(claim *resourceapi.ResourceClaim) bool {
	config := claim.Spec.Devices.Config
	return len(config) > 0 && string(config[0].Opaque.Parameters.Raw) == AsMPS
}
