package doctor

import (
	"strings"
	"testing"

	"chandler.dev/discovery"
)

// Each command of a code's page and of a finding states its effect on others, if there is any.
func TestCommandsThatDisturb(t *testing.T) {
	disturbing := 0
	for _, c := range Codes() {
		page := c.Page()
		for _, fix := range c.Fixes {
			how := disturbanceOf(fix.Command)
			for _, form := range []string{"/reset", "/remove", "/unbind", "sriov_numvfs", "modprobe -r", "rmmod", "restart kubelet", "restart containerd", "drain", "reboot", "gpu-reset"} {
				if strings.Contains(fix.Command, form) && how == "" {
					t.Errorf("%s: %q does not say what it disturbs", c.ID, fix.Command)
				}
			}
			if how != "" {
				disturbing++
				if !strings.Contains(page, how) {
					t.Errorf("%s: the page does not say how %q disturbs others", c.ID, fix.Command)
				}
			}
		}
	}
	if disturbing < 10 {
		t.Errorf("%d commands disturb others", disturbing)
	}
	say := &findingList{}
	say.addFault("CH0301", "a", "b", `sudo sh -c "echo 1 > /sys/bus/pci/devices/0000:03:00.0/reset"   # once`, "sudo dmesg")
	if fix := say.findings[0].Fix; !strings.Contains(fix[0], "# once; every process") || fix[1] != "sudo dmesg" {
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
