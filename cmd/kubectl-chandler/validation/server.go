package validation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/operation"
	"k8s.io/apimachinery/pkg/runtime"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// checkServer reports what the API server refuses in an object of resource.k8s.io/v1: by the rules in
// the API's own package, and by those in its validation of requests and constraints
// (pkg/apis/resource/validation/validation.go in k8s.io/kubernetes, 1.37).
func (v *validator) checkServer(at place, object runtime.Object) {
	ctx, create := context.Background(), operation.Operation{Type: operation.Create}
	spec := field.NewPath("spec")
	switch o := object.(type) {
	case *resourceapi.ResourceClaim:
		v.refused(at, resourceapi.Validate_ResourceClaimSpec(ctx, create, spec, &o.Spec, nil))
		v.checkClaim(at.at("spec.devices"), &o.Spec.Devices)
	case *resourceapi.ResourceClaimTemplate:
		v.refused(at, resourceapi.Validate_ResourceClaimTemplateSpec(ctx, create, spec, &o.Spec, nil))
		v.checkClaim(at.at("spec.spec.devices"), &o.Spec.Spec.Devices)
	case *resourceapi.DeviceClass:
		v.refused(at, resourceapi.Validate_DeviceClassSpec(ctx, create, spec, &o.Spec, nil))
	}
}

// refused adds errors of the API server's rules. Names of requests that are there twice are those of
// checkClaim.
func (v *validator) refused(at place, refusals field.ErrorList) {
	for _, e := range refusals {
		if e.Type != field.ErrorTypeDuplicate {
			v.addFindings(at.at(e.Field), severityError, errors.New(e.ErrorBody()))
		}
	}
}

// checkClaim checks the names and the amounts of requests, and that constraints name an attribute.
func (v *validator) checkClaim(at place, claim *resourceapi.DeviceClaim) {
	var names []string
	for i, request := range claim.Requests {
		field := at.at(fmt.Sprintf("requests[%d]", i))
		v.checkRequestName(field, names, request.Name)
		names = append(names, request.Name)
		switch {
		case (request.Exactly == nil) == (len(request.FirstAvailable) == 0):
			v.errorf(field, "has both exactly and firstAvailable, or neither; want one of them")
		case request.Exactly != nil:
			v.checkAmount(field.at("exactly"), request.Exactly.DeviceClassName, request.Exactly.AllocationMode, request.Exactly.Count)
		}
		var inner []string
		for j, sub := range request.FirstAvailable {
			field := field.at(fmt.Sprintf("firstAvailable[%d]", j))
			v.checkRequestName(field, inner, sub.Name)
			inner = append(inner, sub.Name)
			v.checkAmount(field, sub.DeviceClassName, sub.AllocationMode, sub.Count)
		}
	}
	for i, constraint := range claim.Constraints {
		if constraint.MatchAttribute == nil && constraint.DistinctAttribute == nil {
			v.errorf(at.at(fmt.Sprintf("constraints[%d]", i)), "has neither matchAttribute nor distinctAttribute")
		}
	}
}

// checkRequestName checks the name of a request, which the earlier ones must not have.
func (v *validator) checkRequestName(at place, earlier []string, name string) {
	messages := utilvalidation.IsDNS1123Label(name)
	switch {
	case name == "":
		v.errorf(at, "has no name")
	case len(messages) > 0:
		v.errorf(at.at("name"), "is %q; %s", name, strings.Join(messages, "; "))
	case slices.Contains(earlier, name):
		v.errorf(at.at("name"), "is %q, as that of an earlier request", name)
	}
}

func (v *validator) checkAmount(at place, class string, mode resourceapi.DeviceAllocationMode, count int64) {
	if class == "" {
		v.errorf(at, "has no deviceClassName")
	}
	switch {
	case count < 0:
		v.errorf(at.at("count"), "is %d; must be greater than zero", count)
	case mode == resourceapi.DeviceAllocationModeAll && count != 0:
		v.errorf(at.at("count"), "is %d; must be unset with allocationMode All", count)
	}
}
