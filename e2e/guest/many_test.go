package guest_test

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"chandler.dev/e2e/guest"
)

// TestMany offers 2,048 virtual functions under uio_pci_generic, and logs the agent's memory, the
// CPU time for events of other devices, and the CPU usage at rest. It asserts none of these,
// because they depend on the load of the machine.
func TestMany(t *testing.T) {
	guest.Long(t)
	if !guest.HasCompiler() {
		t.Skip("there is no C compiler for pcifake")
	}
	const adapters = 32 // with 64 virtual functions each
	g := guest.Boot(t, guest.Config{
		CPUs: 2, Memory: 3072, Carry: []string{"pcifake", "pci-pf-stub", "uio_pci_generic"}, Programs: programs(t),
	})
	g.Load(t, "pcifake", "functions="+strings.TrimSuffix(strings.Repeat("0/8086:1592:020000/64/1889,", adapters), ","))
	g.Load(t, "pci-pf-stub")
	g.Load(t, "uio_pci_generic")
	began := time.Now()
	g.Sh(t, `
		echo 8086 1592 > /sys/bus/pci/drivers/pci-pf-stub/new_id
		echo 8086 1889 > /sys/bus/pci/drivers/uio_pci_generic/new_id
		for f in /sys/bus/pci/drivers/pci-pf-stub/0*; do echo 64 > $f/sriov_numvfs; done`)
	t.Logf("the kernel made them in %v", time.Since(began).Round(time.Second))
	n := newNode(t, g, "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\nmode: DRA\nattributes: [vfIndex]\n") // a device for each function
	began = time.Now()
	agent := n.agent(t)
	healthy := func() int {
		lines := strings.Split(strings.TrimSpace(n.kubelet.Output()), "\n")
		return strings.Count(lines[len(lines)-1], "=Healthy")
	}
	for deadline := began.Add(5 * time.Minute); healthy() < 64*adapters; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d are offered", healthy())
		}
	}
	t.Logf("all are offered after %v", time.Since(began).Round(time.Second))
	measure := func(when string) {
		t.Helper()
		status := g.Sh(t, fmt.Sprintf("cat /proc/%d/status", agent.PID))
		t.Logf("%s: %s", when, strings.Join(regexp.MustCompile(`(?m)^(VmHWM|VmRSS|RssAnon):\s+.*`).FindAllString(status, -1), ", "))
	}
	measure("at once")
	ticks := func() int { // in units of 10 ms, in user space and in the kernel (proc_pid_stat(5))
		t.Helper()
		fields := strings.Fields(g.Sh(t, fmt.Sprintf("cat /proc/%d/stat", agent.PID)))
		user, _ := strconv.Atoi(fields[13])
		system, _ := strconv.Atoi(fields[14])
		return user + system
	}
	time.Sleep(time.Minute) // until all devices are published
	before, since := ticks(), time.Now()
	g.Sh(t, "for i in 0 1 2 3 4 5 6 7 8 9; do for name in null zero; do echo change > /sys/class/mem/$name/uevent; sleep 1.5; done; done")
	t.Logf("20 events of /dev/null and /dev/zero in %v: %.1f s of a processor", time.Since(since).Round(time.Second), float64(ticks()-before)/100)
	before, since = ticks(), time.Now()
	time.Sleep(5 * time.Minute)
	t.Logf("at rest: %.1f %% of a processor", float64(ticks()-before)/time.Since(since).Seconds())
	measure("later")
	agent.Stop(t)
}
