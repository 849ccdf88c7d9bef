package codes

import "chandler.dev/internal/selectors"

// HelmSet changes values of the chart and keeps the others.
const HelmSet = selectors.HelmUpgrade

// The commands that run the host service with the plain manifests, and let the agents use it.
const (
	ApplyHostService = "kubectl apply -f deployments/examples/host-service.yaml"
	UseHostService   = "kubectl -n chandler patch daemonset chandler --patch-file deployments/examples/host-service-patch.yaml"
)

// GetValues writes the values of the chart to a file, and SetValues applies that file.
const (
	GetValues = "helm get values chandler --namespace chandler -o yaml > values.yaml"
	SetValues = HelmSet + " -f values.yaml"
)

// EditConfig opens the configuration of an installation by the plain manifests.
const EditConfig = "kubectl -n chandler edit configmap chandler"

// SELinuxPatch gives the agent's container the type that may connect to the kubelet.
const SELinuxPatch = `kubectl -n chandler patch daemonset chandler -p '{"spec":{"template":{"spec":{"containers":[{"name":"chandler","securityContext":{"seLinuxOptions":{"type":"container_device_plugin_t"}}}]}}}}'`

// ConfigFixes returns the commands for a change of the configuration.
func ConfigFixes(change string) []string {
	return []string{GetValues + "   # then, in its section config: " + change, SetValues, EditConfig + "   # with the plain manifests"}
}
