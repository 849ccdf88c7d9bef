package guest_test

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"chandler.dev/e2e/guest"
)

// kubeconfig is the kubeconfig of a cluster that does not answer.
const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "http://127.0.0.1:9"}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
users: [{name: none, user: {}}]
current-context: none
`

// TestHotPlug creates, binds, unbinds and removes virtual functions, and renames a network
// interface, while an agent runs without a cluster, in the DaemonSet's container with a separate
// network namespace. It reports the delay between the kernel's events and the agent's reaction, and
// the number of steps in which the agent followed a burst of events. The delay depends on the
// machine and is not asserted.
func TestHotPlug(t *testing.T) {
	guest.Long(t)
	g := guest.Boot(t, guest.Config{
		IOMMU:    "intel",
		Modules:  []string{"igb", "igbvf"},
		Programs: map[string]string{"guestevents": guest.Build(t, "chandler.dev/e2e/cmd/guestevents")},
		Files: map[string]string{
			"/etc/chandler/kubeconfig":  kubeconfig,
			"/etc/chandler/config.yaml": "apiVersion: chandler.dev/v1alpha1\nkind: DriverConfig\n",
		},
		Tools: []string{"ip", "runc"},
		CPUs:  2,
		Args: []string{"-device", "pcie-root-port,id=rp0,chassis=1", "-netdev", "user,id=net,restrict=on,ipv6=off",
			"-device", "igb,netdev=net,bus=rp0"},
	})
	t.Logf("Linux %s in QEMU %s", g.Kernel, g.QEMU)
	function := strings.TrimSpace(g.Sh(t, "cd /sys/bus/pci/drivers/igb; ls -d 0000:*"))
	dir := "/sys/bus/pci/devices/" + function
	g.Sh(t, "ip link set dev $(ls "+dir+"/net) up")
	events := g.Start(t, "guestevents")
	events.Until(t, "listening")
	pod := daemonSet(t)
	agent := g.Start(t, contained(t, g, pod, append(pod.Containers[0].Args, "--kubeconfig=/etc/chandler/kubeconfig", "--web-ui-bind-address=", "-v=2")...)...)
	agent.Until(t, "compares their names instead")
	agent.Until(t, changedLine)

	var took []time.Duration
	step := func(name string, devices int, script string) {
		t.Helper()
		time.Sleep(3 * time.Second)
		heard, said := len(events.Output()), len(agent.Output())
		g.Sh(t, script)
		after := until(t, agent, said, devices)
		first, last := eventsBefore(events.Output()[heard:], after)
		if first.IsZero() {
			t.Fatalf("%s: no event before the agent knew", name)
		}
		took = append(took, after.Sub(last))
		t.Logf("%s: %d devices %v after the kernel's first event, %v after the last one before; changed %d times", name, devices,
			after.Sub(first).Round(time.Millisecond), after.Sub(last).Round(time.Millisecond), strings.Count(agent.Output()[said:], changedLine))
	}
	step("virtual functions made", devicesOf(agent)+2, "echo 2 > "+dir+"/sriov_numvfs")
	for range 4 { // the other one stays unchanged
		step("unbound", devicesOf(agent), "echo $(basename $(readlink "+dir+"/virtfn0)) > /sys/bus/pci/drivers/igbvf/unbind")
		step("bound", devicesOf(agent), "echo $(basename $(readlink "+dir+"/virtfn0)) > /sys/bus/pci/drivers/igbvf/bind")
	}
	// The kernel does not report this change in the agent's network namespace.
	renamed := "name=$(ls " + dir + "/virtfn0/net); ip link set dev $name down; ip link set dev $name name renamed"
	step("an interface renamed", devicesOf(agent), renamed)
	took = took[:len(took)-1]
	step("unmade", devicesOf(agent)-2, "echo 0 > "+dir+"/sriov_numvfs")

	said, began := len(agent.Output()), time.Now()
	heard := strings.Count(events.Output(), "event ")
	for strings.Count(events.Output(), "event ")-heard < 500 {
		g.Sh(t, fmt.Sprintf("echo 7 > %s/sriov_numvfs; echo 0 > %s/sriov_numvfs", dir, dir))
	}
	time.Sleep(3 * time.Second)
	t.Logf("a storm of %d events in %v: changed %d times", strings.Count(events.Output(), "event ")-heard, time.Since(began).Round(time.Second), strings.Count(agent.Output()[said:], changedLine))
	slices.Sort(took)
	t.Logf("of %d steps: median %v, most %v", len(took), took[len(took)/2], took[len(took)-1])
}

// changedLine is the agent's log message about a changed host.
const changedLine = "The host's devices changed"

var (
	changed = regexp.MustCompile(`[IWE](\d\d)(\d\d) (\d\d:\d\d:\d\d\.\d{6}).*` + changedLine + `" devices=(\d+)`)
	event   = regexp.MustCompile(`event (\d+) `)
)

// eventsBefore returns the times of the first and the last event before a time.
func eventsBefore(output string, before time.Time) (first, last time.Time) {
	for _, match := range event.FindAllStringSubmatch(output, -1) {
		micros, _ := strconv.ParseInt(match[1], 10, 64)
		at := time.UnixMicro(micros).UTC()
		if first.IsZero() {
			first = at
		}
		if !at.After(before) {
			last = at
		}
	}
	return first, last
}

// devicesOf returns the number of devices in the agent's last message.
func devicesOf(agent *guest.Process) int {
	all := changed.FindAllStringSubmatch(agent.Output(), -1)
	devices, _ := strconv.Atoi(all[len(all)-1][4])
	return devices
}

// until returns the time of the agent's first message with a number of devices, after a position in
// its output.
func until(t *testing.T, agent *guest.Process, said, devices int) time.Time {
	t.Helper()
	for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(50 * time.Millisecond) {
		for _, match := range changed.FindAllStringSubmatch(agent.Output()[said:], -1) {
			if match[4] == strconv.Itoa(devices) {
				return logged(t, match)
			}
		}
	}
	t.Fatalf("the agent did not see %d devices:\n%s", devices, agent.Output()[said:])
	return time.Time{}
}

// saidChanged returns the times of the agent's messages about a changed host.
func saidChanged(t testing.TB, output string) (all []time.Time) {
	t.Helper()
	for _, match := range changed.FindAllStringSubmatch(output, -1) {
		all = append(all, logged(t, match))
	}
	return all
}

// logged returns the time of a line that matches changed.
func logged(t testing.TB, match []string) time.Time {
	t.Helper()
	at, err := time.Parse("2006 0102 15:04:05.000000", fmt.Sprintf("%d %s%s %s", time.Now().UTC().Year(), match[1], match[2], match[3]))
	if err != nil {
		t.Fatal(err)
	}
	return at
}
