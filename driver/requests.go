package driver

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
)

// requestParameters returns the parameters of each request from the claim and its device classes.
// The device class comes first in the allocation, so that the claim overrides it. Invalid
// parameters are an error.
func (h *claimHandler) requestParameters(claim *resourceapi.ResourceClaim, results []allocation.Result) (map[string]discovery.Parameters, error) {
	asked := make(map[string]discovery.Parameters)
	var errs []error
	for _, r := range results {
		if _, seen := asked[r.Request]; !seen {
			parameters, err := h.readParameters(claim, r.Request)
			if err != nil {
				errs = append(errs, fmt.Errorf("request %s: %w", r.Request, err))
			}
			asked[r.Request] = parameters
		}
	}
	return asked, errors.Join(errs...)
}

// accept returns an error if devices do not support the parameters of their requests.
func (h *claimHandler) accept(results []allocation.Result, devices []rules.Offered, asked map[string]discovery.Parameters) error {
	given := make(map[string][]rules.Offered)
	var errs []error
	for i, r := range results {
		switch {
		case !r.Admin:
			given[r.Request] = append(given[r.Request], devices[i])
		case len(asked[r.Request]) > 0:
			errs = append(errs, fmt.Errorf("request %s: parameters: with admin access device %s is not the claim's alone, and nothing of it is changed", r.Request, r.Device))
		}
	}
	for _, request := range slices.Sorted(maps.Keys(given)) {
		if err := h.config.AcceptParameters(rules.PlainDevices(given[request]), asked[request]); err != nil {
			err = fmt.Errorf("request %s: parameters: %w", request, err)
			if slices.ContainsFunc(given[request], h.mayGetInterface) {
				err = discovery.TransientError(err)
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// readParameters joins the parameters of a request for this driver.
func (h *claimHandler) readParameters(claim *resourceapi.ResourceClaim, request string) (discovery.Parameters, error) {
	joined := make(discovery.Parameters)
	var errs []error
	result := resourceapi.DeviceRequestAllocationResult{Request: request}
	for _, config := range resourceclaim.ConfigForResult(claim.Status.Allocation.Devices.Config, result) {
		if config.Opaque.Driver != discovery.Domain {
			continue
		}
		parameters, err := h.config.ReadParameters(config.Opaque.Parameters.Raw)
		if err != nil {
			errs = append(errs, fmt.Errorf("parameters %s: %w", config.Source, err))
		}
		maps.Copy(joined, parameters)
	}
	return joined, errors.Join(errs...)
}

// claimOrders returns the orders for programs that must run for a claim. They require devices with
// an exclusive allocation.
func (h *claimHandler) claimOrders(results []allocation.Result, devices []rules.Offered, parameters map[string]discovery.Parameters) ([]discovery.Order, error) {
	if h.config.OrderDaemons == nil {
		return nil, nil
	}
	var all [][]discovery.Order
	var seen []string
	for _, result := range results {
		request := result.Request
		if slices.Contains(seen, request) || len(parameters[request]) == 0 {
			continue
		}
		seen = append(seen, request)
		var given []discovery.Device
		alone := true
		for i := range results {
			if r := &results[i]; r.Request == request {
				given = append(given, devices[i].Device)
				alone = alone && !r.Admin && !r.Shared && r.Consumes == nil
			}
		}
		orders := h.config.OrderDaemons(given, parameters[request])
		if len(orders) > 0 && !alone {
			return nil, fmt.Errorf("request %s: parameters: it has devices that are not the claim's alone", request)
		}
		all = append(all, orders)
	}
	orders, err := discovery.JoinOrders(all...)
	if err != nil {
		return nil, fmt.Errorf("parameters: %w", err)
	}
	return orders, nil
}

// devicesVariable contains the device names of a request, separated by commas.
const devicesVariable = "CHANDLER_DEVICES"

// amountPrefix and the name of a capacity form an environment variable. Its value is the request's
// amount of the capacity on each shared device, such as CHANDLER_MEMORY in bytes.
const amountPrefix = "CHANDLER_"

// claimName returns the name of the claim in the pod's spec. For a claim made from a template, this
// is the pod's name for the claim.
func claimName(claim *resourceapi.ResourceClaim) string {
	if name := claim.Annotations[resourceapi.PodResourceClaimAnnotation]; name != "" {
		return name
	}
	return claim.Name
}

// setEdits sets the edits of each result: those of its device and those of its request.
//
// When a claim is prepared, the mapping of containers to requests is unknown, and container
// runtimes overwrite environment variables of the same name. Edits that depend on the set of
// devices are therefore computed for each request, and all devices of a request carry the same
// edits. The variables are repeated under a name specific to the request.
func (h *claimHandler) setEdits(results []allocation.Result, devices []rules.Offered, parameters map[string]discovery.Parameters, claim *resourceapi.ResourceClaim) {
	given := make(map[string][]rules.Offered)
	parts := make(map[string][]allocation.Result)
	consumed := make(map[string]discovery.Consumed)
	for i, result := range results {
		request := result.Request
		given[request] = append(given[request], devices[i])
		parts[request] = append(parts[request], result)
		if consumed[request] == nil {
			consumed[request] = make(discovery.Consumed)
		}
		consumed[request].Add(devices[i].Name, result.Consumes)
	}
	granted := make(map[string]specs.ContainerEdits)
	for request := range maps.Keys(given) {
		edits := h.config.Granter(rules.PlainDevices(given[request]), discovery.Grant{
			API: discovery.ModeDRA, Resource: rules.ResourceOf(given[request]), Claim: claimName(claim), UID: string(claim.UID), SharingDir: h.config.SharingDir, Request: request, Parameters: parameters[request], Consumed: consumed[request],
		})
		edits.Env = slices.Concat(edits.Env, parameters[request].Environment(), resultVariables(parts[request]))
		edits.Env = append(edits.Env, ofRequest(edits.Env, claimName(claim), request)...)
		granted[request] = edits
	}
	for i := range results {
		results[i].Edits = discovery.Join(devices[i].Edits, granted[results[i].Request])
	}
	hookOnce(results)
}

// hookOnce removes repeated hooks from all devices of a request except the first. A container gets
// all devices of a request, and the container runtime would call the hook for each device.
func hookOnce(results []allocation.Result) {
	called := make(map[string][]*specs.Hook)
	for i := range results {
		r := &results[i]
		r.Edits.Hooks = slices.DeleteFunc(slices.Clone(r.Edits.Hooks), func(hook *specs.Hook) bool {
			same := func(other *specs.Hook) bool { return reflect.DeepEqual(hook, other) }
			if slices.ContainsFunc(called[r.Request], same) {
				return true
			}
			called[r.Request] = append(called[r.Request], hook)
			return false
		})
	}
}

// resultVariables returns environment variables that are independent of vendors: the device names
// of a request, and the amounts of each shared capacity in the same order. A result without an
// amount has an empty string between the commas.
func resultVariables(results []allocation.Result) []string {
	var names []string
	amounts := make(map[resourceapi.QualifiedName][]string)
	for i, result := range results {
		names = append(names, result.GivenDevice())
		for capacity, amount := range result.Consumes {
			if amount.IsZero() {
				continue // not requested
			}
			if amounts[capacity] == nil {
				amounts[capacity] = make([]string, len(results))
			}
			amounts[capacity][i] = strconv.FormatInt(amount.Value(), 10)
		}
	}
	env := []string{devicesVariable + "=" + strings.Join(names, ",")}
	for _, capacity := range slices.Sorted(maps.Keys(amounts)) {
		env = append(env, amountPrefix+discovery.VariableName(string(capacity))+"="+strings.Join(amounts[capacity], ","))
	}
	return env
}

// ofRequest returns the variables under names specific to the request.
func ofRequest(env []string, claim, request string) []string {
	suffix := "_" + discovery.VariableName(claim) + "_" + discovery.VariableName(request)
	var out []string
	for _, entry := range env {
		if key, value, ok := strings.Cut(entry, "="); ok {
			out = append(out, key+suffix+"="+value)
		}
	}
	return out
}
