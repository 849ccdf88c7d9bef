package ledger

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/ledger/stocktest"
)

// Grants of present agents stay readable in all later versions, and are written unchanged.
func TestGoldenGrants(t *testing.T) {
	files, err := filepath.Glob("testdata/grants/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("no golden grants: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			golden, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			name := filepath.Join(dir, allocation.GrantsFile)
			if err := errors.Join(os.Mkdir(filepath.Dir(name), 0o700), os.WriteFile(name, golden, 0o600)); err != nil {
				t.Fatal(err)
			}
			l := New(Config{Dir: dir, Boot: "boot-1", Listings: true})
			if problems, err := l.Open(t.Context()); err != nil || len(problems) > 0 {
				t.Fatal(err, problems)
			}
			grants, err := allocation.DecodeGrants(golden)
			if err != nil || len(l.View(nil).OwnGrants()) != len(grants) {
				t.Fatalf("%d of %d grants are read, %v", len(l.View(nil).OwnGrants()), len(grants), err)
			}
			if again, err := allocation.EncodeGrants(grants); err != nil || !bytes.Equal(again, golden) {
				t.Errorf("written as %s, %v", again, err)
			}
			for _, g := range grants {
				for _, device := range g.Devices {
					silicon := slices.Contains(g.Silicon, device)
					if b := l.View(stocktest.New(stocktest.NewGPU(device, 1))).BlockedBy(dra, "", wantAll(device)); (b != nil) != silicon && len(g.Silicon) != 1 {
						t.Errorf("%s: %v", device, b)
					}
				}
			}
		})
	}
}

func wantAll(device string) []allocation.Hold {
	return []allocation.Hold{{Device: device, Silicon: device, Whole: true}}
}

// podsSay returns a PodResources listing: containers with IDs of a resource.
func podsSay(whole bool, containers map[string][]string) *kubeletapi.Listing {
	said := &kubeletapi.Listing{Whole: whole}
	for name, ids := range containers {
		pod, container, _ := strings.Cut(name, " ")
		c := &podresourcesapi.ContainerResources{Name: container}
		if len(ids) > 1 {
			c.Devices = []*podresourcesapi.ContainerDevices{{ResourceName: ids[0], DeviceIds: ids[1:]}}
		}
		said.Pods = append(said.Pods, &podresourcesapi.PodResources{Namespace: "default", Name: pod, Containers: []*podresourcesapi.ContainerResources{c}})
	}
	return said
}

// kubelet is an open ledger with a simulated kubelet.
type kubelet struct {
	*Ledger
	t     *testing.T
	stock stocktest.Stock
	disk  *disktest.Disk
}

func newKubelet(t *testing.T, config Config, devices ...string) *kubelet {
	t.Helper()
	s := make(stocktest.Stock)
	for i, name := range devices {
		s[name] = stocktest.NewGPU(name, int64(128+i))
	}
	d := &disktest.Disk{}
	config.Dir, config.Boot, config.Listings, config.Disk = t.TempDir(), "boot-1", true, d
	l := New(config)
	if problems, err := l.Open(t.Context()); err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	return &kubelet{l, t, s, d}
}

// give allocates an ID to a container. The ID is the name of the device.
func (k *kubelet) give(id string) error {
	g, _ := k.stock.WithID("ours/gpu", id)
	given := *g
	given.Resource, given.ID, given.Since, given.Nodes = "ours/gpu", id, time.Now(), exclusion.NodesOf(id, k.stock)
	return k.Grants.AllocateIDs(k.stock, []*allocation.Grant{&given})
}

func (k *kubelet) mustGive(id string) {
	k.t.Helper()
	if err := k.give(id); err != nil {
		k.t.Fatal(err)
	}
	time.Sleep(time.Millisecond) // later answers include the grant
}

// says passes a PodResources listing to the ledger.
func (k *kubelet) says(said *kubeletapi.Listing) {
	k.t.Helper()
	if err := k.Grants.ObserveListing(time.Now(), said, always(k.stock)); err != nil {
		k.t.Fatal(err)
	}
}

// check checks the owner that blocks an API from a device, or "" for none.
func (k *kubelet) check(when string, by discovery.Mode, device, want string) {
	k.t.Helper()
	blocked := ""
	if b := k.View(k.stock).BlockedBy(by, "", wantAll(device)); b != nil {
		blocked = b.Owner.String()
	}
	if blocked != want {
		k.t.Errorf("%s: %s is blocked for %s by %q, want %q", when, device, by, blocked, want)
	}
}

const starting, train = "a container that the kubelet is starting", "default/train main"

// A grant ends when complete listings have left its container out for long enough. An incomplete
// listing ends no grant.
func TestLifeOfAGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet(t, Config{Termination: func(string, string) (time.Duration, bool) { return 0, true }}, "a")
		before := time.Now().Add(-time.Second)
		had, nothing := podsSay(true, map[string][]string{"train main": {"ours/gpu", "a"}}), podsSay(true, nil)
		k.mustGive("a")
		k.check("given", classic, "a", starting)
		if err := k.Grants.ObserveListing(before, had, always(k.stock)); err != nil {
			t.Fatal(err)
		}
		k.check("an answer from before the grant", classic, "a", starting)
		k.says(nothing)
		k.check("not listed yet", classic, "a", starting)
		time.Sleep(time.Hour)
		k.says(nothing)
		k.check("never listed", classic, "a", starting)
		k.says(had)
		k.check("listed", classic, "a", train)
		k.says(nothing)
		time.Sleep(50 * time.Second)
		k.says(nil)
		k.check("no answer", classic, "a", train)
		k.says(had)
		k.says(nothing)
		time.Sleep(9 * time.Second)
		k.says(nothing)
		k.check("left out for a little", classic, "a", train)
		time.Sleep(time.Minute)
		k.says(podsSay(false, nil))
		k.check("left out by a kubelet that does not know its pods", classic, "a", train)
		if !k.Grants.LastListing().IsZero() {
			t.Error("IDs may leave by what such a kubelet said")
		}
		k.says(nothing)
		k.check("left out again", classic, "a", train)
		time.Sleep(10 * time.Second)
		k.says(nothing)
		k.check("left out for long", classic, "a", "")
		if data, err := os.ReadFile(k.files.Path(allocation.GrantsFile)); err != nil || string(data) != "[]\n" {
			t.Errorf("the file says %s, %v", data, err)
		}
	})
}

// The kubelet removes a force-deleted pod from its records at once, while the pod's containers use
// up their grace period. The kubelet may allocate the ID again at once, but a claim waits.
func TestForceDeletedPod(t *testing.T) {
	for name, test := range map[string]struct {
		termination func(string, string) (time.Duration, bool)
		want        time.Duration // until a claim gets the device
	}{
		"of a known time":    {func(_, pod string) (time.Duration, bool) { return 2 * time.Minute, pod == "train" }, 130 * time.Second},
		"of an unknown time": {func(string, string) (time.Duration, bool) { return 0, false }, 40 * time.Second},
		"no grace period":    {nil, 40 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newKubelet(t, Config{Termination: test.termination}, "a")
				k.mustGive("a")
				k.says(podsSay(true, map[string][]string{"train main": {"ours/gpu", "a"}}))
				nothing := podsSay(true, nil)
				k.says(nothing)
				deleted := time.Now()
				for at := time.Duration(0); at <= test.want; at += time.Second {
					time.Sleep(time.Until(deleted.Add(at)))
					k.says(nothing)
					want := train
					if at >= test.want {
						want = ""
					}
					k.check(at.String(), dra, "a", want)
					if at >= 10*time.Second {
						want = ""
					}
					k.check(at.String(), classic, "a", want)
				}
			})
		})
	}
}

// A stopped kubelet ends no containers.
func TestForceDeletedPodWhileTheKubeletIsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet(t, Config{}, "a")
		k.mustGive("a")
		k.says(podsSay(true, map[string][]string{"train main": {"ours/gpu", "a"}}))
		nothing := podsSay(true, nil)
		k.says(nothing)
		time.Sleep(11 * time.Second)
		k.says(nothing)
		time.Sleep(time.Minute)
		k.says(nil)
		k.check("the kubelet is down", dra, "a", train)
		k.says(nothing)
		k.check("it is there again", dra, "a", train)
		k.check("it is there again", classic, "a", "")
		time.Sleep(40 * time.Second)
		k.says(nothing)
		k.check("it had the time to end containers", dra, "a", "")
	})
}

// A newly allocated ID may have belonged to a force-deleted pod, whose containers may outlive the
// present ones.
func TestIDOfAForceDeletedPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet(t, Config{Termination: func(_, pod string) (time.Duration, bool) {
			return map[string]time.Duration{"train": 2 * time.Minute}[pod], true
		}}, "a")
		k.mustGive("a")
		k.says(podsSay(true, map[string][]string{"train main": {"ours/gpu", "a"}}))
		k.mustGive("a")
		k.says(podsSay(true, map[string][]string{"infer main": {"ours/gpu", "a"}}))
		nothing := podsSay(true, nil)
		for range 2 {
			k.says(nothing)
			time.Sleep(time.Minute - time.Second)
		}
		again := New(k.config)
		if problems, err := again.Open(t.Context()); err != nil || len(problems) > 0 {
			t.Fatal(err, problems)
		}
		k.Ledger = again
		k.says(nothing)
		k.check("its time is not over", dra, "a", "default/infer main")
		time.Sleep(10 * time.Second)
		k.says(nothing)
		k.check("its time is over", dra, "a", "")
	})
}

// A newly allocated ID belongs to the newer container.
func TestIDAllocatedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet(t, Config{}, "a")
		k.mustGive("a")
		k.says(podsSay(true, map[string][]string{"train main": {"ours/gpu", "a"}}))
		k.mustGive("a")
		k.check("handed out again", dra, "a", starting)
		k.says(podsSay(true, map[string][]string{"infer main": {"ours/gpu", "a"}}))
		k.check("listed again", dra, "a", "default/infer main")
		if n := len(k.View(nil).OwnGrants()); n != 1 {
			t.Errorf("%d grants of one ID", n)
		}
	})
}

// After the loss of its checkpoint, a kubelet lists a container without its devices. The container
// keeps them while its pod requests them, and no other owner gets them.
func TestCheckpointLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asks, known := true, true
		k := newKubelet(t, Config{RequestsResource: func(namespace, pod, resource string) (bool, bool) {
			return asks && namespace == "default" && pod == "train" && resource == "ours/gpu", known
		}}, "a", "b")
		k.mustGive("a")
		k.says(podsSay(true, map[string][]string{"train main": {"ours/gpu", "a"}}))
		lost := podsSay(true, map[string][]string{"train main": nil})
		for range 20 {
			k.says(lost)
			time.Sleep(10 * time.Second)
		}
		k.check("the container runs", dra, "a", train)
		var blocked *exclusion.Blocked
		if err := k.give("a"); !errors.As(err, &blocked) || !strings.Contains(err.Error(), "default/train main") {
			t.Errorf("the ID is given to another: %v", err)
		}
		k.mustGive("b")
		asks, known = false, false // as in an agent that has just started
		for range 20 {
			k.says(lost)
			time.Sleep(10 * time.Second)
		}
		k.check("it is not known whether its pod asks for it", dra, "a", train)
		known = true // the pod has ended
		for range 10 {
			k.says(podsSay(true, nil))
			time.Sleep(10 * time.Second)
		}
		k.check("the container has ended", dra, "a", "")
		k.mustGive("a")
	})
}

// After the loss of its checkpoint, a kubelet allocates a running container's devices at once.
// Claims wait for the container too.
func TestIDAllocatedAfterACheckpointWasLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet(t, Config{RequestsResource: func(_, pod, _ string) (bool, bool) { return pod != "ended", true }}, "a")
		k.mustGive("a")
		k.says(podsSay(true, map[string][]string{"train main": {"ours/gpu", "a"}}))
		k.mustGive("a")
		k.says(podsSay(true, map[string][]string{"train main": nil, "ended main": {"ours/gpu", "a"}}))
		k.mustGive("a")
		for range 10 {
			k.says(podsSay(true, map[string][]string{"train main": nil, "ended main": nil, "infer main": {"ours/gpu", "a"}}))
			time.Sleep(10 * time.Second)
		}
		for range 10 {
			k.says(podsSay(true, map[string][]string{"train main": nil, "ended main": nil}))
			time.Sleep(10 * time.Second)
		}
		k.check("the first container runs", dra, "a", "default/infer main")
		k.check("it has been given to another", classic, "a", "")
		again := New(Config{Dir: k.config.Dir, Boot: "boot-1", Listings: true, RequestsResource: k.config.RequestsResource})
		if _, err := again.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		k.Ledger = again
		for range 10 {
			k.says(podsSay(true, map[string][]string{"train main": nil, "ended main": nil}))
			time.Sleep(10 * time.Second)
		}
		k.check("after a restart", dra, "a", "default/infer main")
		for range 10 {
			k.says(podsSay(true, map[string][]string{"ended main": nil}))
			time.Sleep(10 * time.Second)
		}
		k.check("the first container has ended", dra, "a", "")
	})
}

// An ended pod may be listed for a long time, without its devices. Once the end is known, the ID is
// free, and at once for other pods of the same API.
func TestEndedPodIsListed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet(t, Config{RequestsResource: func(string, string, string) (bool, bool) { return true, true }}, "a", "b")
		for _, id := range []string{"a", "b"} {
			k.mustGive(id)
		}
		k.says(podsSay(true, map[string][]string{"train main": {"ours/gpu", "a"}, "infer main": {"ours/gpu", "b"}}))
		ended := podsSay(true, map[string][]string{"train main": nil, "infer main": {"ours/gpu", "b"}})
		k.says(ended)
		lost := k.Grants.LostGrants()
		if len(lost) != 1 || lost[0].ID != "a" || k.give("a") == nil {
			t.Fatalf("lost: %v", lost)
		}
		k.Grants.PodsEnded(lost)
		if len(k.Grants.LostGrants()) > 0 {
			t.Error("it is lost still")
		}
		k.check("its containers may go on", dra, "a", train)
		for range 10 {
			k.says(ended)
			time.Sleep(10 * time.Second)
		}
		k.check("the pod has ended", dra, "a", "")
		k.mustGive("a")
		k.says(podsSay(true, map[string][]string{"train main": {"ours/gpu", "a"}})) // another pod of that name
		k.says(ended)
		if len(k.Grants.LostGrants()) != 1 {
			t.Error("the next pod of that name is taken for the one that has ended")
		}
	})
}

// UnconfirmedGrants returns grants without a known container. Such grants end, unless they were
// allocated again or confirmed meanwhile.
func TestUnconfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet(t, Config{}, "a", "b", "c")
		for _, id := range []string{"a", "b", "c"} {
			k.mustGive(id)
		}
		time.Sleep(5 * time.Minute)
		k.says(podsSay(true, map[string][]string{"train main": {"ours/gpu", "b"}}))
		old := k.Grants.UnconfirmedGrants(time.Now().Add(-4 * time.Minute))["ours/gpu"]
		if len(old) != 2 || old[0].ID != "a" || old[1].ID != "c" {
			t.Fatalf("unconfirmed: %v", old)
		}
		k.mustGive("c")
		if err := k.Grants.EndGrants(old); err != nil {
			t.Fatal(err)
		}
		k.check("ended", dra, "a", "")
		k.check("confirmed", dra, "b", train)
		k.check("made anew", dra, "c", starting)
	})
}

// An ID of another plugin blocks its device while the ID is listed, and is in no file. The ID is
// adopted once its resource is ours.
func TestGivenByAnotherPlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet(t, Config{Termination: func(string, string) (time.Duration, bool) { return 0, true }}, "a")
		theirs := podsSay(true, map[string][]string{"train main": {"theirs/gpu", "a"}})
		k.says(theirs)
		k.check("listed", dra, "a", train)
		k.check("listed", classic, "a", train)
		if n := len(k.View(nil).OwnGrants()); n != 0 {
			t.Errorf("%d grants", n)
		}
		if _, err := os.Stat(k.files.Path(allocation.GrantsFile)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("it is in the file of grants: %v", err)
		}
		k.says(podsSay(true, nil))
		time.Sleep(11 * time.Second)
		k.says(podsSay(true, nil))
		k.check("listed no more", dra, "a", "")

		k.says(podsSay(true, map[string][]string{"train main": {"ours/gpu", "a", "unknown"}}))
		if n := len(k.View(nil).OwnGrants()); n != 2 {
			t.Fatalf("%d grants adopted", n)
		}
		data, err := os.ReadFile(k.files.Path(allocation.GrantsFile))
		if err != nil || !strings.Contains(string(data), `"unknown"`) {
			t.Errorf("adopted: %s, %v", data, err)
		}
		k.stock["unknown"] = stocktest.NewGPU("unknown", 200)
		k.says(podsSay(true, map[string][]string{"train main": {"ours/gpu", "a", "unknown"}}))
		k.check("known later", dra, "unknown", train)
	})
}

// The kubelet may have listed its containers before the first scan. A device of a container is not
// allocated, even if the device is found later. If the resource is ours, the grant is written.
func TestDeviceFoundAfterTheKubeletHasSaid(t *testing.T) {
	for _, resource := range []string{"theirs/gpu", "ours/gpu"} {
		t.Run(resource, func(t *testing.T) {
			k := newKubelet(t, Config{}, "a")
			if err := k.Grants.ObserveListing(time.Now(), podsSay(true, map[string][]string{"train main": {resource, "a"}}), always(stocktest.Stock{})); err != nil {
				t.Fatal(err)
			}
			k.check("not found yet", dra, "a", "")
			k.Grants.RecogniseListed(k.stock)
			k.check("found", dra, "a", train)
			if err := k.ReconcileFiles(t.Context()); err != nil {
				t.Fatal(err)
			}
			data, _ := os.ReadFile(k.files.Path(allocation.GrantsFile))
			if ours := resource == "ours/gpu"; strings.Contains(string(data), `"silicon"`) != ours {
				t.Errorf("the file of grants is %q", data)
			}
		})
	}
}

// A device may be found while a listing is being recorded.
func TestDeviceFoundMeanwhile(t *testing.T) {
	k := newKubelet(t, Config{}, "a")
	done := make(chan struct{})
	meanwhile := func() exclusion.Stock {
		go func() { k.Grants.RecogniseListed(k.stock); close(done) }()
		time.Sleep(10 * time.Millisecond)
		return stocktest.Stock{}
	}
	if err := k.Grants.ObserveListing(time.Now(), podsSay(true, map[string][]string{"train main": {"theirs/gpu", "a"}}), meanwhile); err != nil {
		t.Fatal(err)
	}
	<-done
	k.check("found meanwhile", dra, "a", train)
}

// Until the kubelet has listed all its pods, new claims get no device of a possible container.
// Containers can get devices nevertheless.
func TestUnheard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet(t, Config{}, "a", "b")
		c := &allocation.Claim{UID: "uid-1", Namespace: "default", Name: "c", Boot: "boot-1", Results: []allocation.Result{{Device: "b", Source: "b", Silicon: "b", Whole: true}}}
		k.says(nil)
		k.says(podsSay(false, nil))
		var blocked *exclusion.Blocked
		if err := k.AllocateClaim(c, allocation.Allocated, k.stock); !errors.As(err, &blocked) || !strings.Contains(err.Error(), "kubelet has not yet reported") {
			t.Errorf("a claim gets it: %v", err)
		}
		k.mustGive("a")
		k.says(podsSay(true, nil))
		k.says(nil)
		if err := k.AllocateClaim(c, allocation.Allocated, k.stock); err != nil {
			t.Error(err)
		}
	})
}

// After a reboot the kubelet repeats its earlier answer: the devices with a grant's nodes then
// belong to the container.
func TestGrantAfterAReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet(t, Config{}, "a", "b")
		k.mustGive("a")
		k.says(podsSay(true, map[string][]string{"train main": {"ours/gpu", "a"}}))
		again := New(Config{Dir: k.config.Dir, Boot: "boot-2", Listings: true})
		if problems, err := again.Open(t.Context()); err != nil || len(problems) > 0 {
			t.Fatal(err, problems)
		}
		k.Ledger = again
		k.check("the same nodes", dra, "a", train)
		k.check("the same nodes", dra, "b", "")
		k.stock["a"], k.stock["b"] = stocktest.NewGPU("a", 129), stocktest.NewGPU("b", 128) // the devices have exchanged their nodes
		k.check("its device", dra, "a", train)
		k.check("what has its node now", dra, "b", train)
		k.check("what has its node now", classic, "b", train)
	})
}

// An unwritable grant is not allocated and leaves nothing behind.
func TestGrantThatCannotBeWritten(t *testing.T) {
	for _, step := range []disktest.Op{disktest.Create, disktest.Write, disktest.Sync, disktest.Rename} {
		t.Run(string(step), func(t *testing.T) {
			k := newKubelet(t, Config{}, "a", "b")
			k.mustGive("b")
			full := errors.New("no space")
			k.disk.Before = func(op disktest.Op, _ string) error {
				if op == step || op == disktest.Remove {
					return full
				}
				return nil
			}
			if err := k.give("a"); !errors.Is(err, full) {
				t.Errorf("given: %v", err)
			}
			k.check("not given", dra, "a", "")
			k.check("given before", dra, "b", starting)
			k.disk.Before = nil
			long := time.Now().Add(-disk.Abandoned)
			left, _ := filepath.Glob(filepath.Join(filepath.Dir(k.files.Path(allocation.GrantsFile)), ".*"))
			for _, name := range left {
				if err := os.Chtimes(name, long, long); err != nil {
					t.Fatal(err)
				}
			}
			if err := k.ReconcileFiles(t.Context()); err != nil {
				t.Error(err)
			}
			if files, err := os.ReadDir(filepath.Dir(k.files.Path(allocation.GrantsFile))); err != nil || len(files) != 1 {
				t.Errorf("left beside the grants: %v, %v", files, err)
			}
			again := New(Config{Dir: k.config.Dir, Boot: "boot-1", Listings: true})
			if problems, err := again.Open(t.Context()); err != nil || len(problems) > 0 {
				t.Fatal(err, problems)
			}
			if ours := again.View(nil).OwnGrants(); len(ours) != 1 || ours[0].ID != "b" {
				t.Errorf("after a restart: %v", ours)
			}
		})
	}
}

// An invalid file of grants is set aside. PodResources still lists the allocations.
func TestGrantsThatCannotBeRead(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, allocation.GrantsFile)
	if err := errors.Join(os.Mkdir(filepath.Dir(name), 0o700), os.WriteFile(name, []byte("[{"), 0o600)); err != nil {
		t.Fatal(err)
	}
	l := New(Config{Dir: dir, Boot: "boot-1", Listings: true})
	problems, err := l.Open(t.Context())
	if err != nil || len(problems) != 1 {
		t.Errorf("%v, problems %v", err, problems)
	}
	if _, err := os.Stat(name + ".unreadable"); err != nil {
		t.Errorf("not set aside: %v", err)
	}
	if err := l.Grants.AllocateIDs(stocktest.New(stocktest.NewGPU("a", 1)), []*allocation.Grant{{Resource: "ours/gpu", ID: "a", Devices: []string{"a"}, Silicon: []string{"a"}}}); err != nil {
		t.Error(err)
	}
}

// While the file of grants is unreadable, the file is not overwritten, no claim gets a device of a
// possible container, and no container gets any device. The file is read again later, and the
// grants of the meantime are added. PodResources lists no init containers.
func TestGrantsThatCannotBeReadForTheMoment(t *testing.T) {
	for name, again := range map[string]func(*kubelet) error{
		"read by Reconcile": func(k *kubelet) error { return k.ReconcileFiles(t.Context()) },
		"read for a grant":  func(k *kubelet) error { return k.give("c") },
	} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t, Config{}, "a", "b", "c")
			k.mustGive("a")
			before, err := os.ReadFile(k.files.Path(allocation.GrantsFile))
			if err != nil {
				t.Fatal(err)
			}
			k.disk.BeforeRead = func(name string) error {
				if name == k.files.Path(allocation.GrantsFile) {
					return syscall.EIO
				}
				return nil
			}
			restarted := New(k.config)
			if problems, err := restarted.Open(t.Context()); err != nil || len(problems) != 1 || !errors.Is(problems[0], syscall.EIO) {
				t.Fatal(err, problems)
			}
			k.Ledger = restarted
			k.says(podsSay(true, map[string][]string{"infer main": {"ours/gpu", "b"}}))
			if err := k.ReconcileFiles(t.Context()); !errors.Is(err, syscall.EIO) {
				t.Errorf("Reconcile: %v", err)
			}
			var blocked *exclusion.Blocked
			if err := k.AllocateClaim(stocktest.Claim("c", stocktest.NewGPU("a", 128)), allocation.Allocated, k.stock); !errors.As(err, &blocked) || !strings.Contains(err.Error(), k.files.Path(allocation.GrantsFile)) {
				t.Errorf("a claim gets it: %v", err)
			}
			if who := k.View(k.stock).OwnerOf(classic, "a"); !strings.Contains(who, k.files.Path(allocation.GrantsFile)) {
				t.Errorf("in use by %q", who)
			}
			if _, b := k.Leases.LeaseDevices(allocation.Change{Name: "a", Devices: []allocation.Hold{allocation.SiliconHold("a")}}, k.stock); b == nil {
				t.Error("the agent may change it")
			}
			if !k.Grants.LastListing().IsZero() {
				t.Error("IDs may leave that an init container has")
			}
			if err := k.give("c"); !errors.Is(err, syscall.EIO) {
				t.Errorf("a container gets another: %v", err)
			}
			if data, err := os.ReadFile(k.files.Path(allocation.GrantsFile)); err != nil || !bytes.Equal(data, before) {
				t.Errorf("written over: %s, %v", data, err)
			}

			k.disk.BeforeRead = nil
			if err := errors.Join(again(k), k.ReconcileFiles(t.Context())); err != nil {
				t.Fatal(err)
			}
			k.check("read again", dra, "a", starting)
			if k.Grants.LastListing().IsZero() {
				t.Error("IDs never leave")
			}
			k.check("listed meanwhile", dra, "b", "default/infer main")
			data, err := os.ReadFile(k.files.Path(allocation.GrantsFile))
			for _, id := range []string{`"id": "a"`, `"id": "b"`} {
				if err != nil || strings.Count(string(data), id) != 1 {
					t.Errorf("the file says %s, %v", data, err)
				}
			}
			k.mustGive("c")
			if err := k.AllocateClaim(stocktest.Claim("c", stocktest.NewGPU("a", 128)), allocation.Allocated, k.stock); !errors.As(err, &blocked) || blocked.Owner.String() != starting {
				t.Errorf("a claim gets it: %v", err)
			}
		})
	}
}

// If a damaged file of grants cannot be set aside, the file is not overwritten.
func TestGrantsThatCannotBeSetAside(t *testing.T) {
	k := newKubelet(t, Config{}, "a")
	if err := os.WriteFile(k.files.Path(allocation.GrantsFile), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	k.disk.Before = func(op disktest.Op, _ string) error {
		if op == disktest.Rename {
			return syscall.EIO
		}
		return nil
	}
	k.Ledger = New(k.config)
	if _, err := k.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.says(podsSay(true, nil))
	k.disk.Before = nil
	if err := k.give("a"); err == nil || !strings.Contains(err.Error(), "set aside") {
		t.Errorf("set aside without a word: %v", err)
	}
	k.mustGive("a")
	if data, err := os.ReadFile(k.files.Path(allocation.GrantsFile) + ".unreadable"); err != nil || string(data) != "{}" {
		t.Errorf("set aside: %q, %v", data, err)
	}
}

// whileRemoved is an output that reads the ledger while the files of an entry are removed.
type whileRemoved struct {
	HostFiles

	look func()
}

func (w whileRemoved) Remove(allocation.Entry, []allocation.Entry) error { w.look(); return nil }

// The grant of a pod without a grace period is in the ledger until its outputs are removed: an
// output must withhold the device before the device is free.
func TestGrantOutlastsItsOutputs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet(t, Config{Termination: func(string, string) (time.Duration, bool) { return 0, true }}, "a")
		removed, free := 0, false
		k.SetOutputs(whileRemoved{look: func() {
			removed++
			free = free || k.View(k.stock).BlockedBy(dra, "", wantAll("a")) == nil
		}})
		k.says(podsSay(true, nil))
		k.mustGive("a")
		k.says(podsSay(true, map[string][]string{"pod main": {"ours/gpu", "a"}}))
		for range 3 {
			time.Sleep(20 * time.Second)
			k.says(podsSay(true, nil))
		}
		if removed != 1 || free {
			t.Errorf("outputs removed %d times; device free meanwhile: %t", removed, free)
		}
		if blocked := k.View(k.stock).BlockedBy(dra, "", wantAll("a")); blocked != nil {
			t.Errorf("afterwards: %v", blocked)
		}
	})
}
