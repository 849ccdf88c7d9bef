package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/amdgpu/parttest"
	"chandler.dev/discovery/families/vfio"
)

// withAdminAccess gives a claim admin access, as for a monitor, and adds devices to the claim.
func withAdminAccess(claim *resourceapi.ResourceClaim, more ...string) *resourceapi.ResourceClaim {
	results := &claim.Status.Allocation.Devices.Results
	for _, device := range more {
		*results = append(*results, resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: discovery.Domain, Pool: "node", Device: device})
	}
	for i := range *results {
		(*results)[i].AdminAccess = new(true)
	}
	return claim
}

// A monitor with admin access gets the devices that exist. For a partition that could be created,
// the monitor gets nothing, and the agent creates nothing.
func TestAdminAccessBesidePartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDividing(t)
		stop := d.start()
		var parts []string
		for _, part := range []string{"-dpx-0", "-dpx-1", "-cpx-0"} {
			parts = append(parts, parttest.Device+part)
		}
		if err := d.prepareAgain(withAdminAccess(d.claims("", "monitor"), parts...)); err != nil {
			t.Errorf("monitor: %v", err)
		}
		stop()
	})
}

// A virtual machine has the device under vfio. A monitor with admin access gets no node of the
// device.
func TestAdminAccessBesideVirtualMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		stop := r.start()
		vm, monitor := r.claim("vm", "vfio"), withAdminAccess(r.claim("monitor", ""))
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		if err := r.prepareAgain(monitor); err != nil {
			t.Errorf("monitor: %v", err)
		}
		for _, name := range r.specsOf("monitor") {
			if data, err := os.ReadFile(name); err != nil || strings.Contains(string(data), "/dev/") {
				t.Errorf("monitor: %s, %v", data, err)
			}
		}
		if driver := r.Driver(diskFunction); driver != "vfio-pci" {
			t.Errorf("driver %q", driver)
		}
		stop()
	})
}

// A monitor with admin access can prepare a device that is available only under vfio, but gets no
// node of the device.
func TestAdminAccessToDeviceOfNoFamily(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		r.families = []*discovery.Family{vfio.Family}
		stop := r.start()
		monitor := withAdminAccess(r.claim("monitor", ""))
		if err := r.prepareAgain(monitor); err != nil {
			t.Errorf("monitor: %v", err)
		}
		for _, name := range r.specsOf("monitor") {
			if data, err := os.ReadFile(name); err != nil || strings.Contains(string(data), "/dev/") {
				t.Errorf("monitor: %s, %v", data, err)
			}
		}
		stop()
	})
}

// specsOf returns the CDI specs of a claim.
func (n *node) specsOf(claim string) []string {
	names, _ := filepath.Glob(filepath.Join(n.dir, "cdi/*"+claim+"*"))
	return names
}
