package driver

import (
	"errors"
	"fmt"
	"maps"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"chandler.dev/discovery"
)

// parameters returns what the claim and its device classes ask of the devices
// of each request. The device class comes first in the allocation, so that
// what the claim says counts. What is not understood, or not taken by a device
// that was allocated for the request, is an error.
func (d *Driver) parameters(claim *resourceapi.ResourceClaim, results []result, devices []discovery.Device) (map[string]discovery.Parameters, error) {
	asked := make(map[string]discovery.Parameters)
	var errs []error
	for i, r := range results {
		if _, seen := asked[r.Request]; !seen {
			parameters, err := d.readParameters(claim, r.Request)
			if err != nil {
				errs = append(errs, fmt.Errorf("request %s: %w", r.Request, err))
			}
			asked[r.Request] = parameters
		}
		if err := d.config.Accept(devices[i], asked[r.Request]); err != nil {
			errs = append(errs, fmt.Errorf("request %s: parameters: %w", r.Request, err))
		}
	}
	return asked, errors.Join(errs...)
}

// readParameters joins what is said to this driver about a request.
func (d *Driver) readParameters(claim *resourceapi.ResourceClaim, request string) (discovery.Parameters, error) {
	joined := make(discovery.Parameters)
	var errs []error
	result := resourceapi.DeviceRequestAllocationResult{Request: request}
	for _, config := range resourceclaim.ConfigForResult(claim.Status.Allocation.Devices.Config, result) {
		if config.Opaque.Driver != discovery.Domain {
			continue
		}
		parameters, err := d.config.ReadParameters(config.Opaque.Parameters.Raw)
		if err != nil {
			errs = append(errs, fmt.Errorf("parameters %s: %w", config.Source, err))
		}
		maps.Copy(joined, parameters)
	}
	return joined, errors.Join(errs...)
}
