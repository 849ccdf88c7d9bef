package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/rebind/rebindtest"
)

const (
	siblingFunction = "0000:03:00.1" // in the IOMMU group of the disk
	siblingName     = "pci-0000-03-00-1"
)

// onlyVirtual allows passthrough for virtual functions.
var onlyVirtual = []discovery.Rebinding{{Expression: "virtual", Driver: "vfio-pci", Selects: func(d discovery.Device) (bool, error) {
	return d.Attributes.String("function") == "virtual", nil
}}}

// addSibling adds a second disk to the IOMMU group of the first.
func (r *rebinding) addSibling() {
	r.File("dev/nvme1", "c 240:1")
	r.Add(siblingFunction, "nvme", "3")
}

// keepsDisk reports an error if the first disk has lost its driver.
func (r *rebinding) keepsDisk() {
	r.t.Helper()
	if driver := r.Driver(diskFunction); driver != "nvme" {
		r.t.Errorf("the disk of claim default/pod was taken from it: driver %q; writes %q", driver, r.Written())
	}
}

// A pod has a disk, with whose sibling it became one piece of silicon since: passthrough was enabled for both, or the
// sibling was plugged in. The sibling is refused under vfio until the pod's claim has ended.
func TestSiblingOfPreparedDisk(t *testing.T) {
	for name, before := range map[string]func(r *rebinding, pod *resourceapi.ResourceClaim) (stop func()){
		"passthrough is enabled": func(r *rebinding, pod *resourceapi.ResourceClaim) func() {
			r.addSibling()
			config := r.config(&rules.Rules{Mode: discovery.ModeDRA})
			config.Settings.Rebind = nil
			stop := r.run(config)
			r.offers(diskName+" "+siblingName, "")
			r.gives(pod, diskNode)
			stop()
			return r.run(r.config(&rules.Rules{Mode: discovery.ModeDRA}))
		},
		"the sibling is plugged in": func(r *rebinding, pod *resourceapi.ResourceClaim) func() {
			stop := r.start()
			r.gives(pod, diskNode)
			r.addSibling()
			return stop
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRebinding(t)
				pod := r.claim("pod", "")
				stop := before(r, pod)
				r.offers(diskName+" "+siblingName, "")
				vm := r.claimFor(siblingName, "vm", "vfio")
				if err := r.prepareAgain(vm); err == nil {
					t.Error("the sibling is prepared under vfio")
				}
				r.keepsDisk()
				r.unprepare(pod)
				if err := r.prepareAgain(vm); err != nil {
					t.Errorf("after the end of the other claim: %v", err)
				}
				stop()
			})
		})
	}
}

// The same where a resource of the device plugin API wants the sibling under vfio.
func TestSiblingForResource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		r.addSibling()
		without := r.config(&rules.Rules{Mode: discovery.ModeDRA})
		without.Settings.Rebind = nil
		stop := r.run(without)
		r.offers(diskName+" "+siblingName, "")
		r.gives(r.claim("pod", ""), diskNode)
		stop()
		wanted := classicVFIO(t)
		wanted.Resources[0].Selector = selector(t, `device.attributes["resource.kubernetes.io"].pciBusID == "`+siblingFunction+`"`)
		stop = r.run(r.config(wanted))
		time.Sleep(workInterval + 2*time.Minute)
		synctest.Wait()
		r.keepsDisk()
		stop()
	})
}

// Two claims are allocated virtual functions that do not exist yet, and that turn out to be in one IOMMU group. The
// one that asks for vfio waits until the other has ended.
func TestVirtualFunctionsOfOneGroupAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := makesOf(t, &rebindtest.Physical{Address: physicalFunction, Total: 7, OneGroup: true})
		config := m.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Settings.Rebind = onlyVirtual
		stop := m.run(config)
		m.offers(virtuals, "")
		pod, vm := m.claimFor(virtual(0), "pod", ""), m.claimFor(virtual(1), "vm", "vfio")
		errs := map[string]chan error{"pod": make(chan error, 1), "vm": make(chan error, 1)}
		go func() { errs["pod"] <- m.prepareAgain(pod) }()
		go func() { errs["vm"] <- m.prepareAgain(vm) }()
		forPod, forVM := <-errs["pod"], <-errs["vm"]
		if (forPod == nil) == (forVM == nil) {
			t.Errorf("one of the claims gets its function: pod %v, vm %v", forPod, forVM)
		}
		time.Sleep(time.Minute)
		underVFIO := m.Driver(rebindtest.VirtualAddress(0)) == "vfio-pci"
		if underVFIO == (forPod == nil) {
			t.Errorf("function of claim pod under vfio: %t, while the claim was answered %v", underVFIO, forPod)
		}
		winner, loser := pod, vm
		if forPod != nil {
			winner, loser = vm, pod
		}
		m.unprepare(winner)
		if err := m.prepareAgain(loser); err != nil {
			t.Errorf("after the end of the other claim: %v", err)
		}
		stop()
	})
}

// Claims for virtual functions of one IOMMU group do not exclude each other while none of them asks for vfio, though
// passthrough is allowed for all.
func TestVirtualFunctionsOfOneGroupWithoutVFIO(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := makesOf(t, &rebindtest.Physical{Address: physicalFunction, Total: 7, OneGroup: true})
		config := m.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Settings.Rebind = onlyVirtual
		stop := m.run(config)
		m.offers(virtuals, "")
		for i, name := range []string{"first", "second"} {
			if err := m.prepareAgain(m.claimFor(virtual(i), name, "")); err != nil {
				t.Error(err)
			}
		}
		stop()
	})
}

// A claim that a container may have stays given while its device is changed for it once more: when it ends, the
// container before it is not forgotten.
func TestGivenClaimStaysGivenWhileItsDeviceChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		stop := r.start()
		vm := r.claim("vm", "vfio")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		r.SetDriver(diskFunction, "nvme") // by an administrator
		r.Opens("48", "dd", diskNode)
		time.Sleep(time.Minute)
		if err := r.prepareAgain(vm); err == nil {
			t.Error("prepared while a process of the host uses the disk")
		}
		record, err := os.ReadFile(filepath.Join(r.dir, "plugins/chandler.dev/claims/vm.record"))
		if err != nil || strings.Contains(string(record), `"configuring": true`) {
			t.Errorf("record %s, %v", record, err)
		}
		stop()
	})
}
