package validation

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
)

// checkParameters checks the parameters for this driver in an object, as Prepare does.
func (v *validator) checkParameters(at place, object *unstructured.Unstructured) {
	path := configOf[object.GetKind()]
	var configured []configEntry
	requests := requestsIn(object, path[:len(path)-1])
	names := namesOf(requests)
	entries, _, _ := unstructured.NestedFieldNoCopy(object.Object, path...) // an invalid type was reported before
	list, _ := entries.([]any)
	for i, entry := range list {
		config, _ := entry.(map[string]any)
		opaque, _ := config["opaque"].(map[string]any)
		entryAt := at.at(fmt.Sprintf("%s[%d]", strings.Join(path, "."), i))
		if object.GetKind() != "DeviceClass" {
			v.checkRequests(entryAt, requestsOf(config), names)
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
		configured = append(configured, configEntry{at: field, parameters: v.claimParameters(field, data), requests: requestsOf(config)})
	}
	if object.GetKind() == "DeviceClass" {
		v.checkConflicts(configured)
		v.classConfigs[object.GetName()] = configured
	} else {
		v.claims = append(v.claims, claimConfig{at, requests, configured})
	}
	constraints, _, _ := unstructured.NestedFieldNoCopy(object.Object, append(slices.Clone(path[:len(path)-1]), "constraints")...)
	list, _ = constraints.([]any)
	for i, item := range list {
		constraint, _ := item.(map[string]any)
		v.checkRequests(at.at(fmt.Sprintf("%s.constraints[%d]", strings.Join(path[:len(path)-1], "."), i)), requestsOf(constraint), names)
	}
}

// A claimRequest is a request of a claim, or an alternative of a request.
type claimRequest struct {
	name  string // of an alternative: request/alternative
	class string
	path  string // of the class in the claim
}

// requestsIn returns a claim's requests, and their alternatives. The path is that of the claim's devices.
// A class has no requests.
func requestsIn(object *unstructured.Unstructured, path []string) (requests []claimRequest) {
	all, _, _ := unstructured.NestedFieldNoCopy(object.Object, append(slices.Clone(path), "requests")...) // an invalid type was reported before
	list, _ := all.([]any)
	for i, item := range list {
		request, _ := item.(map[string]any)
		name, _ := request["name"].(string)
		at := fmt.Sprintf("%s.requests[%d]", strings.Join(path, "."), i)
		exactly, _ := request["exactly"].(map[string]any)
		class, _ := exactly["deviceClassName"].(string)
		classAt := at + ".exactly.deviceClassName"
		if exactly == nil { // v1beta1, or a request with alternatives
			class, _ = request["deviceClassName"].(string)
			classAt = at + ".deviceClassName"
		}
		requests = append(requests, claimRequest{name, class, classAt})
		alternatives, _ := request["firstAvailable"].([]any)
		for j, item := range alternatives {
			alternative, _ := item.(map[string]any)
			class, _ := alternative["deviceClassName"].(string)
			requests = append(requests, claimRequest{fmt.Sprintf("%s/%v", name, alternative["name"]), class, fmt.Sprintf("%s.firstAvailable[%d].deviceClassName", at, j)})
		}
	}
	return requests
}

func namesOf(requests []claimRequest) (names []string) {
	for _, r := range requests {
		names = append(names, r.name)
	}
	return names
}

// A claimConfig is the part of a claim that can set parameters for this driver.
type claimConfig struct {
	at         place
	requests   []claimRequest
	configured []configEntry
}

// checkClaims checks the parameters of claims together with those of the DeviceClasses in the files,
// which come first in the allocation of each request.
func (v *validator) checkClaims() {
	for _, claim := range v.claims {
		var configured []configEntry
		for _, r := range claim.requests {
			for _, entry := range v.classConfigs[r.class] {
				configured = append(configured, configEntry{claim.at.at(r.path), entry.parameters, []string{r.name}, r.class})
			}
		}
		configured = append(configured, claim.configured...)
		v.checkConflicts(configured)
		v.checkSharingRequests(configured, namesOf(claim.requests))
	}
}

// checkConflicts reports entries that set parameters which the agent refuses to combine.
func (v *validator) checkConflicts(configured []configEntry) {
	for i, entry := range configured {
		if one, other := conflictOf(entry.parameters, entry.parameters); one != "" {
			v.errorf(entry.at.descendTo(string(one)), "%s: cannot be combined with %s", one, other)
			continue
		}
		for _, earlier := range configured[:i] {
			one, other := conflictOf(entry.parameters, earlier.parameters)
			if one == "" || !entry.sharesRequest(earlier) {
				continue
			}
			by := "another entry of config"
			if earlier.class != "" {
				by = "DeviceClass " + earlier.class
			}
			v.errorf(entry.at.descendTo(string(one)), "%s: cannot be combined with %s of %s for the same request", one, other, by)
			break
		}
	}
}

// conflictOf returns a parameter of a that the agent refuses to combine with a parameter of b, or "".
// A device under vfio takes no other parameter ([discovery.Driver]).
func conflictOf(a, b discovery.Parameters) (one, other discovery.Parameter) {
	for _, one := range slices.Sorted(maps.Keys(a)) {
		for _, other := range slices.Sorted(maps.Keys(b)) {
			isDriver := (one == discovery.Driver) != (other == discovery.Driver)
			if isDriver || one == nvidia.TimeSlice && other == nvidia.MPS || one == nvidia.MPS && other == nvidia.TimeSlice {
				return one, other
			}
		}
	}
	return "", ""
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
// for devices of other families is refused too. If entries are for some alternatives of a request only,
// another alternative may be allocated, and the finding is a warning.
func (v *validator) checkSharingRequests(entries []configEntry, requests []string) {
	type use struct {
		at   place
		name string
		by   string // the class, if the request has them by its class
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
			by := ""
			if entry.class != "" {
				by = ", by DeviceClass " + entry.class
			}
			uses = append(uses, use{entry.at, name, by})
		}
	}
	slices.SortStableFunc(uses, func(a, b use) int { return strings.Count(a.name, "/") - strings.Count(b.name, "/") })
	isCertain := func(name string) bool { // every alternative of the request has them
		return !slices.ContainsFunc(requests, func(request string) bool {
			return isAlternative(name) && isAlternative(request) && baseRequest(request) == baseRequest(name) &&
				!slices.ContainsFunc(uses, func(u use) bool { return u.name == request })
		})
	}
	for _, other := range uses {
		first := uses[0].name
		if baseRequest(other.name) == baseRequest(first) {
			continue
		}
		s := severityError
		if !isCertain(first) || !isCertain(other.name) {
			s = severityWarning
		}
		v.addFindings(other.at, s, fmt.Errorf("%s and %s: requests %s and %s have them%s; only one request of a claim can, for any number of devices", nvidia.MPS, nvidia.TimeSlice, first, other.name, other.by))
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
	class      string   // the DeviceClass of an entry that is not the claim's own, or ""
}

// requestsOf returns the requests of an entry of config or of a constraint.
func requestsOf(entry map[string]any) []string {
	requests, _, _ := unstructured.NestedStringSlice(entry, "requests") // an invalid type was reported before
	return requests
}

// sharesRequest reports whether two entries can apply to the same request.
func (e configEntry) sharesRequest(other configEntry) bool {
	return len(e.requests) == 0 || len(other.requests) == 0 || slices.ContainsFunc(e.requests, func(a string) bool {
		return slices.ContainsFunc(other.requests, func(b string) bool { return isSameRequest(a, b) })
	})
}

// isSameRequest reports whether two names can refer to the same device. A name may be that of a
// request, or of an alternative in it: request/alternative.
func isSameRequest(a, b string) bool {
	return a == b || strings.HasPrefix(a, b+"/") || strings.HasPrefix(b, a+"/")
}
