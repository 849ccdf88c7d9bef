package legacy

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list"
	"chandler.dev/legacy/list/listtest"
	"chandler.dev/legacy/sockets"
)

// grace is short. The tests in list_test.go check the grace period without a clock.
const grace = 150 * time.Millisecond

// configFor is a configuration with short intervals for the kubelet's directories.
func configFor(k *kubelettest.Kubelet) Config {
	return Config{
		Kubelet:          sockets.New(k.Dir, nil),
		ListPods:         podsOf(k),
		Ledger:           ledgerOf(k),
		Grace:            grace,
		Poll:             20 * time.Millisecond,
		UnconfirmedAfter: 200 * time.Millisecond,
	}
}

// stateOf is the ledger directory next to the kubelet's directory.
func stateOf(k *kubelettest.Kubelet) string { return filepath.Join(filepath.Dir(k.Dir), "state") }

// ledgerOf returns a ledger in that directory. It is not open yet.
func ledgerOf(k *kubelettest.Kubelet, outputs ...ledger.Output) *ledger.Ledger {
	l := ledger.New(ledger.Config{
		Dir: stateOf(k), Boot: "boot", Listings: true, Patience: grace,
		Termination:      func(string, string) (time.Duration, bool) { return 0, true },
		RequestsResource: func(_, pod, _ string) (bool, bool) { return pod != "agent", true },
	})
	l.SetOutputs(outputs...)
	return l
}

// open opens the ledger of a plugin.
func open(t *testing.T, p *Plugin) {
	t.Helper()
	problems, err := p.config.Ledger.Open(t.Context())
	if err := errors.Join(append(problems, err)...); err != nil {
		t.Fatal(err)
	}
}

// podsOf returns a function that lists pods like the agent in the pod chandler/agent.
func podsOf(k *kubelettest.Kubelet) func(context.Context) (*kubeletapi.Listing, error) {
	return func(ctx context.Context) (*kubeletapi.Listing, error) {
		said, err := kubeletapi.ListPods(ctx, k.Pods)
		if err == nil {
			said.Whole = slices.ContainsFunc(said.Pods, func(pod *podresourcesapi.PodResources) bool { return kubeletapi.PodName(pod) == "chandler/agent" })
		}
		return said, err
	}
}

// socketsOf returns the sockets of a plugin.
func socketsOf(p *Plugin) *sockets.Directory { return p.config.Kubelet.(*sockets.Directory) }

// run opens the ledger of a plugin and runs both. The returned function stops them.
func run(t *testing.T, p *Plugin) (stop func()) {
	t.Helper()
	open(t, p)
	return runOnly(t, p)
}

// runOnly runs a plugin whose ledger is already open.
func runOnly(t *testing.T, p *Plugin) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() { p.Run(ctx) })
	all.Go(func() { p.config.Ledger.Run(ctx) })
	go func() { all.Wait(); close(ended) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(kubelettest.Patience):
			t.Error("run does not end")
		}
	})
	t.Cleanup(stop)
	return stop
}

// publish offers all devices of the host.
func publish(p *Plugin, s *rules.Snapshot) {
	p.SetHostDevices(host(s))
	p.Publish(s, nil)
}

// gpus returns a snapshot of devices "gpu-<id>" with one ID of example.com/gpu each.
func gpus(ids ...string) *rules.Snapshot {
	s := &rules.Snapshot{}
	for _, id := range ids {
		s.Devices = append(s.Devices, listtest.GPU(id))
	}
	return s
}

// listsOf returns the first lists of the devices.
func listsOf(devices ...rules.Offered) map[string]*list.List {
	lists, _ := list.Lists{}.Next(list.Input{Snapshot: listtest.Snapshot(devices...), View: ledger.ViewOf(list.StockOf(listtest.FoundDevices(devices), list.Lists{}))})
	return lists.Resources()
}

// holder returns the container that blocks a physical device for claims.
func holder(p *Plugin, silicon string) (who string, held bool) {
	who = p.config.Ledger.View(p.stock.Load()).OwnerOf(discovery.ModeDevicePlugin, silicon)
	owner, _, _ := strings.Cut(who, " (device ")
	return owner, who != ""
}

// claim allocates a device to a claim.
func claim(t *testing.T, p *Plugin, uid, device string) {
	t.Helper()
	c := &allocation.Claim{UID: types.UID(uid), Namespace: "default", Name: uid, Boot: "boot", Results: []allocation.Result{{Device: device, Source: device, Silicon: device, Whole: true}}}
	if err := p.config.Ledger.AllocateClaim(c, allocation.Allocated, p.stock.Load()); err != nil {
		t.Error(err)
	}
}
