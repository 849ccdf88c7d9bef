package simulation

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/simulation/apiserver"
	"chandler.dev/internal/simulation/cluster"
)

// foreignClaims is the number of claims on other nodes. Each is about 300 bytes in protobuf.
const foreignClaims = 2000

// requests are the answered requests of the agents, by verb, resource and selector.
type requests struct {
	counts map[string]int
	bytes  int
}

func (r *requests) add(call apiserver.Call, size int) {
	r.counts[strings.TrimSpace(call.String()+" "+call.Selector)]++
	r.bytes += size
}

// total returns the number of requests.
func (r *requests) total() (n int) {
	for _, count := range r.counts {
		n += count
	}
	return n
}

func (r *requests) String() string {
	var b strings.Builder
	for _, call := range slices.Sorted(maps.Keys(r.counts)) {
		fmt.Fprintf(&b, "\n\t%4d %s", r.counts[call], call)
	}
	return fmt.Sprintf("%d requests, %d bytes%s", r.total(), r.bytes, b.String())
}

// quietWorld returns a world of GPUs without faults, in a mode, with a cluster of many claims.
func quietWorld(mode discovery.Mode) *World {
	seed := uint64(1)
	w := NewWorld(seed)
	for ; w.minor < 37 || !strings.HasSuffix(w.machine.Name, requestsMachine) || w.settings.Rules.Mode != mode || len(w.settings.Rules.Sharing)+len(w.settings.Rules.Exclude)+len(w.settings.Reclaim) > 0; w = NewWorld(seed) {
		seed++
	}
	w.surges = false
	for n := range foreignClaims {
		claim := cluster.NewClaim(fmt.Sprintf("foreign-%d", n), 1)
		claim.Namespace = "foreign"
		claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "devices", Driver: discovery.Domain, Pool: fmt.Sprintf("node-%d", n), Device: "pci-0000-19-00-0"},
		}}}
		w.server.Put(claim)
	}
	w.cluster.AddAgentPod(agentPod)
	w.kubelet.StartKubelet()
	return w
}

// requestsMachine ends the name of the machine whose requests are counted.
const requestsMachine = " GPUs"

// No request of an agent depends on the size of the cluster: none lists claims, pods, slices or nodes
// without the node, and the answers stay small beside the claims of the cluster. The numbers of
// requests are those in docs/operating.md. A list of the cluster fails in apiGate.
func TestNoListOfTheCluster(t *testing.T) {
	for name, test := range map[string]struct {
		mode       discovery.Mode
		situations []situation
	}{
		"DRA": {discovery.ModeDRA, []situation{
			{"start", 2 * time.Minute, 5, func(w *World) { w.startAgent() }},
			{"rest", 4 * time.Hour, 20, func(*World) {}},
			{"a claim", time.Minute, 5, func(w *World) { startsPod(w, "first") }}, // 2, and lists of the pods of the node that happen to be due
			{"its end", 2 * time.Minute, 2, func(w *World) { w.cluster.DeletePod(podNamed(w, "first"), false) }},
			{"restart", 2 * time.Minute, 3, func(w *World) { w.replaceAgent(0) }},
			{"a device fails", time.Minute, 10, func(w *World) { sickenCard(w) }},
			{"it recovers", 5 * time.Minute, 10, func(*World) {}},
			{"a device is replaced while a pod has another", 5 * time.Minute, 30, func(w *World) { startsPod(w, "second"); swapCard(w) }},
			{"changed sharing", 10 * time.Minute, 30, func(w *World) { w.wants(discovery.ModeDRA, w.machine.Sharings[len(w.machine.Sharings)-1]) }},
			{"a move, while a claim has a device", time.Hour, 40, func(w *World) { w.wants(discovery.ModeDevicePlugin, nil) }},
			{"the end of the claim", 10 * time.Minute, 15, func(w *World) { w.cluster.DeletePod(podNamed(w, "second"), false) }},
			{"a move back", 10 * time.Minute, 6, func(w *World) { w.wants(discovery.ModeDRA, nil) }},
			{"a record without a claim", time.Hour, 40, func(w *World) { startsPod(w, "third"); damageRecord(w) }},
		}},
		"device plugin API on a fresh node": {discovery.ModeDevicePlugin, []situation{
			{"start", 2 * time.Minute, 8, func(w *World) { w.startAgent() }},
			{"rest", 4 * time.Hour, 20, func(*World) {}},
			{"restart", 2 * time.Minute, 3, func(w *World) { w.replaceAgent(0) }},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := quietWorld(test.mode)
				var seen *requests
				w.server.SetObserver(func(call apiserver.Call, size int) { seen.add(call, size) })
				for _, s := range test.situations {
					seen = &requests{counts: make(map[string]int)}
					s.happen(w)
					for end := time.Now().Add(s.lasts); time.Now().Before(end); time.Sleep(time.Second) {
						w.tendCluster()
					}
					synctest.Wait()
					t.Logf("%s: %s", s.name, seen)
					if n := seen.total(); n > s.most {
						t.Errorf("%s: %d requests, want at most %d", s.name, n, s.most)
					}
					if len(w.history.AllFailures()) > 0 {
						t.Fatalf("%s: %q", s.name, w.history.AllFailures())
					}
				}
				w.end()
			})
		})
	}
}

// situation is what happens to a node, and the number of requests that it may cost.
type situation struct {
	name   string
	lasts  time.Duration
	most   int
	happen func(*World)
}

// startsPod submits a pod with a claim for one device.
func startsPod(w *World, name string) {
	p := w.cluster.NewPod(name)
	p.Name, p.Grace, p.Stubborn, p.Claims = name, time.Second, false, []string{name}
	w.server.Put(cluster.NewClaim(name, 1))
	w.cluster.SubmitPod(p)
}

func podNamed(w *World, name string) *cluster.Pod {
	for _, p := range w.cluster.AllPods() {
		if p.Name == name {
			return p
		}
	}
	panic("no pod " + name)
}

// wants changes the configuration.
func (w *World) wants(mode discovery.Mode, sharing []rules.Share) {
	settings := w.settings
	changed := *settings.Rules
	changed.Mode, changed.Sharing = mode, sharing
	settings.Rules, w.settings = &changed, settings
	w.forms = append(w.forms, w.machine.ApplyRules(&changed))
	w.tell(agent.Change{Settings: settings})
}
