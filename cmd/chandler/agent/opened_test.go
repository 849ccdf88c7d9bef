package agent

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// The files of the agent were lost while a pod has a disk under vfio. The pod's claim is prepared
// again, although its own container has the disk open. The claim of another pod is refused.
func TestOpenedByItsOwnPod(t *testing.T) {
	for _, own := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			r := newRebinding(t)
			stop := r.start()
			vm := r.claim("vm", "vfio")
			vm.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "qemu", UID: "uid"}}
			r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
			uid := "uid"
			if !own {
				uid = "other"
			}
			r.File("proc/47/cgroup", "0::/kubepods/pod"+uid+"/0\n")
			r.OpenNode("47", "qemu", "/dev/vfio/3")
			stop()
			for _, lost := range []string{"plugins/chandler.dev/claims", "cdi"} {
				if err := os.RemoveAll(filepath.Join(r.dir, lost)); err != nil {
					t.Fatal(err)
				}
			}
			stop = r.start()
			if own {
				r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
			} else {
				r.refuses(vm, "process 47 (qemu) has it open")
			}
			stop()
		})
	}
}

// A claim for one function of an IOMMU group under vfio is refused while a process has another
// function of the group open.
func TestSiblingIsOpened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		r.addSibling()
		r.File(passthroughtest.Source(siblingFunction)+"/resource0", "")
		stop := r.run(r.config(&rules.Rules{Mode: discovery.ModeDRA}))
		r.offers(diskName+" "+siblingName, "")
		vm := r.claim("vm", "vfio")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		r.OpenNode("47", "qemu", "/"+passthroughtest.Source(siblingFunction)+"/resource0")
		r.unprepare(vm)
		next := r.claim("next", "vfio")
		r.refuses(next, "function "+siblingFunction+": process 47 (qemu) has it open as a whole")
		r.EndProcess("47")
		r.gives(next, "/dev/vfio/3", "/dev/vfio/vfio")
		stop()
	})
}
