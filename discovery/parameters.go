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

// Acceptor reports why a device cannot be given with parameters, nil if it can.
type Acceptor func(d Device, parameters Parameters) error

// Acceptors joins what families accept: a device takes the parameters that its
// family lists, and no other.
func Acceptors(families []*Family) Acceptor {
	return func(d Device, parameters Parameters) error {
		var accepted []Parameter
		for _, f := range families {
			if f.Name == d.Family {
				accepted = f.Parameters
			}
		}
		var errs []error
		for _, name := range slices.Sorted(maps.Keys(parameters)) {
			if !slices.Contains(accepted, name) {
				errs = append(errs, fmt.Errorf("device %s of family %s takes no %s; name the request that %s is for", d.Name, d.Family, name, name))
			}
		}
		return errors.Join(errs...)
	}
}
