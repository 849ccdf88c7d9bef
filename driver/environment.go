package driver

import (
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// devicesVariable holds the names of the devices of a request, joined with
// commas.
const devicesVariable = "CHANDLER_DEVICES"

// claimName returns the name that the pod's author gave the claim: for one
// made from a template, that in the pod.
func claimName(claim *resourceapi.ResourceClaim) string {
	if name := claim.Annotations[resourceapi.PodResourceClaimAnnotation]; name != "" {
		return name
	}
	return claim.Name
}

// setEdits gives each result the edits of its device and those of its request.
//
// Which containers get which requests is not known when a claim is prepared,
// and container runtimes replace a variable by its name. So what depends on
// the set of devices is computed for each request, carried alike by all of its
// devices, and said again under a name of the request's own.
func (d *Driver) setEdits(results []result, devices []discovery.Device, parameters map[string]discovery.Parameters, claim string) {
	given := make(map[string][]discovery.Device)
	names := make(map[string][]string)
	for i, result := range results {
		given[result.Request] = append(given[result.Request], devices[i])
		names[result.Request] = append(names[result.Request], result.Device)
	}
	granted := make(map[string]specs.ContainerEdits)
	for request := range maps.Keys(given) {
		var edits specs.ContainerEdits
		if d.config.Granter != nil {
			edits = d.config.Granter(given[request], discovery.Grant{
				API: discovery.ModeDRA, Claim: claim, Request: request, Parameters: parameters[request],
			})
		}
		edits.Env = slices.Concat(edits.Env, parameters[request].Environment())
		edits.Env = append(edits.Env, devicesVariable+"="+strings.Join(names[request], ","))
		edits.Env = append(edits.Env, ofRequest(edits.Env, claim, request)...)
		granted[request] = edits
	}
	for i := range results {
		results[i].Edits = discovery.Join(devices[i].Edits, granted[results[i].Request])
	}
}

// ofRequest returns the variables under their names for the request.
func ofRequest(env []string, claim, request string) []string {
	suffix := "_" + discovery.Variable(claim) + "_" + discovery.Variable(request)
	var out []string
	for _, entry := range env {
		if key, value, ok := strings.Cut(entry, "="); ok {
			out = append(out, key+suffix+"="+value)
		}
	}
	return out
}
