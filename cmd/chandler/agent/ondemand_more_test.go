package agent

import (
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/cmd/chandler/agent/changes"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// The kernel creates virtual functions at other addresses than announced. The claim fails, the
// actual functions are offered, and stay as long as one has a consumer.
func TestAgentCreatesVirtualFunctionsElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := makesOf(t, &passthroughtest.Physical{Address: physicalFunction, Total: 7, Shift: 5})
		config := m.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Settings.IdleTime = 10 * time.Minute
		stop := m.run(config)
		m.offers(virtuals, "")
		claim := m.claimFor(virtual(0), "predicted", "")
		m.refuses(claim, "it did not appear within 30s")
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

// An agent removes the functions of an earlier agent even if the disk cannot read their records at
// first.
func TestAgentReadsCreatedDevicesLater(t *testing.T) {
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
		m.has(0, changes.RetryInterval+keepMade+5*time.Second)
		stop()
	})
}

// A claim that begins and ends between two checks postpones the removal.
func TestAgentKeepsWhatWasHadForAMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		stop := m.start()
		m.gets(1, "first")()
		m.has(4, keepMade-5*time.Second)
		m.gets(2, "second")() // for a moment
		m.has(4, keepMade-5*time.Second)
		m.has(0, 10*time.Second)
		if writes := strings.Join(m.ListWrites(), "\n"); strings.Count(writes, "sriov_numvfs") != 2 {
			t.Errorf("writes %s", writes)
		}
		stop()
	})
}

// The agent's directory is removed while functions exist. The next agent still removes the
// functions.
func TestAgentRecordsCreatedDevicesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		stop := m.start()
		unprepare := m.gets(1, "first")
		m.wipes("run/chandler/journal/create")
		time.Sleep(changes.RetryInterval + time.Second)
		stop()
		stop = m.run(m.config(&rules.Rules{Mode: discovery.ModeDRA}))
		time.Sleep(time.Minute)
		unprepare()
		m.has(0, 2*keepMade)
		stop()
	})
}
