package scan

import (
	"fmt"
	"sync"

	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Recoveries records the results of the kernel's attempts to recover PCI functions from errors
// since [Listen] began. No file contains a result: the kernel only sends events (pci_uevent_ers in
// drivers/pci/pci-driver.c). The zero value has no records. Listen writes, scans read.
type Recoveries struct {
	mu        sync.Mutex
	events    int
	failed    map[string]int // by the function's directory, the number of the last event that reported a failure
	recovered map[string]int // by directory, the last event that reported a recovery or a newly bound driver
}

// readEvent records a kernel event with these variables.
func (r *Recoveries) readEvent(variables map[string]string) {
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
			r.failed, r.recovered = make(map[string]int), make(map[string]int)
		}
		r.failed[function] = r.events
	case len(r.failed) == 0:
	case action == "remove":
		delete(r.failed, function)
		delete(r.recovered, function)
	case said == "SUCCESSFUL_RECOVERY", action == "add", action == "bind":
		r.recovered[function] = r.events
	}
}

// FailureReason returns the reason if the kernel could not recover a function, or a port above the
// function, and the function has not recovered since. Otherwise FailureReason returns "". A virtual
// function follows its physical function. The failure of a port affects everything below the port.
func (r *Recoveries) FailureReason(function sysfs.Device) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.failed) == 0 {
		return ""
	}
	last, well, whose := 0, 0, function
	for _, f := range []sysfs.Device{function, pci.PhysicalFunction(function)} {
		well = max(well, r.recovered[f.Path])
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
