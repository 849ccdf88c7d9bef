package agent

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// If the node gets the label that excludes agents while a claim is prepared, the agent reports the
// claim in one Event. Without an allocated device, there is no Event.
func TestLabelBeforeDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		wanted := &rules.Rules{Mode: discovery.ModeDRA}
		config := n.config(wanted)
		config.Pod = "chandler/agent"
		events := func(want ...string) {
			t.Helper()
			synctest.Wait()
			list, err := n.client.EventsV1().Events("chandler").List(context.Background(), metav1.ListOptions{})
			if err != nil || len(list.Items) != len(want) {
				t.Fatalf("%d Events, %v; want %d", len(list.Items), err, len(want))
			}
			for i, event := range list.Items {
				if event.Reason != "NodeNotDrained" || event.Regarding.Name != "agent" || !strings.Contains(event.Note, want[i]) {
					t.Errorf("Event %+v; want %q", event, want[i])
				}
			}
		}
		labelled := func(off bool) {
			n.changes <- Change{Settings: Settings{Rules: wanted, LeftAlone: off}}
		}
		stop := n.run(config)
		n.offers("kvm tun", "")
		labelled(true)
		n.offers("kvm tun", "")
		events()
		labelled(false)
		claim, err := n.prepare("kvm")
		if err != nil {
			t.Fatal(err)
		}
		n.offers("kvm tun", "")
		events()
		labelled(true)
		const note = "the node has the label chandler.dev/agent=off, but devices are allocated to claim "
		events(note)
		n.offers("kvm tun", "")
		events(note)
		n.unprepare(claim)
		n.offers("kvm tun", "")
		events(note)
		stop()
	})
}
