package agent

import (
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families/vfio"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// A claim gets an IOMMU group as a whole, and the group returns to its drivers as a whole.
func TestAgentBindsAGroupToVFIO(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const otherFunction, other = "0000:03:00.1", "pci-0000-03-00-1"
		r := newRebinding(t)
		r.File("dev/nvme1", "c 240:1")
		r.Add(otherFunction, "nvme", "3")
		stop := r.run(r.config(&rules.Rules{Mode: discovery.ModeDRA}))
		r.offers(diskName+" "+other, "")
		r.OpenNode("47", "dd", "/dev/nvme1")
		vm, pod := r.claim("vm", "vfio"), r.claimFor(other, "pod", "")
		r.refuses(vm, "function "+otherFunction+": in use: /dev/nvme1: process 47 (dd) has it open")
		r.EndProcess("47")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		if driver := r.Driver(otherFunction); driver != "vfio-pci" {
			t.Errorf("the other function has driver %q", driver)
		}
		r.offers(diskName+" "+other, "")
		r.refuses(pod, "until it is returned to driver nvme")
		r.unprepare(vm)
		r.bound("nvme", 3*time.Second)
		if driver := r.Driver(otherFunction); driver != "nvme" {
			t.Errorf("the other function has driver %q", driver)
		}
		if err := r.prepareAgain(pod); err != nil {
			t.Error(err)
		}
		r.refuses(vm, "claim default/pod")
		stop()
	})
}

// A function leaves its IOMMU group and returns in a group of its own. The agent binds the function
// to vfio again for a resource, and the other function, which no resource needs any more, returns
// to its driver.
func TestAgentBindsToVFIOAFunctionThatReturnsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const otherFunction = "0000:03:00.1"
		r := newRebinding(t)
		r.File("dev/nvme1", "c 240:1")
		r.Add(otherFunction, "nvme", "3")
		wanted := classicVFIO(t)
		wanted.Mode = discovery.ModeDevicePlugin
		wanted.Resources[0].Selector = rulestest.CompileSelector(t, `device.attributes["resource.kubernetes.io"].pciBusID == "`+diskFunction+`"`)
		stop := r.run(r.config(wanted))
		r.bound("vfio-pci", 2*time.Minute)
		if driver := r.Driver(otherFunction); driver != "vfio-pci" {
			t.Errorf("the other function has driver %q", driver)
		}
		r.ReturnFunction(diskFunction, "nvme", "5")
		r.bound("vfio-pci", placement.WorkInterval+2*time.Minute)
		if driver := r.Driver(otherFunction); driver != "nvme" {
			t.Errorf("the other function has driver %q\nwrites: %q", driver, r.ListWrites())
		}
		stop()
	})
}

// A virtual function returns to its driver while another function of the adapter is still
// allocated.
func TestAgentBindsVirtualFunctionsToVFIO(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const sibling = "0000:04:00.1"
		r := newRebinding(t)
		r.File("dev/nvme1", "c 240:1")
		r.Add(sibling, "nvme", "4")
		for _, function := range []string{diskFunction, sibling} {
			r.Link(passthroughtest.Source(function)+"/physfn", "../0000:02:00.0")
		}
		r.File(passthroughtest.Source("0000:02:00.0")+"/class", "0x010802\n")
		stop := r.run(r.config(&rules.Rules{Mode: discovery.ModeDRA}))
		r.offers(diskName+" pci-0000-04-00-1", "")
		pod, vm := r.claimFor("pci-0000-04-00-1", "pod", ""), r.claim("vm", "vfio")
		if err := r.prepareAgain(pod); err != nil {
			t.Error(err)
		}
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		r.unprepare(vm)
		r.bound("nvme", 3*time.Second)
		r.unprepare(pod)

		other := r.claimFor("pci-0000-04-00-1", "other", "vfio")
		for _, claim := range []*resourceapi.ResourceClaim{other, vm} {
			if err := r.prepareAgain(claim); err != nil {
				t.Error(err)
			}
		}
		r.unprepare(vm)
		time.Sleep(3 * time.Second)
		if mine, others := r.Driver(diskFunction), r.Driver(sibling); mine != "nvme" || others != "vfio-pci" {
			t.Errorf("drivers %q and %q", mine, others)
		}
		r.unprepare(other)
		r.bound("nvme", 3*time.Second)
		if driver := r.Driver(sibling); driver != "nvme" {
			t.Errorf("driver %q", driver)
		}
		stop()
	})
}

// A disk that no family offers is available only under vfio.
func TestAgentBindsFunctionsToVFIOThatNoFamilyOffers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		r.families = []*discovery.Family{vfio.Family}
		stop := r.start()
		vm, pod := r.claim("vm", "vfio"), r.claim("pod", "")
		for range 2 {
			r.refuses(pod, "can only be allocated with driver: vfio")
			r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
			stop()
			stop = r.start()
			r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
			r.refuses(pod, "can only be allocated with driver: vfio")
			r.unprepare(vm)
			r.bound("nvme", 2*time.Second)
		}
		stop()
	})
}
