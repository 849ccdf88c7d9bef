package guest_test

import (
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"time"
)

// rebindConfig allows claims to use disks through vfio.
const rebindConfig = `apiVersion: chandler.dev/v1alpha1
kind: DriverConfig
mode: DRA
passthrough:
- cel: device.attributes["chandler.dev"].?pciClass.orValue("").startsWith("0108")
`

// byTheAgent lets an agent bind a function to vfio for claims, and back to its own driver, and
// kills the agent in between.
func byTheAgent(t *testing.T, n *node, r rebound) {
	agent := n.agent(t)
	kill := func() {
		agent.Signal(t, syscall.SIGKILL)
		agent.Wait(t)
		agent = n.agent(t)
	}
	device := "pci-" + strings.NewReplacer(":", "-", ".", "-").Replace(r.address)
	claim := device + ".vfio.first"
	n.offers(t, inSlices, device, "Healthy")

	node := "/dev/" + strings.TrimSpace(r.Sh(t, "ls /sys/bus/pci/devices/"+r.address+"/nvme"))
	host := r.Start(t, "sh", "-c", "exec 3<"+node+"; echo ready; exec sleep 1000")
	host.Until(t, "ready")
	n.refused(t, node, "prepare", claim)
	r.check(t, "nvme (null)")
	host.Stop(t)

	began := time.Now()
	n.granted(t, "prepare", claim)
	t.Logf("prepared after %v", time.Since(began).Round(time.Millisecond))
	r.check(t, "vfio-pci vfio-pci")
	if spec := r.ReadFile(t, "/var/run/cdi/chandler.dev-claim_"+claim+".json"); !strings.Contains(spec, `"/dev/vfio/`+n.group(t, r.address)+`"`) {
		t.Errorf("the container would get %s", spec)
	}
	n.refused(t, "in use by", "prepare", device+".vfio.second")
	user := r.Start(t, "guestuse", "vfio", r.address)
	user.Until(t, "ready")

	kill()
	n.granted(t, "prepare", claim)
	r.check(t, "vfio-pci vfio-pci")
	n.granted(t, "unprepare", claim)
	n.step()
	n.refused(t, "guestuse", "prepare", device+".vfio.second") // the kernel would refuse VFIO to the pod
	kill()                                                     // while the agent waits for the process
	n.offers(t, inSlices, device, "driver-unbound")
	r.check(t, "vfio-pci vfio-pci")
	user.Stop(t)
	r.back(t)
	n.offers(t, inSlices, device, "Healthy")

	if testing.Short() {
		agent.Stop(t)
		return
	}
	for range 10 {
		prepared := n.Start(t, "guestkubelet", "prepare", claim)
		time.Sleep(rand.N(600 * time.Millisecond)) //nolint:gosec // random test times need no secrecy
		kill()
		prepared.Wait(t)
		n.granted(t, "prepare", claim)
		r.check(t, "vfio-pci vfio-pci")
		n.granted(t, "unprepare", claim)
		time.Sleep(rand.N(300 * time.Millisecond)) //nolint:gosec // random test times need no secrecy
		kill()
		r.back(t)
	}
	agent.Stop(t)
}

// back waits until the function has its own driver again.
func (r rebound) back(t *testing.T) {
	t.Helper()
	began := time.Now()
	for deadline := began.Add(settleTime); strings.Join(strings.Fields(r.driver(t)), " ") != r.own+" (null)"; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s is not returned: %s", r.address, r.driver(t))
		}
	}
	t.Logf("returned after %v", time.Since(began).Round(time.Millisecond))
}
