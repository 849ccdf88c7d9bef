package agent

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/internal/podevents"
)

// An agent keeps the configuration in force in a file, so that another agent can start with the
// configuration after a reboot.
func TestAgentKeepsItsConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		config := n.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Settings.Text = []byte("first")
		stop := n.run(config)
		kept := func(want string) {
			t.Helper()
			synctest.Wait()
			if text, err := os.ReadFile(filepath.Join(config.StateDir, KeptConfig)); err != nil || string(text) != want {
				t.Errorf("kept %q, %v; want %q", text, err, want)
			}
		}
		kept("first")
		n.changes <- Change{Err: errors.New("wrong")}
		kept("first")
		n.changes <- Change{Settings: Settings{Rules: config.Settings.Rules, Text: []byte("second")}}
		kept("second")
		stop()
	})
}

// After a reboot the configuration is invalid, and no earlier one is known. Pods start with the
// devices that they have, claims end, and no other device is offered until the configuration is
// valid. Metrics, the readiness probe and an Event report the reason.
func TestAgentStartsWithAnInvalidConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		classic := discovery.ModeDevicePlugin
		tun := rules.Resource{Selector: rulestest.CompileSelector(t, `device.attributes["chandler.dev"].?model.orValue("") == "tun"`), Name: "devices.kubevirt.io/tun", Mode: &classic}
		wanted := &rules.Rules{Mode: discovery.ModeDRA, Resources: []rules.Resource{tun}}
		stop := n.run(n.config(wanted))
		n.offers("kvm", "devices.kubevirt.io/tun")
		claim, err := n.prepare("kvm")
		if err != nil {
			t.Errorf("prepare: %v", err)
		}
		n.allocate("devices.kubevirt.io/tun", "tun0", "/dev/net/tun")
		stop()

		config := n.config(&rules.Rules{Mode: discovery.ModeAuto, Unknown: "the configuration is invalid"})
		config.BootID = "another"
		config.ConfigError = errors.New("exclude[0].cel: no such field")
		config.Pod, config.PodUID = "chandler/agent", "pod-uid"
		n.published = nil
		answer := serveInMemory(&config)
		stop = n.run(config)
		n.offers("", "devices.kubevirt.io/tun")
		if !slices.Contains(n.healthy["devices.kubevirt.io/tun"], "tun0") {
			t.Errorf("the kubelet would not start the pod that has TUN: %v", n.healthy)
		}
		if err := n.prepareAgain(claim); err != nil {
			t.Errorf("prepare after the boot: %v", err)
		}
		n.unprepare(claim)
		n.offers("", "devices.kubevirt.io/tun")
		expectLines(t, answer("/metrics"), "chandler_config_last_reload_successful 0")
		if got, want := answer("/readyz"), "the configuration is invalid: exclude[0].cel: no such field\n"; got != want {
			t.Errorf("readyz: %q, want %q", got, want)
		}
		events, err := n.client.EventsV1().Events("chandler").List(t.Context(), metav1.ListOptions{})
		if err != nil || len(events.Items) != 1 || events.Items[0].Reason != podevents.ReasonConfig || events.Items[0].Note != config.ConfigError.Error() || events.Items[0].Regarding.UID != "pod-uid" {
			t.Errorf("events of the agent's pod: %v, %v", events, err)
		}

		n.changes <- Change{Err: errors.New("wrong in another way")}
		synctest.Wait()
		if got := answer("/readyz"); !strings.Contains(got, "another way") {
			t.Errorf("readyz gives the first reason: %q", got)
		}
		n.changes <- Change{Settings: Settings{Rules: wanted}}
		n.offers("kvm", "devices.kubevirt.io/tun")
		expectLines(t, answer("/metrics"), "chandler_config_last_reload_successful 1")
		if got := answer("/readyz"); got != "ok\n" {
			t.Errorf("readyz: %q", got)
		}
		stop()
	})
}

// An agent starts with an invalid configuration beside a working agent, as in an update of the
// DaemonSet. The kubelet continues to call the working agent. Once the configuration is valid, the
// new agent registers, becomes ready, and takes over.
func TestAgentWithAnInvalidConfigurationLeavesCallsToTheOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		shared := make(turns, 1)
		wanted := &rules.Rules{Mode: discovery.ModeDRA}
		config := n.config(wanted)
		config.Lock = shared
		stop := n.run(config)
		n.offers("kvm tun", "")

		next := n.config(wanted)
		next.Lock, next.ConfigError = shared, errors.New("exclude[0].cel: no such field")
		changes := make(chan Change)
		next.Changes = changes
		answer := serveInMemory(&next)
		stopNext := n.run(next)
		time.Sleep(time.Minute)
		claim, err := n.prepare("kvm")
		if err != nil {
			t.Errorf("prepare beside an agent with a wrong configuration: %v", err)
		}
		n.unprepare(claim)
		for path, want := range map[string]string{"/readyz": "the configuration is invalid: exclude[0].cel: no such field\n", "/healthz": "ok\n"} {
			if got := answer(path); got != want {
				t.Errorf("%s: %q, want %q", path, got, want)
			}
		}

		changes <- Change{Settings: Settings{Rules: wanted}}
		time.Sleep(time.Minute)
		if got := answer("/readyz"); got != "ok\n" {
			t.Errorf("readyz, with a right configuration: %q", got)
		}
		stop()
		n.offers("kvm tun", "")
		if err := n.prepareAgain(claim); err != nil {
			t.Errorf("prepare: %v", err)
		}
		n.unprepare(claim)
		stopNext()
	})
}

// If the working agent dies, an agent with an invalid configuration registers, so that claims can
// end.
func TestAgentWithAnInvalidConfigurationTakesOverFromTheDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		shared := make(turns, 1)
		config := n.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Lock = shared
		stop := n.run(config)
		n.offers("kvm tun", "")
		claim, err := n.prepare("kvm")
		if err != nil {
			t.Fatal(err)
		}
		config = n.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Lock, config.ConfigError = shared, errors.New("exclude[0].cel: no such field")
		stopNext := n.run(config)
		time.Sleep(time.Minute)
		n.mu.Lock()
		n.plugin = nil
		n.mu.Unlock()
		stop()
		time.Sleep(time.Minute)
		if n.dra() == nil {
			t.Fatal("the agent that is left has not registered")
		}
		n.unprepare(claim)
		stopNext()
	})
}

// turns is a lock that one agent holds at a time.
type turns chan struct{}

// Acquire implements Lock.
func (l turns) Acquire(ctx context.Context) (func(), error) {
	select {
	case l <- struct{}{}:
		return func() { <-l }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Awaited implements Lock.
func (l turns) Awaited() bool { return false }

// serveInMemory configures an agent to serve without a socket, and returns a function that requests
// a path.
func serveInMemory(config *Config) (answer func(path string) string) {
	handlers := make(chan http.Handler, 1)
	config.Serve = func(ctx context.Context, handler http.Handler) error {
		handlers <- handler
		<-ctx.Done()
		return nil
	}
	return func(path string) string {
		handler := <-handlers
		handlers <- handler
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
		return recorder.Body.String()
	}
}
