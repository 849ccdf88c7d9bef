package discovery

import (
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Parameter names what a claim may ask of a device beyond having it. The names
// are those of the fields that users write.
type Parameter string

// The parameters that there are. Each [Family] lists those that it takes.
const (
	// InterfaceName is what the network interface of the device is called in
	// the container.
	InterfaceName Parameter = "interfaceName"

	// AcceleratorFunction is the function that an FPGA is to be programmed
	// with: lower-case hexadecimal digits without dashes.
	AcceleratorFunction Parameter = "acceleratorFunction"
)

// Parameters are what a claim asks of the devices of a request.
type Parameters map[Parameter]string

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
		if len(parameters) == 0 {
			return nil
		}
		var errs []error
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
		if f == nil || !slices.Contains(f.Parameters, name) {
			errs = append(errs, fmt.Errorf("device %s of family %s takes no %s; name the request that %s is for", d.Name, d.Family, name, name))
		}
	}
	return errors.Join(errs...)
}
