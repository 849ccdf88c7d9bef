package discovery

import (
	"fmt"
	"sync"

	"chandler.dev/discovery/sysfs"
)

// Recoveries are the PCI functions that the kernel has tried to recover from an error since it was
// listened to. No file says how that ended: the kernel only sends events (pci_uevent_ers in
// drivers/pci/pci-driver.c). The zero value knows of none.
type Recoveries struct {
	mu     sync.Mutex
	events int
	failed map[string]int // by the function's directory, the number of the last event that said so
	well   map[string]int // likewise, that it was recovered, or that a driver has taken it anew
}

// hear takes note of a kernel event with these variables.
func (r *Recoveries) hear(variables map[string]string) {
	if variables["SUBSYSTEM"] != "pci" {
		return
	}
	function := "sys" + variables["DEVPATH"]
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events++
	switch action, said := variables["ACTION"], variables["ERROR_EVENT"]; {
	case said == "FAILED_RECOVERY":
		if r.failed == nil {
			r.failed, r.well = make(map[string]int), make(map[string]int)
		}
		r.failed[function] = r.events
	case len(r.failed) == 0:
	case action == "remove":
		delete(r.failed, function)
		delete(r.well, function)
	case said == "SUCCESSFUL_RECOVERY", action == "add", action == "bind":
		r.well[function] = r.events
	}
}

// failure says that the kernel could not recover a function, or what is above it, and that the function
// has not been well since, "" if it could. A virtual function follows its physical one. Of a port it means
// all that is below it.
func (r *Recoveries) failure(function sysfs.Device) string {
	if r == nil {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.failed) == 0 {
		return ""
	}
	last, well, whose := 0, 0, function
	for _, f := range []sysfs.Device{function, physicalOf(function)} {
		well = max(well, r.well[f.Path])
		for d := f; sysfs.IsPCIAddress(d.Name()); d = d.Parent() {
			if n := r.failed[d.Path]; n > last {
				last, whose = n, d
			}
		}
	}
	switch {
	case last <= well:
		return ""
	case whose.Path == function.Path:
		return "the kernel could not recover it from a PCIe error"
	}
	return fmt.Sprintf("the kernel could not recover %s from a PCIe error", whose.Name())
}

// physicalOf returns the physical function of a virtual one, and any other function itself.
func physicalOf(function sysfs.Device) sysfs.Device {
	if physical, ok := function.LinkTo("physfn"); ok && sysfs.IsPCIAddress(physical.Name()) {
		return physical
	}
	return function
}
