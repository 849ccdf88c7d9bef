package agent

import (
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/rebind/rebindtest"
)

// The kernel puts virtual functions elsewhere than it had said. The claim fails, those that came are offered, and
// they stay as long as somebody has one.
func TestAgentMakesVirtualFunctionsElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := makesOf(t, &rebindtest.Physical{Address: physicalFunction, Total: 7, Shift: 5})
		config := m.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Settings.KeepMade = 10 * time.Minute
		stop := m.run(config)
		m.offers(virtuals, "")
		claim := m.claimFor(virtual(0), "predicted", "")
		m.refuses(claim, "it was not seen within 30s")
		m.unprepare(claim)
		const came = "pci-0000-03-11-2"
		m.offers(came+" pci-0000-03-11-4 pci-0000-03-11-6 pci-0000-03-12-0", "")
		other := m.claimFor(came, "other", "")
		m.gives(other)
		m.has(4, time.Hour)
		m.unprepare(other)
		m.has(0, 10*time.Minute+5*time.Second)
		m.offers(virtuals, "")
		stop()
	})
}

// An agent whose disk does not read for a moment what the one before has made removes it nevertheless.
func TestAgentReadsLaterWhatWasMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		stop := m.start()
		m.gets(0, "first")()
		stop()
		config := m.config(&rules.Rules{Mode: discovery.ModeDRA})
		var failing atomic.Bool
		failing.Store(true)
		config.Disk = &disktest.Disk{BeforeRead: func(name string) error {
			if failing.Load() && strings.Contains(name, "/journal/create/") {
				return syscall.EIO
			}
			return nil
		}}
		stop = m.run(config)
		m.has(4, 10*time.Minute)
		failing.Store(false)
		m.has(0, refuseInterval+keepMade+5*time.Second)
		stop()
	})
}

// A claim that has come and gone between two looks counts.
func TestAgentKeepsWhatWasHadForAMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		stop := m.start()
		m.gets(1, "first")()
		m.has(4, keepMade-5*time.Second)
		m.gets(2, "second")() // in a moment
		m.has(4, keepMade-5*time.Second)
		m.has(0, 10*time.Second)
		if writes := strings.Join(m.Written(), "\n"); strings.Count(writes, "sriov_numvfs") != 2 {
			t.Errorf("writes %s", writes)
		}
		stop()
	})
}

// Somebody removes the agent's directory while functions are there. The next agent undoes them all the same.
func TestAgentWritesDownAgainWhatWasMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		stop := m.start()
		unprepare := m.gets(1, "first")
		m.wipes("run/chandler/journal/create")
		time.Sleep(refuseInterval + time.Second)
		stop()
		stop = m.run(m.config(&rules.Rules{Mode: discovery.ModeDRA}))
		time.Sleep(time.Minute)
		unprepare()
		m.has(0, 2*keepMade)
		stop()
	})
}
