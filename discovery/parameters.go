package discovery

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Parameter names what a claim may ask of a device beyond having it. Each [Family]
// has names for those that it takes, which are those of the fields that users write.
type Parameter string

// Environment returns the parameter that sets a variable in the containers which
// get the devices. A family takes it that has the variable among its Variables.
func Environment(variable string) Parameter {
	return Parameter(variablePrefix + variable + "]")
}

// variablePrefix begins the parameters that set variables.
const variablePrefix = "environment["

// variable returns the name of the variable that the parameter sets, "" if it
// sets none.
func (p Parameter) variable() string {
	if rest, ok := strings.CutPrefix(string(p), variablePrefix); ok {
		return strings.TrimSuffix(rest, "]")
	}
	return ""
}

// Parameters are what a claim asks of the devices of a request.
type Parameters map[Parameter]string

// Environment returns the variables that the parameters set, as NAME=value, in
// the order of their names.
func (p Parameters) Environment() []string {
	var env []string
	for _, name := range slices.Sorted(maps.Keys(p)) {
		if variable := name.variable(); variable != "" {
			env = append(env, variable+"="+p[name])
		}
	}
	return env
}

// Acceptor reports why the devices of a request cannot be given with
// parameters, nil if they can.
type Acceptor func(given []Device, parameters Parameters) error

// Acceptors joins what families accept: a device takes the parameters that its
// family lists, and no other, where the family's Accept has nothing against
// those that are its own.
func Acceptors(families []*Family) Acceptor {
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
			errs = append(errs, f.takes(d, parameters))
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

// takes reports which of the parameters the family does not list.
func (f *Family) takes(d Device, parameters Parameters) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(parameters)) {
		if f == nil || !f.Lists(name) {
			errs = append(errs, fmt.Errorf("device %s of family %s takes no %s; name the request that %s is for", d.Name, d.Family, name, name))
		}
	}
	return errors.Join(errs...)
}

// Lists reports whether the family lists the parameter among those that it takes.
func (f *Family) Lists(name Parameter) bool {
	if variable := name.variable(); variable != "" {
		return slices.Contains(f.Variables, variable)
	}
	return slices.Contains(f.Parameters, name)
}
