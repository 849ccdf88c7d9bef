package qat

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// order is the kernel's order of services. Before Linux 6.5 the kernel accepted two services only
// in this order.
var order = []string{"sym", "asym", "dc", "decomp", "dcc"}

// Services are the wanted services of a function: "sym", "asym". Their order is irrelevant.
type Services []string

// provision sets the services of a physical function. The function is down during the change
// (Documentation/ABI/testing/sysfs-driver-qat). The kernel decides which services can be combined.
func provision(_ *discovery.Host, function sysfs.Device, want any) ([]discovery.Write, error) {
	attrs := function.Attrs()
	vendor, _ := attrs.Hex("vendor", 4)
	wanted, ours := want.(Services)
	if vendor != "8086" || !function.HasEntry("qat/cfg_services") || !ours {
		return nil, errors.ErrUnsupported
	}
	state, _ := attrs.Text("qat/state")
	now, _ := attrs.Text("qat/cfg_services")
	if err := attrs.Err(); err != nil {
		return nil, err
	}
	if state != "up" && state != "down" {
		return nil, fmt.Errorf("attribute qat/state: neither up nor down: %.32q", state)
	}
	file := func(name string) string { return function.Child("qat/" + name).Path }
	up := discovery.Set(file("state"), "down", "up")
	up.Always = true
	services := inOrder(wanted)
	switch same := slices.Equal(inOrder(strings.Split(now, ";")), services); {
	case same && state == "up":
		return nil, nil
	case same:
		return []discovery.Write{up}, nil
	}
	writes := []discovery.Write{discovery.Set(file("cfg_services"), now, strings.Join(services, ";")), up}
	if state == "up" {
		writes = slices.Insert(writes, 0, discovery.Set(file("state"), "up", "down"))
	}
	return writes, nil
}

// inOrder returns the services in the kernel's order, followed by unknown services.
func inOrder(services []string) []string {
	place := func(name string) int {
		if i := slices.Index(order, name); i >= 0 {
			return i
		}
		return len(order)
	}
	sorted := slices.Sorted(slices.Values(services))
	slices.SortStableFunc(sorted, func(a, b string) int { return place(a) - place(b) })
	return sorted
}
