package reclaim

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/passthrough/passthroughtest"
)

const address = "0000:03:00.0"

// bench is a host with one device, the claim that has the device, and a [Manager].
type bench struct {
	*Manager
	*passthroughtest.Kernel

	t    *testing.T
	dir  string
	disk *disktest.Disk

	ledgerDisk disk.FS                                                     // the operating system's if nil
	listed     []string                                                    // pods that the kubelet lists with the claim
	podsOf     func(context.Context) (map[types.NamespacedName]Pod, error) // a request to the API server

	fsys   fs.FS
	rule   discovery.Selection[Rule]
	lifted atomic.Bool // the administrator has removed the rule

	swapped atomic.Bool // the kernel has exchanged the names of two devices
	device  discovery.Device
	others  []discovery.Device
	ledger  *ledger.Ledger
	claim   *allocation.Claim
}

func newBench(t *testing.T) *bench {
	b := &bench{t: t, Kernel: passthroughtest.New(t), dir: t.TempDir(), disk: &disktest.Disk{}, rule: discovery.Selection[Rule]{Selects: func(discovery.Device) (bool, error) { return true, nil }, Value: Rule{Reset: true}}}
	b.podsOf = func(context.Context) (map[types.NamespacedName]Pod, error) { return nil, nil }
	b.Add(address, "nvme", "3")
	b.fsys = b.FS()
	b.device = discovery.Device{Name: "d", Source: passthroughtest.Source(address), Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/d", HostPath: "/dev/d", Type: "c", Major: 240}}}}
	b.claim = &allocation.Claim{Version: 1, UID: "old", Namespace: "default", Name: "old", Boot: "boot", Results: []allocation.Result{{Request: "r", Device: "d", Silicon: "d", Whole: true, Source: "d", CDI: "d"}}}
	return b
}

// open creates a [Manager] and a ledger from the records on disk.
func (b *bench) open() (problems []error) {
	b.t.Helper()
	b.ledger = ledger.New(ledger.Config{Dir: filepath.Join(b.dir, "state"), Boot: "boot", Disk: b.ledgerDisk})
	b.Manager = New(Config{
		Stock: func() exclusion.Stock { return &exclusion.Present{} },
		Host:  &discovery.Host{FS: b.fsys}, Write: b.Kernel.Write, Journal: journal.Config{Files: disk.Files{FS: b.disk}, Dir: b.dir, Boot: "boot"}, Earlier: filepath.Join(b.dir, "handover"),
		Ledger: b.ledger, Rules: func() []discovery.Selection[Rule] {
			if b.lifted.Load() {
				return nil
			}
			return []discovery.Selection[Rule]{b.rule}
		},
		Snapshot: func() *discovery.Snapshot {
			devices := append(slices.Clone(b.others), b.device)
			if b.swapped.Load() {
				devices[0].Source, devices[1].Source = devices[1].Source, devices[0].Source
			}
			slices.SortFunc(devices, func(a, b discovery.Device) int { return strings.Compare(a.Name, b.Name) })
			return &discovery.Snapshot{Devices: devices}
		},
		PodOf: func(allocation.Owner) types.UID { return "" }, Changed: func() {},
		Users:  func(allocation.Owner) []string { return b.listed },
		PodsOf: func(ctx context.Context) (map[types.NamespacedName]Pod, error) { return b.podsOf(ctx) },
	})
	b.ledger.SetOutputs(b.Manager)
	problems = b.Load()
	if _, err := b.ledger.Open(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	return problems
}

// gives gives the device to the claim.
func (b *bench) gives(pods ...types.UID) {
	b.t.Helper()
	b.NoteUsers("old", pods)
	if err := b.ledger.AllocateClaim(b.claim, allocation.Allocated, &exclusion.Present{}); err != nil {
		b.t.Fatal(err)
	}
	if err := b.ledger.Write("old"); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) ends() {
	b.t.Helper()
	if err := b.ledger.End("old", nil); err != nil {
		b.t.Error(err)
	}
}

// keeps checks why the device is withheld, "" if available.
func (b *bench) keeps(why string) {
	b.t.Helper()
	blocked := b.ledger.View(&exclusion.Present{}).BlockedBy(discovery.ModeDRA, "", []allocation.Hold{{Device: "d", Silicon: "d", Whole: true}})
	if (blocked != nil) != (why != "") || blocked != nil && !strings.Contains(blocked.Error(), why) {
		b.t.Errorf("%v, want %q", blocked, why)
	}
}

// run runs the [Manager] until stop is called.
func (b *bench) run() (stop func()) {
	ctx, cancel := context.WithCancel(b.t.Context())
	go b.Run(ctx)
	return func() {
		cancel()
		synctest.Wait()
	}
}

// handsOver ends the process of [bench.trains], waits until the device is reclaimed without any
// record left, and stops the [Manager].
func (b *bench) handsOver(stop func()) {
	b.t.Helper()
	b.EndProcess("47")
	time.Sleep(2 * time.Second)
	b.keeps("")
	stop()
	if len(b.files()) != 0 {
		b.t.Errorf("files %q", b.files())
	}
}

// trains makes a process of the pod open the device.
func (b *bench) trains() {
	b.t.Helper()
	b.File("proc/47/cgroup", "0::/kubepods/podpod/0\n")
	b.OpenNode("47", "train", "/dev/d")
}

// A device that the previous owner did not use alone is not reset.
func TestNotReset(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*bench)
		writes int
		why    string
	}{
		"it is": {func(*bench) {}, 1, ""},
		"a share": {func(b *bench) {
			b.claim.Results[0].Consumes = allocation.Amounts{"shares": resource.MustParse("1")}
		}, 0, ""},
		"a partition": {func(b *bench) {
			b.device.PartOf = &discovery.Silicon{Name: "gpu", Counters: allocation.Counters{"slices": resource.MustParse("7")}}
		}, 0, ""},
		"a virtual function": {func(b *bench) { b.device.PartOf = &discovery.Silicon{Name: "adapter"} }, 1, ""},
		"another on the function": {func(b *bench) {
			b.others = []discovery.Device{{Name: "e", Source: b.device.Source + "/misc/e"}}
		}, 0, "it cannot be reset: device e is on the same function"},
		"an open one on the function": {func(b *bench) {
			b.others = []discovery.Device{{Name: "e", Source: b.device.Source + "/misc/e", Shareable: true}}
		}, 1, ""},
		"no function": {func(b *bench) { b.device.Source = "sys/class/block/x" }, 0, "it belongs to no PCI function"},
		"no way":      {func(b *bench) { _ = os.Remove(filepath.Join(b.Dir, b.device.Source, "reset")) }, 0, "the kernel has no way to reset function 0000:03:00.0"},
		"an old kernel": {func(b *bench) {
			b.rule.Value.Methods = []string{"flr"}
			_ = os.Remove(filepath.Join(b.Dir, b.device.Source, "reset_method"))
		}, 0, "which ways the kernel has"},
		"a way that it has not": {func(b *bench) {
			b.rule.Value.Methods = []string{"acpi"}
			b.Refuses["reset_method"] = syscall.EINVAL
		}, 1, `write "acpi" to reset_method: invalid argument`},
		"nothing asked": {func(b *bench) { b.rule.Value.Reset = false }, 0, ""},
		"another owner": {func(*bench) {}, 0, "it is in use"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				test.change(b)
				b.open()
				b.gives("pod")
				if name == "another owner" {
					b.ledger.Leases.KeepDevice(&ledger.KeptDevice{Name: "as if", Previous: allocation.Owner{API: discovery.ModeDRA, Name: "other"}, Hold: b.claim.Holds()[0], Reason: "it is in use"})
				}
				b.ends()
				synctest.Wait()
				if got := b.ListWrites(); len(got) != test.writes {
					t.Errorf("writes %q", got)
				}
				b.keeps(test.why)
			})
		})
	}
}

// A check that hangs withholds the device until the check ends, or until the administrator removes
// the rule.
func TestHangingOpenFileCheck(t *testing.T) {
	for _, lifted := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			hangs := make(chan struct{})
			b.fsys = hanging{b.FS(), hangs}
			b.open()
			b.trains()
			b.gives("pod")
			b.ends()
			b.keeps(reasonChecking)
			stop := b.run()
			time.Sleep(9 * time.Second)
			b.keeps(reasonChecking)
			time.Sleep(time.Hour)
			b.keeps("looking at what the processes of its pod have open has not ended after 10s")
			if lifted {
				b.lifted.Store(true)
				time.Sleep(11 * time.Second)
				b.keeps("")
				close(hangs)
				time.Sleep(time.Minute)
			} else {
				close(hangs)
				time.Sleep(2 * time.Second)
				b.keeps("process 47 (train) has it open")
				b.EndProcess("47")
				time.Sleep(2 * time.Second)
				b.keeps("")
			}
			stop()
			if resets := len(b.ListWrites()); (resets > 0) == lifted {
				t.Errorf("lifted %v: %d resets", lifted, resets)
			}
		})
	}
}

// A claim does not end while it has no record on disk, because the next agent would have no
// information about its device. A damaged record withholds no device.
func TestWhatCannotBeTold(t *testing.T) {
	t.Run("no record on disk", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			b.open()
			b.trains()
			b.gives("pod")
			if err := os.RemoveAll(filepath.Join(b.dir, "reclaim")); err != nil {
				t.Fatal(err)
			}
			b.disk.Before = func(_ disktest.Op, name string) error {
				if strings.Contains(name, "reclaim") {
					return syscall.EIO
				}
				return nil
			}
			if err := b.ledger.End("old", nil); err == nil {
				t.Error("a claim ended whose device may be lost track of")
			}
			b.disk.Before = nil
			b.ends()
			b.keeps("process 47 (train) has it open")
		})
	})
	t.Run("damaged", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			b.open()
			b.trains()
			b.gives("pod")
			b.ends()
			b.keeps("process 47")
			for _, file := range b.files() {
				if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if problems := b.open(); len(problems) != 1 || len(b.files()) != 1 {
				t.Errorf("%v, %q", problems, b.files())
			}
			b.keeps("")
		})
	})
}

func (b *bench) files() []string {
	files, _ := filepath.Glob(filepath.Join(b.dir, "reclaim/*"))
	return files
}

// The device of a claim whose end was missed is still reclaimed before another consumer gets the
// device.
func TestLostOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.open()
		b.trains()
		b.gives("pod")
		if err := os.RemoveAll(filepath.Join(b.dir, "state")); err != nil {
			t.Fatal(err)
		}
		b.open()
		b.keeps(reasonChecking)
		stop := b.run()
		time.Sleep(2 * time.Second)
		b.keeps("claim default/old, which has ended: /dev/d: process 47 (train) has it open")
		b.EndProcess("47")
		time.Sleep(2 * time.Second)
		b.keeps("")
		stop()
		if got := b.ListWrites(); len(got) != 1 || len(b.files()) != 0 {
			t.Errorf("writes %q, files %q", got, b.files())
		}
	})
}

// hanging is a host whose processes cannot be listed until a channel is closed.
type hanging struct {
	fs.FS

	until chan struct{}
}

func (h hanging) ReadDir(name string) ([]fs.DirEntry, error) {
	if name == "proc" {
		<-h.until
	}
	return fs.ReadDir(h.FS, name)
}
func (h hanging) ReadLink(name string) (string, error)   { return fs.ReadLink(h.FS, name) }
func (h hanging) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(h.FS, name) }
func (h hanging) Stat(name string) (fs.FileInfo, error)  { return fs.Stat(h.FS, name) }

// Devices that end together are reclaimed together: a slow device does not delay the others.
func TestTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.Add("0000:04:00.0", "nvme", "4")
		e := b.device
		e.Name, e.Source = "e", passthroughtest.Source("0000:04:00.0")
		b.others = []discovery.Device{e}
		b.claim.Results = append(b.claim.Results, allocation.Result{Request: "r", Device: "e", Silicon: "e", Whole: true, Source: "e", CDI: "e"})
		b.open()
		b.config.Write = func(name, value string) error {
			time.Sleep(endWait * 2 / 3)
			return b.Kernel.Write(name, value)
		}
		b.gives("pod")
		b.ends()
		if files := b.files(); len(files) > 0 {
			t.Errorf("not released in time: %q", files)
		}
		synctest.Wait()
	})
}

// A device that has changed into something else, such as a partitioned GPU or a function with
// virtual functions, is withheld only as long as a process has it open. Otherwise no consumer could
// ever use the new devices.
func TestNoMore(t *testing.T) {
	const virtual = "0000:03:10.0"
	for name, change := range map[string]func(*bench){
		"cut": func(b *bench) { b.device.Name = "d-mig-0" },
		"divided": func(b *bench) {
			b.Link(b.device.Source+"/virtfn0", "../"+virtual)
			b.device.Name, b.device.Source, b.device.PartOf = "v", passthroughtest.Source(virtual), &discovery.Silicon{Name: "d"}
		},
	} {
		t.Run(name, func(t *testing.T) { noMore(t, change) })
	}
}

func noMore(t *testing.T, change func(*bench)) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.open()
		b.trains()
		b.gives("pod")
		change(b)
		stop := b.run()
		b.ends()
		time.Sleep(2 * time.Second)
		b.keeps("process 47 (train) has it open")
		b.EndProcess("47")
		time.Sleep(2 * time.Second)
		b.keeps("")
		stop()
		if got := b.ListWrites(); len(got) > 0 {
			t.Errorf("writes %q", got)
		}
	})
}

// If the disk is read-only and a claim cannot end, the claim keeps its device, without a reset.
func TestFailedEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		full := &disktest.Disk{}
		b.ledgerDisk = full
		b.open()
		b.gives("pod")
		full.Before = func(op disktest.Op, name string) error {
			if op == disktest.Remove && strings.Contains(name, "claims") {
				return syscall.EROFS
			}
			return nil
		}
		if err := b.ledger.End("old", nil); err == nil {
			t.Error("it ended")
		}
		stop := b.run()
		time.Sleep(2 * refreshInterval)
		if files := b.files(); len(files) != 1 || len(b.ListWrites()) > 0 {
			t.Errorf("records %q, writes %q", files, b.ListWrites())
		}
		if b.ledger.View(&exclusion.Present{}).KeptReason("d") != "" {
			t.Error("the device is withheld")
		}
		stop()
	})
}

// The API server is rarely asked for a missing pod, and no other work waits for the answer. A pod
// that joins a claim, or replaces another pod, is requested by name.
func TestPodsThatJoin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.listed = []string{"second"}
		var asked atomic.Int32
		answer := make(chan map[types.NamespacedName]Pod)
		b.podsOf = func(ctx context.Context) (map[types.NamespacedName]Pod, error) {
			asked.Add(1)
			select {
			case <-ctx.Done():
				return nil, ctx.Err()
			case pods := <-answer:
				return pods, nil
			}
		}
		b.open()
		b.gives("other")
		b.trains()
		stop := b.run()
		time.Sleep(time.Hour) // the API server does not answer
		answer <- nil
		synctest.Wait()
		time.Sleep(askInterval / 2)
		synctest.Wait()
		if got := asked.Load(); got != 1 {
			t.Errorf("asked %d times", got)
		}
		time.Sleep(askInterval)
		answer <- map[types.NamespacedName]Pod{{Namespace: "default", Name: "second"}: {UID: "pod"}}
		time.Sleep(time.Hour)
		synctest.Wait()
		if got := asked.Load(); got != 2 {
			t.Errorf("asked %d times", got)
		}
		b.ends()
		b.keeps("process 47 (train) has it open")
		stop()
	})
}

// The pods of a claim that ends while its pods are listed are not kept.
func TestPodsOfEndedClaim(t *testing.T) {
	b := newBench(t)
	b.open()
	b.gives("pod")
	b.listed = []string{"training"}
	b.ends()
	b.pods.askAll(t.Context(), []*allocation.Claim{b.claim})
	if n := len(b.pods.claims); n > 0 {
		t.Errorf("the pods of %d claims are kept", n)
	}
}

// A device of unknown pods is withheld for as long as their containers may continue to run, and is
// not reset.
func TestUnknownPods(t *testing.T) {
	for name, test := range map[string]struct {
		pods   []types.UID
		listed []string
		pod    Pod
		wait   time.Duration
		resets int
	}{
		"no pod":                       {nil, nil, Pod{}, 40 * time.Second, 0},
		"one of two":                   {[]types.UID{"other"}, []string{"second"}, Pod{}, 40 * time.Second, 0},
		"a pod of a PodGroup is found": {nil, []string{"second"}, Pod{UID: "second", Grace: time.Hour}, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				b.listed = test.listed
				b.podsOf = func(context.Context) (map[types.NamespacedName]Pod, error) {
					return map[types.NamespacedName]Pod{{Namespace: "default", Name: "second"}: test.pod}, nil
				}
				b.open()
				b.gives(test.pods...)
				stop := b.run()
				time.Sleep(time.Minute)
				b.ends()
				if test.wait > 0 {
					time.Sleep(test.wait - 2*time.Second)
					b.keeps("it is unknown whether a process has it open (its previous pods are unknown)")
				}
				time.Sleep(4 * time.Second)
				b.keeps("")
				stop()
				if got := len(b.ListWrites()); got != test.resets {
					t.Errorf("writes %q", b.ListWrites())
				}
			})
		})
	}
}

// A pod joins a claim, and may be deleted by force, before the kubelet lists it with the claim. While a
// process of the pod has the device open, the device is withheld as long as that of unknown pods, and
// not reset. The same holds if the API server does not answer.
func TestPodJoinsUnseen(t *testing.T) {
	const joined = types.UID("00000000-0000-4000-8000-000000000021")
	for name, test := range map[string]struct {
		listed bool
		claims []string // of the listed pod
		err    error
		why    string
		resets int
	}{
		"deleted by force": {why: "it is unknown whether a process has it open (a pod that was not known as its consumer: /dev/d: process 47 (train) has it open), and containers may run for a while"},
		"joins at the end": {listed: true, claims: []string{"old"}, why: "it is unknown whether a process has it open (a pod that was not known as its consumer: /dev/d: process 47 (train) has it open), and containers may run for a while"},
		"a monitor":        {listed: true, claims: []string{"another"}, resets: 1},
		"no answer":        {err: errors.New("refused"), why: "it is unknown whether a process has it open (the pods of the node are unknown: refused), and containers may run for a while"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				b.podsOf = func(context.Context) (map[types.NamespacedName]Pod, error) {
					if test.listed {
						return map[types.NamespacedName]Pod{{Namespace: "default", Name: "joined"}: {UID: joined, Claims: test.claims}}, test.err
					}
					return nil, test.err
				}
				b.open()
				b.trains()
				b.File("proc/47/cgroup", "0::/kubepods/pod"+string(joined)+"/0\n")
				b.gives("pod")
				stop := b.run()
				time.Sleep(time.Minute)
				b.ends()
				time.Sleep(2 * time.Second)
				b.keeps(test.why)
				time.Sleep(time.Minute)
				b.keeps("")
				stop()
				if got := len(b.ListWrites()); got != test.resets {
					t.Errorf("writes %q", b.ListWrites())
				}
			})
		})
	}
}

// A kubelet that has lost its checkpoint allocates the ID of a running container again. If PodResources
// has never listed that container with the ID, no record names its pod. The end of the next container
// causes no reset while the process of the first one has the device open.
func TestContainerIsNeverListed(t *testing.T) {
	const first = types.UID("00000000-0000-4000-8000-000000000021")
	for name, test := range map[string]struct {
		resources []string // of the first pod
		err       error
		closed    bool
		resets    int
	}{
		"it requests the resource":          {resources: []string{"cpu", "example.com/d"}},
		"a monitor":                         {resources: []string{"cpu"}, resets: 1},
		"no answer":                         {err: errors.New("refused")},
		"no answer, and no pod has it open": {err: errors.New("refused"), closed: true, resets: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				b.podsOf = func(context.Context) (map[types.NamespacedName]Pod, error) {
					return map[types.NamespacedName]Pod{{Namespace: "default", Name: "first"}: {UID: first, Resources: test.resources}}, test.err
				}
				b.open()
				b.config.PodOf = func(allocation.Owner) types.UID { return "second" }
				if !test.closed {
					b.OpenNode("47", "train", "/dev/d")
					b.File("proc/47/cgroup", "0::/kubepods/pod"+string(first)+"/0\n")
				}
				stop := b.run()
				g := &allocation.Grant{Resource: "example.com/d", ID: "d", Container: "default/second main", Devices: []string{"d"}, Silicon: []string{"d"}, Exclusive: true, Since: time.Now()}
				if err := b.Remove(g, nil); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Minute)
				b.keeps("")
				stop()
				if got := len(b.ListWrites()); got != test.resets {
					t.Errorf("writes %q", b.ListWrites())
				}
			})
		})
	}
}

// A pod is deleted by force, and the kubelet allocates its ID to the next container while the pod's
// container, whose processes are not known, still runs. The end of the next container causes no
// reset before the container of the first pod must have ended.
func TestEarlierContainerIsUnseen(t *testing.T) {
	for name, test := range map[string]struct {
		wait   time.Duration
		resets int
	}{
		"a moment later": {time.Second, 0},
		"after it":       {time.Minute, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				b.open()
				b.config.PodOf = func(o allocation.Owner) types.UID { return map[string]types.UID{"second": "uid"}[o.Name] }
				stop := b.run()
				pass := func(pod string) {
					t.Helper()
					g := &allocation.Grant{Resource: "example.com/d", ID: "d", Container: "default/" + pod + " main", Devices: []string{"d"}, Silicon: []string{"d"}, Exclusive: true, Since: time.Now()}
					if err := b.GrantsReplaced([]*allocation.Grant{g}); err != nil {
						t.Error(err)
					}
				}
				pass("first")
				b.keeps("")
				time.Sleep(test.wait)
				pass("second")
				b.keeps("")
				stop()
				if got := len(b.ListWrites()); got != test.resets {
					t.Errorf("writes %q", b.ListWrites())
				}
			})
		})
	}
}

// A disk that stays full is logged once.
func TestFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.open()
		if err := b.ledger.AllocateClaim(b.claim, allocation.Allocated, &exclusion.Present{}); err != nil {
			t.Fatal(err)
		}
		var mended atomic.Bool
		b.disk.Before = func(op disktest.Op, name string) error {
			if op == disktest.Write && strings.Contains(name, "reclaim") && !mended.Load() {
				return syscall.ENOSPC
			}
			return nil
		}
		said := 0
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), funcr.New(func(_, args string) {
			if strings.Contains(args, "no space left on device") {
				said++
			}
		}, funcr.Options{})))
		go b.Run(ctx)
		time.Sleep(time.Minute)
		mended.Store(true)
		time.Sleep(2 * refreshInterval)
		synctest.Wait()
		if files := b.files(); said != 1 || len(files) != 1 {
			t.Errorf("said %d times; files %q", said, files)
		}
		cancel()
		synctest.Wait()
	})
}
