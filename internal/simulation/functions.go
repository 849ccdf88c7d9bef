package simulation

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"

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
		expression = atAddress(machine.AddressIn(device.Source))
	}
	selectDevice(claim, expression)
	if vfio {
		claim.Spec.Devices.Config = machine.ConfigWith(machine.AsVFIO)
	}
}

// selectDevice restricts the request of a claim to devices that match a CEL expression.
func selectDevice(claim *resourceapi.ResourceClaim, expression string) {
	claim.Spec.Devices.Requests[0].Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
}

// atAddress returns a CEL expression that matches the devices with a PCI address.
func atAddress(address string) string {
	return fmt.Sprintf(`device.attributes["resource.kubernetes.io"].pciBusID == %q`, address)
}

// changedFunction returns an error text if a function without a user does not have its original state.
func changedFunction(w *World) string {
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
		if own[f.Address] == "nvme" && slices.ContainsFunc(groupOf(w, f), offered) {
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
			if data, _ := w.disk.FileContent(file); bytes.Contains(data, []byte(strconv.Quote(w.host.BootID()))) || strings.HasSuffix(file, ".tmp") {
				return fmt.Sprintf("file %s is left: %s", file, data)
			}
		}
	}
	return ""
}

// groupOf returns the functions that go to vfio with a function.
func groupOf(w *World, of kernel.Function) (addresses []string) {
	for _, f := range w.machine.Functions {
		if f.Group == of.Group {
			addresses = append(addresses, f.Address)
		}
	}
	return addresses
}
