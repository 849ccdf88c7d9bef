package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/ledger/allocation"
)

// fpgas is a fake family with its hardware. Each device has a function, and its device node gets
// another number when the function changes.
type fpgas struct {
	mu    sync.Mutex
	has   map[string]string
	minor map[string]int64
	works []string      // works that were begun
	hold  chan struct{} // a work ends when hold is closed; nil: at once
	fails error
	bench *bench
}

// newFPGAs returns a bench with devices that have the function "old". Claims can request others.
func newFPGAs(t *testing.T) (*bench, *fpgas) {
	f := &fpgas{has: map[string]string{"a": "old", "b": "old"}, minor: map[string]int64{"a": 1, "b": 2}, bench: newBench(t)}
	f.bench.config.Configure = f.configure
	f.bench.config.ReadParameters = func(raw []byte) (discovery.Parameters, error) {
		return discovery.Parameters{acceleratorFunction: string(raw)}, nil
	}
	f.bench.restart().offers(gpu("a", 1), gpu("b", 2), gpu("c", 3))
	return f.bench, f
}

// acceleratorFunction is a parameter that requires work.
const acceleratorFunction discovery.Parameter = "acceleratorFunction"

func (f *fpgas) configure(d discovery.Device, want discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	function := want[acceleratorFunction]
	if function == "unknown" {
		return d, nil, fmt.Errorf("device %s: there is no bitstream", d.Name)
	}
	if len(want) > 0 {
		d.Edits = gpu(d.Name, f.minor[d.Name]).Edits
	}
	if function == "" || f.has[d.Name] == function {
		return d, nil, nil
	}
	return d, func(ctx context.Context) error { return f.work(ctx, d.Name, function) }, nil
}

func (f *fpgas) work(_ context.Context, device, function string) error {
	f.mu.Lock()
	f.works = append(f.works, device+"="+function)
	hold := f.hold
	f.mu.Unlock()
	if function == "panic" {
		panic("a defect")
	}
	if hold != nil {
		<-hold
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fails != nil {
		return fmt.Errorf("device %s: program: %w", device, f.fails)
	}
	f.has[device] = function
	f.minor[device] += 10
	f.bench.host["dev/"+device] = charDevice(226, uint32(f.minor[device]))
	return nil
}

func (f *fpgas) begun() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Join(f.works, " ")
}

// wanting returns the claim with parameters for all of its requests.
func wanting(function string, c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
	c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
		Source: resourceapi.AllocationConfigSourceClaim,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: "chandler.dev", Parameters: runtime.RawExtension{Raw: []byte(function)}}},
	}}
	return c
}

// call prepares one claim with the kubelet's timeout of 45 seconds.
func (b *bench) call(c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	ctx, cancel := context.WithTimeout(b.t.Context(), 45*time.Second)
	defer cancel()
	results, err := b.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{c})
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		b.t.Errorf("the kubelet has given up: %v", err)
	}
	return results[c.UID].Devices, results[c.UID].Err
}

func (b *bench) configuring(c *resourceapi.ResourceClaim) bool {
	r, _ := b.ledger.Claim(c.UID)
	return exists(b.recordFile(c)) && r != nil && r.Configuring
}

func TestConfigure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, f := newFPGAs(t)
		f.hold = make(chan struct{})
		c := wanting("new", claim("c", "a"))
		prepared := make(chan error, 1)
		go func() {
			_, err := b.call(c)
			prepared <- err
		}()
		synctest.Wait()
		if !b.configuring(c) || exists(b.specFile(c)) || f.begun() != "a=new" {
			t.Errorf("while it is done: record %v, spec %v, begun %q", b.configuring(c), exists(b.specFile(c)), f.begun())
		}
		if who, held := b.OwnerOf("a"); !held || who != "claim default/c" {
			t.Errorf("in use by %q, %v", who, held)
		}
		start := time.Now()
		mustPrepare(t, b, claim("quick", "c"))
		mustRefuse(t, b, claim("rival", "a"), "in use by claim default/c")
		if time.Since(start) > 0 {
			t.Error("other claims waited")
		}
		close(f.hold)
		if err := <-prepared; err != nil {
			t.Fatal(err)
		}
		if minor := b.specOf(c)["chandler.dev/claim=uid-c-0-a"].DeviceNodes[0].Minor; minor != 11 || b.configuring(c) {
			t.Errorf("the spec has minor %d and not that of the device as it is now; configuring %v", minor, b.configuring(c))
		}
		for range 2 {
			mustPrepare(t, b, c)
			b.restart().offers(gpu("a", 11), gpu("b", 2))
		}
		if f.begun() != "a=new" {
			t.Errorf("done again: %s", f.begun())
		}
		if !exists(b.specFile(c)) {
			t.Error("the spec did not outlive the restart")
		}
	})
}

// A device that needs no change is prepared as usual, and so is a device without parameters.
func TestConfigureNothing(t *testing.T) {
	b, f := newFPGAs(t)
	mustPrepare(t, b, wanting("old", claim("c", "a")))
	mustPrepare(t, b, claim("d", "b"))
	if f.begun() != "" {
		t.Errorf("begun: %s", f.begun())
	}
}

func TestConfigureOutlastsCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, f := newFPGAs(t)
		f.hold = make(chan struct{})
		c := wanting("new", claim("c", "a"))
		for i := range 3 {
			start := time.Now()
			_, err := b.call(c)
			if err == nil || !strings.Contains(err.Error(), "still configuring a") || time.Since(start) >= 45*time.Second {
				t.Fatalf("call %d ended after %v: %v", i, time.Since(start), err)
			}
		}
		time.AfterFunc(10*time.Second, func() { close(f.hold) })
		start := time.Now()
		if _, err := b.call(c); err != nil || time.Since(start) != 10*time.Second {
			t.Fatalf("after %v: %v", time.Since(start), err)
		}
		if f.begun() != "a=new" {
			t.Errorf("begun: %s", f.begun())
		}
	})
}

// After a crash the claim still has the device, without a CDI spec, and the next call continues.
func TestConfigureAfterCrash(t *testing.T) {
	for _, failing := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b, f := newFPGAs(t)
			hold := make(chan struct{})
			defer close(hold) // the work of the first driver ends too late
			f.hold = hold
			c := wanting("new", claim("c", "a"))
			if _, err := b.call(c); err == nil {
				t.Fatal("prepared")
			}
			f.mu.Lock()
			f.hold = nil
			f.mu.Unlock()
			b.restart().offers(gpu("a", 1), gpu("b", 2))
			if exists(b.specFile(c)) || !b.configuring(c) {
				t.Error("forgotten that it was under way")
			}
			mustRefuse(t, b, claim("rival", "a"), "in use by claim default/c")
			if failing {
				f.fails = errors.New("CRC error")
				mustRefuse(t, b, c, "device a", "CRC error")
				mustRefuse(t, b, claim("rival", "a"), "in use by claim default/c") // nothing is rolled back
				mustUnprepare(t, b, c)
				mustPrepare(t, b, claim("rival", "a"))
				return
			}
			mustPrepare(t, b, c)
			if f.begun() != "a=new a=new" || b.configuring(c) || !exists(b.specFile(c)) {
				t.Errorf("begun %q, configuring %v", f.begun(), b.configuring(c))
			}
		})
	}
}

func TestConfigureFails(t *testing.T) {
	for name, test := range map[string]struct {
		want  string
		words []string
		works string
	}{
		"no such function": {"unknown", []string{"request r", "device a", "no bitstream"}, ""},
		"the work":         {"new", []string{"device a", "program", "CRC error"}, "a=new"},
		"a defect":         {"panic", []string{"panic: a defect"}, "a=panic"},
	} {
		t.Run(name, func(t *testing.T) {
			b, f := newFPGAs(t)
			f.fails = errors.New("CRC error")
			c := wanting(test.want, claim("c", "a"))
			mustRefuse(t, b, c, test.words...)
			if f.begun() != test.works {
				t.Errorf("begun: %s", f.begun())
			}
			// Work that has begun may have changed the device, which stays allocated until
			// Unprepare.
			begun := test.works != ""
			if who, held := b.OwnerOf("a"); held != begun || b.configuring(c) != begun || exists(b.specFile(c)) {
				t.Errorf("held %v by %s, configuring %v", held, who, b.configuring(c))
			}
			if err := b.tryUnprepare(c); err != nil {
				t.Error(err)
			}
			mustPrepare(t, b, claim("other", "a"))
		})
	}
}

// After configuration, successful or not, the device is scanned at once. A call without
// configuration starts no scan.
func TestRescanAfterConfiguring(t *testing.T) {
	b, f := newFPGAs(t)
	var rescans []string
	b.config.Rescan = func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		rescans = append(rescans, f.has["a"])
	}
	b.restart().offers(gpu("a", 1), gpu("b", 2))
	mustPrepare(t, b, claim("d", "b"))
	c := wanting("new", claim("c", "a"))
	f.fails = errors.New("CRC error")
	mustRefuse(t, b, c, "CRC error")
	b.claims.jobs.group.Wait() // the refusal does not wait for the scan
	f.fails = nil
	mustPrepare(t, b, c)
	mustPrepare(t, b, c)
	b.claims.jobs.group.Wait()
	if want := []string{"old", "new"}; !slices.Equal(rescans, want) {
		t.Errorf("looked at anew when it had %q, want %q", rescans, want)
	}
}

// A prepared claim whose device cannot be configured again keeps the device.
func TestConfigureAgainFails(t *testing.T) {
	b, f := newFPGAs(t)
	c := wanting("new", claim("c", "a"))
	mustPrepare(t, b, c)
	b.offers(gpu("a", 11)) // the next scan
	f.has["a"], f.fails = "other", errors.New("CRC error")
	mustRefuse(t, b, c, "CRC error")
	mustRefuse(t, b, claim("rival", "a"), "in use by claim default/c")
	f.fails = nil
	mustPrepare(t, b, c)
	if f.begun() != "a=new a=new a=new" {
		t.Errorf("begun: %s", f.begun())
	}
}

func TestConfigureOnlyWhatIsOnesOwn(t *testing.T) {
	b, f := newFPGAs(t)
	c := wanting("new", claim("c", "a"))
	c.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	mustRefuse(t, b, c, "device a", "not the claim's alone")
	b.offers(rules.Offered{Device: discovery.Device{Name: "a", Shareable: true}})
	mustRefuse(t, b, wanting("new", claim("d", "a")), "device a", "not the claim's alone")
	b.offers(byMemory("a", 8))
	shared := wanting("new", claim("e", "a"))
	shared.Status.Allocation.Devices.Results[0].ShareID = new(types.UID("1"))
	shared.Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("1Gi")}
	mustRefuse(t, b, shared, "device a", "not the claim's alone")
	if f.begun() != "" {
		t.Errorf("begun: %s", f.begun())
	}
}

// Unprepare waits for running work, cancels the rest, and leaves nothing behind.
func TestUnprepareCallsOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, f := newFPGAs(t)
		f.hold = make(chan struct{})
		c := wanting("new", claim("c", "a", "b"))
		if _, err := b.call(c); err == nil {
			t.Fatal("prepared")
		}
		if err := b.tryUnprepare(c); err == nil || !strings.Contains(err.Error(), "still configuring a, b") {
			t.Errorf("unprepared while the host is changed: %v", err)
		}
		mustRefuse(t, b, claim("rival", "a"), "in use by claim default/c")
		close(f.hold)
		if err := b.tryUnprepare(c); err != nil {
			t.Fatal(err)
		}
		if f.begun() != "a=new" {
			t.Errorf("begun: %s", f.begun())
		}
		if exists(b.recordFile(c)) || exists(b.specFile(c)) {
			t.Error("something is left")
		}
		b.offers(gpu("a", 11), gpu("b", 2)) // the next scan
		mustPrepare(t, b, claim("rival", "a"))
		mustPrepare(t, b, wanting("new", claim("d", "b")))
	})
}

// A device that cannot be read during its configuration is not reported as Unknown.
func TestHealthWhileConfiguring(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, f := newFPGAs(t)
		f.hold = make(chan struct{})
		c := wanting("new", claim("c", "a"))
		if _, err := b.call(c); err == nil {
			t.Fatal("prepared")
		}
		unreadable := gpu("a", 1)
		unreadable.Health.Status = discovery.Unknown
		b.offers(unreadable, gpu("b", 2))
		unknown := func() bool {
			now := time.Now()
			in, _ := b.poolInput(now)
			in.Features = features.All()
			published, _ := pool.BuildPools(in)
			report := b.healthReport(b.view.Load(), now)
			reported := report.Devices[0].Health != kubeletplugin.HealthStatusHealthy
			if tainted := len(pool.SlicesOf(published)[0].Devices[0].Taints) > 0; tainted != reported {
				t.Errorf("slices say %v, health reports %v", tainted, reported)
			}
			return reported
		}
		time.Sleep(5 * time.Minute)
		if unknown() {
			t.Error("it is said that the health is unknown")
		}
		close(f.hold)
		if _, err := b.call(c); err != nil {
			t.Fatal(err)
		}
		time.Sleep(29 * time.Second)
		if unknown() {
			t.Error("unknown before the next scan")
		}
		time.Sleep(2 * time.Second)
		if !unknown() {
			t.Error("never unknown again")
		}
	})
}

// A stopping driver waits for running work. Waiting calls get their answers before.
func TestRunWaitsForWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, f := newFPGAs(t)
		stop := b.run(&pooltest.Helper{})
		b.offers(gpu("a", 1), gpu("b", 2))
		f.hold = make(chan struct{})
		prepared := make(chan error, 1)
		go func() {
			_, err := b.try(wanting("new", claim("c", "a", "b")))
			prepared <- err
		}()
		synctest.Wait()
		ended := make(chan error, 1)
		go func() { ended <- stop() }()
		if err := <-prepared; !errors.Is(err, errStopping) {
			t.Errorf("the call: %v", err)
		}
		synctest.Wait()
		select {
		case <-ended:
			t.Error("Run has returned while the host was changed")
		default:
		}
		close(f.hold)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if f.begun() != "a=new" {
			t.Errorf("begun: %s", f.begun())
		}
	})
}

// TestConfigureCrash stops the driver before each of its file operations in turn. No container can
// get the device before its configuration. Afterwards the claim can be prepared, and it leaves
// nothing behind.
func TestConfigureCrash(t *testing.T) {
	c := wanting("new", claim("c", "a"))
	for step := 1; ; step++ {
		if step > 50 {
			t.Fatal("no end of steps")
		}
		b, f := newFPGAs(t)
		steps := 0
		b.disk.Before = func(disktest.Op, string) error {
			if steps++; steps >= step {
				return errors.New("crashed")
			}
			return nil
		}
		b.restart().offers(gpu("a", 1))
		_, err := b.try(c)
		if steps < step {
			if err != nil {
				t.Fatalf("nothing was stopped and yet: %v", err)
			}
			t.Logf("%d steps", step-1)
			return
		}
		b.disk.Before = nil
		b.restart().offers(gpu("a", f.minor["a"]))
		if exists(b.specFile(c)) && f.has["a"] != "new" {
			t.Errorf("step %d: a container can have the device as it was", step)
		}
		mustPrepare(t, b, c)
		b.offers(gpu("a", f.minor["a"]))
		mustRefuse(t, b, claim("rival", "a"), "in use by claim default/c")
		if f.has["a"] != "new" || !exists(b.specFile(c)) || b.configuring(c) {
			t.Errorf("step %d: the device has %s", step, f.has["a"])
		}
		if err := b.tryUnprepare(c); err != nil {
			t.Fatal(err)
		}
		for _, dir := range []string{b.records(), b.config.CDI.Path} {
			if entries, _ := os.ReadDir(dir); len(entries) > 0 {
				t.Errorf("step %d: left %v", step, entries)
			}
		}
	}
}

// changingHost is a host whose devices another call changes right after a device node was examined.
type changingHost struct {
	fs.FS

	examined func(name string)
}

// Stat implements [fs.StatFS].
func (h changingHost) Stat(name string) (fs.FileInfo, error) {
	info, err := fs.Stat(h.FS, name)
	h.examined(name)
	return info, err
}

// ReadLink implements [fs.ReadLinkFS].
func (h changingHost) ReadLink(name string) (string, error) { return fs.ReadLink(h.FS, name) }

// Lstat implements [fs.ReadLinkFS].
func (h changingHost) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(h.FS, name) }

// The agent undoes an earlier change of a device between the examination of the device for a claim
// and the allocation. The claim does not get the device as it was, but configured again.
func TestChangedBeforeAllocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, f := newFPGAs(t)
		f.has["a"] = "new"
		undone := false
		b.config.HostFS = changingHost{b.host, func(name string) {
			if name != "dev/a" || undone {
				return
			}
			undone = true
			change := allocation.Change{Name: "undo of a", API: discovery.ModeDRA, Devices: []allocation.Hold{allocation.DeviceHold("a", "")}}
			lease, blocked := b.config.Ledger.Leases.LeaseDevices(change, b.view.Load())
			if blocked != nil {
				t.Fatal(blocked)
			}
			f.mu.Lock()
			f.has["a"], f.minor["a"] = "old", 5
			b.host["dev/a"] = charDevice(226, 5)
			f.mu.Unlock()
			lease.Release()
		}}
		b.restart().offers(gpu("a", 1))
		c := wanting("new", claim("c", "a"))
		if _, err := b.call(c); err != nil {
			t.Fatal(err)
		}
		if minor := b.specOf(c)["chandler.dev/claim=uid-c-0-a"].DeviceNodes[0].Minor; !undone || minor != 15 || f.begun() != "a=new" {
			t.Errorf("undone %v, minor %d, begun %q", undone, minor, f.begun())
		}
	})
}
