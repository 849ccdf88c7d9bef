package simulation

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery/rules"
	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/kernel"
	"chandler.dev/internal/simulation/machine"
)

// specifyFunction adds a random request to a claim of a machine with functions: a function under
// vfio or with its own driver, or the function of the given device.
func (w *World) specifyFunction(claim *resourceapi.ResourceClaim, device *rules.Offered) {
	if len(w.machine.Functions) == 0 {
		return
	}
	if w.machine.Joins {
		device = nil // a claim cannot select one of several functions
	}
	vfio := w.random.IntN(2) == 0
	expression := `device.attributes["chandler.dev"].kind == "nic"`
	if len(w.machine.Allowed.Rebind) == 0 {
		vfio = false
	}
	if vfio {
		expression = `device.attributes["chandler.dev"].?vfioDriver.hasValue()`
	}
	if device != nil {
		// The functions of one group go to vfio together, and the last pods want each function.
		oneGroup := strings.Contains(device.Source, ":10.") && w.machine.Functions[4].OneGroup
		vfio = device.Passthrough != nil && (device.Passthrough.Only || vfio && !oneGroup)
		expression = fmt.Sprintf(`device.attributes["resource.kubernetes.io"].pciBusID == %q`, machine.AddressIn(device.Source))
	}
	claim.Spec.Devices.Requests[0].Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
	if vfio {
		claim.Spec.Devices.Config = machine.ConfigWith(machine.AsVFIO)
	}
}

// judgeWrite fails if the administrator does not allow a write, or if the write takes a function
// from a user.
func (w *World) judgeWrite(name, value string) {
	a := kernel.ParseWrite(name, value)
	may, taken := false, []string{a.Function}
	switch a.Name {
	case "sriov_numvfs":
		may = a.Function == w.machine.Allowed.Creates
		taken = nil
		if value == "0" {
			taken = w.host.VirtualFunctions(a.Function)
		}
	case "reset", "reset_method":
		may = w.isReset()
	default:
		may = slices.Contains(w.machine.Allowed.Rebind, a.Function)
	}
	if !may {
		w.history.Fail("%q is written to %s, which the administrator does not allow", value, name)
	}
	if a.Name == "driver_override" {
		lost := w.damage.HasLostRecords()
		w.mu.Lock()
		w.touched[a.Function] = time.Now()
		apart := w.apart && !lost
		w.mu.Unlock()
		if apart && a.Function == machine.Movable && value == kernel.VFIO {
			w.history.Fail("%s is bound to vfio for devices whose IOMMU group it has left", machine.Movable)
		}
	}
	if a.Name == "reset" {
		if w.machine.Reassigns && !w.damage.HasLostRecords() && !w.wasHanded(a.Function) {
			w.history.Fail("%q is written to %s, which no consumer has had", value, name)
		}
		if who := w.usage.Processes.WithOpen(a.Function); who != "" {
			w.history.Fail("%q is written to %s, and %s", value, name, who)
		}
	}
	if a.Name != "unbind" && a.Name != "sriov_numvfs" && a.Name != "reset" {
		return
	}
	for _, address := range taken {
		if who := w.usage.UserOf(address, a.Driver); who != "" {
			w.history.Fail("%q is written to %s, and %s", value, name, who)
		}
		for _, since := range w.host.OpenSince(address) {
			if a.Name != "reset" && w.longOpen(address, since) {
				w.history.Fail("%q is written to %s, and a process has had %s open since %s", value, name, address, since.Format(time.TimeOnly))
			}
		}
	}
}

// isReset reports whether the administrator has ever enabled resets of functions.
func (w *World) isReset() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.resets
}

func (w *World) wasHanded(address string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.handed[address]
}

// longOpen reports whether an agent that took a function must have seen the function open: the
// agent checks before its first write, and no check is possible right before the second write.
func (w *World) longOpen(address string, since time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	begun, now := w.touched[address], time.Now()
	return since.Before(begun) || now.Sub(begun) > 30*time.Second && since.Before(now)
}

// asBefore returns an error text if a function without a user does not have its original state.
func (w *World) asBefore() string {
	if w.damage.HasLostRecords() {
		return ""
	}
	offered := func(address string) bool {
		d, wanted := w.wantedForm()[machine.DeviceName(address)]
		return wanted && w.pluginOnly() && len(d.Offers) > 0
	}
	made := false
	for _, f := range w.machine.Functions {
		virtual := w.host.VirtualFunctions(f.Address)
		number := f.Boot
		if f.Address == w.machine.Allowed.Creates && slices.ContainsFunc(w.machine.Allowed.VirtualAddresses(), offered) {
			number, made = machine.VirtualFunctions, true
		}
		if len(virtual) != number {
			return fmt.Sprintf("%s has %d virtual functions, and not %d", f.Address, len(virtual), number)
		}
		own := map[string]string{f.Address: f.Driver}
		for _, address := range virtual {
			own[address] = "igbvf"
		}
		if own[f.Address] == "nvme" && slices.ContainsFunc(w.group(f), offered) {
			own[f.Address] = kernel.VFIO
			made = true
		}
		for address, want := range own {
			if driver, _ := w.host.Driver(address); driver != want || want != kernel.VFIO && w.host.HasOverride(address) {
				return fmt.Sprintf("%s is under %q, override %v, and is to be under %s", address, driver, w.host.HasOverride(address), want)
			}
		}
	}
	dirs := []string{agents.StateDir + "/handover", agents.RunDir + "/journal/reclaim", agents.StateDir + "/rebound", agents.StateDir + "/made", agents.RunDir + "/journal/rebind", agents.RunDir + "/journal/create"}
	if made {
		dirs = dirs[:2]
	}
	for _, dir := range dirs {
		for _, file := range w.disk.Files(dir) {
			// If this agent could not remove the files of an earlier boot, the next one does.
			if data, _ := w.disk.FileContent(file); bytes.Contains(data, []byte(strconv.Quote(w.boot))) || strings.HasSuffix(file, ".tmp") {
				return fmt.Sprintf("file %s is left: %s", file, data)
			}
		}
	}
	return ""
}

// group returns the functions that go to vfio with a function.
func (w *World) group(of kernel.Function) (addresses []string) {
	for _, f := range w.machine.Functions {
		if f.Group == of.Group {
			addresses = append(addresses, f.Address)
		}
	}
	return addresses
}
