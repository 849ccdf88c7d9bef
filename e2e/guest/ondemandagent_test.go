package guest_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"chandler.dev/e2e/guest"
)

// idleTime is the time for which agents in guests keep unused functions. onRequest allows the agent
// to create them on adapters under igb.
const (
	keepMade  = 3 * time.Second
	onRequest = `
onDemand:
  keepSeconds: 3
  virtualFunctions:
  - cel: device.attributes["chandler.dev"].driver == "igb"
    count: 3
`
)

// TestOnDemand creates virtual functions on demand on the kernel of Debian 12. [TestPassthrough] does
// so on the newer kernel.
func TestOnDemand(t *testing.T) {
	guest.Long(t)
	programs := withHostService(t, programs(t))
	programs["guestmake"] = guest.Build(t, "chandler.dev/e2e/cmd/guestmake")
	g := guest.Boot(t, guest.Config{
		Kernel: guest.Debian12, IOMMU: "intel", Modules: []string{"igb", "igbvf"}, Tools: []string{"ip", "runc"}, Programs: programs,
		Args: []string{"-device", "pcie-root-port,id=rp0,chassis=1", "-device", "igb,bus=rp0"},
	})
	m := madeOf(t, g)
	m.makes(t)
	m.killed(t)
	m.refuses(t)
	m.byTheAgent(t, newNode(t, g, rebindConfig+onRequest))
}

// madeOf returns the virtual functions of the adapter under igb.
func madeOf(t *testing.T, g *guest.Guest) made {
	t.Helper()
	return made{g, strings.Fields(g.Sh(t, "cd /sys/bus/pci/drivers/igb; ls -d 0*"))[0], "/run/made/create"}
}

// byTheAgent lets an agent without privilege create virtual functions for claims by the host
// service, and remove them, and kills both at random moments.
func (m made) byTheAgent(t *testing.T, n *node) {
	var names []string
	for line := range strings.Lines(m.Must(t, "guestmake", "could", m.physical)) {
		names = append(names, strings.Fields(line)[0])
	}
	m.dir = "/run/chandler/journal/create"
	s := n.separate(t)
	defer s.dump(t)
	offered := func() {
		t.Helper()
		for _, name := range names {
			n.offers(t, inSlices, name, "Healthy")
		}
	}
	offered()
	m.has(t, 0)

	first, second := names[0]+".first", names[2]+".second"
	began := time.Now()
	n.granted(t, "prepare", first)
	t.Logf("made after %v", time.Since(began).Round(time.Millisecond))
	m.has(t, 3)
	s.wrote(t, "3", "/"+m.physical+"/sriov_numvfs")
	n.granted(t, "prepare", second)
	n.refused(t, "in use by", "prepare", names[0]+".third")
	offered()
	s.kill(t, agentAndService)
	n.granted(t, "prepare", first)
	n.granted(t, "unprepare", first)
	time.Sleep(2 * keepMade)
	m.has(t, 3) // as long as one is allocated
	n.granted(t, "unprepare", second)
	m.undone(t)
	offered()

	turns := 12
	if testing.Short() {
		turns = 1
	}
	for turn := range turns {
		v := theAgent + victims(turn%3)
		claim := fmt.Sprintf("%s.turn%d", names[turn%3], turn)
		prepared := n.Start(t, "guestkubelet", "prepare", claim)
		time.Sleep(rand.N(1500 * time.Millisecond)) //nolint:gosec // random test times need no secrecy
		s.kill(t, v)
		prepared.Wait(t)
		if turn%2 == 0 { // the pod still exists
			n.granted(t, "prepare", claim)
			m.has(t, 3)
		}
		n.granted(t, "unprepare", claim)
		time.Sleep(keepMade - time.Second + rand.N(3*time.Second)) //nolint:gosec // random test times need no secrecy
		s.kill(t, v)
		m.undone(t)
	}
	offered()
	s.stop(t)
}

// undone waits until all virtual functions and records are removed.
func (m made) undone(t *testing.T) {
	t.Helper()
	began := time.Now()
	for deadline := began.Add(settleTime); m.now(t) != "0\n0" || m.left(t) != ""; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not undone: sriov_numvfs and links %q, written down %q", m.now(t), m.left(t))
		}
	}
	t.Logf("undone after %v", time.Since(began).Round(time.Millisecond))
}
