package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
)

var hostChecks = []check{
	{codes.Host, []string{"CH0409"}, checkProc},
	{codes.Host, []string{"CH0401", "CH0402"}, checkIOMMU},
	{codes.Host, []string{"CH0304"}, checkDrivers},
	{codes.Host, []string{"CH0305"}, checkNodes},
	{codes.Host, []string{"CH0403"}, checkModules},
	{codes.Host, []string{"CH0404"}, checkSELinux},
	{codes.Host, []string{"CH0405"}, checkClock},
	{codes.Host, []string{"CH0406", "CH0407"}, checkSpace},
	{codes.Host, []string{"CH0408"}, checkState},
}

func checkProc(f *Facts, say *report.List) {
	if proc, known := f.Host.Proc.get(); known && !proc {
		say.AddFault("CH0409", "--host-root is not the root directory of a host",
			"The directory has no /proc of a kernel, so its files do not describe this machine.",
			"chandler doctor --host-root=/")
	}
}

// isVFIO reports whether a driver gives functions to user space.
func isVFIO(driver string) bool { return strings.HasPrefix(driver, "vfio") }

// isBridge reports whether a function is a bridge. A bridge with a kernel driver does not
// prevent the use of its group by vfio (vfio_dev_whitelisted in drivers/vfio/vfio_main.c, and
// pcieport's driver_managed_dma since Linux 6.0).
func (f Function) isBridge() bool { return strings.HasPrefix(f.Class, "06") }

func checkIOMMU(f *Facts, say *report.List) {
	functions, known := f.Host.Functions.get()
	if !known {
		say.AddSkipped("the PCI bus: %s", f.Host.Functions.unknownReason())
		return
	}
	groups := make(map[string][]Function)
	for _, function := range functions {
		if function.Group != "" {
			groups[function.Group] = append(groups[function.Group], function)
		}
	}
	switch bound := f.boundToVFIO(); {
	case len(groups) == 0 && len(bound) > 0:
		say.AddFault("CH0401", fmt.Sprintf("the IOMMU is off, but %s bound to vfio", countVerb(len(bound), "function")),
			fmt.Sprintf("%s cannot be used safely: without an IOMMU, the device could access all memory of the host.", report.JoinNames(bound)),
			"cat /proc/cmdline   # requires intel_iommu=on or amd_iommu=on, and VT-d or AMD-Vi on in the firmware", "sudo reboot")
		return
	case len(groups) == 0:
		say.AddOK("no IOMMU groups, and no device needs them")
		return
	}
	before, shared := len(say.Findings), false
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		var theirs, others, fix []string
		for _, function := range groups[name] {
			switch {
			case isVFIO(function.Driver):
				theirs = append(theirs, function.Address)
			case function.Driver != "" && !function.isBridge():
				at := function.Address
				others = append(others, at+" ("+function.Driver+")")
				fix = append(fix, fmt.Sprintf(`sudo sh -c "echo vfio-pci > /sys/bus/pci/devices/%s/driver_override; echo %s > /sys/bus/pci/devices/%s/driver/unbind; echo %s > /sys/bus/pci/drivers_probe"`, at, at, at, at))
			}
		}
		if len(theirs) == 0 || len(others) == 0 {
			continue
		}
		if slices.ContainsFunc(groups[name], f.blocksDevice) { // the finding of that device suffices
			shared = true
			continue
		}
		say.AddFault("CH0402", fmt.Sprintf("IOMMU group %s has both vfio functions and functions of the host", name),
			fmt.Sprintf("%s is bound to vfio, and %s in the same group to a driver of the host. The kernel opens a group only if no function of it has a driver of the host.", report.JoinNames(theirs), report.JoinNames(others)), fix...)
	}
	if say.NoFaultSince(before) && !shared {
		say.AddOK("the IOMMU is on: %s, none with both vfio functions and functions of the host", report.CountNoun(len(groups), "group"))
	}
}

func countVerb(n int, noun string) string {
	if n == 1 {
		return "1 " + noun + " is"
	}
	return fmt.Sprintf("%d %ss are", n, noun)
}

// accelerates are the prefixes of accelerators' PCI classes: 3D controllers, processing
// accelerators and co-processors (PCI Code and ID Assignment Specification, 1.1). VGA
// controllers are left out, since every server has one for its console.
var accelerates = []string{"0302", "12", "0b40"}

// lacksDriver reports whether a device has no driver, which checkHealth reports.
func (f *Facts) lacksDriver() bool {
	snapshot, known := f.Devices.Snapshot.get()
	return known && slices.ContainsFunc(snapshot.Devices, func(d rules.Offered) bool { return d.Health.Key() == discovery.ConditionDriverUnbound })
}

// checkDrivers reports accelerators without a driver that no family describes.
func checkDrivers(f *Facts, say *report.List) {
	functions, known := f.Host.Functions.get()
	if !known {
		return
	}
	before, accelerators, lacksOther := len(say.Findings), 0, false
	byOverride := make(map[string][]Function)
	for _, function := range functions {
		accelerator := slices.ContainsFunc(accelerates, func(class string) bool { return strings.HasPrefix(function.Class, class) })
		if f.hasDevice(function.Address) {
			accelerators++
		}
		if !accelerator || function.Virtual || function.Driver != "" || f.hasDevice(function.Address) {
			continue
		}
		if f.blocksDevice(function) { // the finding of that device suffices
			lacksOther = true
			continue
		}
		byOverride[function.Override] = append(byOverride[function.Override], function)
	}
	for _, override := range slices.Sorted(maps.Keys(byOverride)) {
		reportUnbound(say, byOverride[override], override)
	}
	if say.NoFaultSince(before) && accelerators > 0 && !f.lacksDriver() && !lacksOther {
		say.AddOK("every accelerator has a kernel driver")
	}
}

// reportUnbound reports functions without a driver that have the same driver_override, or none.
func reportUnbound(say *report.List, functions []Function, override string) {
	var names, addresses []string
	var fixes [][]string
	for _, function := range functions {
		at := function.Address
		names = append(names, fmt.Sprintf("%s %s:%s", strings.TrimPrefix(at, "0000:"), function.Vendor, function.Device))
		addresses = append(addresses, at)
		fix := []string{fmt.Sprintf(`sudo modprobe "$(cat /sys/bus/pci/devices/%s/modalias)"`, at)}
		if override != "" {
			fix = []string{"sudo modprobe " + override, fmt.Sprintf(`sudo sh -c "echo %s > /sys/bus/pci/drivers_probe"`, at)}
		}
		fixes = append(fixes, fix)
	}
	text, devices := names[0]+" has no kernel driver", "The device"
	if len(names) > 1 {
		text, devices = report.CountNoun(len(names), "accelerator")+" have no kernel driver", "The devices "+report.JoinNames(names)
	}
	cause := "No module with a driver for the device is loaded."
	if override != "" {
		cause = fmt.Sprintf("The driver_override is %s, but this driver is not bound.", override)
	}
	say.AddFault("CH0304", text, cause+" "+devices+" cannot be allocated.", inLoop(addresses, fixes)...)
}

// hasDevice reports whether discovery found a device at a PCI address.
func (f *Facts) hasDevice(at string) bool {
	found := f.Devices.Found
	return found != nil && slices.ContainsFunc(found.Devices, func(d discovery.Device) bool { return pciAddress(&d) == at })
}

// blocksDevice reports whether the driver of a PCI function makes a device unusable that is on another
// function, such as the other function of the same chip.
func (f *Facts) blocksDevice(function Function) bool {
	snapshot, known := f.Devices.Snapshot.get()
	return known && slices.ContainsFunc(snapshot.Devices, func(d rules.Offered) bool { return d.Health.OtherFunction == function.Address })
}

// checkNodes reports success if all device nodes exist. checkHealth reports missing nodes, and nodes
// with unknown numbers. A recording or a copy may have files in place of the nodes.
func checkNodes(f *Facts, say *report.List) {
	snapshot, known := f.Devices.Snapshot.get()
	if !known {
		return
	}
	nodes := 0
	for i := range snapshot.Devices {
		if key := snapshot.Devices[i].Health.Key(); key == discovery.ConditionNodeMissing || key == discovery.ConditionUnknown {
			return
		}
		nodes += len(snapshot.Devices[i].Edits.DeviceNodes)
	}
	switch {
	case nodes == 0:
	case f.Source != "":
		say.AddOK("every device node exists")
	default:
		say.AddOK("every device node exists with the kernel's numbers")
	}
}

func checkModules(f *Facts, say *report.List) {
	if f.Host.Modules == nil {
		say.AddSkipped("the kernel modules: /sys/module cannot be read")
		return
	}
	functions, _ := f.Host.Functions.get()
	before, overrides := len(say.Findings), 0
	wanted := make(map[string][]string)
	for _, function := range functions {
		if function.Override != "" {
			overrides++
		}
		if function.Override != "" && function.Driver == "" && !f.Host.Modules[strings.ReplaceAll(function.Override, "-", "_")] {
			wanted[function.Override] = append(wanted[function.Override], function.Address)
		}
	}
	for _, driver := range slices.Sorted(maps.Keys(wanted)) {
		say.AddFault("CH0403", fmt.Sprintf("the module %s is not loaded", driver),
			fmt.Sprintf("The driver_override of %s names this module. A device without a driver cannot be allocated.", report.JoinNames(wanted[driver])),
			"sudo modprobe "+driver, fmt.Sprintf("echo %s | sudo tee /etc/modules-load.d/%s.conf", driver, driver))
	}
	if f.Host.Virtual && !f.Host.Modules["kvm"] {
		say.AddFault("CH0403", "the module kvm is not loaded",
			"The processors support virtualization, but /dev/kvm is missing.",
			"sudo modprobe kvm_intel || sudo modprobe kvm_amd")
	}
	if say.NoFaultSince(before) && overrides > 0 {
		say.AddOK("every driver that a driver_override names is bound or has its module loaded")
	}
}

func checkSELinux(f *Facts, say *report.List) {
	linux, known := f.Host.SELinux.get()
	switch {
	case !known:
		return
	case !linux.Enforcing:
		say.AddOK("SELinux is off or permissive")
	case linux.Agent == "":
		say.AddSkipped("SELinux is enforcing, but the type of the agent cannot be read")
	case isConfined(linux.Agent):
		say.AddFault("CH0404", "SELinux blocks the agent",
			fmt.Sprintf("The agent runs as %s. This type must not connect to the kubelet's sockets or write to its directories.", linux.Agent),
			codes.HelmSet+" --set seLinux.type=container_device_plugin_t", codes.SELinuxPatch+"   # with the plain manifests",
			"sudo ausearch -m avc -ts recent")
	default:
		say.AddOK("SELinux is enforcing, and the agent runs as %s", linux.Agent)
	}
}

// isConfined reports whether an SELinux context has the type of ordinary containers.
func isConfined(context string) bool {
	fields := strings.Split(context, ":")
	return len(fields) > 2 && (fields[2] == "container_t" || fields[2] == "svirt_lxc_net_t")
}

// maxSkew is the largest accepted difference between two clocks. The kubelet renews its lease
// every ten seconds, and certificates and tokens are valid from their time of creation.
const maxSkew = 30 * time.Second

func checkClock(f *Facts, say *report.List) {
	skew, known := f.Host.Skew.get()
	if !known {
		return
	}
	if skew.Abs() <= maxSkew {
		say.AddOK("the clock matches the API server's")
		return
	}
	direction := "ahead of"
	if skew < 0 {
		direction = "behind"
	}
	say.AddFault("CH0405", fmt.Sprintf("the clock is %s %s the API server's", skew.Abs().Round(time.Second), direction),
		"Certificates and tokens may appear to be expired or not yet valid, and the times of device faults are wrong.",
		"timedatectl status", "sudo systemctl restart systemd-timesyncd || sudo systemctl restart chronyd")
}

const (
	leastFree   = 64 << 20 // bytes for records and specs
	leastInodes = 1000
)

func (s Space) isFull() bool      { return s.Free < leastFree }
func (s Space) lacksInodes() bool { return s.Inodes > 0 && s.INFree < leastInodes }

// fullDisk returns the code for a full file system of records or specs, and a directory on it. It
// returns "" if all file systems have free space, or if the free space is unknown.
func (f *Facts) fullDisk() (code, dir string) {
	spaces, _ := f.Host.Space.get()
	for _, s := range spaces {
		switch {
		case s.isFull():
			return "CH0406", s.Path
		case s.lacksInodes():
			return "CH0407", s.Path
		}
	}
	return "", ""
}

func checkSpace(f *Facts, say *report.List) {
	spaces, known := f.Host.Space.get()
	if !known {
		return
	}
	before := len(say.Findings)
	for _, s := range spaces {
		if s.isFull() {
			say.AddFault("CH0406", fmt.Sprintf("the disk with %[2]s has %[1]d MiB of free space", s.Free>>20, s.Path),
				"The agent records each allocation before it allocates a device. With a full disk, no claim is prepared and no device is allocated.",
				"df -h "+s.Path, "sudo journalctl --vacuum-size=200M", "sudo crictl rmi --prune")
		}
		if s.lacksInodes() {
			say.AddFault("CH0407", fmt.Sprintf("the disk with %[2]s has %[1]d free inodes", s.INFree, s.Path),
				"No files can be created there, whatever space is free.",
				"df -i "+s.Path, "sudo du --inodes -xd1 / | sort -n | tail", "sudo crictl rmi --prune")
		}
	}
	if say.NoFaultSince(before) && len(spaces) > 0 {
		say.AddOK("the disk has free space for records and CDI specs")
	}
}

func checkState(f *Facts, say *report.List) {
	why, known := f.Host.State.get()
	if !known || why == "" {
		return
	}
	say.AddFault("CH0408", "the agent's directory is not writable", asSentence(why)+" No claim can be prepared.",
		fmt.Sprintf("findmnt -T %s", f.Kubelet.Root), fmt.Sprintf("sudo mount -o remount,rw $(findmnt -no TARGET -T %s)", f.Kubelet.Root))
}
