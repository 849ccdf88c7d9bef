package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"syscall"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
	"chandler.dev/internal/pattern"
)

var deviceChecks = []check{
	{codes.Devices, []string{
		"CH0301", "CH0302", "CH0303", "CH0304", "CH0305", "CH0306", "CH0307", "CH0308", "CH0314",
	}, checkHealth},
	{codes.Devices, []string{"CH0309", "CH0310", "CH0311", "CH0312"}, checkProblems},
	{codes.Devices, []string{"CH0315"}, checkExpressions},
	{codes.Devices, []string{"CH0313"}, checkOffered},
}

// checkHealth reports each unhealthy device.
func checkHealth(f *Facts, say *report.List) {
	snapshot, known := f.Devices.Snapshot.get()
	if !known {
		say.AddFault("CH0310", "the devices of the host cannot be read", f.Devices.Snapshot.unknownReason(), "sudo dmesg | tail -n 50   # shows the kernel's messages")
		return
	}
	families := make(map[string]bool)
	for i := range snapshot.Devices {
		families[snapshot.Devices[i].Family] = true
	}
	switch {
	case len(snapshot.Devices) > 0:
		say.AddOK("%s of %s", report.CountNoun(len(snapshot.Devices), "device"), report.CountNoun(len(families), "family"))
	case f.busProblem() && f.Host.Functions.Unknown != "":
		say.AddFault("CH0310", "the devices of the host cannot be read", asSentence(f.Host.Functions.unknownReason())+" No PCI device is found.",
			"ls "+path.Join("/", f.HostRoot, pciBus)+"   # this path must be in the /sys of a host")
	case f.busProblem():
		say.AddOK("no accelerators outside of the PCI bus")
	default:
		say.AddOK("no accelerators")
	}
	parts := make(map[ailing][]*discovery.Device)
	var order []ailing
	for i := range snapshot.Devices {
		d := &snapshot.Devices[i].Device
		if key := d.Health.Key(); key != "" {
			a := ailing{d.Silicon(), key, d.Health.Reason}
			if parts[a] == nil {
				order = append(order, a)
			}
			parts[a] = append(parts[a], d)
		}
	}
	alike := make(map[together][]*discovery.Device) // the first device of each physical device
	for _, a := range order {
		if g := f.togetherOf(parts[a]); g.key != "" && !f.Devices.Recovered[parts[a][0].Name] {
			alike[g] = append(alike[g], parts[a][0])
		}
	}
	for _, a := range order {
		first := parts[a][0]
		switch all := alike[f.togetherOf(parts[a])]; {
		case f.Devices.Recovered[first.Name]:
			f.reportSettling(say, first)
		case len(all) < 2:
			f.reportUnhealthy(say, first, first.Health, parts[a][1:]...)
		case all[0] == first:
			f.sickTogether(say, all)
		}
	}
	for name, health := range snapshot.Gone {
		if holders := f.Devices.Holders[name]; len(holders) > 0 {
			f.reportUnhealthy(say, &discovery.Device{Name: name, Family: "device"}, health)
		}
	}
}

// pciBus is the directory of the PCI bus, and the name of a problem with the list of its devices.
const pciBus = "/sys/bus/pci"

// busProblem reports whether the devices of the PCI bus cannot be listed.
func (f *Facts) busProblem() bool {
	snapshot, known := f.Devices.Snapshot.get()
	return known && slices.ContainsFunc(snapshot.Problems, func(p discovery.Problem) bool { return p.Device == pciBus })
}

// ailing identifies a fault of a physical device. All its partitions have the fault, which is
// reported once.
type ailing struct {
	silicon string
	key     discovery.Condition
	reason  string
}

// together identifies a fault that several devices of a family usually have for one cause,
// such as a missing module or missing device nodes.
type together struct {
	family string
	key    discovery.Condition
	reason string // "" for a missing driver or node, whatever the reason
}

// togetherOf returns the key under which physical devices are reported together. The key is
// zero for a physical device with a report of its own.
func (f *Facts) togetherOf(parts []*discovery.Device) together {
	if len(parts) > 1 {
		return together{}
	}
	t := together{parts[0].Family, parts[0].Health.Key(), parts[0].Health.Reason}
	if t.key == discovery.ConditionDriverUnbound || t.key == discovery.ConditionNodeMissing && !f.hasProblem(parts[0].Name, pci.ErrVFIO) {
		t.reason = ""
	}
	return t
}

// manyTexts are the texts of conditionTexts for several devices.
var manyTexts = map[discovery.Condition]string{
	discovery.ConditionUnhealthy:       "are unhealthy",
	discovery.ConditionUnknown:         "cannot be read",
	discovery.ConditionGone:            "are missing",
	discovery.ConditionDriverUnbound:   "have no kernel driver",
	discovery.ConditionNodeMissing:     "lack a device node",
	discovery.ConditionOverTemperature: "are too hot",
	discovery.ConditionLinkDegraded:    "have a degraded PCIe link",
	discovery.ConditionFatalErrors:     "have had fatal PCIe errors",
	discovery.ConditionNotResponding:   "do not respond on the bus",
}

// sickTogether reports several devices of a family with the same fault.
func (f *Facts) sickTogether(say *report.List, all []*discovery.Device) {
	key := all[0].Health.Key()
	reasons := make(map[string]bool)
	usable := false
	var each, fix []string
	for _, d := range all {
		reasons[d.Health.Reason] = true
		usable = usable || d.Health.IsUsable()
		each = append(each, fmt.Sprintf("%s (%s)", d.Name, d.Health.Reason))
		for _, h := range f.Devices.Holders[d.Name] {
			if line := deleteFix(&h, key); line != "" && !slices.Contains(fix, line) {
				fix = append(fix, line)
			}
		}
	}
	cause := strings.Join(each, ", ") + "."
	if len(reasons) == 1 {
		cause = asSentence(all[0].Health.Reason) + fmt.Sprintf(" The devices are %s.", namesOf(all))
		if key == discovery.ConditionDriverUnbound {
			cause = fmt.Sprintf("No driver is bound to %s.", namesOf(all))
		}
	}
	cause += f.missingNodes(key, all[0])
	if !usable {
		cause += " No new pod gets these devices."
	}
	say.AddFault(codes.CodeOf(key), fmt.Sprintf("%s of %s %s%s", report.CountNoun(len(all), "device"), all[0].Family, manyTexts[key], lastingText(all[0].Health.Since.Time, f.Time)), cause, append(fix, f.fixTogether(key, all)...)...)
}

// deleteFix returns the command that deletes the pod of a consumer, "" if that does not help.
func deleteFix(h *Holder, key discovery.Condition) string {
	if h.Pod == "" || key == discovery.ConditionLinkDegraded || key == discovery.ConditionFatalErrors {
		return ""
	}
	return fmt.Sprintf("kubectl -n %s delete pod %s   # once the pod may end", h.Namespace, h.Pod)
}

// fixTogether returns the commands that repair a condition of several devices: a loop if they differ
// only by the PCI address.
func (f *Facts) fixTogether(key discovery.Condition, all []*discovery.Device) []string {
	var addresses []string
	var fixes [][]string
	for _, d := range all {
		addresses = append(addresses, pciAddress(d))
		fixes = append(fixes, f.conditionFix(key, d))
	}
	return inLoop(addresses, fixes)
}

// inLoop joins the commands for several PCI functions. Commands that differ only by the address are
// in a loop, and commands without an address precede it.
func inLoop(addresses []string, fixes [][]string) (fix []string) {
	const inside = "$a"
	alike := make(map[string][]int) // indexes, by commands with $a instead of the address
	var order []string
	for i, lines := range fixes {
		body := strings.Join(lines, "\n")
		if addresses[i] != "" {
			body = strings.ReplaceAll(body, addresses[i], inside)
		}
		if alike[body] == nil {
			order = append(order, body)
		}
		alike[body] = append(alike[body], i)
	}
	add := func(line string) {
		if !slices.Contains(fix, line) {
			fix = append(fix, line)
		}
	}
	for _, body := range order {
		var loop, of []string
		for _, i := range alike[body] {
			of = append(of, addresses[i])
		}
		lines := strings.Split(body, "\n")
		if len(of) < 2 {
			lines = fixes[alike[body][0]]
		}
		for _, line := range lines {
			if len(of) > 1 && strings.Contains(line, inside) {
				loop = append(loop, "  "+line)
			} else {
				add(line)
			}
		}
		if len(loop) > 0 {
			fix = slices.Concat(fix, []string{"for a in " + strings.Join(of, " ") + "; do"}, loop, []string{"done"})
		}
	}
	return fix
}

// reportSettling reports a device that has recovered but must stay healthy before it is allocated
// again.
func (f *Facts) reportSettling(say *report.List, d *discovery.Device) {
	say.AddFault(codes.CodeOf(d.Health.Key()), f.title(d)+" has recovered, and is allocated again after a delay",
		fmt.Sprintf("The fault has ended: %s A device must stay healthy for 10 seconds, and for up to 5 minutes if it fails repeatedly.", asSentence(d.Health.Reason)),
		"chandler doctor --only devices --wait 60s   # waits for the end of the delay")
}

// conditionTexts describe conditions. The name of a device precedes the text.
var conditionTexts = map[discovery.Condition]string{
	discovery.ConditionUnhealthy:       "is unhealthy",
	discovery.ConditionUnknown:         "cannot be read",
	discovery.ConditionGone:            "is missing",
	discovery.ConditionDriverUnbound:   "has no kernel driver",
	discovery.ConditionNodeMissing:     "lacks a device node",
	discovery.ConditionOverTemperature: "is too hot",
	discovery.ConditionLinkDegraded:    "has a degraded PCIe link",
	discovery.ConditionFatalErrors:     "has had fatal PCIe errors",
	discovery.ConditionNotResponding:   "does not respond on the bus",
}

// reportUnhealthy reports an unhealthy device, and others of the same physical device with the same
// fault.
func (f *Facts) reportUnhealthy(say *report.List, d *discovery.Device, health discovery.Health, others ...*discovery.Device) {
	key := health.Key()
	what, cause := conditionTexts[key], asSentence(health.Reason)
	if health.Resetting {
		what = "is being reset"
	}
	text := fmt.Sprintf("%s %s%s", f.title(d), what, lastingText(health.Since.Time, f.Time))
	holders := slices.Clone(f.Devices.Holders[d.Name])
	for _, other := range others {
		holders = append(holders, f.Devices.Holders[other.Name]...)
	}
	if len(others) > 0 {
		cause += fmt.Sprintf(" The same applies to %s: %s.", report.CountNoun(len(others), "device"), namesOf(others))
	}
	var names, fix []string
	for _, h := range holders {
		names = append(names, h.String())
		if line := deleteFix(&h, key); line != "" {
			fix = append(fix, line)
		}
	}
	cause += f.missingNodes(key, d)
	if len(names) > 0 {
		cause += fmt.Sprintf(" In use by %s.", report.JoinNames(names))
	}
	if health.IsUsable() {
		cause += " The device is still allocated."
	} else {
		cause += " No new pod gets the device."
	}
	say.AddFault(codes.CodeOf(key), text, cause, append(fix, f.conditionFix(key, d)...)...)
}

// missingNodes returns a sentence about the missing nodes that all devices of the family share, if
// a node of the device itself is missing. The same command creates both kinds of nodes.
func (f *Facts) missingNodes(key discovery.Condition, d *discovery.Device) string {
	others := slices.DeleteFunc(slices.Clone(f.Devices.MissingNodes[d.Family]), func(node string) bool { return node == d.Health.MissingNode })
	if key != discovery.ConditionNodeMissing || len(others) == 0 {
		return ""
	}
	return fmt.Sprintf(" Of the nodes that these devices share, %s %s missing too.", report.JoinNames(others), isAre(len(others)))
}

// namesOf lists the names of devices.
func namesOf(devices []*discovery.Device) string {
	var names []string
	for _, d := range devices {
		names = append(names, d.Name)
	}
	return report.JoinNames(names)
}

// conditionFix returns the commands that repair a condition.
func (f *Facts) conditionFix(key discovery.Condition, d *discovery.Device) []string {
	switch {
	case d.Health.Resetting:
		return []string{"chandler doctor --only devices --wait 60s   # the driver resets the device; if the reset does not end, read the kernel's messages"}
	case d.Health.Fix != "":
		return []string{d.Health.Fix}
	}
	if d.Health.Setting != "" {
		return codes.ConfigFixes(d.Health.Setting)
	}
	at := pciAddress(d)
	if f.hasProblem(d.Name, pci.ErrNoVFIOControl) {
		return []string{"sudo modprobe -a vfio iommufd", "grep -e VFIO -e IOMMUFD /boot/config-$(uname -r)   # the kernel requires CONFIG_VFIO_CONTAINER or CONFIG_IOMMUFD"}
	}
	if key == discovery.ConditionNodeMissing && f.hasProblem(d.Name, pci.ErrVFIO) {
		return f.vfioFix(f.hasProblem(d.Name, pci.ErrNoIOMMUGroup), at)
	}
	if makeNodes := f.Devices.MakeNodes[d.Family]; key == discovery.ConditionNodeMissing && (at == "" || makeNodes != "" || hasOwnNode(d)) {
		return []string{cmp.Or(makeNodes, "sudo udevadm trigger --action=add   # creates device nodes again")}
	}
	if at == "" {
		return []string{"sudo dmesg | tail -n 50" + noRepair}
	}
	kernel := fmt.Sprintf("sudo dmesg | grep %s   # shows the kernel's messages", at)
	rescan := []string{
		fmt.Sprintf(`sudo sh -c "echo 1 > /sys/bus/pci/devices/%s/remove"`, at),
		`sudo sh -c "echo 1 > /sys/bus/pci/rescan"   # if this does not help, reseat the card`,
	}
	switch key {
	case discovery.ConditionLinkDegraded:
		return rescan
	case discovery.ConditionNodeMissing: // the driver has created none, so udev cannot either
		return []string{kernel, fmt.Sprintf(`sudo sh -c "echo %s > /sys/bus/pci/devices/%s/driver/unbind; echo %s > /sys/bus/pci/drivers_probe"`, at, at, at)}
	case discovery.ConditionDriverUnbound:
		return []string{
			fmt.Sprintf("sudo modprobe \"$(cat /sys/bus/pci/devices/%s/modalias)\"", at),
			fmt.Sprintf("sudo sh -c \"echo %s > /sys/bus/pci/drivers_probe\"", at),
		}
	case discovery.ConditionOverTemperature:
		return []string{fmt.Sprintf("grep . /sys/bus/pci/devices/%s/hwmon/hwmon*/temp*_input   # then check fans and air flow", at)}
	case discovery.ConditionUnhealthy, discovery.ConditionUnknown:
		// A reset neither creates a file nor changes a text that the driver writes.
		if function := f.failedFunction(d.Name); function != "" && function != at { // such as the physical function
			at, kernel = function, fmt.Sprintf("sudo dmesg | grep %s   # shows the kernel's messages", function)
		} else if isPart(d) || key == discovery.ConditionUnknown && !f.hasProblem(d.Name, syscall.EIO) {
			break
		}
		return []string{kernel, fmt.Sprintf(`sudo sh -c "echo 1 > /sys/bus/pci/devices/%s/reset"`, at)}
	}
	return []string{"sudo dmesg | grep " + at + noRepair}
}

// noRepair is the remark for a command that shows what is wrong, if no command is known to repair it.
const noRepair = "   # shows the kernel's messages; no command is known to repair this"

// hasOwnNode reports whether the kernel has a device node for a device alone.
func hasOwnNode(d *discovery.Device) bool {
	return slices.ContainsFunc(d.Edits.DeviceNodes, func(node *specs.DeviceNode) bool { return !slices.Contains(d.CommonNodes, node.HostPath) })
}

// hasProblem reports whether a device has a problem with an error.
func (f *Facts) hasProblem(device string, err error) bool {
	snapshot, known := f.Devices.Snapshot.get()
	return known && slices.ContainsFunc(snapshot.Problems, func(p discovery.Problem) bool { return p.Device == device && errors.Is(p.Err, err) })
}

// failedFunction returns the address of the PCI function with the file whose read failed with an
// input/output error, or "".
func (f *Facts) failedFunction(device string) string {
	snapshot, _ := f.Devices.Snapshot.get()
	if snapshot == nil {
		return ""
	}
	for _, p := range snapshot.Problems {
		var file *fs.PathError
		if p.Device == device && errors.Is(p.Err, syscall.EIO) && errors.As(p.Err, &file) {
			if function, found := sysfs.At(nil, strings.TrimPrefix(file.Path, "/")).PCIFunction(); found {
				return function.Name()
			}
		}
	}
	return ""
}

// isPart reports whether a device is one of several on its PCI function, such as a MIG
// instance. A reset of the function would affect the others.
func isPart(d *discovery.Device) bool {
	return d.PartOf != nil && d.Name != d.PartOf.Name && d.Attributes.String("function") != "virtual"
}

// asSentence returns a reason as a sentence, with a full stop. The text of an error, which begins with a
// step or the name of an object and a colon, keeps its first letter.
func asSentence(reason string) string {
	reason = strings.ReplaceAll(strings.TrimSpace(reason), "\n", "; ")
	if word, _, several := strings.Cut(reason, " "); several && strings.Trim(word, lowerLetters) == "" && !errorText().MatchString(reason) {
		reason = strings.ToUpper(reason[:1]) + reason[1:]
	}
	if reason == "" || strings.HasSuffix(reason, ".") {
		return reason
	}
	return reason + "."
}

// errorText matches the beginning of an error's text: "read /sys/a: ", "attribute vendor: ", "vfio: ".
var errorText = pattern.Lazy(`^\S+: |^(attribute|default|describe|device|group|interface|link|list|management|mediated|open|physical|no such|read|stat) .*?: `)

const lowerLetters = "abcdefghijklmnopqrstuvwxyz"

// checkProblems reports devices of the host that could not be read or described.
func checkProblems(f *Facts, say *report.List) {
	snapshot, known := f.Devices.Snapshot.get()
	if !known {
		return
	}
	before := len(say.Findings)
	seen := make(map[string]bool)
	for _, p := range snapshot.Problems {
		if _, only := expressionErrors(p.Err); only {
			continue // checkExpressions reports the cause, which is not the device
		}
		if p.Device == pciBus && f.Host.Functions.Unknown != "" && len(snapshot.Devices) == 0 {
			continue // checkHealth has already reported the bus
		}
		d, offered := snapshot.Lookup(p.Device)
		if offered && (d.Health.Key() == discovery.ConditionUnknown || strings.Contains(d.Health.Reason, p.Text())) || seen[p.Device] {
			continue // checkHealth has already reported the device
		}
		seen[p.Device] = true
		f.reportProblem(say, p, &d, offered)
	}
	if say.NoFaultSince(before) && len(snapshot.Problems) == 0 {
		say.AddOK("all facts about the devices could be read")
	}
}

func (f *Facts) reportProblem(say *report.List, p discovery.Problem, d *rules.Offered, offered bool) {
	name, causes := p.Device, strings.Split(p.Text(), "\n")
	if offered {
		name = f.title(&d.Device)
		reported := strings.Split(d.Health.Reason, "\n") // by checkHealth
		causes = slices.DeleteFunc(causes, func(cause string) bool { return slices.Contains(reported, cause) })
	}
	reason := strings.Join(causes, "; ")
	at := functionOf(p.Device)
	look := f.examineFix(at)
	switch {
	case errors.Is(p.Err, discovery.ErrHangs):
		fix := []string{"sudo dmesg | tail -n 50"}
		if at != "" {
			fix = []string{fmt.Sprintf("sudo dmesg | grep %s", at), fmt.Sprintf(`sudo sh -c "echo 1 > /sys/bus/pci/devices/%s/reset"   # if this does not help, reboot`, at)}
		}
		say.AddFault("CH0310", name+" hangs", "A read of the device hangs in the kernel: "+asSentence(reason)+" Chandler does not access it, so that other devices are not affected.", fix...)
	case errors.Is(p.Err, discovery.ErrNotUnique):
		say.AddFault("CH0311", name+": the identity is not unique", asSentence(reason), look...)
	case errors.Is(p.Err, pci.ErrVFIO) && !offered:
		say.AddFault("CH0312", name+" is bound to vfio but cannot be opened", asSentence(reason)+" Chandler does not offer it.", f.vfioFix(errors.Is(p.Err, pci.ErrNoIOMMUGroup), at)...)
	case !p.IsUnread():
		say.AddFault("CH0309", p.Setting+" has no effect on "+name, asSentence(reason), look...)
	case offered && !d.Health.IsUsable(): // checkHealth has reported that no new pod gets the device
		say.AddFault("CH0309", name+" cannot be read completely", asSentence(reason), look...)
	case offered:
		say.AddFault("CH0309", name+" cannot be read completely", asSentence(reason)+" It is offered without these facts.", look...)
	case strings.HasPrefix(p.Device, "/"):
		say.AddFault("CH0309", name+" cannot be read", asSentence(reason)+" Devices in this directory are not found.", look...)
	default:
		say.AddFault("CH0309", name+" cannot be described", asSentence(reason)+" Chandler does not offer it.", look...)
	}
}

// examineFix returns commands for a problem that no command is known to repair. The file for a report
// about a host recording is the recording itself.
func (f *Facts) examineFix(at string) []string {
	if at != "" {
		return []string{"sudo dmesg | grep " + at + noRepair}
	}
	fix := []string{"sudo dmesg | tail -n 50" + noRepair}
	const options = " -o node.host   # records the files that discovery reads, for a report"
	switch f.Source {
	case report.Recording:
	case report.Copy:
		fix = append(fix, "chandler record --host-root="+f.HostRoot+options)
	default:
		fix = append(fix, "chandler record"+options)
	}
	return fix
}

// vfioFix returns the commands for a function that is bound to vfio and cannot be opened. ungrouped
// is set for a function without an IOMMU group.
func (f *Facts) vfioFix(ungrouped bool, at string) []string {
	switch {
	case ungrouped && f.hasIOMMUGroups():
		return []string{"sudo dmesg | grep -i -e dmar -e ivrs -e iommu   # the IOMMU is on, but not for this device: look for faults in the tables of the firmware, which only an update of the firmware repairs"}
	case ungrouped && len(f.boundToVFIO()) > 0: // checkIOMMU prints the commands
		return []string{"chandler explain CH0401   # the IOMMU is off"}
	case ungrouped:
		return []string{"cat /proc/cmdline   # requires intel_iommu=on or amd_iommu=on, and VT-d or AMD-Vi on in the firmware", "sudo reboot"}
	}
	if slices.Contains(f.boundToVFIO(), at) { // the module is loaded
		return []string{
			"grep -e CONFIG_VFIO_GROUP -e CONFIG_VFIO_DEVICE_CDEV /boot/config-$(uname -r)   # the kernel requires one of these settings",
			fmt.Sprintf("ls /sys/class/vfio /sys/bus/pci/devices/%s/vfio-dev   # the kernel's names of the missing nodes", at),
		}
	}
	fix := []string{"sudo modprobe vfio-pci", "ls -l /dev/vfio /dev/vfio/devices /dev/iommu"}
	if at != "" {
		fix = append(fix, fmt.Sprintf("ls /sys/bus/pci/devices/%s/vfio-dev", at))
	}
	return fix
}

// hasIOMMUGroups reports whether the kernel uses an IOMMU, for any function.
func (f *Facts) hasIOMMUGroups() bool {
	functions, known := f.Host.Functions.get()
	return known && slices.ContainsFunc(functions, func(function Function) bool { return function.Group != "" })
}

// boundToVFIO returns the addresses of the functions that are bound to a vfio driver.
func (f *Facts) boundToVFIO() (bound []string) {
	functions, _ := f.Host.Functions.get()
	for _, function := range functions {
		if isVFIO(function.Driver) {
			bound = append(bound, function.Address)
		}
	}
	return bound
}

// functionOf returns the PCI address at the beginning of a device's name, or "".
func functionOf(name string) string {
	parts := strings.SplitN(strings.TrimPrefix(name, "pci-"), "-", 5)
	if !strings.HasPrefix(name, "pci-") || len(parts) < 4 {
		return ""
	}
	return fmt.Sprintf("%s:%s:%s.%s", parts[0], parts[1], parts[2], parts[3])
}

// checkExpressions reports each expression of the configuration that cannot be evaluated, once for all
// devices with the same error.
func checkExpressions(f *Facts, say *report.List) {
	snapshot, _ := f.Devices.Snapshot.get()
	if snapshot == nil {
		return
	}
	var failures []*rules.ExpressionError
	devices := make(map[string][]string)
	for _, p := range snapshot.Problems {
		failed, _ := expressionErrors(p.Err)
		for _, e := range failed {
			if devices[e.Error()] == nil {
				failures = append(failures, e)
			}
			devices[e.Error()] = append(devices[e.Error()], e.Device)
		}
	}
	for _, e := range failures {
		names := devices[e.Error()]
		say.AddFault("CH0315", fmt.Sprintf("%s fails for %s", e.Entry, report.CountNoun(len(names), "device")),
			fmt.Sprintf("The expression %s has the error: %s The entry does not apply to %s.", e.Expression, asSentence(oneLine(e.Err)), report.JoinNames(names)),
			codes.ConfigFixes("correct "+e.Entry+", for example with .?NAME.orValue(DEFAULT) for an attribute that some devices lack")...)
	}
}

// expressionErrors returns the errors of the configuration's expressions in an error, and whether the
// error has no other causes.
func expressionErrors(err error) (failed []*rules.ExpressionError, only bool) {
	causes := []error{err}
	if joined, is := errors.AsType[interface {
		error
		Unwrap() []error
	}](err); is {
		causes = joined.Unwrap()
	}
	for _, cause := range causes {
		if e, is := errors.AsType[*rules.ExpressionError](cause); is {
			failed = append(failed, e)
		}
	}
	return failed, len(failed) == len(causes)
}

// checkOffered reports discovered devices if the configuration excludes all of them.
func checkOffered(f *Facts, say *report.List) {
	snapshot, known := f.Devices.Snapshot.get()
	if !known || f.Devices.Found == nil {
		return
	}
	var left []string
	for i := range f.Devices.Found.Devices {
		d := &f.Devices.Found.Devices[i]
		if _, offered := snapshot.Lookup(d.Name); !offered && !named(d) {
			left = append(left, f.title(d))
		}
	}
	slices.Sort(left)
	if len(left) > 0 && len(snapshot.Devices) == 0 {
		say.AddFault("CH0313", fmt.Sprintf("the configuration excludes all devices: %s", report.CountNoun(len(left), "device")),
			"Without its entries exclude and resources, the node would offer "+report.JoinNames(left)+".",
			"kubectl -n chandler get configmap chandler -o yaml")
	}
}

// named reports whether a device exists only if the configuration names it.
func named(d *discovery.Device) bool { return d.OptIn || d.FromConfig || d.PoolOnly != "" }
