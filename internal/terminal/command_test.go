package terminal

import (
	"slices"
	"testing"
)

func TestBreakCommand(t *testing.T) {
	got := BreakCommand("sudo sed -i 's/enable_cdi = false/enable_cdi = true/' /etc/containerd/config.toml   # or add it", 67)
	want := []string{"sudo sed -i 's/enable_cdi = false/enable_cdi = true/' \\", "  /etc/containerd/config.toml", "# or add it"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	got = BreakCommand(`  sudo sh -c "echo 1 > /sys/bus/pci/devices/$a/reset" now   # every process loses it`, 56)
	if want := []string{`  sudo sh -c "echo 1 > /sys/bus/pci/devices/$a/reset" \`, "    now", "  # every process loses it"}; !slices.Equal(got, want) {
		t.Errorf("in a loop: got %q, want %q", got, want)
	}
	if got := BreakCommand("short   # with a remark", 67); len(got) != 1 {
		t.Errorf("%q", got)
	}
}
