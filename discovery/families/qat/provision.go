package qat

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// order is that in which the kernel names services. Before Linux 6.5 it took no
// other order of two.
var order = []string{"sym", "asym", "dc", "decomp", "dcc"}

// Services are what a function is to do: "sym", "asym". Their order says nothing.
type Services []string

// provision chooses the services of a physical function, which is down while
// they are changed (Documentation/ABI/testing/sysfs-driver-qat). Which of them
// go together is for the kernel to say.
func provision(_ *discovery.Host, function sysfs.Device, want any) ([]discovery.Write, error) {
	attrs := function.Attrs()
	vendor, _ := attrs.Hex("vendor", 4)
	wanted, ours := want.(Services)
	if vendor != "8086" || !function.Exists("qat/cfg_services") || !ours {
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

// inOrder returns the services in the order of the kernel, and what we do not
// know of after them.
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
