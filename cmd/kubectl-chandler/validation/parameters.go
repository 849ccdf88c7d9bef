package validation

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
)

// checkParameters checks the parameters for this driver in an object, as Prepare does.
func (v *validator) checkParameters(at place, object *unstructured.Unstructured) {
	path := configOf[object.GetKind()]
	var previous []configEntry
	requests := requestNames(object, path[:len(path)-1])
	entries, _, _ := unstructured.NestedFieldNoCopy(object.Object, path...) // an invalid type was reported before
	list, _ := entries.([]any)
	for i, entry := range list {
		config, _ := entry.(map[string]any)
		opaque, _ := config["opaque"].(map[string]any)
		entryAt := at.at(fmt.Sprintf("%s[%d]", strings.Join(path, "."), i))
		if object.GetKind() != "DeviceClass" {
			v.checkRequests(entryAt, requestsOf(config), requests)
		}
		if driver, _ := opaque["driver"].(string); driver != discovery.Domain {
			v.warnReplacedDriver(entryAt.at("opaque.driver"), driver)
			continue
		}
		field := entryAt.at("opaque.parameters")
		data, err := json.Marshal(opaque["parameters"])
		if err != nil {
			v.addFindings(field, severityError, err)
			continue
		}
		entry := configEntry{field, v.claimParameters(field, data), requestsOf(config)}
		if slices.ContainsFunc(previous, entry.conflicts) {
			v.errorf(field, "%s: cannot be combined with %s of another entry of config for the same request", nvidia.TimeSlice, nvidia.MPS)
		}
		previous = append(previous, entry)
	}
	v.checkSharingRequests(previous, requests)
	constraints, _, _ := unstructured.NestedFieldNoCopy(object.Object, append(slices.Clone(path[:len(path)-1]), "constraints")...)
	list, _ = constraints.([]any)
	for i, item := range list {
		constraint, _ := item.(map[string]any)
		v.checkRequests(at.at(fmt.Sprintf("%s.constraints[%d]", strings.Join(path[:len(path)-1], "."), i)), requestsOf(constraint), requests)
	}
}

// requestNames returns the names of a claim's requests, and of their alternatives: request/alternative.
// The path is that of the claim's devices. A class has no requests.
func requestNames(object *unstructured.Unstructured, path []string) (names []string) {
	requests, _, _ := unstructured.NestedFieldNoCopy(object.Object, append(slices.Clone(path), "requests")...) // an invalid type was reported before
	list, _ := requests.([]any)
	for _, item := range list {
		request, _ := item.(map[string]any)
		name, _ := request["name"].(string)
		names = append(names, name)
		alternatives, _ := request["firstAvailable"].([]any)
		for _, item := range alternatives {
			alternative, _ := item.(map[string]any)
			names = append(names, fmt.Sprintf("%s/%v", name, alternative["name"]))
		}
	}
	return names
}

// checkRequests reports the names of an entry of config that are none of the claim's requests, as the
// API server does (validateRequestNameRef in pkg/apis/resource/validation of Kubernetes 1.37).
func (v *validator) checkRequests(at place, names, known []string) {
	for i, name := range names {
		if !slices.Contains(known, name) {
			v.errorf(at.at(fmt.Sprintf("requests[%d]", i)), "is %q, which is none of the claim's requests", name)
		}
	}
}

// checkSharingRequests reports mps and timeSlice of several requests of a claim, because a claim can have
// one order per family ([discovery.JoinOrders]). Both are parameters of one family, so that an entry
// for devices of other families is refused too. If an entry is for an alternative of a request, its
// device may not be allocated, and the finding is a warning.
func (v *validator) checkSharingRequests(entries []configEntry, requests []string) {
	type use struct {
		at   place
		name string
	}
	var uses []use
	for _, entry := range entries {
		if entry.parameters[nvidia.MPS] == "" && entry.parameters[nvidia.TimeSlice] == "" {
			continue
		}
		names := entry.requests
		if len(names) == 0 {
			names = slices.DeleteFunc(slices.Clone(requests), isAlternative)
		}
		for _, name := range names {
			uses = append(uses, use{entry.at, name})
		}
	}
	slices.SortStableFunc(uses, func(a, b use) int { return strings.Count(a.name, "/") - strings.Count(b.name, "/") })
	for _, other := range uses {
		first := uses[0].name
		if baseRequest(other.name) == baseRequest(first) {
			continue
		}
		s := severityError
		if isAlternative(other.name) { // first may be one too only if all are
			s = severityWarning
		}
		v.addFindings(other.at, s, fmt.Errorf("%s and %s: requests %s and %s have them; only one request of a claim can, for any number of devices", nvidia.MPS, nvidia.TimeSlice, first, other.name))
		return
	}
}

func isAlternative(name string) bool { return strings.Contains(name, "/") }

// baseRequest returns the request of a name that may be that of an alternative.
func baseRequest(name string) string {
	request, _, _ := strings.Cut(name, "/")
	return request
}

// A configEntry is an entry of config with parameters for this driver.
type configEntry struct {
	at         place
	parameters discovery.Parameters
	requests   []string // nil for all requests
}

// requestsOf returns the requests of an entry of config or of a constraint.
func requestsOf(entry map[string]any) []string {
	requests, _, _ := unstructured.NestedStringSlice(entry, "requests") // an invalid type was reported before
	return requests
}

// conflicts reports whether two entries together set parameters that the agent refuses to combine.
func (e configEntry) conflicts(other configEntry) bool {
	both := e.parameters[nvidia.TimeSlice] != "" && other.parameters[nvidia.MPS] != "" ||
		e.parameters[nvidia.MPS] != "" && other.parameters[nvidia.TimeSlice] != ""
	return both && (len(e.requests) == 0 || len(other.requests) == 0 || slices.ContainsFunc(e.requests, func(a string) bool {
		return slices.ContainsFunc(other.requests, func(b string) bool { return isSameRequest(a, b) })
	}))
}

// isSameRequest reports whether two names can refer to the same device. A name may be that of a
// request, or of an alternative in it: request/alternative.
func isSameRequest(a, b string) bool {
	return a == b || strings.HasPrefix(a, b+"/") || strings.HasPrefix(b, a+"/")
}
