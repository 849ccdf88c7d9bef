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

// kubeconfig is that of a cluster that does not answer.
const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "http://127.0.0.1:9"}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
users: [{name: none, user: {}}]
current-context: none
`

// TestHotPlug has virtual functions made, bound, unbound and unmade, and a network interface renamed, while an agent runs
// without a cluster, in a container as the DaemonSet has it, with a network namespace of its own. It says how long after the kernel's events the agent knew, and in how many steps it followed a
// storm of them. How long that takes depends on the machine, and is not asserted.
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
		Args: []string{"-device", "pcie-root-port,id=rp0,chassis=1", "-netdev", "user,id=net,restrict=on",
			"-device", "igb,netdev=net,bus=rp0"},
	})
	t.Logf("Linux %s in QEMU %s", g.Kernel, g.QEMU)
	function := strings.TrimSpace(g.Sh(t, "cd /sys/bus/pci/drivers/igb; ls -d 0000:*"))
	dir := "/sys/bus/pci/devices/" + function
	g.Sh(t, "ip link set dev $(ls "+dir+"/net) up")
	events := g.Start(t, "guestevents")
	events.Until(t, "listening")
	pod := daemonSet(t)
	agent := g.Start(t, contained(t, g, pod, append(pod.Containers[0].Args, "--kubeconfig=/etc/chandler/kubeconfig", "--page-bind-address=", "-v=2")...)...)
	agent.Until(t, "names are compared instead")
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
	for range 4 { // the other one stays as it is
		step("unbound", devicesOf(agent), "echo $(basename $(readlink "+dir+"/virtfn0)) > /sys/bus/pci/drivers/igbvf/unbind")
		step("bound", devicesOf(agent), "echo $(basename $(readlink "+dir+"/virtfn0)) > /sys/bus/pci/drivers/igbvf/bind")
	}
	// Of this the kernel says nothing in the agent's network namespace.
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

// changedLine is what the agent logs when it has found the host changed.
const changedLine = "The host's devices changed"

var (
	changed = regexp.MustCompile(`[IWE](\d\d)(\d\d) (\d\d:\d\d:\d\d\.\d{6}).*` + changedLine + `" devices=(\d+)`)
	event   = regexp.MustCompile(`event (\d+) `)
)

// eventsBefore returns when the first and the last event of those before a time were.
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

// devicesOf returns how many devices the agent said last that there are.
func devicesOf(agent *guest.Process) int {
	all := changed.FindAllStringSubmatch(agent.Output(), -1)
	devices, _ := strconv.Atoi(all[len(all)-1][4])
	return devices
}

// until returns when the agent first said, after so much of its output, that it has so many devices.
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

// saidChanged returns when the agent said that it had found the host changed.
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
