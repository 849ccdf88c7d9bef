package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/internal/passthrough/passthroughtest"
)

const (
	siblingFunction = "0000:03:00.1" // in the IOMMU group of the disk
	siblingName     = "pci-0000-03-00-1"
)

// onlyVirtual allows passthrough for virtual functions.
var onlyVirtual = []discovery.Selection[string]{{Expression: "virtual", Value: "vfio-pci", Selects: func(d discovery.Device) (bool, error) {
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
		r.t.Errorf("the disk of claim default/pod was taken from it: driver %q; writes %q", driver, r.ListWrites())
	}
}

// A pod has a disk that has since become one physical device with a sibling: passthrough was
// enabled for both, or the sibling was plugged in. The sibling is refused under vfio until the
// pod's claim has ended.
func TestSiblingOfPreparedDisk(t *testing.T) {
	for name, before := range map[string]func(r *rebinding, pod *resourceapi.ResourceClaim) (stop func()){
		"passthrough is enabled": func(r *rebinding, pod *resourceapi.ResourceClaim) func() {
			r.addSibling()
			config := r.config(&rules.Rules{Mode: discovery.ModeDRA})
			config.Settings.Passthrough = nil
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

// The same for a resource of the device plugin API that wants the sibling under vfio.
func TestSiblingForResource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		r.addSibling()
		without := r.config(&rules.Rules{Mode: discovery.ModeDRA})
		without.Settings.Passthrough = nil
		stop := r.run(without)
		r.offers(diskName+" "+siblingName, "")
		r.gives(r.claim("pod", ""), diskNode)
		stop()
		wanted := classicVFIO(t)
		wanted.Resources[0].Selector = rulestest.CompileSelector(t, `device.attributes["resource.kubernetes.io"].pciBusID == "`+siblingFunction+`"`)
		stop = r.run(r.config(wanted))
		time.Sleep(placement.WorkInterval + 2*time.Minute)
		synctest.Wait()
		r.keepsDisk()
		stop()
	})
}

// Two claims are allocated virtual functions that do not exist yet, and that turn out to be in one
// IOMMU group. The claim for vfio waits until the other claim has ended.
func TestVirtualFunctionsOfOneGroupAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := makesOf(t, &passthroughtest.Physical{Address: physicalFunction, Total: 7, OneGroup: true})
		config := m.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Settings.Passthrough = onlyVirtual
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
		underVFIO := m.Driver(passthroughtest.VirtualAddress(0)) == "vfio-pci"
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

// Claims for virtual functions of one IOMMU group do not exclude each other while no claim wants
// vfio, although passthrough is allowed for all.
func TestVirtualFunctionsOfOneGroupWithoutVFIO(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := makesOf(t, &passthroughtest.Physical{Address: physicalFunction, Total: 7, OneGroup: true})
		config := m.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Settings.Passthrough = onlyVirtual
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

// A claim that a container may have stays given while its device is changed for the claim again:
// when the claim ends, the earlier container is not forgotten.
func TestGivenClaimStaysGivenWhileItsDeviceChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		stop := r.start()
		vm := r.claim("vm", "vfio")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		r.SetDriver(diskFunction, "nvme") // by an administrator
		r.OpenNode("48", "dd", diskNode)
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

// A pod has a disk by DRA. A resource of the device plugin API wants its sibling under vfio, so the
// two become one physical device for two APIs, and neither API may offer it. The claim of the pod
// keeps its disk and is prepared again: by an agent that starts with that configuration, by a
// running agent that reads it, and after the sibling is plugged in. The physical device is left out
// once the claim has ended.
func TestClaimKeepsItsDiskWhenEntriesSplitTheGroup(t *testing.T) {
	for name, plugged := range map[string]bool{"configuration": false, "sibling is plugged in": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRebinding(t)
				if !plugged {
					r.addSibling()
				}
				wanted := classicVFIO(t)
				wanted.Resources[0].Selector = rulestest.CompileSelector(t, `device.attributes["resource.kubernetes.io"].pciBusID == "`+siblingFunction+`"`)
				config := r.config(&rules.Rules{Mode: discovery.ModeDRA})
				if plugged {
					config = r.config(wanted)
				}
				stop := r.run(config)
				offered := diskName + " " + siblingName
				if plugged {
					offered = diskName
				}
				r.offers(offered, "")
				pod := r.claim("pod", "")
				r.gives(pod, diskNode)
				if plugged {
					r.addSibling()
				} else {
					stop()
					stop = r.run(r.config(wanted))
				}
				time.Sleep(placement.WorkInterval)
				if err := r.prepareAgain(pod); err != nil {
					t.Error(err)
				}
				r.keepsDisk()
				stop()
			})
		})
	}
}
