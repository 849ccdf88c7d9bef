package agent

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"

	"chandler.dev/cmd/chandler/agent/changes"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families/rdma"
	"chandler.dev/discovery/families/sriovnet"
	"chandler.dev/discovery/families/vfio"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/passthrough/passthroughtest"
)

const (
	physicalFunction = "0000:03:00.0"
	virtuals         = "pci-0000-03-10-0 pci-0000-03-10-2 pci-0000-03-10-4 pci-0000-03-10-6"
	keepMade         = time.Minute
)

// virtual returns the name of a virtual function.
func virtual(i int) string { return strings.Fields(virtuals)[i] }

// makes is a node with an adapter that can have four virtual functions on demand.
type makes struct {
	*rebinding
	physical *passthroughtest.Physical
}

func newMakes(t *testing.T) *makes {
	return makesOf(t, &passthroughtest.Physical{Address: physicalFunction, Total: 7})
}

func makesOf(t *testing.T, physical *passthroughtest.Physical) *makes {
	families := []*discovery.Family{rdma.Family, sriovnet.Family, vfio.Family}
	m := &makes{&rebinding{newNode(t), passthroughtest.New(t), "first", families}, physical}
	m.AddPhysical(m.physical)
	return m
}

func (m *makes) config(wanted *rules.Rules) Config {
	config := m.rebinding.config(wanted)
	config.Settings.Passthrough, config.Settings.IdleTime = nil, keepMade
	config.Settings.VirtualFunctions = []discovery.Selection[int]{{Expression: "nics", Value: 4, Selects: func(d discovery.Device) (bool, error) {
		return d.Attributes.String("kind") == "nic", nil
	}}}
	return config
}

// start runs an agent, and waits until the agent offers the possible virtual functions.
func (m *makes) start() (stop func()) {
	m.t.Helper()
	stop = m.run(m.config(&rules.Rules{Mode: discovery.ModeDRA}))
	m.offers(virtuals, "")
	return stop
}

// has waits, and then checks the number of virtual functions, and that a record exists if there are
// any.
func (m *makes) has(count int, after time.Duration) {
	m.t.Helper()
	time.Sleep(after)
	synctest.Wait()
	records, _ := filepath.Glob(filepath.Join(m.dir, "run/chandler/journal/create/*"))
	if got := m.VirtualCount(physicalFunction); got != count || (len(records) > 0) != (count > 0) {
		m.t.Errorf("%d virtual functions, written down %q; want %d\nwrites: %q", got, records, count, m.ListWrites())
	}
}

// gets prepares a claim for a virtual function.
func (m *makes) gets(i int, name string) (release func()) {
	m.t.Helper()
	claim := m.claimFor(virtual(i), name, "")
	if err := m.prepareAgain(claim); err != nil {
		m.t.Errorf("claim %s: %v\nwrites: %q", name, err, m.ListWrites())
	}
	return func() { m.unprepare(claim) }
}

// One write creates all virtual functions when the first is claimed, and one write removes all of
// them when none has had a consumer for a while.
func TestAgentCreatesVirtualFunctions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		stop := m.start()
		m.has(0, time.Minute)
		first := m.gets(1, "first")
		second := m.gets(3, "second")
		m.has(4, 0)
		m.offers(virtuals, "")
		if taint := m.taint(); taint != "" {
			t.Errorf("taints %s", taint)
		}
		m.has(4, time.Hour)
		first()
		m.has(4, time.Hour)
		second()
		m.has(4, keepMade-5*time.Second)
		third := m.gets(1, "third") // the virtual functions still exist
		m.has(4, time.Hour)
		third()
		m.has(0, keepMade+5*time.Second)
		m.offers(virtuals, "")
		if got, want := m.ListWrites(), []string{passthroughtest.Source(physicalFunction) + "/sriov_numvfs 4", passthroughtest.Source(physicalFunction) + "/sriov_numvfs 0"}; !slices.Equal(got, want) {
			t.Errorf("writes %q, want %q", got, want)
		}
		m.gets(0, "fourth")()
		stop()
	})
}

// While virtual functions come and go one by one and are without drivers for a moment, all are
// offered and none is reported as unhealthy.
func TestAgentReportsNoDeviceUnhealthyDuringCreation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		kernel := make(chan struct{})
		config := m.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Uevents = func(ctx context.Context, events chan scan.Changes) error {
			for {
				select {
				case <-ctx.Done():
					return nil
				case <-kernel:
					scan.Changes{Everything: true}.Send(events)
				}
			}
		}
		stop := m.run(config)
		m.offers(virtuals, "")
		look := func() {
			for range 100 {
				time.Sleep(7 * time.Millisecond)
				kernel <- struct{}{}
				if taint := m.taint(); taint != "" {
					t.Error(taint)
				}
				m.mu.Lock()
				if got := strings.Join(m.published, " "); got != virtuals {
					t.Errorf("slices have %q", got)
				}
				m.mu.Unlock()
			}
		}
		ended := make(chan func(), 1)
		go func() { ended <- m.gets(3, "last") }()
		look()
		(<-ended)()
		time.Sleep(keepMade - time.Second)
		look()
		m.offers(virtuals, "")
		m.has(0, 0)
		stop()
	})
}

// A virtual function with RDMA has its interface before its RDMA device. The claim waits for the
// RDMA device. The adapter itself is offered while it has no virtual functions.
func TestAgentCreatesVirtualFunctionsWithRDMA(t *testing.T) {
	const adapter = "pci-0000-03-00-0"
	synctest.Test(t, func(t *testing.T) {
		m := makesOf(t, &passthroughtest.Physical{Address: physicalFunction, Total: 7, RDMA: 3 * time.Second})
		stop := m.run(m.config(&rules.Rules{Mode: discovery.ModeDRA}))
		m.offers(adapter+" "+virtuals, "")
		claim := m.claimFor(virtual(1), "first", "")
		m.gives(claim, "/dev/infiniband/uverbs2")
		m.offers(virtuals, "")
		if taint := m.taint(); taint != "" {
			t.Errorf("taints %s", taint)
		}
		m.has(4, time.Hour)
		m.unprepare(claim)
		m.has(0, keepMade+5*time.Second)
		m.offers(adapter+" "+virtuals, "")
		whole := m.claimFor(adapter, "whole", "")
		if err := m.prepareAgain(whole); err != nil {
			t.Fatal(err)
		}
		m.refuses(claim, "in use by claim default/whole")
		m.has(0, 0)
		stop()
	})
}

// If the RDMA device of a virtual function does not appear, the claim fails.
func TestAgentGivesNoVirtualFunctionWithoutItsRDMADevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := makesOf(t, &passthroughtest.Physical{Address: physicalFunction, Total: 7, RDMA: time.Hour})
		stop := m.run(m.config(&rules.Rules{Mode: discovery.ModeDRA}))
		m.offers("pci-0000-03-00-0 "+virtuals, "")
		claim := m.claimFor(virtual(1), "first", "")
		m.refuses(claim, "it did not appear within 30s")
		m.unprepare(claim)
		m.has(0, 2*keepMade)
		time.Sleep(time.Hour)
		stop()
	})
}

// Virtual functions that an administrator created remain. While they exist, the agent offers no
// others.
func TestAgentLeavesOthersVirtualFunctions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		if err := m.SetVirtual(physicalFunction, 2); err != nil {
			t.Fatal(err)
		}
		two := virtual(0) + " " + virtual(1)
		stop := m.run(m.config(&rules.Rules{Mode: discovery.ModeDRA}))
		m.offers(two, "")
		m.gets(1, "first")()
		time.Sleep(time.Hour)
		m.offers(two, "")
		if len(m.ListWrites()) > 0 || m.VirtualCount(physicalFunction) != 2 {
			t.Errorf("writes %q", m.ListWrites())
		}
		stop()
	})
}

// If an administrator changes the number of virtual functions that the agent has created, the
// virtual functions remain, and the agent does not log a removal.
func TestAgentLogsThatVirtualFunctionsWereChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		var mu sync.Mutex
		var log []string
		logger := funcr.New(func(_, args string) {
			mu.Lock()
			defer mu.Unlock()
			log = append(log, args)
		}, funcr.Options{})
		ctx, stop := context.WithCancel(klog.NewContext(t.Context(), logger))
		ended := make(chan error, 1)
		go func() { ended <- Run(ctx, m.config(&rules.Rules{Mode: discovery.ModeDRA})) }()
		time.Sleep(time.Minute)
		m.gets(1, "first")()
		for _, count := range []int{0, 2} {
			if err := m.SetVirtual(physicalFunction, count); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Hour)
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		all := strings.Join(log, "\n")
		if m.VirtualCount(physicalFunction) != 2 || strings.Contains(all, "Removed what was created") || !strings.Contains(all, "another program has changed them") {
			t.Errorf("%d virtual functions\n%s", m.VirtualCount(physicalFunction), all)
		}
	})
}

// A new agent continues with the virtual functions of the previous agent, and removes them later.
func TestAgentRestartsWithCreatedDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		stop := m.start()
		claim := m.claimFor(virtual(2), "c", "")
		if err := m.prepareAgain(claim); err != nil {
			t.Fatal(err)
		}
		stop()
		stop = m.start()
		if err := m.prepareAgain(claim); err != nil {
			t.Fatal(err)
		}
		m.has(4, time.Hour)
		m.unprepare(claim)
		stop()
		config := m.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Settings.VirtualFunctions = nil // the administrator no longer allows virtual functions on demand
		stop = m.run(config)
		m.has(0, 2*keepMade)
		m.offers("", "")
		stop()
	})
}

// If an agent is killed before any of its writes, the next agent continues from there, whether the
// claim is still wanted or not. A reboot removes all virtual functions.
func TestAgentIsKilledWhileItCreatesVirtualFunctions(t *testing.T) {
	for step := range 3 {
		for _, then := range []string{"wanted", "unwanted", "rebooted"} {
			t.Run(fmt.Sprint(step, " ", then), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					m := newMakes(t)
					stop := m.start()
					claim := m.claimFor(virtual(2), "c", "")
					m.Kill(step)
					if err := m.prepareAgain(claim); (err == nil) != (step > 0) {
						t.Fatalf("prepare: %v", err)
					}
					if step > 0 && then != "wanted" {
						m.unprepare(claim)
						time.Sleep(2 * keepMade)
					}
					stop()
					m.Kill(-1)
					if then == "rebooted" {
						m.Reboot()
						m.boot = "second"
					}
					stop = m.run(m.config(&rules.Rules{Mode: discovery.ModeDRA}))
					time.Sleep(keepMade / 2) // half the time, because the agent removes units after all of idleTime
					if then != "unwanted" {
						if err := m.prepareAgain(claim); err != nil {
							t.Error(err)
						}
						m.has(4, time.Hour)
					}
					m.unprepare(claim)
					m.has(0, 2*keepMade)
					m.offers(virtuals, "")
					stop()
				})
			})
		}
	}
}

// The kernel refuses, creates fewer virtual functions, or no driver binds to them. The claim gets
// the error, and devices that cannot be created are tainted for other claims.
func TestAgentCannotCreateVirtualFunctions(t *testing.T) {
	for name, test := range map[string]struct {
		spoil  func(*makes)
		mend   func(*makes)
		want   string
		offers string // meanwhile
	}{
		"busy": {
			func(m *makes) { m.physical.Refuses = syscall.EBUSY }, func(m *makes) { m.physical.Refuses = nil },
			"its driver is busy", virtuals,
		},
		"fewer": {
			func(m *makes) { m.physical.Fewer = 2 }, nil,
			"was to have 4 virtual functions and has 2", virtual(0) + " " + virtual(1) + " " + virtual(3), // the claim's device is gone
		},
		"no driver takes them": {
			func(m *makes) { m.RefuseProbes("igbvf", syscall.ENODEV) }, func(m *makes) { m.RefuseProbes("igbvf", nil) },
			"it did not appear within 30s", virtuals,
		},
		"no driver would": {
			func(m *makes) { m.File(passthroughtest.Source(physicalFunction)+"/sriov_drivers_autoprobe", "0\n") },
			func(m *makes) { m.File(passthroughtest.Source(physicalFunction)+"/sriov_drivers_autoprobe", "1\n") },
			"sriov_drivers_autoprobe", virtuals,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMakes(t)
				stop := m.start()
				test.spoil(m)
				claim := m.claimFor(virtual(3), "c", "")
				m.refuses(claim, test.want)
				time.Sleep(time.Second)
				m.offers(test.offers, "")
				if taint := m.taint(); test.offers == virtuals && !strings.Contains(taint, virtual(0)+" chandler.dev/") {
					t.Errorf("taints %q", taint)
				}
				if test.mend == nil {
					m.unprepare(claim)
					stop()
					stop = m.run(m.config(&rules.Rules{Mode: discovery.ModeDRA}))
					m.has(0, 2*keepMade) // the existing virtual functions are removed nevertheless
					stop()
					return
				}
				test.mend(m)
				if m.VirtualCount(physicalFunction) > 0 { // they are removed and created again
					m.unprepare(claim)
					m.has(0, 2*keepMade)
				}
				if err := m.prepareAgain(claim); err != nil {
					t.Error(err)
				}
				time.Sleep(10 * time.Minute)
				if taint := m.taint(); taint != "" {
					t.Errorf("taints %q", taint)
				}
				stop()
			})
		})
	}
}

// A write that hangs in the kernel blocks its own adapter and nothing else.
func TestAgentCreatesVirtualFunctionsWhileTheKernelHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		hangs := make(chan struct{})
		m.physical.Hangs = hangs
		stop := m.start()
		claim := m.claimFor(virtual(0), "c", "")
		m.refuses(claim, "still configuring")
		time.Sleep(time.Minute)
		m.refuses(claim, "has not ended after 1m0s")
		m.refuses(claim, "has not ended yet")
		m.offers(virtuals, "")
		close(hangs)
		time.Sleep(time.Second)
		if err := m.prepareAgain(claim); err != nil {
			t.Error(err)
		}
		m.unprepare(claim)
		m.has(0, 2*keepMade)
		stop()
	})
}

// The agent removes no virtual function that a process of the host uses.
func TestAgentKeepsVirtualFunctionsInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		stop := m.start()
		release := m.gets(0, "c")
		release()
		flags := passthroughtest.Source(passthroughtest.VirtualAddress(2)) + "/net/vf2/flags"
		m.File(flags, "0x1003\n") // an administrator set the interface up
		m.has(4, time.Hour)
		m.File(flags, "0x1002\n")
		m.has(0, changes.RetryInterval+5*time.Second)
		stop()
	})
}

// A claim can request a virtual function under vfio before the function exists.
func TestAgentCreatesVirtualFunctionsForPassthrough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		config := m.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Settings.Passthrough = []discovery.Selection[string]{{Expression: "virtual", Value: "vfio-pci", Selects: func(d discovery.Device) (bool, error) {
			return d.Attributes.String("function") == "virtual", nil
		}}}
		stop := m.run(config)
		m.offers(virtuals, "")
		vm := m.claimFor(virtual(1), "vm", "vfio")
		if err := m.prepareAgain(vm); err != nil {
			t.Fatalf("%v\nwrites: %q", err, m.ListWrites())
		}
		if driver := m.Driver(passthroughtest.VirtualAddress(1)); driver != "vfio-pci" {
			t.Errorf("driver %q", driver)
		}
		m.offers(virtuals, "")
		m.unprepare(vm)
		m.has(0, 2*keepMade)
		stop()
	})
}

// An extended resource keeps all its virtual functions as long as the configuration lists the
// resource.
func TestAgentCreatesVirtualFunctionsForAResource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMakes(t)
		classic := discovery.ModeDevicePlugin
		entry := rules.Resource{Selector: rulestest.CompileSelector(t, `device.attributes["chandler.dev"].function == "virtual"`), Name: "example.com/vf", Mode: &classic}
		stop := m.run(m.config(&rules.Rules{Mode: discovery.ModeDRA, Resources: []rules.Resource{entry}}))
		m.has(4, time.Minute)
		m.mu.Lock()
		if healthy := m.healthy["example.com/vf"]; len(healthy) != 4 {
			t.Errorf("healthy: %q", healthy)
		}
		m.mu.Unlock()
		m.has(4, time.Hour)
		m.changes <- Change{Settings: Settings{Rules: &rules.Rules{Mode: discovery.ModeDRA}, IdleTime: keepMade, VirtualFunctions: m.config(nil).Settings.VirtualFunctions}}
		m.has(0, 5*time.Minute)
		m.offers(virtuals, "")
		stop()
	})
}
