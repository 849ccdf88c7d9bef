package legacy

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

func TestRegister(t *testing.T) {
	k := newKubelet(t)
	k.start()
	p := New(k.config())
	p.Publish(gpus("b", "a10", "a9"))
	run(t, p)

	registered := k.plugin(gpuResource, 1)
	registered.says(t, "a9 a10 b")
	r := registered.request
	if r.Version != "v1beta1" || !r.Options.GetPreferredAllocationAvailable || r.Options.PreStartRequired {
		t.Errorf("registered as %v", r)
	}
	if o := registered.options; !o.GetPreferredAllocationAvailable || o.PreStartRequired {
		t.Errorf("options are %v", o)
	}
	if _, err := registered.api.PreStartContainer(t.Context(), &pluginapi.PreStartContainerRequest{}); err != nil {
		t.Errorf("PreStartContainer: %v", err)
	}
	eventually(t, func() bool {
		return p.Registered()[gpuResource] == filepath.Join(k.dir, r.Endpoint)
	}, func() string { return fmt.Sprint("Registered is ", p.Registered()) })
}

func TestNothingIsServedBeforeActive(t *testing.T) {
	k := newKubelet(t)
	k.start()
	active := make(chan struct{})
	config := k.config()
	config.Active = active
	p := New(config)
	p.Publish(gpus("a"))
	run(t, p)
	never(t, 100*time.Millisecond, func() bool { return len(k.sockets()) > 0 }, func() string { return "served before it was active" })
	if _, err := os.Stat(config.StateDir); err == nil {
		t.Error("wrote before it was active")
	}
	close(active)
	k.plugin(gpuResource, 1).says(t, "a")
	<-p.Ready()
}

func TestKubeletIsAbsentAtStart(t *testing.T) {
	for name, dir := range map[string]bool{"directory is there": true, "directory is not": false} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t)
			if !dir {
				os.Remove(k.dir)
			}
			p := New(k.config())
			p.Publish(gpus("a"))
			run(t, p)
			time.Sleep(300 * time.Millisecond)
			if !dir {
				if err := os.Mkdir(k.dir, 0o750); err != nil {
					t.Fatal(err)
				}
			}
			k.start()
			started := time.Now()
			t.Logf("registered %v after the kubelet came", k.plugin(gpuResource, 1).at.Sub(started))
		})
	}
}

func TestKubeletRestarts(t *testing.T) {
	for name, inotify := range map[string]bool{"with inotify": true, "by looking": false} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t)
			k.start()
			p := New(k.config())
			p.Publish(gpus("a"))
			if inotify {
				run(t, p)
			} else {
				lookOnly(t, p)
			}
			names := map[string]bool{k.plugin(gpuResource, 1).request.Endpoint: true}
			for n := 2; n <= 4; n++ {
				k.stop()
				time.Sleep(time.Duration(n) * 150 * time.Millisecond)
				k.start()
				started := time.Now()
				again := k.plugin(gpuResource, n)
				again.says(t, "a")
				t.Logf("registered %v after the kubelet came back", again.at.Sub(started))
				if names[again.request.Endpoint] {
					t.Errorf("socket %s was used before", again.request.Endpoint)
				}
				names[again.request.Endpoint] = true
			}
			eventually(t, func() bool { return len(k.sockets()) == 1 }, func() string { return fmt.Sprint("sockets: ", k.sockets()) })
		})
	}
}

// lookOnly runs a server alone, without what tells it of changes.
func lookOnly(t *testing.T, p *Plugin) {
	s := newServer(gpuResource, grace, p.allocate)
	units, _ := offered(p.snapshot.Load())
	s.publish((*list)(nil).next(situation{units: units[gpuResource]}))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		last, err := s.run(ctx, p.directory)
		last.close()
		ended <- err
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestRegisterAnew(t *testing.T) {
	tests := map[string]func(t *testing.T, k *kubelet, first *plugin){
		"stream ends": func(_ *testing.T, _ *kubelet, first *plugin) { first.conn.Close() },
		"socket vanishes": func(t *testing.T, k *kubelet, first *plugin) {
			if err := os.Remove(filepath.Join(k.dir, first.request.Endpoint)); err != nil {
				t.Error(err)
			}
		},
		"kubelet's socket is another": func(t *testing.T, k *kubelet, _ *plugin) {
			if err := os.Remove(filepath.Join(k.dir, kubeletSocket)); err != nil {
				t.Error(err)
			}
			serve(t, k.server, filepath.Join(k.dir, kubeletSocket))
		},
	}
	for name, disturb := range tests {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t)
			k.start()
			p := New(k.config())
			p.Publish(gpus("a"))
			run(t, p)
			first := k.plugin(gpuResource, 1)
			first.says(t, "a")
			disturb(t, k, first)
			disturbed := time.Now()
			second := k.plugin(gpuResource, 2)
			second.says(t, "a")
			if second.request.Endpoint == first.request.Endpoint {
				t.Error("the socket has the same name")
			}
			t.Logf("took %v", second.at.Sub(disturbed))
			eventually(t, first.hasEnded, func() string { return "the first stream has not ended" })
			// On a busy machine one disturbance may be seen as two.
			registrations := 0
			eventually(t, func() bool {
				before := registrations
				registrations = len(k.registered())
				time.Sleep(300 * time.Millisecond)
				return registrations == before && registrations == len(k.registered()) && registrations <= 3
			}, func() string { return fmt.Sprintf("registered %d times, and again", registrations) })
		})
	}
}

func TestRefusedRegistrationIsNotHurried(t *testing.T) {
	k := newKubelet(t)
	k.refuse = status.Error(codes.Unknown, "no such resource here")
	k.start()
	p := New(k.config())
	p.Publish(gpus("a"))
	run(t, p)
	time.Sleep(1600 * time.Millisecond) // attempts at 0, 0.1, 0.3, 0.7 and 1.5 s, or later
	k.mu.Lock()
	if k.attempts < 1 || k.attempts > 5 {
		t.Errorf("%d attempts", k.attempts)
	}
	k.mu.Unlock()
	k.stop()
	k.mu.Lock()
	k.refuse = nil
	k.mu.Unlock()
	k.start()
	started := time.Now()
	t.Logf("registered %v after another kubelet came", k.plugin(gpuResource, 1).at.Sub(started))
}

func TestNoSocketIsMadeForAKubeletThatIsAway(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := newServer(gpuResource, grace, nil).register(t.Context(), directory(file))
	if !errors.As(err, new(unavailable)) {
		t.Errorf("register: %v", err)
	}
}

func TestAllStreamsGetAllLists(t *testing.T) {
	k := newKubelet(t)
	k.start()
	p := New(k.config())
	p.Publish(gpus("a"))
	run(t, p)
	first := k.plugin(gpuResource, 1)
	second := &plugin{api: first.api}
	go second.watch(t)
	first.says(t, "a")
	second.says(t, "a")
	for i := range 20 {
		status := discovery.Healthy
		want := "a b"
		if i%2 == 0 {
			status, want = discovery.Unhealthy, "a! b"
		}
		p.Publish(snapshot(sick(gpu("a"), status, "hot"), gpu("b")))
		first.says(t, want)
		second.says(t, want)
	}
	before := len(first.said())
	p.Publish(snapshot(gpu("a"), gpu("b")))
	never(t, 100*time.Millisecond, func() bool { return len(first.said()) > before }, func() string { return "the same list was sent again" })
}

func TestIDIsUnhealthyBeforeItLeaves(t *testing.T) {
	k := newKubelet(t)
	k.start()
	p := New(k.config())
	p.Publish(gpus("a", "b"))
	run(t, p)
	registered := k.plugin(gpuResource, 1)
	registered.says(t, "a b")
	p.Publish(gpus("a"))
	registered.says(t, "a b!")
	marked := time.Now()
	registered.says(t, "a")
	if took := time.Since(marked); took < grace-20*time.Millisecond {
		t.Errorf("left after %v", took)
	}
	p.Publish(gpus("a", "b"))
	registered.says(t, "a b")
}

func TestNothingLeavesWhilePodResourcesIsSilent(t *testing.T) {
	k := newKubelet(t)
	k.start()
	p := New(k.config())
	p.Publish(gpus("a", "b"))
	run(t, p)
	registered := k.plugin(gpuResource, 1)
	registered.says(t, "a b")
	k.mute(true)
	time.Sleep(50 * time.Millisecond)
	p.Publish(gpus("a"))
	registered.says(t, "a b!")
	never(t, 3*grace, func() bool { return registered.last() != "a b!" }, func() string { return "list is " + registered.last() })
	k.mute(false)
	registered.says(t, "a")
}

func TestHeldIDsStay(t *testing.T) {
	k := newKubelet(t)
	k.start()
	p := New(k.config())
	p.Publish(gpus("a", "b"))
	run(t, p)
	registered := k.plugin(gpuResource, 1)
	registered.says(t, "a b")
	if _, err := registered.allocate("b"); err != nil {
		t.Fatal(err)
	}
	k.hold("train", gpuResource, "b")
	p.Publish(gpus())
	registered.says(t, "b!")
	never(t, 3*grace, func() bool { return registered.last() != "b!" || registered.hasEnded() }, func() string { return "list is " + registered.last() })

	k.hold("train", gpuResource)
	// The kubelet is told that nothing is left before the plugin ends.
	registered.says(t, "")
	eventually(t, registered.hasEnded, func() string { return "the plugin of a resource that has gone still serves" })
	eventually(t, func() bool { return len(k.sockets()) == 0 }, func() string { return fmt.Sprint("sockets: ", k.sockets()) })

	p.Publish(gpus("a"))
	k.plugin(gpuResource, 2).says(t, "a")
}

func TestUnconfirmedGrant(t *testing.T) {
	for name, test := range map[string]struct {
		pending func(context.Context, string) (bool, error)
		kept    bool
	}{
		"nobody knows":            {nil, true},
		"an init container is on": {func(context.Context, string) (bool, error) { return true, nil }, true},
		"nobody answers":          {func(context.Context, string) (bool, error) { return false, errors.New("away") }, true},
		"there is none":           {func(context.Context, string) (bool, error) { return false, nil }, false},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t)
			k.start()
			config := k.config()
			config.Pending = test.pending
			p := New(config)
			p.Publish(gpus("a"))
			run(t, p)
			registered := k.plugin(gpuResource, 1)
			registered.says(t, "a")
			granted := time.Now()
			if _, err := registered.allocate("a"); err != nil {
				t.Fatal(err)
			}
			if holder, held := p.Holder("gpu-a"); !held || holder != "a container that the kubelet is starting" {
				t.Errorf("holder is %q, %t", holder, held)
			}
			p.Publish(gpus())
			if test.kept {
				never(t, 4*grace, func() bool { _, held := p.Holder("gpu-a"); return !held || registered.last() == "" }, func() string { return "the grant was dropped" })
				return
			}
			eventually(t, func() bool { _, held := p.Holder("gpu-a"); return !held }, func() string { return "the grant is kept" })
			if took := time.Since(granted); took < config.Unconfirmed {
				t.Errorf("dropped after %v", took)
			}
			registered.says(t, "")
		})
	}
}

func TestGrantIsOnDiskBeforeTheAnswer(t *testing.T) {
	k := newKubelet(t)
	k.start()
	config := k.config()
	p := New(config)
	p.Publish(gpus("a", "b"))
	run(t, p)
	registered := k.plugin(gpuResource, 1)
	registered.says(t, "a b")
	if _, err := registered.allocate("a"); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(config.StateDir, "grants.json")
	data, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(data), `"gpu-a"`) || !strings.Contains(string(data), gpuResource) {
		t.Fatalf("grants are %s, %v", data, err)
	}
	// Where it cannot be written, nothing is granted.
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(file, "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := registered.allocate("b"); err == nil || !strings.Contains(err.Error(), "write grants") {
		t.Errorf("allocate: %v", err)
	}
	if holder, held := p.Holder("gpu-b"); held {
		t.Errorf("held by %s", holder)
	}
}

func TestGrantsOutliveTheProcess(t *testing.T) {
	k := newKubelet(t)
	k.start()
	first := New(k.config())
	first.Publish(gpus("a", "b"))
	stop := run(t, first)
	before := k.plugin(gpuResource, 1)
	before.says(t, "a b")
	if _, err := before.allocate("a"); err != nil {
		t.Fatal(err)
	}
	stop()
	if said := before.said(); slices.Contains(said, "") || len(said) != 1 {
		t.Errorf("lists at the end: %q", said)
	}
	if left := k.sockets(); len(left) > 0 {
		t.Errorf("left sockets %v", left)
	}

	k.mute(true)
	second := New(k.config())
	run(t, second)
	<-second.Ready()
	if _, held := second.Holder("gpu-a"); !held {
		t.Error("the grant is forgotten")
	}
	// The device has gone meanwhile. The resource stays registered all the same.
	second.Publish(gpus())
	k.plugin(gpuResource, 2).says(t, "a!")
}

func TestHoldingsOfThePluginBefore(t *testing.T) {
	k := newKubelet(t)
	k.hold("train", gpuResource, "a", "gone")
	k.hold("other", "example.org/nic", "x")
	k.start()
	p := New(k.config())
	p.Publish(gpus("a", "b"))
	run(t, p)
	registered := k.plugin(gpuResource, 1)
	registered.says(t, "a b gone!")
	if said := registered.said(); len(said) != 1 {
		t.Errorf("a list without what pods hold was sent: %q", said)
	}
	if holder, held := p.Holder("gpu-a"); !held || holder != "default/train main" {
		t.Errorf("holder is %q, %t", holder, held)
	}
	// The kubelet asks for the list before it answers the registration.
	eventually(t, func() bool { return len(p.Registered()) == 1 }, func() string { return fmt.Sprintf("registered %v", p.Registered()) })
	k.hold("train", gpuResource)
	registered.says(t, "a b")
	eventually(t, func() bool { _, held := p.Holder("gpu-a"); return !held }, func() string { return "still held" })
}

func TestHolder(t *testing.T) {
	k := newKubelet(t)
	k.start()
	shareable := gpu("s")
	shareable.Shareable = true
	part := gpu("p")
	part.PartOf = &discovery.Whole{Name: "card"}
	p := New(k.config())
	p.Publish(snapshot(part, shareable))
	run(t, p)
	registered := k.plugin(gpuResource, 1)
	registered.says(t, "p s")
	if _, err := registered.allocate("p", "s"); err != nil {
		t.Fatal(err)
	}
	for silicon, want := range map[string]bool{"card": true, "gpu-p": false, "gpu-s": false} {
		if holder, held := p.Holder(silicon); held != want {
			t.Errorf("%s: held %t by %s", silicon, held, holder)
		}
	}
	k.hold("train", gpuResource, "p", "s")
	eventually(t, func() bool { holder, _ := p.Holder("card"); return holder == "default/train main" }, func() string { return "the pod is not named" })
	// The pod's second container reuses what its first one had.
	if _, err := registered.allocate("p"); err != nil {
		t.Errorf("allocate again: %v", err)
	}
}

func TestHolderOfWhatIsNotOffered(t *testing.T) {
	k := newKubelet(t)
	shareable := gpu("s")
	shareable.Shareable = true
	part := gpu("p")
	part.PartOf = &discovery.Whole{Name: "card"}
	k.hold("train", "example.com/renamed", "a::3", "c-_-12", "d/vgpu0", "e-4", "b-x", "p", "s", "unknown")
	p := New(k.config())
	p.Know(snapshot(gpu("a"), gpu("b"), gpu("c"), gpu("d"), gpu("e"), part, shareable))
	p.Publish(snapshot())
	run(t, p)
	<-p.Ready()
	holders := map[string]string{"card": "default/train main", "gpu-b": "", "gpu-p": "", "gpu-s": ""}
	for _, shared := range []string{"gpu-a", "gpu-c", "gpu-d", "gpu-e"} {
		holders[shared] = "default/train main"
	}
	for silicon, want := range holders {
		if who, held := p.Holder(silicon); who != want || held != (want != "") {
			t.Errorf("%s: held %t by %q, want %q", silicon, held, who, want)
		}
	}
	if n := len(p.Registered()); n > 0 {
		t.Errorf("registered %v", p.Registered())
	}
	// A kubelet that does not know its pods frees nothing.
	k.forget()
	never(t, 3*grace, func() bool { _, held := p.Holder("gpu-a"); return !held }, func() string { return "freed" })
	k.hold("static", "example.org/nic", "x")
	never(t, 3*grace, func() bool { _, held := p.Holder("gpu-a"); return !held }, func() string { return "freed by another's pod" })
	k.own()
	eventually(t, func() bool { _, held := p.Holder("gpu-a"); return !held }, func() string { return "held for ever" })
}

func TestHolderBeforeTheKubeletAnswers(t *testing.T) {
	k := newKubelet(t)
	k.mute(true)
	k.start()
	p := New(k.config())
	p.Know(gpus("a", "b"))
	p.Publish(gpus("a"))
	run(t, p)
	<-p.Ready()
	if who, held := p.Holder("gpu-b"); !held || who != unheard {
		t.Errorf("held %t by %q", held, who)
	}
	registered := k.plugin(gpuResource, 1)
	registered.says(t, "a")
	if _, err := registered.allocate("a"); err != nil {
		t.Errorf("allocate: %v", err)
	}
	if who, _ := p.Holder("gpu-a"); who == unheard {
		t.Error("our own grant is unknown")
	}
	k.mute(false)
	eventually(t, func() bool { _, held := p.Holder("gpu-b"); return !held }, func() string { return "still unknown" })
	k.mute(true)
	never(t, 100*time.Millisecond, func() bool { _, held := p.Holder("gpu-b"); return held }, func() string { return "unknown again" })
}

func TestKubeletDoesNotKnowItsPods(t *testing.T) {
	for name, own := range map[string]string{"agent is a pod": "chandler/agent", "agent is none": ""} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t)
			k.start()
			config := k.config()
			config.OwnPod = own
			config.Pending = func(context.Context, string) (bool, error) { return false, nil }
			p := New(config)
			p.Publish(gpus("a", "b"))
			run(t, p)
			registered := k.plugin(gpuResource, 1)
			registered.says(t, "a b")
			if _, err := registered.allocate("a"); err != nil {
				t.Fatal(err)
			}
			k.hold("train", gpuResource, "a")
			eventually(t, func() bool { who, _ := p.Holder("gpu-a"); return who == "default/train main" }, func() string { return "not confirmed" })
			k.forget()
			time.Sleep(50 * time.Millisecond)
			if _, err := registered.allocate("b"); err != nil {
				t.Fatal(err)
			}
			never(t, config.Unconfirmed+3*grace, func() bool {
				_, a := p.Holder("gpu-a")
				_, b := p.Holder("gpu-b")
				return !a || !b
			}, func() string { return "dropped" })
			k.own()
			for _, silicon := range []string{"gpu-a", "gpu-b"} {
				eventually(t, func() bool { _, held := p.Holder(silicon); return !held }, func() string { return silicon + " is kept" })
			}
		})
	}
}

func TestHeldByAnotherName(t *testing.T) {
	const other = "example.com/renamed"
	renamed := func(d discovery.Device) discovery.Device {
		d.Offers = []discovery.Offer{{Resource: other, IDs: d.Offers[0].IDs}}
		return d
	}
	for name, ours := range map[string]bool{"handed out by us": true, "handed out by the plugin before": false} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet(t)
			k.start()
			p := New(k.config())
			p.Know(gpus("a", "b"))
			if ours {
				p.Publish(gpus("a", "b"))
			} else {
				p.Publish(snapshot(renamed(gpu("a")), renamed(gpu("b"))))
				k.hold("train", gpuResource, "a")
			}
			run(t, p)
			if ours {
				registered := k.plugin(gpuResource, 1)
				registered.says(t, "a b")
				if _, err := registered.allocate("a"); err != nil {
					t.Fatal(err)
				}
				k.hold("train", gpuResource, "a")
				eventually(t, func() bool { who, _ := p.Holder("gpu-a"); return who == "default/train main" }, func() string { return "not confirmed" })
				p.Publish(snapshot(renamed(gpu("a")), renamed(gpu("b"))))
			}
			registered := k.plugin(other, 1)
			registered.says(t, "a! b")
			_, err := registered.allocate("a")
			if err == nil || !strings.Contains(err.Error(), "gpu-a is held by default/train main as example.com/gpu a") {
				t.Errorf("allocate: %v", err)
			}
			k.hold("train", gpuResource)
			registered.says(t, "a b")
		})
	}
}

// Two resources of which each list was made before the other was handed out.
func TestTheOtherNameIsQuicker(t *testing.T) {
	p := New(Config{StateDir: t.TempDir()})
	a := gpu("a")
	a.Offers = append(a.Offers, discovery.Offer{Resource: "example.com/renamed", IDs: []string{"x"}})
	units, _ := offered(snapshot(a))
	lists := make(map[string]*list)
	for resource := range units {
		lists[resource] = (*list)(nil).next(situation{resource: resource, units: units[resource]})
	}
	if _, err := p.allocate(t.Context(), lists[gpuResource], gpuResource, [][]string{{"a"}}); err != nil {
		t.Fatal(err)
	}
	_, err := p.allocate(t.Context(), lists["example.com/renamed"], "example.com/renamed", [][]string{{"x"}})
	if err == nil || !strings.Contains(err.Error(), "gpu-a is held by a container that the kubelet is starting as example.com/gpu a") {
		t.Errorf("allocate: %v", err)
	}
	if held := p.holdings.of("example.com/renamed"); len(held) > 0 {
		t.Error("what was refused is held")
	}
	// Another container of the pod has the same ID again.
	if _, err := p.allocate(t.Context(), lists[gpuResource], gpuResource, [][]string{{"a"}}); err != nil {
		t.Error(err)
	}
}

func TestHeldByTheOtherAPI(t *testing.T) {
	k := newKubelet(t)
	k.start()
	other := &holders{}
	config := k.config()
	config.Elsewhere = other
	p := New(config)
	p.Publish(gpus("a", "b"))
	run(t, p)
	registered := k.plugin(gpuResource, 1)
	registered.says(t, "a b")
	other.set("gpu-a", "claim default/c1")
	registered.says(t, "a! b")
	_, err := registered.allocate("a")
	if err == nil || !strings.Contains(err.Error(), `example.com/gpu: device "a": gpu-a is held by claim default/c1`) {
		t.Errorf("allocate: %v", err)
	}
	other.set("gpu-a", "")
	registered.says(t, "a b")
}

// racing takes the silicon at the moment at which it is looked at.
type racing struct {
	mu   sync.Mutex
	race bool
}

func (r *racing) Holder(string) (string, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return "claim default/c1", r.race
}

func TestTheOtherAPIIsQuicker(t *testing.T) {
	other := &racing{}
	p := New(Config{StateDir: t.TempDir(), Elsewhere: other})
	units, _ := offered(gpus("a"))
	l := (*list)(nil).next(situation{units: units[gpuResource]})
	other.race = true
	_, err := p.allocate(t.Context(), l, gpuResource, [][]string{{"a"}})
	if err == nil || !strings.Contains(err.Error(), "claim default/c1") {
		t.Errorf("allocate: %v", err)
	}
	if held := p.holdings.of(gpuResource); len(held) > 0 {
		t.Error("what was refused is held")
	}
}

func TestAllocateRefuses(t *testing.T) {
	k := newKubelet(t)
	k.start()
	p := New(k.config())
	p.Publish(snapshot(gpu("a"), sick(gpu("b"), discovery.Unhealthy, "fell off the bus")))
	run(t, p)
	registered := k.plugin(gpuResource, 1)
	registered.says(t, "a b!")
	for id, want := range map[string]string{
		"x": `example.com/gpu: device "x": unknown`,
		"b": `example.com/gpu: device "b": fell off the bus`,
	} {
		if _, err := registered.allocate("a", id); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", id, err)
		}
	}
	if _, held := p.Holder("gpu-a"); held {
		t.Error("what was refused is held")
	}
}

func TestAllocateForContainers(t *testing.T) {
	k := newKubelet(t)
	k.start()
	config := k.config()
	config.RuntimeRoot = "/host"
	config.Grant = func(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
		var edits specs.ContainerEdits
		var names []string
		for _, d := range given {
			names = append(names, d.Name)
		}
		edits.Env = []string{"VISIBLE=" + strings.Join(names, ","), fmt.Sprintf("BY=%s %s", grant.API, grant.Resource)}
		return edits
	}
	p := New(config)
	p.Publish(gpus("a", "b", "c"))
	run(t, p)
	registered := k.plugin(gpuResource, 1)
	r, err := registered.api.Allocate(t.Context(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{
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
		"map[BY:DevicePlugin example.com/gpu GPU_LIBRARY:/usr/lib/gpu VISIBLE:gpu-a,gpu-c]",
		"/host/dev/gpuctl /dev/gpuctl r", "/host/dev/a /dev/a rw", "/host/dev/c /dev/c rw",
		"map[BY:DevicePlugin example.com/gpu GPU_LIBRARY:/usr/lib/gpu VISIBLE:gpu-b]",
		"/host/dev/gpuctl /dev/gpuctl r", "/host/dev/b /dev/b rw",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestDirectoryIsNotWritable(t *testing.T) {
	k := newKubelet(t)
	if err := os.Remove(k.dir); err != nil {
		t.Fatal(err)
	}
	unwritable(t, k, k.dir, "device-plugins directory "+k.dir+": not writable")
}

func TestStateIsNotWritable(t *testing.T) {
	k := newKubelet(t)
	k.start()
	unwritable(t, k, k.config().StateDir, "make state directory")
}

// unwritable checks that what containers hold is followed where nothing can be
// served, since there is a file in place of a directory, that this is said, and
// that all is served once the directory is there.
func unwritable(t *testing.T, k *kubelet, dir, want string) {
	t.Helper()
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p := New(k.config())
	p.Know(gpus("a"))
	p.Publish(gpus("a"))
	var log log
	logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log)))
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
	ended := make(chan struct{})
	go func() { p.Run(ctx); close(ended) }()
	eventually(t, func() bool { return strings.Contains(log.String(), want) }, func() string { return "the log does not say " + want })
	for _, ids := range [][]string{{"a"}, nil} {
		k.hold("train", gpuResource, ids...)
		eventually(t, func() bool { _, held := p.Holder("gpu-a"); return held == (len(ids) > 0) }, func() string { return "holdings are not followed" })
	}
	if registered := p.Registered(); len(registered) > 0 {
		t.Errorf("serves %v", registered)
	}

	if err := errors.Join(os.Remove(dir), os.Mkdir(dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	if k.server == nil {
		k.start()
	}
	k.plugin(gpuResource, 1).says(t, "a")
	cancel()
	<-ended
}

// log keeps what is logged.
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

func TestSocketsLeftBehind(t *testing.T) {
	k := newKubelet(t)
	leave := func(name string, dead bool) {
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(k.dir, name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		listener.SetUnlinkOnClose(!dead)
		if dead {
			listener.Close()
		}
		t.Cleanup(func() { listener.Close() })
	}
	leave("chandler-dead-1.sock", true)
	leave("chandler-live-1.sock", false)
	leave("other-dead.sock", true)
	if err := os.WriteFile(filepath.Join(k.dir, "chandler-file.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, New(k.config()))
	gone := func(name string) bool {
		_, err := os.Lstat(filepath.Join(k.dir, name))
		return err != nil
	}
	eventually(t, func() bool { return gone("chandler-dead-1.sock") }, func() string { return "the dead socket is left" })
	for _, name := range []string{"chandler-live-1.sock", "other-dead.sock", "chandler-file.sock"} {
		if gone(name) {
			t.Errorf("%s was removed", name)
		}
	}
}

func TestSocketNameFits(t *testing.T) {
	dir, err := os.MkdirTemp("", strings.Repeat("d", 40))
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	names := make(map[string]bool)
	for range 3 {
		listener, err := directory(dir).listen("example.com/" + strings.Repeat("long-", 12))
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		name := listener.Addr().String()
		if len(name) > maxSocketPath || names[name] || strings.Count(strings.TrimPrefix(name, dir), "/") != 1 {
			t.Errorf("%s, %d long", name, len(name))
		}
		names[name] = true
	}
}

func TestBadNamesHideNothing(t *testing.T) {
	k := newKubelet(t)
	k.start()
	bad := gpu("bad")
	bad.Offers = append(bad.Offers, discovery.Offer{Resource: "sym;dc", IDs: []string{"x"}}, discovery.Offer{Resource: gpuResource, IDs: []string{"\xff"}})
	p := New(k.config())
	p.Publish(snapshot(bad, gpu("good")))
	run(t, p)
	k.plugin(gpuResource, 1).says(t, "bad good")
}

func TestStopWaitsForCalls(t *testing.T) {
	k := newKubelet(t)
	k.start()
	begun, proceed := make(chan struct{}), make(chan struct{})
	config := k.config()
	config.Grant = func([]discovery.Device, discovery.Grant) specs.ContainerEdits {
		close(begun)
		<-proceed
		return specs.ContainerEdits{}
	}
	p := New(config)
	p.Publish(gpus("a"))
	stop := run(t, p)
	registered := k.plugin(gpuResource, 1)
	answered := make(chan error, 1)
	go func() { _, err := registered.allocate("a"); answered <- err }()
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
	k := newKubelet(t)
	k.start()
	config := k.config()
	config.Grace = time.Millisecond
	other := &holders{}
	config.Elsewhere = other
	p := New(config)
	ids := []string{"a", "b", "c", "d"}
	p.Publish(gpus(ids...))
	run(t, p)
	registered := k.plugin(gpuResource, 1)
	var group sync.WaitGroup
	end := time.Now().Add(time.Second)
	loop := func(f func()) {
		group.Go(func() {
			for time.Now().Before(end) {
				f()
			}
		})
	}
	loop(func() { p.Publish(gpus(ids[:1+rand.IntN(4)]...)); time.Sleep(time.Millisecond) })
	loop(func() { other.set("gpu-b", []string{"", "claim"}[rand.IntN(2)]) })
	loop(func() { k.hold("train", gpuResource, ids[:rand.IntN(3)]...) })
	for _, id := range ids {
		loop(func() { _, _ = registered.allocate(id) })
	}
	loop(func() {
		_, _ = registered.api.GetPreferredAllocation(t.Context(), &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: ids, AllocationSize: 2}},
		})
	})
	loop(func() {
		stream, err := registered.api.ListAndWatch(t.Context(), &pluginapi.Empty{})
		if err == nil {
			_, _ = stream.Recv()
		}
	})
	loop(func() { p.Holder("gpu-a"); p.Registered() })
	group.Wait()
	other.set("gpu-b", "")
	k.hold("train", gpuResource)
	p.Publish(gpus("a", "b", "c", "d"))
	registered.says(t, "a b c d")
}
