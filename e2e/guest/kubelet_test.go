package guest_test

import (
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"chandler.dev/e2e/guest"
)

// A node is a guest with stand-ins for a kubelet and an API server (cmd/guestkubelet), which print
// the devices that the agent offers.
type node struct {
	*guest.Guest

	kubelet, events *guest.Process
	began           int // start of the present step in the output of events
	since           int // start of the present step in the output of the kubelet
}

// programs returns the programs of a node.
func programs(t testing.TB) map[string]string {
	return map[string]string{
		"guestkubelet": guest.Build(t, "chandler.dev/e2e/cmd/guestkubelet"),
		"guestevents":  guest.Build(t, "chandler.dev/e2e/cmd/guestevents"),
		"guestuse":     guest.Build(t, "chandler.dev/e2e/cmd/guestuse"),
	}
}

// newNode starts the stand-ins, and writes the configuration of an agent.
func newNode(t testing.TB, g *guest.Guest, config string) *node {
	t.Helper()
	t.Logf("Linux %s in QEMU %s", g.Kernel, g.QEMU)
	g.WriteFile(t, "/etc/chandler/config.yaml", config, 0o600)
	n := &node{Guest: g, kubelet: g.Start(t, "guestkubelet", "serve", "/run/kubeconfig"), events: g.Start(t, "guestevents")}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the agent offered:\n%s", n.kubelet.Output())
		}
	})
	n.kubelet.Until(t, "serving")
	n.events.Until(t, "listening")
	return n
}

// agent starts the agent.
func (n *node) agent(t testing.TB) *guest.Process {
	t.Helper()
	agent := n.Start(t, "chandler", "run", "--kubeconfig=/run/kubeconfig", "--config=/etc/chandler/config.yaml", "--node-name=node",
		"--pod-uid=uid", "--pod=default/agent", "--web-ui-bind-address=", "-v=2")
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the agent said:\n%s", agent.Output())
		}
	})
	return agent
}

// step begins a step: earlier output is ignored.
func (n *node) step() { n.began, n.since = len(n.events.Output()), len(n.kubelet.Output()) }

// returnTime is the maximum time until a device is offered again after several absences while
// allocated: the agent waits longer each time.
const returnTime = 3 * time.Minute

// inSlices and inList are the places of offered devices.
const inSlices = "slices"

func inList(resource string) string { return "list " + resource }

// offers waits until the agent offers a device in a state, "" for not at all. It returns the time
// of the first such offer since the step began.
func (n *node) offers(t testing.TB, where, device, state string) (at time.Time) {
	t.Helper()
	for deadline := time.Now().Add(returnTime); ; time.Sleep(50 * time.Millisecond) {
		said := n.said(where, device)
		if len(said) > 0 && said[len(said)-1].state == state {
			last := len(said) - 1
			for last > 0 && said[last-1].state == state {
				last--
			}
			return said[last].at
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %s is not %q, but was %v", where, device, state, said)
		}
	}
}

// named waits until the agent offers a device whose name begins with a prefix, and returns the name.
func (n *node) named(t testing.TB, where, prefix string) string {
	t.Helper()
	name := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(where) + ` \d+ .*\b(` + regexp.QuoteMeta(prefix) + `\S*)=`)
	for deadline := time.Now().Add(returnTime); ; time.Sleep(50 * time.Millisecond) {
		if found := name.FindStringSubmatch(n.kubelet.Output()[n.since:]); found != nil {
			return found[1]
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: no device is named %s*:\n%s", where, prefix, n.kubelet.Output()[n.since:])
		}
	}
}

// never checks that no answer since the step began has offered a device as healthy.
func (n *node) never(t testing.TB, where, device string) {
	t.Helper()
	for _, s := range n.said(where, device) {
		if s.state == "Healthy" {
			t.Errorf("%s: %s is offered: %v", where, device, n.said(where, device))
			return
		}
	}
}

// A said is an offered state of a device, with the time.
type said struct {
	at    time.Time
	state string
}

// said returns the offered states of a device since the step began.
func (n *node) said(where, device string) (all []said) {
	line := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(where) + ` (\d+) (.*)\n`)
	for _, match := range line.FindAllStringSubmatch(n.kubelet.Output()[n.since:], -1) {
		s := said{at: micros(match[1])}
		for _, d := range strings.Fields(match[2]) {
			if name, state, _ := strings.Cut(d, "="); name == device {
				s.state = state
			}
		}
		all = append(all, s)
	}
	return all
}

func micros(text string) time.Time {
	n, _ := strconv.ParseInt(text, 10, 64)
	return time.UnixMicro(n).UTC()
}

// refused repeats a command until the agent refuses a claim or a device for a reason. Before, the agent
// may start, or refuse because it does not know the devices of containers yet.
func (n *node) refused(t testing.TB, why string, command ...string) {
	t.Helper()
	for deadline := time.Now().Add(settleTime); ; time.Sleep(200 * time.Millisecond) {
		got := n.Run(t, append([]string{"guestkubelet"}, command...)...)
		if got.Code != 0 && strings.Contains(got.Stderr, why) {
			return
		}
		if got.Code == 0 || time.Now().After(deadline) {
			t.Fatalf("%s: code %d, %q; want %q", strings.Join(command, " "), got.Code, got.Stderr, why)
		}
	}
}

// granted repeats a command until the agent grants it, which may take a while.
func (n *node) granted(t testing.TB, command ...string) {
	t.Helper()
	for deadline := time.Now().Add(settleTime); ; time.Sleep(200 * time.Millisecond) {
		got := n.Run(t, append([]string{"guestkubelet"}, command...)...)
		if got.Code == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %s", strings.Join(command, " "), got.Stderr)
		}
	}
}
