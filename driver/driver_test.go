package driver

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
	"testing/fstest"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/backoff"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/hostfile"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
)

func TestMain(m *testing.M) {
	// One handler sleeps until a time relative to its last error, which is years later outside a
	// synctest bubble.
	utilruntime.ErrorHandlers = nil
	m.Run()
}

// bench is a driver without a kubelet. Its directories outlive the driver.
type bench struct {
	*Driver
	t         testing.TB
	config    Config
	host      fstest.MapFS
	state     string // the ledger's directory
	boot      string
	active    chan struct{} // the ledger is opened when active is closed; nil: at once
	hostFiles hostfile.Writer
	disk      *disktest.Disk

	termination time.Duration // how long containers of a pod that was deleted by force continue to run
}

func newBench(t testing.TB) *bench {
	host := fstest.MapFS{}
	faulty := &disktest.Disk{}
	b := &bench{t: t, host: host, disk: faulty, state: t.TempDir(), boot: "boot-1", config: Config{
		NodeName:         "node",
		KubeletRoot:      t.TempDir(),
		Granter:          func([]discovery.Device, discovery.Grant) (none specs.ContainerEdits) { return none },
		AcceptParameters: func([]discovery.Device, discovery.Parameters) error { return nil },
		Observe:          func(string, string, time.Duration, error) {},
		Rescan:           func() {},
		StartHelper:      StartHelper,
		GoneEffect:       func() resourceapi.DeviceTaintEffect { return resourceapi.DeviceTaintEffectNoSchedule },
		Abandoned:        func(context.Context, []allocation.Owner) ([]types.UID, error) { return nil, nil },
		NodeClaims:       func(context.Context) ([]*resourceapi.ResourceClaim, error) { return nil, nil },
		StartedPods:      func(context.Context, *resourceapi.ResourceClaim) ([]string, error) { return nil, nil },
		ReadParameters: func([]byte) (discovery.Parameters, error) {
			return nil, errors.New("this driver takes no parameters")
		},
		Configure: func(d discovery.Device, _ discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
			return d, nil, nil
		},
		KubeClient: pooltest.KeepingServer(t),
		NodeUID:    func(context.Context) (types.UID, error) { return "node-uid", nil },
		CDI:        cdi.Dir{Path: t.TempDir()},
		HostFS:     host,
		Disk:       faulty,
	}}
	if err := os.MkdirAll(b.records(), 0o700); err != nil {
		t.Fatal(err)
	}
	return b
}

// records is the directory of the claims' records.
func (b *bench) records() string { return filepath.Join(b.state, "claims") }

// start makes a new driver with a new ledger that is not open yet.
func (b *bench) start() *Driver {
	b.t.Helper()
	b.config.Ledger = ledger.New(ledger.Config{Dir: b.state, Boot: b.boot, Disk: b.disk})
	files := b.hostFiles
	files.Files.FS = b.disk
	d := New(b.config)
	b.config.Ledger.SetOutputs(slices.Concat([]ledger.Output{ledger.HostFiles{Writer: files}}, d.LedgerOutputs())...)
	d.claims.termination = b.termination
	return d
}

// open opens the ledger of the driver that start made.
func (b *bench) open() {
	if b.active != nil {
		<-b.active
	}
	problems, err := b.config.Ledger.Open(context.Background())
	for _, problem := range append(problems, err) {
		if problem != nil {
			b.t.Logf("recovery: %v", problem)
		}
	}
}

// restart makes a new driver that is active and has read its records.
func (b *bench) restart() *bench {
	b.t.Helper()
	d := b.start()
	b.open()
	close(d.calls.ready)
	b.Driver = d
	return b
}

// offers publishes a snapshot of the devices, and adds their nodes to the host.
func (b *bench) offers(devices ...rules.Offered) *bench {
	for _, d := range devices {
		for _, edit := range d.Edits.DeviceNodes {
			if b.host[edit.HostPath[1:]] == nil {
				b.host[edit.HostPath[1:]] = charDevice(uint32(edit.Major), uint32(edit.Minor))
			}
		}
	}
	b.Publish(&rules.Snapshot{Devices: devices, Attributes: []resourceapi.QualifiedName{"uuid"}}, nil)
	return b
}

// has adds a network interface to the host, for devices without a source directory.
func (b *bench) has(network string) { b.host["net/"+network+"/type"] = &fstest.MapFile{} }

// OwnerOf returns the claim that blocks an allocation of a physical device by the device plugin
// API.
func (b *bench) OwnerOf(silicon string) (who string, held bool) {
	who = b.ledger.View(b.view.Load()).OwnerOf(discovery.ModeDRA, silicon)
	owner, _, _ := strings.Cut(who, " (device ")
	return owner, who != ""
}

// healthFor returns the health of a claim's device.
func (b *bench) healthFor(c *resourceapi.ResourceClaim) discovery.Health {
	has, _ := b.ledger.Claim(c.UID)
	return b.healthIn(b.view.Load())(has, &has.Results[0])
}

func charDevice(major, minor uint32) *fstest.MapFile {
	return &fstest.MapFile{Mode: fs.ModeDevice | fs.ModeCharDevice | 0o666, Sys: &syscall.Stat_t{Rdev: unix.Mkdev(major, minor)}}
}

// gpu is a device with a node of its own: /dev/<name>, 226:<minor>.
func gpu(name string, minor int64) rules.Offered {
	d := rules.Offered{Device: discovery.Device{Name: name, Family: "gpu", Identity: "uuid-of-" + name, Attributes: discovery.Attributes{}}}
	d.Attributes.SetString("kind", "gpu")
	d.Attributes.SetString("driver", "amdgpu")
	d.Edits.DeviceNodes = []*specs.DeviceNode{{Path: "/dev/" + name, HostPath: "/dev/" + name, Type: "c", Major: 226, Minor: minor}}
	return d
}

// claim is a claim with one result for each device of the main pool.
func claim(name string, devices ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	for _, device := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
			resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: "chandler.dev", Pool: "node", Device: device})
	}
	return c
}

// fromOtherPool returns the claim with the same devices of the other pool.
func fromOtherPool(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	for i := range c.Status.Allocation.Devices.Results {
		c.Status.Allocation.Devices.Results[i].Pool = "node/other"
	}
	return c
}

// try prepares one claim.
func (b *bench) try(c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	b.t.Helper()
	results, err := b.PrepareResourceClaims(b.t.Context(), []*resourceapi.ResourceClaim{c})
	if err != nil {
		b.t.Fatal(err)
	}
	return results[c.UID].Devices, results[c.UID].Err
}

func (b *bench) tryUnprepare(c *resourceapi.ResourceClaim) error {
	b.t.Helper()
	results, err := b.UnprepareResourceClaims(b.t.Context(), []kubeletplugin.NamespacedObject{
		{UID: c.UID, NamespacedName: types.NamespacedName{Namespace: c.Namespace, Name: c.Name}}})
	if err != nil {
		b.t.Fatal(err)
	}
	return results[c.UID]
}

// run starts a driver with the helper in a synctest bubble. The returned function stops the driver
// and returns the error of Run.
func (b *bench) run(helper helperInterface) (stop func() error) {
	b.t.Helper()
	d := b.start()
	go b.open()
	d.config.StartHelper = func(context.Context, kubeletplugin.DRAPlugin, ...kubeletplugin.Option) (helperInterface, error) {
		return helper, nil
	}
	b.Driver = d
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	return func() error {
		cancel()
		return <-ended
	}
}

type helperInterface = Helper

// After a registration the driver publishes the slices repeatedly for a while, since the kubelet
// deleted all slices before it registered the driver.
func TestPublishingAfterRegistration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, helper := newBench(t), &pooltest.Helper{}
		stop := b.run(helper)
		register := func(accepted bool) {
			status := &registerapi.RegistrationStatus{PluginRegistered: accepted}
			_, err := b.noteRegistration(t.Context(), status, nil, func(context.Context, any) (any, error) { return nil, nil })
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
		}
		register(true)
		pooltest.ExpectPublished(t, helper) // no snapshot yet
		b.offers(gpu("a", 1))
		pooltest.ExpectPublished(t, helper, "a")
		register(false)
		pooltest.ExpectPublished(t, helper)
		register(true)
		pooltest.ExpectPublished(t, helper, "a", "a", "a", "a") // after 1, 3, 7 and 15 s
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}

// No slice contains a device that replaced another one before the claims for the earlier device are
// known.
func TestPublishingReplacedDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, helper := newBench(t), &pooltest.Helper{}
		var answers atomic.Bool
		b.config.NodeClaims = func(context.Context) ([]*resourceapi.ResourceClaim, error) {
			if !answers.Load() {
				return nil, errFault
			}
			return nil, nil
		}
		stop := b.run(helper)
		b.offers(gpu("a", 1), gpu("b", 2))
		pooltest.ExpectPublished(t, helper, "a b")
		other := gpu("a", 1)
		other.Identity = "uuid-of-another"
		b.offers(other, gpu("b", 2))
		pooltest.ExpectPublished(t, helper, "b")
		answers.Store(true)
		time.Sleep(backoff.NewPause().Cap)
		pooltest.ExpectPublished(t, helper, "a b")
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}

// A claim may name the pool in which an earlier agent has published the device. It is prepared, and
// the device is in that pool until the claim ends. The kubelet gets the health of the device by that
// pool.
func TestClaimByAnotherPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, helper := newBench(t), &pooltest.Helper{}
		stop := b.run(helper)
		b.offers(gpu("a", 1), gpu("b", 2))
		expect := func(devices, pool string) {
			t.Helper()
			pooltest.ExpectPublished(t, helper, devices)
			in := b.Publisher.PoolsByDevice()
			if in["a"] != pool || in["b"] != "node" {
				t.Errorf("the devices are in the pools %v, want a in %s", in, pool)
			}
			for _, d := range b.healthReport(b.view.Load(), time.Now()).Devices {
				if d.PoolName != in[d.DeviceName] {
					t.Errorf("the health of %s is that of pool %s, want %s", d.DeviceName, d.PoolName, in[d.DeviceName])
				}
			}
		}
		expect("a b", "node")
		c := fromOtherPool(claim("c", "a"))
		if devices := mustPrepare(t, b, c); len(devices) != 1 || devices[0].PoolName != "node/other" {
			t.Errorf("prepared: %+v", devices)
		}
		synctest.Wait()
		if got := helper.PublishedSketches(); len(got) != 1 || !slices.Equal(got[0], []string{"b", "a"}) {
			t.Errorf("published %q", got)
		}
		b.offers(gpu("a", 1), gpu("b", 2))
		synctest.Wait()
		if report := b.healthReport(b.view.Load(), time.Now()).Devices; len(report) != 2 || report[0].PoolName != "node/other" || report[1].PoolName != "node" {
			t.Errorf("the health report is %+v", report)
		}
		mustUnprepare(t, b, c)
		expect("a b", "node")
		for _, pool := range []string{"node-2", "node/third", "node/other/other", ""} {
			foreign := claim("foreign", "a")
			foreign.Status.Allocation.Devices.Results[0].Pool = pool
			mustRefuse(t, b, foreign, "is not of this node, node")
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}

// If claims have partitions of one physical device by both pools, no pool has its partitions until one
// of the claims ends.
func TestClaimsByBothPools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, helper := newBench(t), &pooltest.Helper{}
		stop := b.run(helper)
		b.offers(gpu("a", 1), pooltest.PartDevice("g", "g-1", 1), pooltest.PartDevice("g", "g-2", 1))
		expect := func(want ...string) {
			t.Helper()
			synctest.Wait()
			if got := helper.PublishedSketches(); len(got) != 1 || !slices.Equal(got[0], want) {
				t.Errorf("published %q, want %q", got, want)
			}
		}
		expect("a", "set:g", "g-1<g g-2<g")
		by, byOther := claim("c", "g-1"), fromOtherPool(claim("other", "g-2"))
		mustPrepare(t, b, by)
		expect("set:g", "a g-1<g g-2<g")
		mustPrepare(t, b, byOther)
		expect("a")
		mustUnprepare(t, b, byOther)
		expect("set:g", "a g-1<g g-2<g")
		mustUnprepare(t, b, by)
		expect("a", "set:g", "g-1<g g-2<g")
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}

// Before the devices are published again, as after a restart, the health of a device that a claim has
// by another pool is reported for both pools.
func TestHealthByPools(t *testing.T) {
	b := newBench(t)
	b.restart().offers(gpu("a", 1))
	mustPrepare(t, b, fromOtherPool(claim("c", "a")))
	var pools []string
	for _, d := range b.healthReport(b.view.Load(), time.Now()).Devices {
		pools = append(pools, d.PoolName)
	}
	if !slices.Equal(pools, []string{"node", "node/other"}) {
		t.Errorf("the pools are %q", pools)
	}
}

func TestPublishing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, helper := newBench(t), &pooltest.Helper{}
		active := make(chan struct{})
		b.active = active
		stop := b.run(helper)
		a, other := gpu("a", 1), gpu("b", 2)
		b.offers(a, other)
		pooltest.ExpectPublished(t, helper) // not while another instance is active
		close(active)
		pooltest.ExpectPublished(t, helper, "a b")

		b.offers(gpu("a", 1), gpu("b", 2))
		pooltest.ExpectPublished(t, helper) // no change

		a.Health.Status = discovery.Unknown
		b.offers(a, other)
		pooltest.ExpectPublished(t, helper, "a!unknown:NoSchedule b")
		a.Health.Status = discovery.Healthy
		b.offers(a, other)
		pooltest.ExpectPublished(t, helper, "a b")

		c := claim("c", "a")
		if _, err := b.try(c); err != nil {
			t.Fatal(err)
		}
		b.offers(other)
		pooltest.ExpectPublished(t, helper, "a!gone:NoSchedule b")
		if err := b.tryUnprepare(c); err != nil {
			t.Fatal(err)
		}
		pooltest.ExpectPublished(t, helper, "b")

		kvm := rules.Offered{Device: discovery.Device{Name: "kvm", Shareable: true}}
		b.offers(kvm)
		pooltest.ExpectPublished(t, helper, "kvm*")
		a.Health.Status = discovery.Unhealthy
		b.offers(a, other)
		pooltest.ExpectPublished(t, helper, "a!unhealthy:NoSchedule b")

		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
		if !helper.IsStopped() {
			t.Error("the helper still runs")
		}
	})
}

func TestFatalErrorEndsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, helper := newBench(t), &pooltest.Helper{}
		stop := b.run(helper)
		synctest.Wait()
		b.HandleError(t.Context(), kubeletplugin.ErrRecoverable, "a passing trouble")
		fatal := errors.New("listener is gone")
		b.HandleError(t.Context(), fatal, "DRA gRPC server")
		synctest.Wait()
		if err := stop(); !errors.Is(err, fatal) {
			t.Errorf("Run: %v", err)
		}
	})
}

func TestCallsWaitForTheActiveInstance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, helper := newBench(t), &pooltest.Helper{}
		active := make(chan struct{})
		b.active = active
		stop := b.run(helper)
		b.offers(gpu("a", 1))
		c := claim("c", "a")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := b.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{c}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Prepare does not end with its context: %v", err)
		}
		if _, err := b.UnprepareResourceClaims(ctx, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Unprepare does not end with its context: %v", err)
		}
		prepared := make(chan error, 1)
		go func() {
			_, err := b.try(c)
			prepared <- err
		}()
		synctest.Wait()
		select {
		case <-prepared:
			t.Error("prepared while another instance is active")
		default:
		}
		close(active)
		if err := <-prepared; err != nil {
			t.Error(err)
		}
		if who, held := b.OwnerOf("a"); !held || who != "claim default/c" {
			t.Errorf("holder is %q, %v", who, held)
		}
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
		if _, err := b.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{c}); !errors.Is(err, errStopping) {
			t.Errorf("a stopped driver takes calls: %v", err)
		}
	})
}

func TestRunFinishesCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, helper := newBench(t), &pooltest.Helper{}
		entered, leave := make(chan struct{}), make(chan struct{})
		b.config.Configure = func(d discovery.Device, _ discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
			close(entered)
			<-leave
			return d, nil, nil
		}
		stop := b.run(helper)
		b.offers(gpu("a", 1))
		prepared := make(chan error, 1)
		go func() {
			_, err := b.try(claim("c", "a"))
			prepared <- err
		}()
		<-entered
		ended := make(chan error, 1)
		go func() { ended <- stop() }()
		synctest.Wait()
		select {
		case <-ended:
			t.Error("Run returned before the call ended")
		default:
		}
		close(leave)
		if err := <-prepared; err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestHealthReports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.restart()
		reports := make(chan kubeletplugin.DeviceHealthReport)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- b.WatchHealthStatus(ctx, reports) }()
		start := time.Now()
		expect := func(after time.Duration, want ...kubeletplugin.HealthStatus) {
			t.Helper()
			report := <-reports
			if since := time.Since(start); since != after {
				t.Errorf("reported after %v, want %v", since, after)
			}
			var got []kubeletplugin.HealthStatus
			for _, device := range report.Devices {
				got = append(got, device.Health)
			}
			for i := range want {
				if len(got) != len(want) || got[i] != want[i] {
					t.Fatalf("reported %v, want %v", got, want)
				}
			}
		}
		healthy, unhealthy, unknown := kubeletplugin.HealthStatusHealthy, kubeletplugin.HealthStatusUnhealthy, kubeletplugin.HealthStatusUnknown
		a, other := gpu("a", 1), gpu("b", 2)
		synctest.Wait()
		b.offers(a, other)
		expect(0, healthy, healthy)
		other.Health = discovery.Health{Status: discovery.Unhealthy}
		b.offers(a, other)
		expect(0, healthy, unhealthy)
		expect(10*time.Second, healthy, unhealthy)
		if _, err := b.try(claim("c", "b")); err != nil {
			t.Fatal(err)
		}
		a.Health.Status = discovery.Unknown
		b.offers(a)
		expect(10*time.Second, unknown, unhealthy) // b is gone
		a.Health.Effect = resourceapi.DeviceTaintEffectNone
		b.offers(a)
		expect(10*time.Second, healthy, unhealthy)
		expect(20*time.Second, healthy, unhealthy)
		gone := discovery.GoneHealth(resourceapi.DeviceTaintEffectNone) // b in the snapshot
		b.Publish(&rules.Snapshot{Devices: []rules.Offered{a}, Gone: map[string]discovery.Health{"b": gone}}, nil)
		expect(20*time.Second, healthy, healthy)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// silentServer is a helper that, like the library's, waits for an API server until the helper is
// stopped. The server never answers.
type silentServer struct{ stopped chan struct{} }

func (s *silentServer) PublishResources(context.Context, resourceslice.DriverResources) error {
	<-s.stopped
	return nil
}

func (s *silentServer) Stop() { close(s.stopped) }

// A driver that waits for the API server prepares claims, and can be stopped.
func TestRunEndsWithoutAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		stop := b.run(&silentServer{stopped: make(chan struct{})})
		b.offers(gpu("a", 1))
		time.Sleep(time.Hour)
		synctest.Wait()
		if _, err := b.try(claim("c", "a")); err != nil {
			t.Error(err)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}
