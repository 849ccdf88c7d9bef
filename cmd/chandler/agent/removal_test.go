package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/cdi/hook"
	"chandler.dev/cmd/chandler/agent/changes"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/internal/passthrough/passthroughtest"
	"chandler.dev/internal/removal"
)

// orders runs an agent that receives orders, and returns a function that sends an order. The
// channel receives the error of the agent when it ends.
func (n *node) orders(config Config) (give func(removal.Order), ended chan error) {
	n.t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "agent", Namespace: "chandler"}}
	if _, err := n.client.CoreV1().Pods("chandler").Create(n.t.Context(), pod, metav1.CreateOptions{}); err != nil {
		n.t.Fatal(err)
	}
	orders := make(chan removal.Order)
	config.Orders, config.Pod = orders, "chandler/agent"
	ended = make(chan error, 1)
	ctx, cancel := context.WithCancel(n.t.Context())
	n.t.Cleanup(cancel)
	go func() { ended <- Run(ctx, config) }()
	return func(o removal.Order) { orders <- o }, ended
}

// answers waits three seconds, and checks the last report.
func (n *node) answers(want removal.Report) {
	n.t.Helper()
	time.Sleep(3 * time.Second)
	synctest.Wait()
	pod, err := n.client.CoreV1().Pods("chandler").Get(n.t.Context(), "agent", metav1.GetOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	if got, _ := removal.ReportOf(pod); got != want {
		n.t.Errorf("the agent answers %+v, want %+v", got, want)
	}
}

// has checks the devices in slices and the number of healthy IDs of the device plugin API.
func (n *node) has(published string, healthy int) {
	n.t.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	ids := 0
	for _, of := range n.healthy {
		ids += len(of)
	}
	if got := strings.Join(n.published, " "); got != published || ids != healthy {
		n.t.Errorf("slices have %q, want %q; %d IDs are healthy, want %d", got, published, ids, healthy)
	}
}

// An agent that is to be removed withholds all devices, reports their consumers, removes everything
// once no device is allocated, and answers probes until its pod is deleted.
func TestRemoval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		classic := discovery.ModeDevicePlugin
		tun := rules.Resource{Selector: rulestest.CompileSelector(t, `device.attributes["chandler.dev"].?model.orValue("") == "tun"`), Name: "devices.kubevirt.io/tun", Mode: &classic}
		config := n.config(&rules.Rules{Mode: discovery.ModeDRA, Resources: []rules.Resource{tun}})
		config.FeatureDir = t.TempDir()
		program := filepath.Join(t.TempDir(), "chandler")
		if err := os.WriteFile(program, []byte("a program"), 0o755); err != nil {
			t.Fatal(err)
		}
		config.HookProgram = filepath.Join(config.StateDir, "bin", "chandler")
		config.KeepHooks = func(ctx context.Context) {
			hook.KeepInstalled(ctx, program, config.HookProgram, 30*time.Second, func(err error) { t.Error(err) })
		}
		slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice"}, Spec: resourceapi.ResourceSliceSpec{Driver: discovery.Domain}}
		if _, err := n.client.ResourceV1().ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		give, ended := n.orders(config)
		n.offers("kvm", "devices.kubevirt.io/tun")
		n.mu.Lock()
		all := len(n.healthy["devices.kubevirt.io/tun"])
		n.mu.Unlock()
		claim, err := n.prepare("kvm")
		if err != nil {
			t.Fatal(err)
		}

		give(removal.Order{Phase: removal.Withhold, ID: "a"})
		n.answers(removal.Report{ID: "a", State: removal.InUse, Detail: "claim default/claim"})
		n.has("", 0)
		give(removal.Order{}) // the removal failed
		n.answers(removal.Report{State: removal.Offering})
		n.has("kvm", all)

		n.unprepare(claim)
		give(removal.Order{Phase: removal.Withhold, ID: "b"})
		n.answers(removal.Report{ID: "b", State: removal.Withheld})
		give(removal.Order{Phase: removal.Remove, ID: "b"})
		n.answers(removal.Report{ID: "b", State: removal.Removed})
		left, err := n.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
		if err != nil || len(left.Items) != 0 {
			t.Errorf("slices that are left: %v, %v", left, err)
		}
		if files, _ := filepath.Glob(filepath.Join(config.FeatureDir, "*")); len(files) != 0 {
			t.Errorf("labels of the node are left: %q", files)
		}
		time.Sleep(2 * removal.Patience) // an order to remove does not expire
		if _, err := os.Stat(config.StateDir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the agent's directory is left, or there again: %v", err)
		}
		give(removal.Order{})
		if err := <-ended; !errors.Is(err, errWithdrawn) {
			t.Errorf("the agent ends with %v", err)
		}
	})
}

// A container with a device of the device plugin API delays the removal, and the report names its
// pod. An order that is not renewed expires.
func TestRemovalWaitsForContainers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		config := n.config(&rules.Rules{Mode: discovery.ModeDevicePlugin})
		give, ended := n.orders(config)
		n.offers("", "devices.kubevirt.io/kvm devices.kubevirt.io/tun")
		n.allocate("devices.kubevirt.io/tun", "tun0", "/dev/net/tun")
		time.Sleep(time.Minute)

		give(removal.Order{Phase: removal.Remove, ID: "a"})
		n.answers(removal.Report{ID: "a", State: removal.InUse, Detail: "pod default/classic"})
		give(removal.Order{Phase: removal.Withhold, ID: "b"})
		n.answers(removal.Report{ID: "b", State: removal.InUse, Detail: "pod default/classic"})
		time.Sleep(removal.Patience)
		n.answers(removal.Report{State: removal.Offering})
		select {
		case err := <-ended:
			t.Errorf("the agent ended: %v", err)
		default:
		}
	})
}

// The report explains why a device cannot return to its driver: a process still has the device
// open. A device that keeps its driver does not delay the removal.
func TestRemovalWhileDevicesAreKept(t *testing.T) {
	for _, want := range []string{"vfio", ""} {
		synctest.Test(t, func(t *testing.T) {
			h := newReclaimNode(t, false)
			config := h.rebinding.config(&rules.Rules{Mode: discovery.ModeDRA})
			config.Settings.Reclaim = h.rules
			give, _ := h.orders(config)
			h.offers(diskName, "")
			claim, node := h.claim("old", want), diskNode
			claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "old", UID: "old"}}
			if want == "vfio" {
				node = "/dev/vfio/3"
				h.gives(claim, node, "/dev/vfio/vfio")
			} else {
				h.gives(claim, node)
			}
			h.runs("47", "train", "old", node)
			h.unprepare(claim)
			give(removal.Order{Phase: removal.Remove, ID: "a"})
			if want == "vfio" {
				h.answers(removal.Report{ID: "a", State: removal.Waiting, Detail: "device " + diskName + " is not returned to its driver yet: it is in use by claim default/old, which has ended: " + node + ": process 47 (train) has it open"})
				h.EndProcess("47")
			}
			time.Sleep(2 * changes.RetryInterval)
			h.answers(removal.Report{ID: "a", State: removal.Removed})
		})
	}
}

// An agent does not leave before all devices have returned to their drivers.
func TestRemovalWaitsForDrivers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		give, ended := r.orders(r.config(&rules.Rules{Mode: discovery.ModeDRA}))
		r.offers(diskName, "")
		vm := r.claim("vm", "vfio")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		give(removal.Order{Phase: removal.Remove, ID: "a"})
		r.answers(removal.Report{ID: "a", State: removal.InUse, Detail: "claim default/vm"})
		r.RefuseProbes("nvme", syscall.ENODEV)
		r.unprepare(vm)
		time.Sleep(time.Minute)
		r.answers(removal.Report{ID: "a", State: removal.Waiting, Detail: "device " + diskName + " is not returned to its driver yet: it is not returned to driver nvme: driver nvme did not take it: function " + diskFunction + `: bind it to nvme: write "` + diskFunction + `" to /sys/bus/pci/drivers/nvme/bind: no such device`})
		r.RefuseProbes("nvme", nil)
		time.Sleep(changes.RetryInterval)
		r.answers(removal.Report{ID: "a", State: removal.Removed})
		if r.Driver(diskFunction) != "nvme" {
			t.Errorf("driver %q", r.Driver(diskFunction))
		}
		give(removal.Order{})
		if err := <-ended; !errors.Is(err, errWithdrawn) && !errors.Is(err, context.Canceled) {
			t.Errorf("the agent ends with %v", err)
		}
	})
}

// An agent that has lost its permissions while a device is bound to vfio does not leave, and
// reports the device and the remedy.
func TestRemovalWithoutPermissions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		stop := r.start()
		vm := r.claim("vm", "vfio")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		stop()
		config := r.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Write = func(string, string) error { return syscall.EROFS }
		give, _ := r.orders(config)
		r.offers(diskName, "")
		r.unprepare(vm)
		give(removal.Order{Phase: removal.Remove, ID: "a"})
		time.Sleep(time.Minute)
		r.answers(removal.Report{ID: "a", State: removal.Waiting, Detail: "device " + diskName + " is not returned to its driver yet: it is not returned to driver nvme: function " + diskFunction +
			`: set its driver: write "" to /` + passthroughtest.Source(diskFunction) + "/driver_override: read-only file system: the agent may not change the host: this needs passthrough.enabled, see docs/vfio-passthrough.md"})
		r.bound("vfio-pci", 0)
	})
}

// An agent that is being removed binds no more devices for resources of the device plugin API.
func TestRemovalUnbindsResources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		give, _ := r.orders(r.config(classicVFIO(t)))
		r.offers("", "example.com/disk")
		r.bound("vfio-pci", 0)
		give(removal.Order{Phase: removal.Withhold, ID: "a"})
		r.bound("nvme", 30*time.Second)
		r.answers(removal.Report{ID: "a", State: removal.Withheld})
		writes := len(r.ListWrites())
		give(removal.Order{Phase: removal.Withhold, ID: "a"})
		r.bound("nvme", time.Minute)
		if now := r.ListWrites(); len(now) != writes {
			t.Errorf("written: %q", now[writes:])
		}
		give(removal.Order{}) // the removal failed
		r.bound("vfio-pci", time.Minute)
		r.offers("", "example.com/disk")
	})
}

// An agent that leaves removes devices that were created on demand at once, although consumers of
// devices may return within the idle time.
func TestRemovalOfCreatedDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		give, _ := m.orders(m.config(&rules.Rules{Mode: discovery.ModeDRA}))
		m.offers(virtuals, "")
		m.gets(1, "first")()
		m.has(4, 0)
		hangs := make(chan struct{})
		m.HangVirtual(physicalFunction, hangs)
		give(removal.Order{Phase: removal.Remove, ID: "a"})
		m.answers(removal.Report{ID: "a", State: removal.Waiting, Detail: "pci-0000-03-00-0 was created on demand and is not removed yet"})
		close(hangs)
		time.Sleep(keepMade / 4)
		m.answers(removal.Report{ID: "a", State: removal.Removed})
		m.has(0, 0)
	})
}
