package doctor

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// findingsOf returns the findings of a snapshot's checks, as lines.
func findingsOf(f *Facts) string {
	var lines []string
	for _, section := range JudgeFacts(f, Devices, Host).Sections {
		for _, finding := range section.Findings {
			lines = append(lines, finding.Text+" | "+finding.Cause+" | "+strings.Join(finding.Fix, "; "))
		}
	}
	return strings.Join(lines, "\n")
}

func factsOf(s *rules.Snapshot) *Facts {
	return &Facts{Head: Head{Time: now}, Devices: DeviceFacts{Snapshot: KnownAnswer(s)}, Host: HostFacts{Functions: KnownAnswer([]Function{{Address: "0000:00:01.0", Class: "060000"}})}}
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

// A reset does not create a missing file. It may end an input/output error.
func TestResetOnlyAfterIOErrors(t *testing.T) {
	for reason, want := range map[string]bool{
		"open /proc/driver/nvidia/gpus/0000:03:00.0/information: file does not exist": false,
		"read /proc/driver/nvidia/gpus/0000:03:00.0/information: input/output error":  true,
	} {
		d := &discovery.Device{Name: "pci-0000-03-00-0", Health: discovery.Health{Status: discovery.Unknown, Reason: reason}}
		d.Attributes = discovery.Attributes{}
		d.Attributes.SetString("resource.kubernetes.io/pciBusID", "0000:03:00.0")
		fix := (&Facts{}).conditionFix(discovery.ConditionUnknown, d)
		if got := strings.Contains(strings.Join(fix, "\n"), "/reset"); got != want {
			t.Errorf("%s: reset %v, want %v: %q", reason, got, want, fix)
		}
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
		"no driver is bound to it":                "No driver is bound to it.",
		"device node /dev/vfio/7 is missing":      "Device node /dev/vfio/7 is missing.",
		"vfio: the device is in no IOMMU group":   "vfio: the device is in no IOMMU group.",
		"/sys/module is missing":                  "/sys/module is missing.",
		"open /proc/version: file does not exist": "open /proc/version: file does not exist.",
		"": "",
	} {
		if got := asSentence(reason); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
