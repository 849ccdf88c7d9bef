package driver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger"
)

// A claim may have as many results as the API allows (resourceapi.AllocationResultsMaxSize), some
// of them for other drivers.
func TestClaimOfManyResults(t *testing.T) {
	var names []string
	var devices []rules.Offered
	for i := range resourceapi.AllocationResultsMaxSize {
		names = append(names, fmt.Sprintf("gpu-%02d", i))
		devices = append(devices, gpu(names[i], int64(i)))
	}
	b := newBench(t).restart().offers(devices...)
	c := claim("c", names...)
	for i := range c.Status.Allocation.Devices.Results {
		r := &c.Status.Allocation.Devices.Results[i]
		r.Request = fmt.Sprintf("r-%02d/sub-%d", i/2, i%3)
		if i%8 == 7 {
			r.Driver = "other.example.com"
		}
	}
	answered := mustPrepare(t, b, c)
	if want := len(names) * 7 / 8; len(answered) != want || len(b.specOf(c)) != want {
		t.Fatalf("%d devices are answered and %d are in the spec, want %d", len(answered), len(b.specOf(c)), want)
	}
	for i, name := range names {
		if _, held := b.OwnerOf(name); held != (i%8 != 7) {
			t.Errorf("device %s is held: %t", name, held)
		}
	}
	b.restart().offers(devices...)
	mustRefuse(t, b, claim("rival", names[30]), "is in use by claim default/c")
	mustUnprepare(t, b, c)
	mustPrepare(t, b, claim("rival", names...))
}

// A claim may have a device several times with admin access, in addition to an exclusive allocation
// of the device by this or another claim.
func TestOneDeviceSeveralTimes(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1), gpu("b", 2))
	mustPrepare(t, b, claim("owner", "b"))
	c := claim("c", "a", "a", "a", "b")
	for i := range c.Status.Allocation.Devices.Results[1:] {
		c.Status.Allocation.Devices.Results[1+i].AdminAccess = new(true)
	}
	c.Status.Allocation.Devices.Results[2].Request = "another"
	ids := make(map[string]bool)
	for range 2 {
		for _, device := range mustPrepare(t, b, c) {
			ids[device.CDIDeviceIDs[0]] = true
		}
		b.restart().offers(gpu("a", 1), gpu("b", 2))
	}
	if len(ids) != 4 || len(b.specOf(c)) != 4 {
		t.Errorf("answered are %v, in the spec %v", ids, b.specOf(c))
	}
	// Device a is allocated to the claim. The claim administers device b, which is allocated to
	// another claim.
	mustRefuse(t, b, claim("rival", "a"), "is in use by claim default/c")
	if who, _ := b.OwnerOf("b"); who != "claim default/owner" {
		t.Errorf("b is in use by %s", who)
	}
	mustUnprepare(t, b, c)
	mustPrepare(t, b, claim("rival", "a"))
}

// Each result of a prioritized list belongs to the chosen subrequest. Containers refer to requests
// only, and parameters may be for either.
func TestPrioritizedList(t *testing.T) {
	c := claim("c", "a", "b")
	c.Status.Allocation.Devices.Results[0].Request = "gpu/big"
	c.Status.Allocation.Devices.Results[1].Request = "gpu/big"
	for _, said := range []struct{ request, raw string }{{"gpu", "all"}, {"gpu/big", "big"}, {"gpu/small", "small"}} {
		asked := asking(claim("x"), said.raw).Status.Allocation.Devices.Config[0]
		asked.Requests = []string{said.request}
		c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, asked)
	}
	b := newBench(t)
	var read []string
	b.config.ReadParameters = func(raw []byte) (discovery.Parameters, error) {
		read = append(read, string(raw))
		return nil, nil
	}
	_, conn, _ := b.serve(fake.NewClientset(c))
	b.offers(gpu("a", 1), gpu("b", 2))
	response, err := drapb.NewDRAPluginClient(conn).NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}})
	if err != nil {
		t.Fatal(err)
	}
	answer := response.Claims[string(c.UID)]
	if len(answer.GetDevices()) != 2 || answer.Devices[0].RequestNames[0] != "gpu" {
		t.Errorf("answered: %v", answer)
	}
	if got := strings.Join(read, " "); got != "all big" {
		t.Errorf("the parameters of %q count", got)
	}
	if env := b.specOf(c)["chandler.dev/claim=uid-c-0-a"].Env; strings.Join(env, " ") != "CHANDLER_DEVICES=a,b CHANDLER_DEVICES_C_GPU_BIG=a,b" {
		t.Errorf("the container gets %q", env)
	}
}

// The driver does not care whether a claim is reserved for one pod, many pods or a PodGroup.
func TestClaimOfManyPods(t *testing.T) {
	reserve := func(n int, group, resource string) (by []resourceapi.ResourceClaimConsumerReference) {
		for i := range n {
			name := fmt.Sprint(resource, "-", i)
			by = append(by, resourceapi.ResourceClaimConsumerReference{APIGroup: group, Resource: resource, Name: name, UID: types.UID(name)})
		}
		return by
	}
	for name, by := range map[string][]resourceapi.ResourceClaimConsumerReference{
		"nobody":       nil,
		"a pod":        reserve(1, "", "pods"),
		"many pods":    reserve(resourceapi.ResourceClaimReservedForMaxSize, "", "pods"),
		"a PodGroup":   reserve(1, "scheduling.k8s.io", "podgroups"),
		"both of them": append(reserve(2, "scheduling.k8s.io", "podgroups"), reserve(3, "", "pods")...),
	} {
		t.Run(name, func(t *testing.T) {
			c := claim("c", "a")
			c.Status.ReservedFor = by
			b := newBench(t)
			_, conn, _ := b.serve(fake.NewClientset(c))
			b.offers(gpu("a", 1))
			for range 3 { // the kubelet calls once for each pod, and may call again after a restart
				prepareCall(t, conn, c)
			}
			unprepareCall(t, conn, c)
			if _, held := b.OwnerOf("a"); held {
				t.Error("it is still held")
			}
		})
	}
}

// After a new allocation, which the kubelet may not have noticed, a claim loses its earlier
// devices, even if the new ones are not available.
func TestClaimAllocatedAgain(t *testing.T) {
	for name, test := range map[string]struct {
		anew  *resourceapi.ResourceClaim
		held  string // by another claim
		holds map[string]bool
	}{
		"another device":          {claim("c", "b"), "", map[string]bool{"a": false, "b": true, "c": false}},
		"one more":                {claim("c", "a", "b"), "", map[string]bool{"a": true, "b": true, "c": false}},
		"one of another driver":   {claim("c"), "", map[string]bool{"a": false, "b": false, "c": false}},
		"one that is held":        {claim("c", "b"), "b", map[string]bool{"a": false, "b": false, "c": false}},
		"one of the same, in use": {claim("c", "a", "c"), "c", map[string]bool{"a": false, "b": false, "c": false}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t).restart().offers(gpu("a", 1), gpu("b", 2), gpu("c", 3))
			mustPrepare(t, b, claim("c", "a"))
			if test.held != "" {
				mustPrepare(t, b, claim("owner", test.held))
				mustRefuse(t, b, test.anew, "is in use by claim default/owner")
			} else {
				mustPrepare(t, b, test.anew)
			}
			for range 2 {
				for device, want := range test.holds {
					if who, held := b.OwnerOf(device); (held && who == "claim default/c") != want {
						t.Errorf("%s is held: %t, by %q", device, held, who)
					}
				}
				for id := range b.specOf(test.anew) {
					if name := id[strings.LastIndex(id, "-")+1:]; !test.holds[name] {
						t.Errorf("containers can have %s", id)
					}
				}
				b.restart().offers(gpu("a", 1), gpu("b", 2), gpu("c", 3))
			}
			mustUnprepare(t, b, test.anew)
		})
	}
}

// Containers of a pod that was deleted by force may continue to run, and the claim may get a new
// allocation at once. While these containers may run, the claim keeps its earlier devices.
func TestContainersOutliveAnAllocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.termination = ledger.DefaultTermination
		b.restart().offers(gpu("a", 1), gpu("b", 2))
		before, anew := claim("c", "a"), claim("c", "b")
		mustPrepare(t, b, before)
		for range 2 {
			mustRefuse(t, b, anew, "allocated again while it was prepared", "30s")
			time.Sleep(ledger.DefaultTermination / 2)
			mustRefuse(t, b, anew, "containers may use its previous devices for 15s")
			mustRefuse(t, b, claim("other", "a"), "is in use by claim default/c")
			mustPrepare(t, b, before) // resets the start of the waiting time
		}
		mustRefuse(t, b, anew, "30s")
		time.Sleep(ledger.DefaultTermination)
		mustPrepare(t, b, anew)
		mustPrepare(t, b, claim("other", "a"))
		mustRefuse(t, b, claim("c", "x"), "gone")
		mustUnprepare(t, b, anew)
		mustPrepare(t, b, claim("another", "b"))
	})
}

// A kubelet up to 1.36 starts a pod with the earlier devices of a claim that was allocated again. The
// claim keeps them until the pod has ended.
func TestPodStartsWithEarlierAllocation(t *testing.T) {
	b := newBench(t)
	started, unread := []string{"default/early"}, errFault
	b.config.StartedPods = func(_ context.Context, c *resourceapi.ResourceClaim) ([]string, error) {
		if c.Name != "c" {
			t.Errorf("asked for claim %s", c.Name)
		}
		return started, unread
	}
	b.restart().offers(gpu("a", 1), gpu("b", 2))
	mustPrepare(t, b, claim("c", "a"))
	mustRefuse(t, b, claim("c", "b"), "read the pods with its previous devices", errFault.Error())
	unread = nil
	mustRefuse(t, b, claim("c", "b"), "its previous devices are in use by pod default/early")
	mustRefuse(t, b, claim("other", "a"), "is in use by claim default/c")
	started = nil
	mustPrepare(t, b, claim("c", "b"))
	mustPrepare(t, b, claim("other", "a"))
}

// A device that replaced another between allocation and Prepare is not the device chosen by the
// scheduler, whether or not the agent saw the other device disappear.
func TestDeviceSwappedSinceItWasAllocated(t *testing.T) {
	other := gpu("a", 1)
	other.Identity = "uuid-of-another"
	unread := gpu("a", 1)
	unread.Identity = ""
	for name, test := range map[string]struct {
		seen    [][]rules.Offered // after the claim was allocated
		refused bool
	}{
		"it is the same":    {[][]rules.Offered{{gpu("a", 1)}}, false},
		"it was away":       {[][]rules.Offered{{}, {gpu("a", 1)}}, false},
		"it was unreadable": {[][]rules.Offered{{unread}, {gpu("a", 1)}}, false},
		"it is unreadable":  {[][]rules.Offered{{unread}}, false},
		"it is another":     {[][]rules.Offered{{other}}, true},
		"it was swapped":    {[][]rules.Offered{{}, {gpu("b", 2)}, {other}}, true},
		"it was read late":  {[][]rules.Offered{{unread}, {other}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				var known []*resourceapi.ResourceClaim
				away := true
				b.config.NodeClaims = func(context.Context) ([]*resourceapi.ResourceClaim, error) {
					if away {
						return nil, errFault
					}
					return known, nil
				}
				b.restart().offers(gpu("a", 1))
				allocated := func(name string, at time.Time) *resourceapi.ResourceClaim {
					c := claim(name, "a")
					c.Status.Allocation.AllocationTimestamp = new(metav1.NewTime(at.Truncate(time.Second)))
					return c
				}
				// The scheduler's clock is an hour slow or fast.
				early, late := allocated("early", time.Now().Add(-time.Hour)), allocated("late", time.Now().Add(time.Hour))
				unknown := claim("unknown", "a")
				known = []*resourceapi.ResourceClaim{fromOtherPool(early), late, unknown}
				for _, devices := range test.seen {
					b.offers(devices...)
				}
				if test.refused {
					mustRefuse(t, b, early, "device a was swapped", "is not yet known")
				}
				withheld := func() bool {
					in, _ := b.poolInput(time.Now())
					return in.Withheld["a"] != ""
				}
				if withheld() != test.refused {
					t.Errorf("while the claims of the earlier device are not known, slices without the device: %v, want %v", withheld(), test.refused)
				}
				if err := b.askPromised(t.Context(), b.view.Load()); (err != nil) != test.refused {
					t.Errorf("while the API server is away: %v", err)
				}
				away = false
				if err := b.askPromised(t.Context(), b.view.Load()); err != nil {
					t.Fatal(err)
				}
				if withheld() {
					t.Error("slices lack the device although the claims of the earlier one are known")
				}
				again := allocated("early", time.Now().Add(-30*time.Minute)) // the same claim
				later := allocated("later", time.Now().Add(-2*time.Hour))
				for _, c := range []*resourceapi.ResourceClaim{early, late} {
					if test.refused {
						mustRefuse(t, b, c, "device a was swapped", "when the claim was allocated")
						continue
					}
					mustPrepare(t, b, c)
					mustUnprepare(t, b, c)
				}
				for _, c := range []*resourceapi.ResourceClaim{later, unknown, again} {
					mustPrepare(t, b, c)
					mustUnprepare(t, b, c)
				}
			})
		})
	}
}

// The error for a claim names an earlier claim of the same name that is still prepared.
func TestClaimOfANameThatIsTaken(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1), pooltest.PartDevice("g", "g-a", 7), pooltest.PartDevice("g", "g-b", 1))
	first, second := claim("c", "a", "g-a"), claim("c", "a")
	second.UID = "uid-second"
	mustPrepare(t, b, first)
	mustRefuse(t, b, second, "is in use by an earlier claim default/c with UID uid-c")
	second.Status.Allocation = claim("c", "g-b").Status.Allocation
	mustRefuse(t, b, second, "is in use by an earlier claim default/c with UID uid-c", "counter")
	mustUnprepare(t, b, first)
	mustPrepare(t, b, second)
	mustUnprepare(t, b, first) // a late repetition, which changes nothing
	if who, held := b.OwnerOf("g"); !held || who != "claim default/c" {
		t.Errorf("in use by %q", who)
	}
}

// If a directory is full or read-only, the error names the operation and the file, no container can
// get a device, and the claim can be prepared when the directory is writable again.
func TestDirectoriesThatCannotBeWritten(t *testing.T) {
	records := func(b *bench) string { return b.records() }
	specs := func(b *bench) string { return b.config.CDI.Path }
	for name, test := range map[string]struct {
		dir   func(*bench) string
		size  string // of a full file system for the directory; empty for a read-only one
		words []string
	}{
		"records, full":      {records, "4k", []string{"write record", "uid-c.record", "no space left on device"}},
		"records, read-only": {records, "", []string{"write record", "uid-c.record", "read-only file system"}},
		"specs, full":        {specs, "4k", []string{"write CDI spec", "uid-c.json", "no space left on device"}},
		"specs, read-only":   {specs, "", []string{"write CDI spec", "uid-c.json", "read-only file system"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			dir := test.dir(b)
			mend := spoil(t, dir, test.size)
			b.restart().offers(gpu("a", 1))
			c := claim("c", "a")
			mustRefuse(t, b, c, test.words...)
			kept := dir != b.records() // a written record remains, and the next call continues
			if who, held := b.OwnerOf("a"); held != kept || exists(b.recordFile(c)) != kept || exists(b.specFile(c)) {
				t.Errorf("in use by %q, record %t, spec %t", who, exists(b.recordFile(c)), exists(b.specFile(c)))
			}
			if err := b.tryUnprepare(c); err != nil {
				t.Errorf("unprepare: %v", err)
			}
			mend()
			mustPrepare(t, b, c)
		})
	}
}

// spoil mounts an unwritable file system on the directory. The returned function makes the
// directory writable.
func spoil(t *testing.T, dir, size string) (mend func()) {
	t.Helper()
	options, flags := "size=1m", uintptr(unix.MS_RDONLY)
	if size != "" {
		options, flags = "size="+size, 0
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", flags, options); err != nil {
		t.Skipf("nothing can be mounted here: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if size == "" {
		return func() {
			if err := unix.Mount("", dir, "", unix.MS_REMOUNT, ""); err != nil {
				t.Fatal(err)
			}
		}
	}
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
	}
}
