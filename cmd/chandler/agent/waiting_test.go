package agent

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// took checks that an action took the expected time, or up to two seconds more.
func took(t *testing.T, what string, began time.Time, want time.Duration) {
	t.Helper()
	if got := time.Since(began); got < want || got > want+2*time.Second {
		t.Errorf("%s took %s, want about %s", what, got, want)
	}
}

// A pod that starts during the reclaim of its disk waits, and gets the disk as soon as it is free.
// Other pods do not wait, and no pod waits without a limit.
func TestAgentWaitsForReclaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, false)
		h.File("dev/nvme1", "c 240:1")
		h.Add("0000:04:00.1", "nvme", "4")
		const otherName = "pci-0000-04-00-1"
		stop := h.run(h.config(&rules.Rules{Mode: discovery.ModeDRA}))
		h.offers(diskName+" "+otherName, "")
		before, next := h.claimOf("old"), h.claimOf("next")
		h.gives(before, diskNode)
		h.runs("47", "train", "old", diskNode)
		h.unprepare(before)
		began := time.Now()
		time.AfterFunc(5*time.Second, func() { h.EndProcess("47") })
		others := make(chan error, 1)
		go func() {
			time.Sleep(time.Second)
			other := h.claimFor(otherName, "other", "")
			err := h.prepareAgain(other)
			h.unprepare(other)
			h.unprepare(next) // the pod is deleted while the call waits; the call still prepares the claim
			if since := time.Since(began); since > 1100*time.Millisecond {
				t.Errorf("others waited too, for %s", since)
			}
			others <- err
		}()
		h.gives(next, diskNode)
		took(t, "the wait", began, 5*time.Second)
		if err := <-others; err != nil {
			t.Error(err)
		}

		h.runs("48", "train", "next", diskNode)
		h.unprepare(next)
		began = time.Now()
		h.refuses(before, "process 48 (train) has it open")
		took(t, "a refusal", began, 15*time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		began = time.Now()
		if prepared, err := h.dra().PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{before}); err != nil || prepared[before.UID].Err == nil {
			t.Errorf("%v, %v", prepared, err)
		}
		cancel()
		took(t, "a call that was cut off", began, 2*time.Second)

		ended := make(chan error, 1)
		began = time.Now()
		go func() { ended <- h.prepareAgain(before) }()
		time.Sleep(time.Second)
		stop()
		if err := <-ended; err == nil {
			t.Error("prepared")
		}
		took(t, "the end of the agent", began, time.Second)
	})
}

// The same applies to the device plugin API, where a pod fails if Allocate fails.
func TestAgentWaitsToReclaimAnID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, false)
		stop := h.startClassic()
		began := time.Now()
		time.AfterFunc(8*time.Second, func() { h.EndProcess("47") })
		h.allocate("example.com/disk", diskFunction, diskNode)
		took(t, "the wait", began, 8*time.Second)
		time.Sleep(time.Minute)
		h.runs("48", "train", "old", diskNode)
		began = time.Now()
		if err := h.asks("example.com/disk", diskFunction); err == nil || !strings.Contains(err.Error(), "process 48 (train)") {
			t.Errorf("error %v", err)
		}
		took(t, "a refusal", began, 10*time.Second)
		stop()
	})
}

// A pod that starts while its disk returns to its driver waits, even for a process that closes the
// disk late.
func TestAgentWaitsForADriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		stop := r.start()
		vm, pod := r.claim("vm", "vfio"), r.claim("pod", "")
		for _, goesOn := range []time.Duration{0, 4 * time.Second} {
			r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
			r.OpenNode("47", "qemu", "/dev/vfio/3")
			if goesOn == 0 {
				r.EndProcess("47")
			} else {
				time.AfterFunc(goesOn, func() { r.EndProcess("47") })
			}
			r.unprepare(vm)
			r.gives(pod, diskNode)
			r.unprepare(pod)
		}
		stop()
	})
}

// A claim for a virtual function that is just being removed waits, and then gets a new function.
func TestAgentWaitsForARemoval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		stop := m.start()
		m.gets(0, "first")()
		synctest.Wait()
		hangs := make(chan struct{})
		m.HangVirtual(physicalFunction, hangs)
		time.Sleep(keepMade + 2*time.Second)
		began := time.Now()
		time.AfterFunc(5*time.Second, func() { close(hangs) })
		m.gets(0, "second")
		took(t, "the wait", began, 5*time.Second)
		if got := m.ListWrites(); len(got) != 3 || got[2] != passthroughtest.Source(physicalFunction)+"/sriov_numvfs 4" {
			t.Errorf("writes %q", got)
		}
		stop()
	})
}

// A family has not answered before the agent first offers devices, as on a busy node that has just
// started. A claim for a device of the family waits, and is refused with the reason after a time
// limit.
func TestAgentWaitsForAFamily(t *testing.T) {
	for answers, want := range map[time.Duration]string{
		15 * time.Second: "",
		time.Minute:      "is not yet known: slow: no answer in 10s",
	} {
		t.Run(answers.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRebinding(t)
				slow, quick := *disks, *disks
				slow.Name, quick.Name = "slow", "quick"
				quick.Match = []discovery.Match{{Bus: "pci", Driver: "quick"}}
				r.Add("0000:04:00.1", "quick", "4")
				r.File("dev/nvme1", "c 240:1")
				slow.Describe = func(host *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
					time.Sleep(answers)
					return disks.Describe(host, found)
				}
				r.families = []*discovery.Family{&quick, &slow}
				stop := r.run(r.config(&rules.Rules{Mode: discovery.ModeDRA}))
				time.Sleep(11 * time.Second)
				claim, began := r.claim("early", ""), time.Now()
				if want == "" {
					r.gives(claim, diskNode)
					took(t, "the wait", began, 4*time.Second)
				} else {
					r.refuses(claim, want)
					took(t, "the wait", began, 15*time.Second)
				}
				stop()
				time.Sleep(answers) // until the last scan has ended
			})
		})
	}
}
