package agent

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/passthrough/passthroughtest"
	"chandler.dev/internal/reclaim"
)

// reclaimNode is a node that reclaims its disk.
type reclaimNode struct {
	*rebinding

	rules []discovery.Selection[reclaim.Rule]
}

func newReclaimNode(t *testing.T, reset bool, methods ...string) *reclaimNode {
	all := func(discovery.Device) (bool, error) { return true, nil }
	return &reclaimNode{newRebinding(t), []discovery.Selection[reclaim.Rule]{{Expression: "true", Selects: all, Value: reclaim.Rule{Reset: reset, Methods: methods}}}}
}

func (h *reclaimNode) config(wanted *rules.Rules) Config {
	config := h.rebinding.config(wanted)
	config.Settings.Passthrough, config.Settings.Reclaim = nil, h.rules
	return config
}

// startClassic runs an agent that offers the disk by the device plugin API, and makes process 47 of
// the pod "old" open the disk.
func (h *reclaimNode) startClassic() (stop func()) {
	h.t.Helper()
	classic := discovery.ModeDevicePlugin
	entry := rules.Resource{Selector: rulestest.CompileSelector(h.t, "true"), Name: "example.com/disk", Mode: &classic}
	h.pod("classic", "old")
	stop = h.run(h.config(&rules.Rules{Resources: []rules.Resource{entry}}))
	h.offers("", "example.com/disk")
	h.allocate("example.com/disk", diskFunction, diskNode)
	time.Sleep(time.Minute)
	h.runs("47", "train", "old", diskNode)
	return stop
}

func (h *reclaimNode) start() (stop func()) {
	h.t.Helper()
	stop = h.run(h.config(&rules.Rules{Mode: discovery.ModeDRA}))
	h.offers(diskName, "")
	return stop
}

// claimOf returns a claim for the disk that is reserved for the pod with the same name.
func (h *reclaimNode) claimOf(pod string) *resourceapi.ResourceClaim {
	h.t.Helper()
	claim := h.claim(pod, "")
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: pod, UID: types.UID(pod)}}
	return claim
}

// runs adds a process of the pod with a UID that has a node open.
func (h *reclaimNode) runs(process, comm, pod, node string) {
	h.t.Helper()
	h.File("proc/"+process+"/cgroup", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"+pod+".slice/cri-containerd-0.scope\n")
	h.OpenNode(process, comm, node)
}

// pod adds a pod to the API server.
func (h *reclaimNode) pod(name string, uid types.UID) {
	h.t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: uid}, Spec: corev1.PodSpec{NodeName: "node"}}
	if _, err := h.client.CoreV1().Pods("default").Create(h.t.Context(), pod, metav1.CreateOptions{}); err != nil {
		h.t.Fatal(err)
	}
}

// records returns the files of the records.
func (h *reclaimNode) records() []string {
	records, _ := filepath.Glob(filepath.Join(h.dir, "run/chandler/journal/reclaim/*"))
	return records
}

// resets returns the written attributes of the disk.
func (h *reclaimNode) resets() (written []string) {
	for _, write := range h.ListWrites() {
		written = append(written, strings.TrimPrefix(write, passthroughtest.Source(diskFunction)+"/"))
	}
	return written
}

// A pod's process continues to run after its claim has ended. No consumer gets the disk before the
// process has ended. The process of a monitor is ignored.
func TestAgentReclaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, false)
		stop := h.start()
		before, next := h.claimOf("old"), h.claimOf("next")
		h.gives(before, diskNode)
		h.runs("47", "train", "old", diskNode)
		h.runs("48", "monitor", "monitor", diskNode)
		h.unprepare(before)
		h.refuses(next, "claim default/old, which has ended: "+diskNode+": process 47 (train) has it open")
		time.Sleep(2 * time.Second)
		if got := h.taint(); got != diskName+" chandler.dev/unhealthy: Unhealthy" && !strings.Contains(got, "unhealthy") {
			t.Errorf("taint %q", got)
		}
		stop()
		stop = h.start() // the next agent keeps the disk too
		h.refuses(next, "process 47 (train)")
		h.EndProcess("47")
		time.Sleep(2 * time.Second)
		h.gives(next, diskNode)
		time.Sleep(2 * time.Second)
		if got := h.taint(); got != "" {
			t.Errorf("taint %q", got)
		}
		if records := h.records(); len(records) != 1 {
			t.Errorf("written down: %q", records)
		}
		h.unprepare(next) // the processes of the pod have ended
		if records := h.records(); len(records) != 0 || len(h.ListWrites()) > 0 {
			t.Errorf("written down: %q; writes %q", records, h.ListWrites())
		}
		h.gives(h.claimOf("third"), diskNode) // at once
		stop()
	})
}

// Nothing is recorded, checked or withheld without a rule of the administrator, and everything ends
// when the administrator removes the rule.
func TestAgentReclaimsNothingWithoutARule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, true)
		wanted := h.rules
		h.rules = nil
		stop := h.start()
		before, next := h.claimOf("old"), h.claimOf("next")
		h.gives(before, diskNode)
		h.runs("47", "train", "old", diskNode)
		h.unprepare(before)
		h.gives(next, diskNode)
		if len(h.records()) > 0 || len(h.ListWrites()) > 0 {
			t.Errorf("written down: %q; writes %q", h.records(), h.ListWrites())
		}
		h.unprepare(next)

		h.changes <- Change{Settings: Settings{Rules: &rules.Rules{Mode: discovery.ModeDRA}, Reclaim: wanted}}
		synctest.Wait()
		h.gives(before, diskNode)
		h.unprepare(before)
		h.refuses(next, "process 47 (train)")
		h.changes <- Change{Settings: Settings{Rules: &rules.Rules{Mode: discovery.ModeDRA}}}
		time.Sleep(5 * time.Second)
		h.gives(next, diskNode)
		if len(h.records()) > 0 || len(h.ListWrites()) > 0 {
			t.Errorf("written down: %q; writes %q", h.records(), h.ListWrites())
		}
		stop()
	})
}

// The disk is reset before the next consumer has it, by the methods that the administrator wants.
func TestAgentResets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, true, "flr")
		stop := h.start()
		before, next := h.claimOf("old"), h.claimOf("next")
		h.gives(before, diskNode)
		h.unprepare(before)
		h.gives(next, diskNode)
		h.unprepare(next)
		if got := h.resets(); !slices.Equal(got, []string{"reset_method flr", "reset 1", "reset 1"}) {
			t.Errorf("writes %q", got)
		}
		stop()
	})
}

// A reset that hangs affects only its disk, until the reset ends. A reset that fails is tried
// again.
func TestAgentResetsWhatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, true)
		h.File("dev/nvme1", "c 240:1")
		h.Add("0000:04:00.1", "nvme", "4")
		hangs := make(chan struct{})
		h.Hangs["reset"] = hangs
		stop := h.run(h.config(&rules.Rules{Mode: discovery.ModeDRA}))
		h.offers(diskName+" pci-0000-04-00-1", "")
		before, next := h.claimOf("old"), h.claimOf("next")
		h.gives(before, diskNode)
		h.unprepare(before)
		h.refuses(next, "claim default/old, which has ended: its reset has not ended after 10s")
		if got := h.taint(); !strings.Contains(got, diskName+" chandler.dev/unhealthy") || strings.Contains(got, "pci-0000-04-00-1") {
			t.Errorf("taint %q", got)
		}
		if err := h.prepareAgain(h.claimFor("pci-0000-04-00-1", "pod", "")); err != nil {
			t.Error(err)
		}
		if got := h.resets(); len(got) != 1 {
			t.Errorf("writes %q while one hangs", got)
		}
		h.Resets = func(string) error { return syscall.ENOTTY }
		close(hangs)
		time.Sleep(time.Second)
		h.refuses(next, "it cannot be reset: function 0000:03:00.0: write \"1\" to reset: inappropriate ioctl for device")
		stop()
		h.Resets = nil
		stop = h.run(h.config(&rules.Rules{Mode: discovery.ModeDRA}))
		h.offers(diskName+" pci-0000-04-00-1", "")
		h.gives(next, diskNode)
		if got := h.taint(); got != "" {
			t.Errorf("taint %q", got)
		}
		stop()
	})
}

// A reset that removes the disk completes the reclaim.
func TestAgentResetsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, true)
		h.Resets = func(address string) error {
			for _, dir := range []string{passthroughtest.Source(address), "sys/bus/pci/devices/" + address} {
				if err := os.RemoveAll(filepath.Join(h.Dir, dir)); err != nil {
					return err
				}
			}
			return syscall.ENODEV
		}
		stop := h.start()
		before := h.claimOf("old")
		h.gives(before, diskNode)
		h.unprepare(before)
		h.offers("", "")
		if records := h.records(); len(records) != 0 {
			t.Errorf("written down: %q", records)
		}
		stop()
	})
}

// If an agent is killed before it has reset a disk, the next agent does so. After a reboot nothing
// is left to do.
func TestAgentIsKilledWhileItReclaims(t *testing.T) {
	for _, reboots := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			h := newReclaimNode(t, true)
			stop := h.start()
			before, next := h.claimOf("old"), h.claimOf("next")
			h.gives(before, diskNode)
			h.Kill(0)
			h.unprepare(before)
			stop()
			h.Kill(-1)
			if reboots {
				h.Reboot()
				h.boot = "second"
			}
			stop = h.start()
			if got := h.resets(); (len(got) == 1) != !reboots || len(h.records()) != 0 {
				t.Errorf("reboot %v: writes %q, written down %q", reboots, got, h.records())
			}
			h.gives(next, diskNode)
			stop()
		})
	}
}

// asks requests a device as the kubelet does, and returns the error.
func (h *reclaimNode) asks(resource, id string) error {
	h.mu.Lock()
	server := h.servers[resource]
	h.mu.Unlock()
	_, err := server.Allocate(h.t.Context(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{id}}}})
	return err
}

// The kubelet allocates an ID again after its pod was deleted by force, before and after the agent
// has seen the end of the pod. No consumer gets the disk while a process of that pod has it open.
func TestAgentReclaimsIDs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, true)
		stop := h.startClassic()
		again := func() error { return h.asks("example.com/disk", diskFunction) }
		has := func(ids ...string) {
			t.Helper()
			h.mu.Lock()
			defer h.mu.Unlock()
			if got := h.healthy["example.com/disk"]; !slices.Equal(got, ids) {
				t.Errorf("healthy: %q, want %q", got, ids)
			}
		}
		const why = "default/classic main, which has ended: /dev/nvme0: process 47 (train) has it open"
		has(diskFunction)
		if err := again(); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("error %v", err)
		}
		time.Sleep(time.Second)
		has()
		h.mu.Lock()
		clear(h.allocated)
		h.mu.Unlock()
		time.Sleep(time.Minute)
		if err := again(); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("error %v", err)
		}
		if len(h.resets()) > 0 {
			t.Errorf("writes %q", h.resets())
		}
		h.EndProcess("47")
		time.Sleep(3 * time.Second)
		has(diskFunction)
		if err := again(); err != nil || len(h.resets()) != 1 {
			t.Errorf("error %v, writes %q", err, h.resets())
		}
		stop()
	})
}

// A claim that is reserved for a PodGroup does not name its pods. The kubelet lists the pods, and
// the disk is withheld until their processes have closed it.
func TestAgentFindsPodsOfPodGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, true)
		stop := h.start()
		before, next := h.claim("old", ""), h.claimOf("next")
		before.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "group", UID: "group"}}
		h.gives(before, diskNode)
		h.pod("train", "trainuid")
		h.runs("47", "train", "trainuid", diskNode)
		h.mu.Lock()
		h.claimed = map[string]string{"train": "old"}
		h.mu.Unlock()
		time.Sleep(time.Minute)
		h.unprepare(before)
		h.refuses(next, "process 47 (train) has it open")
		h.EndProcess("47")
		h.gives(next, diskNode)
		if got := h.resets(); !slices.Equal(got, []string{"reset 1"}) {
			t.Errorf("writes %q", got)
		}
		stop()
	})
}

// Without privilege the agent cannot reset the disk or read the open files of processes: the next
// claim waits for as long as the containers of the earlier pod may continue to run.
func TestReclaimWithoutPrivilege(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, false)
		stop := h.start()
		before, next := h.claimOf("old"), h.claimOf("next")
		h.gives(before, diskNode)
		h.runs("47", "train", "old", diskNode)
		if err := os.RemoveAll(filepath.Join(h.Dir, "proc/1")); err != nil { // hidepid
			t.Fatal(err)
		}
		h.unprepare(before)
		h.refuses(next, "it is unknown whether a process has it open")
		time.Sleep(ledger.DefaultTermination)
		h.gives(next, diskNode)
		stop()

		h.rules[0].Value.Reset = true
		config := h.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Write = nil
		stop = h.run(config)
		h.offers(diskName, "")
		h.unprepare(next)
		time.Sleep(ledger.DefaultTermination)
		h.refuses(before, "it cannot be reset: the agent may not change the host")
		stop()
	})
}

// Temporary files that a killed agent has left beside its records are removed.
func TestAgentRemovesTemporaryFiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, false)
		var left []string
		for _, dir := range []string{"handover", "made", "rebound"} {
			name := filepath.Join(h.dir, "plugins/chandler.dev", dir, ".0000:03:00.0.json.47.tmp")
			if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o700), os.WriteFile(name, nil, 0o600), os.Chtimes(name, time.Now(), time.Now())); err != nil { // by the bubble's clock
				t.Fatal(err)
			}
			left = append(left, name)
		}
		stop := h.start()
		for _, name := range left {
			if _, err := os.Stat(name); !os.IsNotExist(err) {
				t.Errorf("%s: %v", name, err)
			}
		}
		stop()
	})
}

// An agent that ends while a reset hangs does not release the node's lock: the next agent would
// give the disk to a pod, and the reset would hit that pod. After the release of the lock nothing
// is written.
func TestAgentKeepsItsLockWhileAResetHangs(t *testing.T) {
	for _, hanging := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			h := newReclaimNode(t, true)
			hangs := make(chan struct{})
			if hanging {
				h.Hangs["reset"] = hangs
			}
			lock := make(turns, 1)
			config := h.config(&rules.Rules{Mode: discovery.ModeDRA})
			config.Lock = lock
			stop := h.run(config)
			h.offers(diskName, "")
			before := h.claimOf("old")
			h.gives(before, diskNode)
			h.unprepare(before)
			time.Sleep(time.Second)
			stop()
			if held := len(lock) == 1; held != hanging {
				t.Errorf("reset hangs: %t; lock held: %t", hanging, held)
			}
			written := len(h.resets())
			close(hangs)
			time.Sleep(time.Minute)
			if got := h.resets(); !hanging && len(got) != written {
				t.Errorf("written after the lock was released: %q", got[written:])
			}
		})
	}
}

// A pod has a disk under vfio, and its process has the node of the IOMMU group open, when an
// administrator binds the disk to its own driver. The disk is withheld for as long as the process
// has that node open, although the node does not belong to the disk any more. A process that has
// only the control node of vfio open does not matter.
func TestKeptByTheNodesOfTheClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, false)
		config := h.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Settings.Passthrough = everything
		stop := h.run(config)
		h.offers(diskName, "")
		vm, next := h.claim("vm", "vfio"), h.claimOf("next")
		vm.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "vm", UID: "vm"}}
		h.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		h.runs("47", "qemu", "vm", "/dev/vfio/3")
		h.runs("48", "other", "vm", "/dev/vfio/vfio")
		h.SetDriver(diskFunction, "nvme")
		h.File(passthroughtest.Source(diskFunction)+"/driver_override", "(null)\n")
		time.Sleep(time.Minute)
		h.unprepare(vm)
		h.refuses(next, "/dev/vfio/3: process 47 (qemu) has it open")
		h.EndProcess("47")
		h.gives(next, diskNode)
		stop()
	})
}
