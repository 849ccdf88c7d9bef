package guest_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"chandler.dev/e2e/guest"
)

// TestHealth injects PCIe errors with QEMU and makes a device stop responding, and compares the
// agent's reports.
func TestHealth(t *testing.T) {
	kernels := map[string]guest.Version{"newer": guest.Newer, "Debian 12": guest.Debian12}
	if testing.Short() {
		delete(kernels, "Debian 12")
	}
	for name, kernel := range kernels {
		t.Run(name, func(t *testing.T) { healthOn(t, kernel) })
	}
}

// The devices of healthOn, as discovery names them.
const (
	virtual = "pci-0000-01-10-0" // of an adapter below the first root port
	silent  = "pci-0000-02-00-0" // below the second root port
)

// healthOn boots a guest with an adapter with a virtual function, and an adapter under vfio, each
// below its own root port. The errors are errors of the ports: QEMU's adapters do not report their
// own (their Device Control register is not writable).
func healthOn(t *testing.T, kernel guest.Version) {
	args := []string{
		"-device", "pcie-root-port,id=port0,bus=pcie.0,chassis=1,slot=1,addr=0x8", "-device", "igb,bus=port0",
		"-device", "pcie-root-port,id=port1,bus=pcie.0,chassis=2,slot=2,addr=0x9", "-device", "e1000e,bus=port1",
	}
	g := guest.Boot(t, guest.Config{Kernel: kernel, IOMMU: "intel", Modules: []string{"igb", "igbvf", "vfio-pci"}, Tools: []string{"setpci"}, Args: args, Files: map[string]string{
		"/etc/kubeconfig": `{apiVersion: v1, kind: Config, current-context: c,
			clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}], contexts: [{name: c, context: {cluster: c}}]}`,
	}})
	t.Logf("Linux %s in QEMU %s", g.Kernel, g.QEMU)
	// A function under vfio would be suspended while free.
	g.Sh(t, `
		for f in /sys/bus/pci/devices/*; do
			case $(cat $f/vendor):$(cat $f/device) in
			0x8086:0x10c9)
				ip link set $(ls $f/net) up
				echo 1 > $f/sriov_numvfs;;
			0x8086:0x10d3)
				echo vfio-pci > $f/driver_override
				echo ${f##*/} > /sys/bus/pci/drivers_probe
				echo on > $f/power/control;;
			esac
		done`)
	agent := g.Start(t, "chandler", "run", "--kubeconfig", "/etc/kubeconfig", "--node-name", "node", "--pod-uid", "uid", "--kubelet-root", "/run/kubelet",
		"--device-plugin-dir", "/run/kubelet/device-plugins", "--web-ui-bind-address=", "--rescan-interval", "1s", "-v=2")
	agent.Until(t, "The host's devices changed")
	healthy(t, g, virtual, silent)

	g.Monitor(t, "pcie_aer_inject_error port1 RCVR") // correctable
	// After a reported error, a port raises no further interrupt until the kernel has read the error.
	counted(t, g, "aer_dev_correctable", "TOTAL_ERR_COR 1")
	g.Monitor(t, "pcie_aer_inject_error port1 POISON_TLP") // not fatal
	counted(t, g, "aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 1")
	healthy(t, g, virtual, silent)

	// A port with other secondary buses: the devices below do not respond.
	g.Must(t, "setpci", "-s", "00:09.0", "SECONDARY_BUS=7f")
	sick(t, g, silent, "not-responding", "it does not answer: its configuration space reads all ones")
	state := recorded(t, g, silent, "not-responding")
	if since, err := time.Parse(time.RFC3339, state.Since); err != nil || time.Since(since) > time.Minute {
		t.Errorf("it does not answer since %q (%v)", state.Since, err)
	}
	g.Must(t, "setpci", "-s", "00:09.0", "SECONDARY_BUS=02")
	begin := time.Now()
	healthy(t, g, virtual, silent)
	recorded(t, g, silent, "")
	if took := time.Since(begin); took < 5*time.Second {
		t.Errorf("well again after %s", took)
	}

	g.Monitor(t, "pcie_aer_inject_error port1 DLP")
	sick(t, g, silent, "fatal-errors", "1 fatal PCIe error of the port above it, 0000:00:09.0")
	healthy(t, g, virtual)
	g.Monitor(t, "pcie_aer_inject_error port0 DLP")
	// The kernel resets the devices below the port, and the adapter may lose its carrier, which is
	// worse.
	for deadline := time.Now().Add(settleTime); healthOf(t, g)[virtual].Health.Status == "Healthy"; {
		if time.Now().After(deadline) {
			t.Fatalf("%s is well after a fatal error of the port above it", virtual)
		}
	}
	unrecovered(t, g)
	agent.Stop(t)
}

// unrecovered checks the report of failed recoveries: below both ports, because QEMU's links do not
// return after their reset ("subordinate device reset failed"). A virtual function follows its port
// too; the interface of its physical function is set down, otherwise the lost carrier would come
// first. After a driver is bound again, the function is healthy. The kernel reports the failure for
// the port or for the device below, depending on the version.
func unrecovered(t *testing.T, g *guest.Guest) {
	t.Helper()
	const lost = "the kernel could not recover "
	if log := g.Sh(t, "dmesg"); strings.Count(log, "AER: subordinate device reset failed") < 2 {
		t.Errorf("the kernel recovered what it could not before:\n%s", log)
		return
	}
	says(t, g, silent, lost)
	g.Sh(t, "ip link set $(ls /sys/bus/pci/devices/0000:01:00.0/net) down")
	says(t, g, virtual, lost)
	if testing.Short() {
		return
	}
	g.Sh(t, "echo 0000:02:00.0 > /sys/bus/pci/drivers/vfio-pci/unbind; echo 0000:02:00.0 > /sys/bus/pci/drivers_probe")
	time.Sleep(40 * time.Second) // after several faults, the agent waits longer
	recorded(t, g, silent, "fatal-errors")
}

// says waits until the running agent reports a device as unhealthy, with a reason that begins with
// reason.
func says(t *testing.T, g *guest.Guest, name, reason string) {
	t.Helper()
	for deadline := time.Now().Add(settleTime); ; time.Sleep(200 * time.Millisecond) {
		var states map[string]state
		text := g.ReadFile(t, "/run/kubelet/plugins/chandler.dev/health.json")
		if err := json.Unmarshal([]byte(text), &states); err != nil {
			t.Fatal(err)
		}
		if got := states[name]; strings.HasPrefix(got.Reason, reason) && got.Status == "Unhealthy" {
			t.Logf("%s: %s", name, got.Reason)
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s has not become unhealthy (%s) for the agent: %s", name, reason, text)
		}
	}
}

// counted waits until the kernel has counted an error of the second port.
func counted(t *testing.T, g *guest.Guest, file, line string) {
	t.Helper()
	for deadline := time.Now().Add(settleTime); ; time.Sleep(100 * time.Millisecond) {
		text := g.ReadFile(t, "/sys/bus/pci/devices/0000:00:09.0/"+file)
		if strings.Contains(text, line) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not %q:\n%s", file, line, text)
		}
	}
}

// settleTime is the maximum reaction time of the guest's kernel and the agent. It is long because an
// emulated machine on a busy host is slow.
const settleTime = 4 * time.Minute

// healthy checks that discovery finds no fault of devices.
func healthy(t *testing.T, g *guest.Guest, names ...string) {
	t.Helper()
	found := healthOf(t, g)
	for _, name := range names {
		if got := found[name].Health; got.Status != "Healthy" {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// sick waits until discovery reports a condition. The reason is checked unless it is "".
func sick(t *testing.T, g *guest.Guest, name, condition, reason string) {
	t.Helper()
	for deadline := time.Now().Add(settleTime); ; {
		got := healthOf(t, g)[name].Health
		if got.Condition == condition && (reason == "" || got.Reason == reason) {
			t.Logf("%s: %s: %s", name, condition, got.Reason)
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s is %+v, and not %s (%s)\n%s", name, got, condition, reason,
				g.Sh(t, "dmesg | tail -40; grep . /sys/bus/pci/devices/*/aer_rootport_total_err_fatal /sys/bus/pci/devices/*/current_link_width; grep TOTAL /sys/bus/pci/devices/*/aer_dev_fatal"))
		}
	}
}

// A state is a stored state of the agent.
type state struct {
	Status    string `json:"status"`
	Reason    string `json:"reason"`
	Condition string `json:"condition"`
	Since     string `json:"since"`
}

// recorded waits until the running agent has stored a condition of a device, "" for none.
func recorded(t *testing.T, g *guest.Guest, name, condition string) state {
	t.Helper()
	for deadline := time.Now().Add(settleTime); ; time.Sleep(200 * time.Millisecond) {
		var states map[string]state
		text := g.ReadFile(t, "/run/kubelet/plugins/chandler.dev/health.json")
		if err := json.Unmarshal([]byte(text), &states); err != nil {
			t.Fatal(err)
		}
		if got, known := states[name]; known && got.Condition == condition {
			return got
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s has not become %q for the agent: %s", name, condition, text)
		}
	}
}

// foundDevice is a device in the output of chandler discover -o json.
type foundDevice struct {
	Name   string `json:"name"`
	Health struct {
		Status    string `json:"status"`
		Condition string `json:"condition"`
		Reason    string `json:"reason"`
	} `json:"health"`
}

func healthOf(t *testing.T, g *guest.Guest) map[string]foundDevice {
	t.Helper()
	var found struct {
		Devices []foundDevice `json:"devices"`
	}
	if err := json.Unmarshal([]byte(g.Must(t, "chandler", "discover", "-o", "json")), &found); err != nil {
		t.Fatal(err)
	}
	devices := make(map[string]foundDevice)
	for _, d := range found.Devices {
		devices[d.Name] = d
	}
	return devices
}
