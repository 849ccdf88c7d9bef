package codes

import (
	"strings"
	"testing"
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
}
