package legacy

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list/listtest"
)

func TestRegister(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := New(configFor(k))
	publish(p, gpus("b", "a10", "a9"))
	run(t, p)

	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a9 a10 b")
	r := registered.Request
	if r.Version != "v1beta1" || !r.Options.GetPreferredAllocationAvailable || r.Options.PreStartRequired {
		t.Errorf("registered as %v", r)
	}
	if o := registered.Options; !o.GetPreferredAllocationAvailable || o.PreStartRequired {
		t.Errorf("options are %v", o)
	}
	if _, err := registered.API.PreStartContainer(t.Context(), &pluginapi.PreStartContainerRequest{}); err != nil {
		t.Errorf("PreStartContainer: %v", err)
	}
	kubelettest.EventuallyTrue(t, func() bool {
		return socketsOf(p).RegisteredSockets()[listtest.Resource] == filepath.Join(k.Dir, r.Endpoint)
	}, func() string { return fmt.Sprint("Registered is ", socketsOf(p).RegisteredSockets()) })
}

func TestNothingIsServedBeforeActive(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := New(configFor(k))
	publish(p, gpus("a"))
	runOnly(t, p)
	kubelettest.NeverTrue(t, 100*time.Millisecond, func() bool { return len(k.Sockets()) > 0 }, func() string { return "served before it was active" })
	if _, err := os.Stat(stateOf(k)); err == nil {
		t.Error("wrote before it was active")
	}
	open(t, p)
	k.AwaitPlugin(listtest.Resource, 1).AwaitList(t, "a")
	<-p.Ready()
}

func TestAllStreamsGetAllLists(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := New(configFor(k))
	publish(p, gpus("a"))
	run(t, p)
	first := k.AwaitPlugin(listtest.Resource, 1)
	second := &kubelettest.Plugin{API: first.API}
	go second.WatchLists(t)
	first.AwaitList(t, "a")
	second.AwaitList(t, "a")
	for i := range 20 {
		status := discovery.Healthy
		want := "a b"
		if i%2 == 0 {
			status, want = discovery.Unhealthy, "a! b"
		}
		publish(p, listtest.Snapshot(listtest.WithHealth(listtest.GPU("a"), status, "hot"), listtest.GPU("b")))
		first.AwaitList(t, want)
		second.AwaitList(t, want)
	}
	before := len(first.SentLists())
	publish(p, listtest.Snapshot(listtest.GPU("a"), listtest.GPU("b")))
	kubelettest.NeverTrue(t, 100*time.Millisecond, func() bool { return len(first.SentLists()) > before }, func() string { return "the same list was sent again" })
}

func TestIDIsUnhealthyBeforeItLeaves(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := New(configFor(k))
	publish(p, gpus("a", "b"))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a b")
	marked := time.Now()
	publish(p, gpus("a"))
	registered.AwaitList(t, "a")
	if took := time.Since(marked); took < grace {
		t.Errorf("left after %v", took)
	}
	if said := registered.SentLists(); !slices.Equal(said, []string{"a b", "a b!", "a"}) {
		t.Errorf("the lists are %q", said)
	}
	publish(p, gpus("a", "b"))
	registered.AwaitList(t, "a b")
}

func TestNothingLeavesWhilePodResourcesIsSilent(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := New(configFor(k))
	publish(p, gpus("a", "b"))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a b")
	k.MuteListing(true)
	time.Sleep(50 * time.Millisecond)
	publish(p, gpus("a"))
	registered.AwaitList(t, "a b!")
	kubelettest.NeverTrue(t, 3*grace, func() bool { return registered.LastList() != "a b!" }, func() string { return "list is " + registered.LastList() })
	k.MuteListing(false)
	registered.AwaitList(t, "a")
}

func TestHeldIDsStay(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := New(configFor(k))
	publish(p, gpus("a", "b"))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a b")
	if _, err := registered.AllocateIDs("b"); err != nil {
		t.Fatal(err)
	}
	k.HoldIDs("train", listtest.Resource, "b")
	publish(p, gpus())
	registered.AwaitList(t, "b!")
	kubelettest.NeverTrue(t, 3*grace, func() bool { return registered.LastList() != "b!" || registered.HasEnded() }, func() string { return "list is " + registered.LastList() })

	k.HoldIDs("train", listtest.Resource)
	// The kubelet receives an empty list before the plugin ends.
	registered.AwaitList(t, "")
	kubelettest.EventuallyTrue(t, registered.HasEnded, func() string { return "the plugin of a resource that has gone still serves" })
	kubelettest.EventuallyTrue(t, func() bool { return len(k.Sockets()) == 0 }, func() string { return fmt.Sprint("sockets: ", k.Sockets()) })

	publish(p, gpus("a"))
	k.AwaitPlugin(listtest.Resource, 2).AwaitList(t, "a")
}

func TestUnconfirmedGrant(t *testing.T) {
	for name, test := range map[string]struct {
		pending func(context.Context, string) (bool, error)
		kept    bool
	}{
		"unknown":                 {nil, true},
		"an init container is on": {func(context.Context, string) (bool, error) { return true, nil }, true},
		"no program answers":      {func(context.Context, string) (bool, error) { return false, errors.New("away") }, true},
		"there is none":           {func(context.Context, string) (bool, error) { return false, nil }, false},
	} {
		t.Run(name, func(t *testing.T) {
			k := kubelettest.New(t)
			k.Start()
			config := configFor(k)
			config.PendingPods = test.pending
			if !test.kept {
				config.UnconfirmedAfter = 3 * time.Second // longer than the checks before, even on a busy machine
			}
			p := New(config)
			publish(p, gpus("a"))
			run(t, p)
			registered := k.AwaitPlugin(listtest.Resource, 1)
			registered.AwaitList(t, "a")
			granted := time.Now()
			if _, err := registered.AllocateIDs("a"); err != nil {
				t.Fatal(err)
			}
			if holder, held := holder(p, "gpu-a"); !held || holder != "a container that the kubelet is starting" {
				t.Errorf("holder is %q, %t", holder, held)
			}
			publish(p, gpus())
			if test.kept {
				kubelettest.NeverTrue(t, 4*grace, func() bool { _, held := holder(p, "gpu-a"); return !held || registered.LastList() == "" }, func() string { return "the grant was dropped" })
				return
			}
			kubelettest.EventuallyTrue(t, func() bool { _, held := holder(p, "gpu-a"); return !held }, func() string { return "the grant is kept" })
			if took := time.Since(granted); took < config.UnconfirmedAfter {
				t.Errorf("dropped after %v", took)
			}
			registered.AwaitList(t, "")
		})
	}
}

func TestGrantIsOnDiskBeforeTheAnswer(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	p := New(config)
	publish(p, gpus("a", "b"))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a b")
	if _, err := registered.AllocateIDs("a"); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(stateOf(k), "grants/grants.json")
	data, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(data), `"gpu-a"`) || !strings.Contains(string(data), listtest.Resource) {
		t.Fatalf("grants are %s, %v", data, err)
	}
	// If the file cannot be written, nothing is allocated.
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(file, "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := registered.AllocateIDs("b"); err == nil || !strings.Contains(err.Error(), "write grants") {
		t.Errorf("allocate: %v", err)
	}
	if holder, held := holder(p, "gpu-b"); held {
		t.Errorf("in use by %s", holder)
	}
}

func TestGrantsOutliveTheProcess(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	first := New(configFor(k))
	publish(first, gpus("a", "b"))
	stop := run(t, first)
	before := k.AwaitPlugin(listtest.Resource, 1)
	before.AwaitList(t, "a b")
	if _, err := before.AllocateIDs("a"); err != nil {
		t.Fatal(err)
	}
	stop()
	if said := before.SentLists(); slices.Contains(said, "") || len(said) != 1 {
		t.Errorf("lists at the end: %q", said)
	}
	if left := k.Sockets(); len(left) > 0 {
		t.Errorf("left sockets %v", left)
	}

	k.MuteListing(true)
	second := New(configFor(k))
	run(t, second)
	<-second.Ready()
	if _, held := holder(second, "gpu-a"); !held {
		t.Error("the grant is forgotten")
	}
	// The device has vanished in the meantime. The resource remains registered.
	publish(second, gpus())
	k.AwaitPlugin(listtest.Resource, 2).AwaitList(t, "a!")
}

// A resource whose devices exist but are no longer offered is left to another plugin. Pods keep
// their allocations.
func TestResourceIsNotOfferedAnyMore(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	first := New(configFor(k))
	publish(first, gpus("a", "b"))
	stop := run(t, first)
	plugin := k.AwaitPlugin(listtest.Resource, 1)
	plugin.AwaitList(t, "a b")
	if _, err := plugin.AllocateIDs("a"); err != nil {
		t.Fatal(err)
	}
	k.HoldIDs("train", listtest.Resource, "a")
	stop()

	second := New(configFor(k))
	run(t, second)
	<-second.Ready()
	second.SetHostDevices(host(gpus("a", "b")))
	second.Publish(gpus(), nil)
	time.Sleep(10 * second.config.Poll)
	if n := len(k.Registrations()); n != 1 {
		t.Errorf("the resource is registered %d times; want once, by the first", n)
	}
	if who, held := holder(second, "gpu-a"); !held || who != "default/train main" {
		t.Errorf("holder is %q, %t", who, held)
	}
	publish(second, gpus("a", "b"))
	k.AwaitPlugin(listtest.Resource, 2).AwaitList(t, "a b")
}

func TestHoldingsOfThePluginBefore(t *testing.T) {
	k := kubelettest.New(t)
	k.HoldIDs("train", listtest.Resource, "a", "gone")
	k.HoldIDs("other", "example.org/nic", "x")
	k.Start()
	p := New(configFor(k))
	publish(p, gpus("a", "b"))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a b gone!")
	if said := registered.SentLists(); len(said) != 1 {
		t.Errorf("a list without what pods hold was sent: %q", said)
	}
	if holder, held := holder(p, "gpu-a"); !held || holder != "default/train main" {
		t.Errorf("holder is %q, %t", holder, held)
	}
	// The kubelet requests the list before it answers the registration.
	kubelettest.EventuallyTrue(t, func() bool { return len(socketsOf(p).RegisteredSockets()) == 1 }, func() string { return fmt.Sprintf("registered %v", socketsOf(p).RegisteredSockets()) })
	k.HoldIDs("train", listtest.Resource)
	registered.AwaitList(t, "a b")
	kubelettest.EventuallyTrue(t, func() bool { _, held := holder(p, "gpu-a"); return !held }, func() string { return "still held" })
}

// An ID that is not found on the host, such as a serial number, stands for the devices whose nodes
// the container was given.
func TestIDsThatOnlyTheirNodesTell(t *testing.T) {
	k := kubelettest.New(t)
	k.HoldIDs("train", listtest.Resource, "SN17")
	k.HoldIDs("other", "example.org/nic", "x")
	k.Start()
	config := configFor(k)
	read := 0
	config.Written = func() ([]kubeletapi.Holding, error) {
		read++
		return []kubeletapi.Holding{
			{Resource: listtest.Resource, IDs: []string{"SN17"}, Nodes: []string{"/dev/gpuctl", "/dev/b"}},
			{Resource: "example.org/nic", IDs: []string{"x"}, Nodes: []string{"/dev/gpuctl"}}, // identifies no device
		}, nil
	}
	p := New(config)
	publish(p, gpus("a", "b"))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "SN17! a b!")
	if said := registered.SentLists(); len(said) != 1 {
		t.Errorf("a list without what pods hold was sent: %q", said)
	}
	if holder, held := holder(p, "gpu-b"); !held || holder != "default/train main" {
		t.Errorf("holder is %q, %t", holder, held)
	}
	k.HoldIDs("train", listtest.Resource)
	registered.AwaitList(t, "a b")
	if read != 1 {
		t.Errorf("the checkpoint was read %d times", read)
	}
}

func TestHolder(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	shareable := listtest.GPU("s")
	shareable.Shareable = true
	part := listtest.GPU("p")
	part.PartOf = &discovery.Silicon{Name: "card"}
	p := New(configFor(k))
	publish(p, listtest.Snapshot(part, shareable))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "p s")
	if _, err := registered.AllocateIDs("p", "s"); err != nil {
		t.Fatal(err)
	}
	for silicon, want := range map[string]bool{"card": true, "gpu-s": false} {
		if holder, held := holder(p, silicon); held != want {
			t.Errorf("%s: held %t by %s", silicon, held, holder)
		}
	}
	k.HoldIDs("train", listtest.Resource, "p", "s")
	kubelettest.EventuallyTrue(t, func() bool { holder, _ := holder(p, "card"); return holder == "default/train main" }, func() string { return "the pod is not named" })
	// The pod's second container reuses the ID of the first container.
	if _, err := registered.AllocateIDs("p"); err != nil {
		t.Errorf("allocate again: %v", err)
	}
}

func TestHolderOfWhatIsNotOffered(t *testing.T) {
	k := kubelettest.New(t)
	shareable := listtest.GPU("s")
	shareable.Shareable = true
	part := listtest.GPU("p")
	part.PartOf = &discovery.Silicon{Name: "card"}
	dialect := listtest.GPU("d")
	dialect.Offers[0].Infix = "/vgpu"
	k.HoldIDs("train", "example.com/renamed", "a::3", "c-_-12", "d/vgpu0", "e-4", "b-x", "p", "s", "unknown")
	p := New(configFor(k))
	p.SetHostDevices(host(listtest.Snapshot(listtest.GPU("a"), listtest.GPU("b"), listtest.GPU("c"), dialect, listtest.GPU("e"), part, shareable)))
	p.Publish(listtest.Snapshot(), nil)
	run(t, p)
	<-p.Ready()
	holders := map[string]string{"card": "default/train main", "gpu-b": "", "gpu-s": ""}
	for _, shared := range []string{"gpu-a", "gpu-c", "gpu-d", "gpu-e"} {
		holders[shared] = "default/train main"
	}
	for silicon, want := range holders {
		if who, held := holder(p, silicon); who != want || held != (want != "") {
			t.Errorf("%s: held %t by %q, want %q", silicon, held, who, want)
		}
	}
	if n := len(socketsOf(p).RegisteredSockets()); n > 0 {
		t.Errorf("registered %v", socketsOf(p).RegisteredSockets())
	}
	// An incomplete list of pods releases nothing.
	k.ForgetPods()
	kubelettest.NeverTrue(t, 3*grace, func() bool { _, held := holder(p, "gpu-a"); return !held }, func() string { return "freed" })
	k.HoldIDs("static", "example.org/nic", "x")
	kubelettest.NeverTrue(t, 3*grace, func() bool { _, held := holder(p, "gpu-a"); return !held }, func() string { return "freed by another's pod" })
	k.AddOwnPod()
	kubelettest.EventuallyTrue(t, func() bool { _, held := holder(p, "gpu-a"); return !held }, func() string { return "held for ever" })
}

// unheard is part of the owner's text before the kubelet has answered.
const unheard = "the kubelet has not yet reported"

func TestHolderBeforeTheKubeletAnswers(t *testing.T) {
	k := kubelettest.New(t)
	k.MuteListing(true)
	k.Start()
	p := New(configFor(k))
	p.SetHostDevices(host(gpus("a", "b")))
	p.Publish(gpus("a"), nil)
	run(t, p)
	<-p.Ready()
	if who, held := holder(p, "gpu-b"); !held || !strings.Contains(who, unheard) {
		t.Errorf("held %t by %q", held, who)
	}
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a")
	if _, err := registered.AllocateIDs("a"); err != nil {
		t.Errorf("allocate: %v", err)
	}
	if who, _ := holder(p, "gpu-a"); strings.Contains(who, unheard) {
		t.Error("our own grant is unknown")
	}
	k.MuteListing(false)
	kubelettest.EventuallyTrue(t, func() bool { _, held := holder(p, "gpu-b"); return !held }, func() string { return "still unknown" })
	k.MuteListing(true)
	kubelettest.NeverTrue(t, 100*time.Millisecond, func() bool { _, held := holder(p, "gpu-b"); return held }, func() string { return "unknown again" })
}

func TestKubeletDoesNotKnowItsPods(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	config.PendingPods = func(context.Context, string) (bool, error) { return false, nil }
	p := New(config)
	publish(p, gpus("a", "b"))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a b")
	if _, err := registered.AllocateIDs("a"); err != nil {
		t.Fatal(err)
	}
	k.HoldIDs("train", listtest.Resource, "a")
	kubelettest.EventuallyTrue(t, func() bool { who, _ := holder(p, "gpu-a"); return who == "default/train main" }, func() string { return "not confirmed" })
	k.ForgetPods()
	time.Sleep(50 * time.Millisecond)
	if _, err := registered.AllocateIDs("b"); err != nil {
		t.Fatal(err)
	}
	kubelettest.NeverTrue(t, config.UnconfirmedAfter+3*grace, func() bool {
		_, a := holder(p, "gpu-a")
		_, b := holder(p, "gpu-b")
		return !a || !b
	}, func() string { return "dropped" })
	k.AddOwnPod()
	for _, silicon := range []string{"gpu-a", "gpu-b"} {
		kubelettest.EventuallyTrue(t, func() bool { _, held := holder(p, silicon); return !held }, func() string { return silicon + " is kept" })
	}
}

func TestHeldByAnotherName(t *testing.T) {
	const other = "example.com/renamed"
	renamed := func(d rules.Offered) rules.Offered {
		d.Offers = []discovery.Offer{{Resource: other, IDs: d.Offers[0].IDs}}
		return d
	}
	for name, ours := range map[string]bool{"handed out by us": true, "handed out by the plugin before": false} {
		t.Run(name, func(t *testing.T) {
			k := kubelettest.New(t)
			k.Start()
			p := New(configFor(k))
			p.SetHostDevices(host(gpus("a", "b")))
			if ours {
				p.Publish(gpus("a", "b"), nil)
			} else {
				p.Publish(listtest.Snapshot(renamed(listtest.GPU("a")), renamed(listtest.GPU("b"))), nil)
				k.HoldIDs("train", listtest.Resource, "a")
			}
			run(t, p)
			if ours {
				registered := k.AwaitPlugin(listtest.Resource, 1)
				registered.AwaitList(t, "a b")
				if _, err := registered.AllocateIDs("a"); err != nil {
					t.Fatal(err)
				}
				k.HoldIDs("train", listtest.Resource, "a")
				kubelettest.EventuallyTrue(t, func() bool { who, _ := holder(p, "gpu-a"); return who == "default/train main" }, func() string { return "not confirmed" })
				p.Publish(listtest.Snapshot(renamed(listtest.GPU("a")), renamed(listtest.GPU("b"))), nil)
			}
			registered := k.AwaitPlugin(other, 1)
			registered.AwaitList(t, "a! b")
			_, err := registered.AllocateIDs("a")
			if err == nil || !strings.Contains(err.Error(), "gpu-a is in use by default/train main") {
				t.Errorf("allocate: %v", err)
			}
			k.HoldIDs("train", listtest.Resource)
			registered.AwaitList(t, "a b")
		})
	}
}

// The lists of two resources were computed before either allocated the device.
func TestTheOtherNameIsQuicker(t *testing.T) {
	p := New(configFor(kubelettest.New(t)))
	open(t, p)
	a := listtest.GPU("a")
	a.Offers = append(a.Offers, discovery.Offer{Resource: "example.com/renamed", IDs: []string{"x"}})
	lists := listsOf(a)
	if _, err := p.allocateIDs(t.Context(), lists[listtest.Resource], listtest.Resource, [][]string{{"a"}}); err != nil {
		t.Fatal(err)
	}
	_, err := p.allocateIDs(t.Context(), lists["example.com/renamed"], "example.com/renamed", [][]string{{"x"}})
	if err == nil || !strings.Contains(err.Error(), "gpu-a is in use by a container that the kubelet is starting") {
		t.Errorf("allocate: %v", err)
	}
	if given := p.config.Ledger.View(nil).OwnGrants(); len(given) != 1 {
		t.Error("what was refused is had")
	}
	// Another container of the pod gets the same ID again.
	if _, err := p.allocateIDs(t.Context(), lists[listtest.Resource], listtest.Resource, [][]string{{"a"}}); err != nil {
		t.Error(err)
	}
}

func TestHeldByTheOtherAPI(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := New(configFor(k))
	publish(p, gpus("a", "b"))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a b")
	claim(t, p, "c1", "gpu-a")
	registered.AwaitList(t, "a! b")
	_, err := registered.AllocateIDs("a")
	if err == nil || !strings.Contains(err.Error(), `example.com/gpu: device "a": device gpu-a is in use by claim default/c1`) {
		t.Errorf("allocate: %v", err)
	}
	if err := p.config.Ledger.End("c1", nil); err != nil {
		t.Fatal(err)
	}
	registered.AwaitList(t, "a b")
}

func TestTheOtherAPIIsQuicker(t *testing.T) {
	k := kubelettest.New(t)
	config := configFor(k)
	p := New(config)
	open(t, p)
	p.pollOnce(t.Context(), "")
	l := listsOf(listtest.GPU("a"))[listtest.Resource]
	claim(t, p, "c1", "gpu-a")
	_, err := p.allocateIDs(t.Context(), l, listtest.Resource, [][]string{{"a"}})
	if err == nil || !strings.Contains(err.Error(), "claim default/c1") {
		t.Errorf("allocate: %v", err)
	}
	if given := p.config.Ledger.View(nil).OwnGrants(); len(given) > 0 {
		t.Error("what was refused is had")
	}
}

func TestSlowKubelet(t *testing.T) {
	config := configFor(kubelettest.New(t))
	config.ListPods = func(ctx context.Context) (*kubeletapi.Listing, error) {
		select {
		case <-time.After(8 * time.Second):
			return &kubeletapi.Listing{Whole: true}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	p := New(config)
	open(t, p)
	synctest.Test(t, func(t *testing.T) {
		if reason := p.pollOnce(t.Context(), ""); reason != "" {
			t.Errorf("the devices of pods are unknown: %s", reason)
		}
	})
}

func TestAllocateRefuses(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := New(configFor(k))
	publish(p, listtest.Snapshot(listtest.GPU("a"), listtest.WithHealth(listtest.GPU("b"), discovery.Unhealthy, "fell off the bus")))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	registered.AwaitList(t, "a b!")
	for id, want := range map[string]string{
		"x": `example.com/gpu: device "x": unknown`,
		"b": `example.com/gpu: device "b": fell off the bus`,
	} {
		if _, err := registered.AllocateIDs("a", id); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", id, err)
		}
	}
	// The kubelet requests IDs for one container at a time, and each ID once.
	for name, requests := range map[string][]*pluginapi.ContainerAllocateRequest{
		"one container":  {{DevicesIds: []string{"a", "a"}}},
		"two containers": {{DevicesIds: []string{"a"}}, {DevicesIds: []string{"a"}}},
	} {
		_, err := registered.API.Allocate(t.Context(), &pluginapi.AllocateRequest{ContainerRequests: requests})
		if err == nil || !strings.Contains(err.Error(), `example.com/gpu: device "a": requested twice in one call`) {
			t.Errorf("twice for %s: %v", name, err)
		}
	}
	if _, held := holder(p, "gpu-a"); held {
		t.Error("what was refused is held")
	}
}

func TestAllocateForContainers(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	config.CDI.RuntimeRoot = "/host"
	config.Grant = func(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
		var edits specs.ContainerEdits
		var names []string
		for _, d := range given {
			names = append(names, d.Name)
		}
		edits.Env = []string{"VISIBLE=" + strings.Join(names, ","), fmt.Sprintf("BY=%s %s", grant.API, grant.Resource), fmt.Sprint("ALL=", grant.All)}
		return edits
	}
	p := New(config)
	publish(p, gpus("a", "b", "c"))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	r, err := registered.API.Allocate(t.Context(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{
		{DevicesIds: []string{"c", "a"}}, {DevicesIds: []string{"b"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range r.ContainerResponses {
		got = append(got, fmt.Sprint(c.Envs))
		for _, d := range c.Devices {
			got = append(got, fmt.Sprint(d.HostPath, " ", d.ContainerPath, " ", d.Permissions))
		}
	}
	want := []string{
		"map[ALL:false BY:DevicePlugin example.com/gpu GPU_LIBRARY:/usr/lib/gpu VISIBLE:gpu-a,gpu-c]",
		"/host/dev/gpuctl /dev/gpuctl r", "/host/dev/a /dev/a rw", "/host/dev/c /dev/c rw",
		"map[ALL:false BY:DevicePlugin example.com/gpu GPU_LIBRARY:/usr/lib/gpu VISIBLE:gpu-b]",
		"/host/dev/gpuctl /dev/gpuctl r", "/host/dev/b /dev/b rw",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	r, err = registered.API.Allocate(t.Context(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{"c", "b", "a"}}}})
	if err != nil || r.ContainerResponses[0].Envs["ALL"] != "true" {
		t.Errorf("of all: %v, %v", r, err)
	}
}

func TestDirectoryIsNotWritable(t *testing.T) {
	k := kubelettest.New(t)
	if err := os.Remove(k.Dir); err != nil {
		t.Fatal(err)
	}
	unwritable(t, k, k.Dir, "device-plugins directory "+k.Dir+": not writable")
}

// unwritable checks a plugin with a file in place of the directory: the ledger still follows the
// allocations of containers, the log contains the reason, and the plugin serves once the directory
// exists.
func unwritable(t *testing.T, k *kubelettest.Kubelet, dir, want string) {
	t.Helper()
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p := New(configFor(k))
	p.SetHostDevices(host(gpus("a")))
	p.Publish(gpus("a"), nil)
	var log log
	logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log)))
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
	ended := make(chan struct{})
	open(t, p)
	go func() { p.Run(ctx); close(ended) }()
	kubelettest.EventuallyTrue(t, func() bool { return strings.Contains(log.String(), want) }, func() string { return "the log does not say " + want })
	for _, ids := range [][]string{{"a"}, nil} {
		k.HoldIDs("train", listtest.Resource, ids...)
		kubelettest.EventuallyTrue(t, func() bool { _, held := holder(p, "gpu-a"); return held == (len(ids) > 0) }, func() string { return "holdings are not followed" })
	}
	if registered := socketsOf(p).RegisteredSockets(); len(registered) > 0 {
		t.Errorf("serves %v", registered)
	}

	if err := errors.Join(os.Remove(dir), os.Mkdir(dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	if k.Server == nil {
		k.Start()
	}
	k.AwaitPlugin(listtest.Resource, 1).AwaitList(t, "a")
	cancel()
	<-ended
}

// log collects log output.
type log struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func TestBadNamesHideNothing(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	bad := listtest.GPU("bad")
	bad.Offers = append(bad.Offers, discovery.Offer{Resource: "sym;dc", IDs: []string{"x"}}, discovery.Offer{Resource: listtest.Resource, IDs: []string{"\xff"}})
	p := New(configFor(k))
	publish(p, listtest.Snapshot(bad, listtest.GPU("good")))
	run(t, p)
	k.AwaitPlugin(listtest.Resource, 1).AwaitList(t, "bad good")
}

func TestStopWaitsForCalls(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	begun, proceed := make(chan struct{}), make(chan struct{})
	config := configFor(k)
	config.Grant = func([]discovery.Device, discovery.Grant) specs.ContainerEdits {
		close(begun)
		<-proceed
		return specs.ContainerEdits{}
	}
	p := New(config)
	publish(p, gpus("a"))
	stop := run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	answered := make(chan error, 1)
	go func() { _, err := registered.AllocateIDs("a"); answered <- err }()
	<-begun
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	time.Sleep(50 * time.Millisecond)
	close(proceed)
	if err := <-answered; err != nil {
		t.Errorf("allocate: %v", err)
	}
	<-stopped
}

func TestConcurrency(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	config.Grace = time.Millisecond
	p := New(config)
	ids := []string{"a", "b", "c", "d"}
	publish(p, gpus(ids...))
	run(t, p)
	registered := k.AwaitPlugin(listtest.Resource, 1)
	var group sync.WaitGroup
	end := time.Now().Add(time.Second)
	loop := func(f func()) {
		group.Go(func() {
			for time.Now().Before(end) {
				f()
			}
		})
	}
	loop(func() { publish(p, gpus(ids[:1+rand.IntN(4)]...)); time.Sleep(time.Millisecond) })
	loop(func() {
		c := &allocation.Claim{UID: "c", Namespace: "default", Name: "c", Boot: "boot", Results: []allocation.Result{{Device: "gpu-b", Source: "gpu-b", Silicon: "gpu-b", Whole: true}}}
		_ = p.config.Ledger.AllocateClaim(c, allocation.Allocated, p.stock.Load())
		_ = p.config.Ledger.End("c", nil)
	})
	loop(func() { k.HoldIDs("train", listtest.Resource, ids[:rand.IntN(3)]...) })
	for _, id := range ids {
		loop(func() { _, _ = registered.AllocateIDs(id) })
	}
	loop(func() {
		_, _ = registered.API.GetPreferredAllocation(t.Context(), &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: ids, AllocationSize: 2}},
		})
	})
	loop(func() {
		stream, err := registered.API.ListAndWatch(t.Context(), &pluginapi.Empty{})
		if err == nil {
			_, _ = stream.Recv()
		}
	})
	loop(func() { holder(p, "gpu-a"); socketsOf(p).RegisteredSockets() })
	group.Wait()
	k.HoldIDs("train", listtest.Resource)
	publish(p, gpus("a", "b", "c", "d"))
	registered.AwaitList(t, "a b c d")
}

// The ledger receives the same stock while nothing changes, so that lists are not computed again at
// each poll. The stock changes with the device nodes that other plugins gave to containers.
func TestPresentStaysTheSame(t *testing.T) {
	p := New(Config{})
	before := p.presentStock()
	if p.presentStock() != before {
		t.Error("another stock though nothing has changed")
	}
	p.foreignNodes.Store(&map[string][]string{"key": {"/dev/node"}})
	if p.presentStock() == before {
		t.Error("the same stock though containers were given something")
	}
}
