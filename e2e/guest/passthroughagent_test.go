package guest_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
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

// byTheAgent lets an agent without privilege bind a function to vfio for claims by the host service,
// and back to its own driver, and kills both in between.
func byTheAgent(t *testing.T, n *node, r rebound) {
	s := n.separate(t)
	defer s.dump(t)
	device := "pci-" + strings.NewReplacer(":", "-", ".", "-").Replace(r.address)
	claim := device + ".vfio.first"
	n.offers(t, inSlices, device, "Healthy")

	node := r.node(t)
	host := r.Start(t, "sh", "-c", "exec 3<"+node+"; echo ready; exec sleep 1000")
	host.Until(t, "ready")
	n.refused(t, node, "prepare", claim)
	s.confined(t, node)
	r.check(t, "nvme (null)")
	host.Stop(t)

	began := time.Now()
	n.granted(t, "prepare", claim)
	t.Logf("prepared after %v", time.Since(began).Round(time.Millisecond))
	r.check(t, "vfio-pci vfio-pci")
	s.wrote(t, "vfio-pci", "/"+r.address+"/driver_override")
	if spec := r.ReadFile(t, "/var/run/cdi/chandler.dev-claim_"+claim+".json"); !strings.Contains(spec, `"/dev/vfio/`+n.group(t, r.address)+`"`) {
		t.Errorf("the container would get %s", spec)
	}
	n.refused(t, "in use by", "prepare", device+".vfio.second")
	user := r.Start(t, "guestuse", "vfio", r.address)
	user.Until(t, "ready")

	s.kill(t, agentAndService)
	n.granted(t, "prepare", claim)
	r.check(t, "vfio-pci vfio-pci")
	n.granted(t, "unprepare", claim)
	n.step()
	n.refused(t, "guestuse", "prepare", device+".vfio.second") // the kernel would refuse VFIO to the pod
	s.kill(t, agentAndService)                                 // while the agent waits for the process
	n.offers(t, inSlices, device, "driver-unbound")
	r.check(t, "vfio-pci vfio-pci")
	user.Stop(t)
	r.back(t)
	n.offers(t, inSlices, device, "Healthy")

	if testing.Short() {
		s.stop(t)
		return
	}
	for turn := range 12 {
		v := theAgent + victims(turn%3)
		prepared := n.Start(t, "guestkubelet", "prepare", claim)
		time.Sleep(rand.N(600 * time.Millisecond)) //nolint:gosec // random test times need no secrecy
		s.kill(t, v)
		prepared.Wait(t)
		n.granted(t, "prepare", claim)
		r.check(t, "vfio-pci vfio-pci")
		n.granted(t, "unprepare", claim)
		time.Sleep(rand.N(300 * time.Millisecond)) //nolint:gosec // random test times need no secrecy
		s.kill(t, v)
		r.back(t)
	}
	s.stop(t)
}

// reclaimConfig offers the device node of a disk, and lets the agent reset the disk between pods.
const reclaimConfig = `apiVersion: chandler.dev/v1alpha1
kind: DriverConfig
mode: DRA
paths:
- name: example.com/disk
  groups: [{paths: [{path: %s}]}]
reclaim:
- cel: device.attributes["chandler.dev"].family == "paths"
  reset: Function
  resetMethods: [flr]
`

// reclaimed ends the claim of a pod with a running process. An agent without privilege withholds the
// function until the process has ended, and the host service resets the function. Both are killed
// meanwhile.
func (r rebound) reclaimed(t *testing.T, n *node) {
	n.WriteFile(t, "/etc/chandler/config.yaml", fmt.Sprintf(reclaimConfig, r.node(t)), 0o600)
	n.step()
	s := n.separate(t)
	defer s.dump(t)
	device := n.named(t, inSlices, "paths-disk-")
	n.granted(t, "prepare", device+".pod"+podUID)
	s.confined(t, r.node(t))
	user := r.openIn(t, podGroup)
	before := r.driverLog(t)
	n.granted(t, "unprepare", device+".pod"+podUID)
	withheld := "which has ended: " + r.node(t) + ": process"
	n.refused(t, withheld, "prepare", device+".next")
	n.offers(t, inSlices, device, "unhealthy")
	s.kill(t, agentAndService)
	n.refused(t, withheld, "prepare", device+".next")
	if now := r.driverLog(t); now != before {
		t.Errorf("the function was reset while it was open: the kernel said %s", now)
	}
	user.Stop(t)
	n.granted(t, "prepare", device+".next")
	r.wasReset(t, before)
	s.wrote(t, "1", "/"+r.address+"/reset")
	n.granted(t, "unprepare", device+".next")
	s.stop(t)
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
