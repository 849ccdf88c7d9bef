package doctor

import (
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/internal/doctor/report"
)

// The command of a finding states its effect on others.
func TestFindingsThatDisturb(t *testing.T) {
	say := &report.List{}
	say.AddFault("CH0301", "a", "b", `sudo sh -c "echo 1 > /sys/bus/pci/devices/0000:03:00.0/reset"   # once`, "sudo dmesg")
	if fix := say.Findings[0].Fix; !strings.Contains(fix[0], "# once; every process") || fix[1] != "sudo dmesg" {
		t.Errorf("%q", fix)
	}
}

// A reset is advised only for a broken device that is alone on its PCI function.
func TestResetIsAdvised(t *testing.T) {
	const at = "0000:03:00.0"
	device := func(change func(*discovery.Device)) *discovery.Device {
		d := &discovery.Device{Name: "pci-0000-03-00-0", Source: "sys/devices/pci0000:00/" + at, Attributes: discovery.Attributes{}, Health: discovery.Health{Status: discovery.Unhealthy, Reason: "XID 79"}}
		d.Attributes.SetString("resource.kubernetes.io/pciBusID", at)
		change(d)
		return d
	}
	for name, test := range map[string]struct {
		change func(*discovery.Device)
		reset  bool
	}{
		"a GPU":          {func(*discovery.Device) {}, true},
		"MIG is on":      {func(d *discovery.Device) { d.Health.Fix = "sudo nvidia-smi -mig 0" }, false},
		"a MIG instance": {func(d *discovery.Device) { d.Name, d.PartOf = "mig", &discovery.Silicon{Name: "pci-0000-03-00-0"} }, false},
	} {
		f := &Facts{}
		fix := strings.Join(f.conditionFix(discovery.ConditionUnhealthy, device(test.change)), "\n")
		if strings.Contains(fix, "/reset") != test.reset {
			t.Errorf("%s: %q", name, fix)
		}
	}
}
