package simulation

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/simulation/kernel"
)

// allowed holds the changes of functions that the machine's administrator allows.
type allowed struct {
	rebind []string // addresses of the functions allowed under vfio
	make   string   // the physical function that may get virtual functions, "" for none
}

// count is the number of virtual functions on demand.
const count = 3

// functionMachine returns a machine with disks and network adapters whose drivers change: one disk
// that the agents must not change, one disk alone in its IOMMU group, two disks in one group, an
// adapter without virtual functions, and an adapter with two virtual functions from the boot on.
func functionMachine(rebinds, makes, oneGroup bool) *machine {
	m := &machine{name: fmt.Sprintf("disks and adapters, passthrough %v, on demand %v, virtual functions in one group %v", rebinds, makes, oneGroup), resets: true}
	disk := func(address string, group int) { m.add(address, kernel.Function{Driver: "nvme", Group: group}) }
	disk("0000:01:00.0", 1)
	disk("0000:02:00.0", 2)
	disk("0000:04:00.0", 4)
	disk("0000:04:00.1", 4)
	m.add("0000:03:00.0", kernel.Function{Driver: "igb", Group: 10, Total: 7, OneGroup: oneGroup})
	m.add("0000:05:00.0", kernel.Function{Driver: "igb", Group: 20, Total: 7, Boot: 2})
	if rebinds {
		m.allowed.rebind = []string{"0000:02:00.0", "0000:04:00.0", "0000:04:00.1", "0000:03:10.0", "0000:03:10.2", "0000:03:10.4"}
		m.cards = append(m.cards, card{address: "0000:02:00.0"}) // a single function of a multi-function card does not vanish
	}
	if makes {
		m.allowed.make = "0000:03:00.0"
	}
	m.cards = append(m.cards, card{address: "0000:03:00.0"})
	m.text = append(m.text, "-- end --\n"...)
	return m
}

// add adds a function to the host recording, without its driver.
func (m *machine) add(address string, f kernel.Function) {
	bus := strings.Split(address, ":")[1]
	f.Address, f.Source = address, fmt.Sprintf("sys/devices/pci0000:00/0000:00:%s.0/%s", bus, address)
	attributes := []string{"vendor 0x144d", "device 0xa80a", "class 0x010802", "numa_node 0", "reset ", "reset_method flr bus"}
	if f.Driver != "nvme" {
		attributes = []string{
			"vendor 0x8086", "device 0x1521", "class 0x020000", "numa_node 0", "sriov_totalvfs 7", "sriov_numvfs 0", "sriov_offset 128",
			"sriov_stride 2", "sriov_vf_device 1520", "sriov_drivers_autoprobe 1",
		}
	}
	var b strings.Builder
	for _, attribute := range attributes {
		name, value, _ := strings.Cut(attribute, " ")
		fmt.Fprintf(&b, "-- %s/%s --\n%s\n", f.Source, name, value)
	}
	fmt.Fprintf(&b, "-- sys/bus/pci/devices/%s -> ../../../%s --\n", address, strings.TrimPrefix(f.Source, "sys/"))
	fmt.Fprintf(&b, "-- %s/iommu_group -> ../../../../kernel/iommu_groups/%d --\n", f.Source, f.Group)
	fmt.Fprintf(&b, "-- sys/kernel/iommu_groups/%d/devices/%s -> ../../../../%s --\n", f.Group, address, strings.TrimPrefix(f.Source, "sys/"))
	m.text = append(m.text, b.String()...)
	m.functions = append(m.functions, f)
}

// host returns a machine's host with the settings that the administrator allows.
func (m *machine) host(h *kernel.Host) *discovery.Host {
	host := &discovery.Host{FS: h}
	if len(m.allowed.rebind) > 0 {
		host.Passthroughs = []discovery.Selection[string]{{Expression: "some", Value: kernel.VFIO, Selects: func(d discovery.Device) (bool, error) {
			return slices.ContainsFunc(m.allowed.rebind, func(address string) bool { return d.Name == deviceName(address) }), nil
		}}}
	}
	if m.allowed.make != "" {
		host.VirtualFunctions = []discovery.Selection[int]{{Expression: "one", Value: count, Selects: func(d discovery.Device) (bool, error) {
			return d.Name == deviceName(m.allowed.make), nil
		}}}
	}
	return host
}

// resources returns the extended resources of devices that have none themselves: disks under vfio,
// virtual functions with their own driver, interchangeable devices.
func (m *machine) resources() ([]rules.Resource, error) {
	if len(m.functions) == 0 || m.joins {
		channels, err := rules.Compile(`device.attributes["chandler.dev"].?channel.hasValue()`)
		return []rules.Resource{{Selector: channels, Name: "example.com/channel"}}, err
	}
	disks, err := rules.Compile(`device.attributes["chandler.dev"].?pciClass.orValue("") == "010802"`)
	if err != nil {
		return nil, err
	}
	adapters, err := rules.Compile(`device.attributes["chandler.dev"].kind == "nic"`)
	return []rules.Resource{
		{Selector: disks, Name: "example.com/disk", Want: discovery.Parameters{discovery.Driver: discovery.DriverVFIO}},
		{Selector: adapters, Name: "example.com/adapter"},
	}, err
}

func deviceName(address string) string { return discovery.DeviceName(sysfs.At(nil, address)) }

// asVFIO is the parameter of claims that request functions under vfio.
const asVFIO = `{"driver":"vfio"}`

// readParameters decodes the parameters of claims.
func readParameters(raw []byte) (discovery.Parameters, error) {
	switch string(raw) {
	case asVFIO:
		return discovery.Parameters{discovery.Driver: discovery.DriverVFIO}, nil
	case asMPS:
		return discovery.Parameters{nvidia.MPS: "true"}, nil
	}
	return nil, fmt.Errorf("no parameters: %s", raw)
}

// specifyFunction adds a random request to a claim of a machine with functions: a function under
// vfio or with its own driver, or the function of the given device.
func (w *World) specifyFunction(claim *resourceapi.ResourceClaim, device *rules.Offered) {
	if len(w.machine.functions) == 0 {
		return
	}
	if w.machine.joins {
		device = nil // a claim cannot select one of several functions
	}
	vfio := w.random.IntN(2) == 0
	expression := `device.attributes["chandler.dev"].kind == "nic"`
	if len(w.machine.allowed.rebind) == 0 {
		vfio = false
	}
	if vfio {
		expression = `device.attributes["chandler.dev"].?vfioDriver.hasValue()`
	}
	if device != nil {
		// The functions of one group go to vfio together, and the last pods want each function.
		oneGroup := strings.Contains(device.Source, ":10.") && w.machine.functions[4].OneGroup
		vfio = device.Passthrough != nil && (device.Passthrough.Only || vfio && !oneGroup)
		expression = fmt.Sprintf(`device.attributes["resource.kubernetes.io"].pciBusID == %q`, addressIn(device.Source))
	}
	claim.Spec.Devices.Requests[0].Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
	if vfio {
		claim.Spec.Devices.Config = configWith(asVFIO)
	}
}

// configWith returns the configuration of a claim with parameters.
func configWith(parameters string) []resourceapi.DeviceClaimConfiguration {
	return []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: discovery.Domain, Parameters: runtime.RawExtension{Raw: []byte(parameters)}},
	}}}
}

// addressIn returns the last PCI address in a path, "" if there is none.
func addressIn(source string) string {
	found := address.FindAllString(source, -1)
	if len(found) == 0 {
		return ""
	}
	return found[len(found)-1]
}

// write changes the host for an agent, and fails if the change is not allowed or takes a function
// from a user.
func (i *incarnation) write(name, value string) error {
	w := i.world
	if i.dead.Load() {
		return errKilled
	}
	if i.hostLimit.Load() > 0 && i.hostLimit.Add(-1) == 0 {
		w.log("%s is killed before it can write %q to %s", i.name, value, name)
		w.countFault("agentKilledChanging")
		i.killAgent()
		return errKilled
	}
	if !w.lock.beginWrite(i) {
		w.fail("%s writes %q to %s without the node's lock", i.name, value, name)
	}
	defer w.lock.endWrite(i)
	w.judgeWrite(name, value)
	latency := w.upTo(200 * time.Millisecond)
	if w.oneChanceIn(20) {
		latency = w.upTo(5 * time.Second)
	}
	err := w.host.Write(name, value, latency)
	w.log("%s wrote %q to %s: %v", i.name, value, name, err)
	return err
}

// judgeWrite fails if the administrator does not allow a write, or if the write takes a function
// from a user.
func (w *World) judgeWrite(name, value string) {
	a := kernel.ParseWrite(name, value)
	may, taken := false, []string{a.Function}
	switch a.Name {
	case "sriov_numvfs":
		may = a.Function == w.machine.allowed.make
		taken = nil
		if value == "0" {
			taken = w.host.VirtualFunctions(a.Function)
		}
	case "reset", "reset_method":
		may = w.isReset()
	default:
		may = slices.Contains(w.machine.allowed.rebind, a.Function)
	}
	if !may {
		w.fail("%q is written to %s, which the administrator does not allow", value, name)
	}
	if a.Name == "driver_override" {
		w.mu.Lock()
		w.touched[a.Function] = time.Now()
		apart := w.apart && !w.wiped
		w.mu.Unlock()
		if apart && a.Function == movable && value == kernel.VFIO {
			w.fail("%s is bound to vfio for devices whose IOMMU group it has left", movable)
		}
	}
	if a.Name == "reset" {
		if w.machine.reassigns && !w.wiped && !w.wasHanded(a.Function) {
			w.fail("%q is written to %s, which no consumer has had", value, name)
		}
		if who := w.openProcess(a.Function); who != "" {
			w.fail("%q is written to %s, and %s", value, name, who)
		}
	}
	if a.Name != "unbind" && a.Name != "sriov_numvfs" && a.Name != "reset" {
		return
	}
	for _, address := range taken {
		if who := w.userOf(address, a.Driver); who != "" {
			w.fail("%q is written to %s, and %s", value, name, who)
		}
		for _, since := range w.host.OpenSince(address) {
			if a.Name != "reset" && w.longOpen(address, since) {
				w.fail("%q is written to %s, and a process has had %s open since %s", value, name, address, since.Format(time.TimeOnly))
			}
		}
	}
}

func (w *World) wasHanded(address string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.handed[address]
}

// userOf returns the container that has a function which is being taken from a driver, "" if there
// is none. A container that got the function under vfio no longer has the function after the
// function was replaced by one under another driver. driver is "" if the driver does not matter.
func (w *World) userOf(address, driver string) string {
	if w.wiped {
		return ""
	}
	for _, u := range w.allUses() {
		if u.device != deviceName(address) || u.open || u.back || u.forgotten {
			continue
		}
		if driver != "" && w.disturbed[address] && u.vfio != (driver == kernel.VFIO) {
			continue
		}
		return u.String()
	}
	return ""
}

// longOpen reports whether an agent that took a function must have seen the function open: the
// agent checks before its first write, and no check is possible right before the second write.
func (w *World) longOpen(address string, since time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	begun, now := w.touched[address], time.Now()
	return since.Before(begun) || now.Sub(begun) > 30*time.Second && since.Before(now)
}

// checkForm returns an error text if the driver of a container's device differs from the driver at
// the allocation.
func (w *World) checkForm(u *use) string {
	address := w.addressOf(u.device)
	if address == "" || w.wiped || u.open || u.back || u.forgotten || w.disturbed[address] {
		return ""
	}
	own := "nvme"
	if strings.Contains(address, ":10.") {
		own = "igbvf"
	}
	if u.vfio {
		own = kernel.VFIO
	}
	if driver, found := w.host.Driver(address); driver != own {
		return fmt.Sprintf("it is to be under %s, and is under %q, there %v", own, driver, found)
	}
	if u.vfio {
		return w.keptFromVFIO(address)
	}
	return ""
}

// keptFromVFIO returns an error text if the host uses a function of the IOMMU group, which makes
// the other functions unusable under vfio. A function that vanished and returned in the meantime
// may be under its own driver.
func (w *World) keptFromVFIO(address string) string {
	for _, member := range w.host.Group(address) {
		if driver, _ := w.host.Driver(member); driver != "" && driver != kernel.VFIO && !w.disturbed[member] {
			return fmt.Sprintf("of its IOMMU group %s is under %s", member, driver)
		}
	}
	return ""
}

// addressOf returns the PCI address of a device, "" on a machine without functions.
func (w *World) addressOf(device string) string {
	if len(w.machine.functions) == 0 {
		return ""
	}
	d := w.machine.devices[device]
	return addressIn(d.Source)
}

// asBefore returns an error text if a function without a user does not have its original state.
func (w *World) asBefore() string {
	if w.wiped {
		return ""
	}
	offered := func(address string) bool {
		d, wanted := w.wantedForm()[deviceName(address)]
		return wanted && w.pluginOnly() && len(d.Offers) > 0
	}
	made := false
	for _, f := range w.machine.functions {
		virtual := w.host.VirtualFunctions(f.Address)
		number := f.Boot
		if f.Address == w.machine.allowed.make && slices.ContainsFunc(w.machine.allowed.rebindableAddresses(), offered) {
			number, made = count, true
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
	dirs := []string{stateDir + "/handover", runDir + "/journal/reclaim", stateDir + "/rebound", stateDir + "/made", runDir + "/journal/rebind", runDir + "/journal/create"}
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
	for _, f := range w.machine.functions {
		if f.Group == of.Group {
			addresses = append(addresses, f.Address)
		}
	}
	return addresses
}

// rebindableAddresses returns the addresses of the virtual functions on demand.
func (a allowed) rebindableAddresses() (addresses []string) {
	for i := range count {
		addresses = append(addresses, fmt.Sprintf("%s10.%d", strings.TrimSuffix(a.make, "00.0"), 2*i))
	}
	return addresses
}
