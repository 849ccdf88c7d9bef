package driver

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

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
			errs = append(errs, fmt.Errorf("request %s: parameters: %w", request, err))
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
