package discovery

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Parameter names a setting for a device that a claim can request. Each [Family] lists its accepted
// parameters. The names are the field names in the users' configuration.
type Parameter string

// EnvironmentParameter returns the parameter that sets an environment variable in the containers of
// a device. A family accepts the parameter if its Variables list the variable.
func EnvironmentParameter(variable string) Parameter {
	return Parameter(variablePrefix + variable + "]")
}

// variablePrefix is the prefix of parameters for environment variables.
const variablePrefix = "environment["

// variable returns the name of the parameter's environment variable, or "".
func (p Parameter) variable() string {
	if rest, ok := strings.CutPrefix(string(p), variablePrefix); ok {
		return strings.TrimSuffix(rest, "]")
	}
	return ""
}

// Parameters are the settings of a claim for the devices of a request.
type Parameters map[Parameter]string

// Environment returns the environment variables of the parameters, as NAME=value, sorted by name.
func (p Parameters) Environment() []string {
	var env []string
	for _, name := range slices.Sorted(maps.Keys(p)) {
		if variable := name.variable(); variable != "" {
			env = append(env, variable+"="+p[name])
		}
	}
	return env
}

// Acceptor returns an error if the devices of a request cannot be allocated with the parameters.
type Acceptor func(given []Device, parameters Parameters) error

// JoinAcceptors joins the Accept functions of families. A device accepts only its family's listed
// parameters, and only if the family's Accept returns no error for the family's own parameters.
func JoinAcceptors(families []*Family) Acceptor {
	byName := make(map[string]*Family, len(families))
	for _, f := range families {
		byName[f.Name] = f
	}
	return func(given []Device, parameters Parameters) error {
		var errs []error
		for i := range given {
			errs = append(errs, acceptDriver(&given[i], parameters))
		}
		if _, other := parameters[Driver]; other || len(parameters) == 0 {
			return errors.Join(errs...)
		}
		own := make(map[*Family][]Device)
		for _, d := range given {
			f := byName[d.Family]
			errs = append(errs, f.checkParameters(d, parameters))
			if f != nil {
				own[f] = append(own[f], d)
			}
		}
		for _, f := range families {
			if f.Accept != nil && len(own[f]) > 0 {
				errs = append(errs, f.Accept(own[f], parameters))
			}
		}
		return errors.Join(errs...)
	}
}

// checkParameters returns an error for each parameter missing from the family's list.
func (f *Family) checkParameters(d Device, parameters Parameters) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(parameters)) {
		if f == nil || !f.AcceptsParameter(name) {
			errs = append(errs, fmt.Errorf("device %s of family %s takes no %s; name the request that %s is for", d.Name, d.Family, name, name))
		}
	}
	return errors.Join(errs...)
}

// AcceptsParameter reports whether the family accepts the parameter.
func (f *Family) AcceptsParameter(name Parameter) bool {
	if variable := name.variable(); variable != "" {
		return slices.Contains(f.Variables, variable)
	}
	return slices.Contains(f.Parameters, name)
}
