package doctor

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
)

// findingsOf returns the findings of a snapshot's checks, as lines.
func findingsOf(f *Facts) string {
	var lines []string
	for _, section := range JudgeFacts(f, codes.Devices, codes.Host).Sections {
		for _, finding := range section.Findings {
			lines = append(lines, finding.Text+" | "+finding.Cause+" | "+strings.Join(finding.Fix, "; "))
		}
	}
	return strings.Join(lines, "\n")
}

func factsOf(s *rules.Snapshot) *Facts {
	return &Facts{Head: report.Head{Time: now}, Devices: DeviceFacts{Snapshot: KnownAnswer(s)}, Host: HostFacts{Functions: KnownAnswer([]Function{{Address: "0000:00:01.0", Class: "060000"}})}}
}

// A directory is not a device, and a machine without accelerators gets no praise for their drivers.
func TestNoDevices(t *testing.T) {
	s := &rules.Snapshot{Problems: []discovery.Problem{{Device: "/sys/bus/pci", Err: errors.New("list devices: no such file")}}}
	got := findingsOf(factsOf(s))
	if !strings.Contains(got, "/sys/bus/pci cannot be read | list devices: no such file. Devices in this directory are not found.") {
		t.Errorf("the directory is missing:\n%s", got)
	}
	if strings.Contains(got, "kernel driver") || strings.Contains(got, "not offered") {
		t.Errorf("untrue:\n%s", got)
	}
}

// The command for a report reads the same files as doctor.
func TestRecordForAReport(t *testing.T) {
	s := &rules.Snapshot{Problems: []discovery.Problem{{Device: "usb-2-2", Err: errors.New("attribute idProduct: empty")}}}
	for source, want := range map[string]string{
		"":               "chandler record -o node.host",
		report.Copy:      "chandler record --host-root=/mnt/rack7 -o node.host",
		report.Recording: "repair this",
	} {
		f := factsOf(s)
		f.Source, f.HostRoot = source, "/mnt/rack7"
		if got := findingsOf(f); !strings.Contains(got, want) || source == report.Recording && strings.Contains(got, "record ") {
			t.Errorf("%q: got\n%s", source, got)
		}
	}
}

// A reset does not create a missing file. It may end an input/output error.
func TestResetOnlyAfterIOErrors(t *testing.T) {
	const file = "proc/driver/nvidia/gpus/0000:03:00.0/information"
	for _, test := range []struct {
		err  error
		want bool
	}{
		{&fs.PathError{Op: "open", Path: file, Err: fs.ErrNotExist}, false},
		{errors.New("attribute mode: unknown: \"input/output error\""), false},
		{&fs.PathError{Op: "read", Path: file, Err: syscall.EIO}, true},
	} {
		d := functionAt("0000:03:00.0")
		d.Health = discovery.Health{Status: discovery.Unknown, Reason: test.err.Error()}
		f := factsOf(&rules.Snapshot{Problems: discovery.Problems(d.Name, test.err)})
		fix := f.conditionFix(discovery.ConditionUnknown, d)
		if got := strings.Contains(strings.Join(fix, "\n"), "/reset"); got != test.want {
			t.Errorf("%v: reset %v, want %v: %q", test.err, got, test.want, fix)
		}
	}
}

// functionAt returns a device that is a PCI function.
func functionAt(address string) *discovery.Device {
	d := &discovery.Device{Name: "pci-" + strings.NewReplacer(":", "-", ".", "-").Replace(address), Attributes: discovery.Attributes{}}
	d.Attributes.SetString("resource.kubernetes.io/pciBusID", address)
	return d
}

// udev creates the nodes that the kernel announces. If the driver has created none, it is bound again.
func TestNodesThatTheDriverHasNotCreated(t *testing.T) {
	d := functionAt("0000:03:00.0")
	d.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionNodeMissing}
	if fix := strings.Join((&Facts{}).conditionFix(discovery.ConditionNodeMissing, d), "\n"); strings.Contains(fix, "udevadm") || !strings.Contains(fix, "drivers_probe") {
		t.Errorf("without a node: %s", fix)
	}
	d.Edits.DeviceNodes = []*specs.DeviceNode{{Path: "/dev/accel/accel0"}}
	if fix := strings.Join((&Facts{}).conditionFix(discovery.ConditionNodeMissing, d), "\n"); !strings.Contains(fix, "udevadm") || strings.Contains(fix, "drivers_probe") {
		t.Errorf("with a node: %s", fix)
	}
}

// A success is reported only if it is true of all devices, and names the kernel only on a node.
func TestDeviceNodesThatAreKnown(t *testing.T) {
	for _, test := range []struct {
		status discovery.HealthStatus
		source string
		want   string
	}{
		{discovery.Healthy, "", "every device node exists with the kernel's numbers |"},
		{discovery.Healthy, report.Copy, "every device node exists |"},
		{discovery.Unknown, "", ""},
	} {
		d := functionAt("0000:03:00.0")
		d.Health, d.Edits.DeviceNodes = discovery.Health{Status: test.status}, []*specs.DeviceNode{{Path: "/dev/accel/accel0"}}
		f := factsOf(&rules.Snapshot{Devices: []rules.Offered{{Device: *d}}})
		f.Source = test.source
		got := findingsOf(f)
		if test.want == "" && strings.Contains(got, "every device node") || !strings.Contains(got, test.want) {
			t.Errorf("%+v: got\n%s", test, got)
		}
	}
}

// A function of the class of accelerators that is no device gets no praise for its driver.
func TestDriverOfNoDevice(t *testing.T) {
	f := factsOf(&rules.Snapshot{})
	f.Host.Functions = KnownAnswer([]Function{{Address: "0000:00:04.0", Class: "120000", Driver: "test"}})
	if got := findingsOf(f); strings.Contains(got, "kernel driver") {
		t.Errorf("got\n%s", got)
	}
}

// A command that does not depend on the function precedes the loop.
func TestLoopHasOnlyCommandsOfEachFunction(t *testing.T) {
	got := inLoop([]string{"a1", "b2"}, [][]string{{"modprobe vfio-pci", "ls a1"}, {"modprobe vfio-pci", "ls b2"}})
	if want := []string{"modprobe vfio-pci", "for a in a1 b2; do", "  ls $a", "done"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A reason becomes a whole sentence. The text of an error keeps its first letter.
func TestAsSentence(t *testing.T) {
	for reason, want := range map[string]string{
		"no driver is bound to it":                  "No driver is bound to it.",
		"device node /dev/vfio/7 is missing":        "Device node /dev/vfio/7 is missing.",
		"attribute vendor is missing":               "Attribute vendor is missing.",
		"vfio: the device has no IOMMU group":       "vfio: the device has no IOMMU group.",
		"/sys/module is missing":                    "/sys/module is missing.",
		"open /proc/version: file does not exist":   "open /proc/version: file does not exist.",
		"no shell: the card is not flashed":         "No shell: the card is not flashed.",
		"in survivability mode: it must be flashed": "In survivability mode: it must be flashed.",
		"attribute vendor: not a number":            "attribute vendor: not a number.",
		"device node /dev/a: attribute dev: empty":  "device node /dev/a: attribute dev: empty.",
		"open /proc/0000:04:00.0/a: no such file":   "open /proc/0000:04:00.0/a: no such file.",
		"": "",
	} {
		if got := asSentence(reason); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
