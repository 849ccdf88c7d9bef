package agent

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/amdgpu"
	"chandler.dev/discovery/families/amdgpu/parttest"
	"chandler.dev/discovery/rules"
)

// dividing is a node with two MI300X. The configuration allows on-demand partitions, and the GPUs
// stay partitioned for a minute after the last release.
type dividing struct {
	*rebinding
	host *parttest.Host
}

func newDividing(t *testing.T) *dividing {
	return &dividing{&rebinding{node: newNode(t), boot: "first"}, parttest.New(2)}
}

func (d *dividing) config() Config {
	config := d.node.config(&rules.Rules{Mode: discovery.ModeDRA})
	config.FS, config.Families, config.Write, config.BootID = d.host, []*discovery.Family{amdgpu.Family}, d.host.Write, d.boot
	config.Settings.IdleTime = time.Minute
	config.Settings.Partition = []discovery.Selection[struct{}]{{Expression: "all", Selects: func(discovery.Device) (bool, error) { return true, nil }}}
	return config
}

// start runs an agent, and waits until the devices are published.
func (d *dividing) start() (stop func()) {
	d.t.Helper()
	stop = d.run(d.config())
	d.pause(time.Minute)
	return stop
}

func (d *dividing) pause(long time.Duration) {
	time.Sleep(long)
	synctest.Wait()
}

// claims returns a claim for a device of the first GPU, such as "-cpx-0", or "" for the whole GPU.
func (d *dividing) claims(suffix, name string) *resourceapi.ResourceClaim {
	return d.claimFor(parttest.Device+suffix, name, "")
}

// got prepares a claim, which must succeed, and checks the claim's device nodes of the first GPU.
func (d *dividing) got(claim *resourceapi.ResourceClaim, partitions ...int) (release func()) {
	d.t.Helper()
	if err := d.prepareAgain(claim); err != nil {
		d.t.Errorf("claim %s: %v\nwritten: %q", claim.Name, err, d.host.ListWrites())
		return func() {}
	}
	specs, _ := filepath.Glob(filepath.Join(d.dir, "cdi/*"+claim.Name+"*"))
	if len(specs) != 1 {
		d.t.Errorf("specs of claim %s: %q", claim.Name, specs)
		return func() {}
	}
	spec, err := os.ReadFile(specs[0])
	if err != nil {
		d.t.Fatal(err)
	}
	for i := range 8 {
		if has := strings.Contains(string(spec), `"`+d.host.Node(i)+`"`); has != slices.Contains(partitions, i) {
			d.t.Errorf("the spec of claim %s has the node of partition %d: %v", claim.Name, i, has)
		}
	}
	if len(partitions) > 0 && !strings.Contains(string(spec), `"/dev/kfd"`) {
		d.t.Errorf("the spec of claim %s has no /dev/kfd", claim.Name)
	}
	return func() { d.unprepare(claim) }
}

// is checks the modes of the GPUs, the number of records, and that all devices are offered and
// healthy.
func (d *dividing) is(modes string, records int) {
	d.t.Helper()
	synctest.Wait()
	if got := d.host.Mode(0) + " " + d.host.Mode(1); got != modes {
		d.t.Errorf("modes %s, want %s\nwritten: %q", got, modes, d.host.ListWrites())
	}
	written, _ := filepath.Glob(filepath.Join(d.dir, "run/chandler/journal/create/*"))
	if len(written) != records {
		d.t.Errorf("written down %q, want %d", written, records)
	}
	d.mu.Lock()
	offered := len(d.published)
	d.mu.Unlock()
	if offered != 30 {
		d.t.Errorf("slices have %q", d.published)
	}
	if taint := d.taint(); taint != "" {
		d.t.Errorf("taints %s", taint)
	}
}

// A GPU is partitioned once, for the first claim for a partition, and restored a while after the
// last release. A claim for the whole GPU, or for another mode, need not wait so long.
func TestAgentPartitionsAGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDividing(t)
		stop := d.start()
		d.is("SPX SPX", 0)
		first, second := d.got(d.claims("-cpx-3", "first"), 3), d.got(d.claims("-cpx-0", "second"), 0)
		d.pause(time.Hour)
		d.is("CPX SPX", 1)
		dpx := d.claims("-dpx-1", "dpx")
		d.refuses(dpx, "first")
		first()
		d.refuses(dpx, "second")
		all := d.claims("", "all")
		d.refuses(all, "second")
		second()
		third := d.got(dpx, 1)
		d.pause(time.Hour)
		d.is("DPX SPX", 1)
		third()
		release := d.got(all, 0)
		d.pause(time.Hour)
		d.is("SPX SPX", 1)
		release()
		d.pause(2 * time.Minute)
		d.is("SPX SPX", 0)
		d.got(d.claims("-qpx-2", "last"), 2)()
		d.pause(30 * time.Second)
		d.is("QPX SPX", 1)
		d.pause(time.Minute)
		d.is("SPX SPX", 0)
		want := "CPX DPX SPX QPX SPX"
		if got := strings.ReplaceAll(strings.Join(d.host.ListWrites(), " "), parttest.Device+" ", ""); got != want {
			t.Errorf("written %q, want %q", got, want)
		}
		stop()
	})
}

// An agent takes over the partitions of its predecessor. After a reboot all GPUs are whole.
func TestAgentAdoptsAPartitionedGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDividing(t)
		stop := d.start()
		release := d.got(d.claims("-cpx-3", "first"), 3)
		other := d.got(d.claimFor("pci-0000-06-00-0-dpx-0", "other", ""))
		other()
		stop()
		stop = d.start()
		d.pause(2 * time.Minute)
		d.is("CPX SPX", 1)
		release()
		d.pause(2 * time.Minute)
		d.is("SPX SPX", 0)
		d.got(d.claims("-cpx-3", "again"), 3)
		stop()
		if err := d.host.Set(0, "SPX"); err != nil { // as a reboot does
			t.Error(err)
		}
		d.boot = "second"
		stop = d.start()
		d.is("SPX SPX", 0)
		stop()
	})
}

// An agent that is killed before or after any write leaves a state that the next agent can
// continue.
func TestAgentIsKilledWhileItPartitionsAGPU(t *testing.T) {
	for name, after := range map[string]bool{"before": false, "after": true} {
		for writes := range 3 {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					d := newDividing(t)
					left := writes
					config := d.config()
					config.Write = func(name, value string) error {
						if left--; left >= 0 {
							return d.host.Write(name, value)
						}
						if after && left == -1 {
							if err := d.host.Write(name, value); err != nil {
								t.Error(err)
							}
						}
						return errors.New("the agent was killed")
					}
					stop := d.run(config)
					d.pause(time.Minute)
					for _, suffix := range []string{"-cpx-3", "-dpx-0"} {
						claim := d.claims(suffix, "of"+suffix)
						_ = d.prepareAgain(claim)
						d.unprepare(claim)
					}
					d.pause(2 * time.Minute)
					stop()
					stop = d.start()
					d.got(d.claims("-qpx-3", "next"), 3)()
					d.pause(2 * time.Minute)
					d.is("SPX SPX", 0)
					stop()
				})
			})
		}
	}
}

// A kernel call that hangs blocks one GPU and no other.
func TestAgentPartitionsAGPUWhileTheKernelHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDividing(t)
		hangs := make(chan struct{})
		d.host.Refuse = func(device, _ string) error {
			if device == parttest.Device {
				<-hangs
			}
			return nil
		}
		stop := d.start()
		claim := d.claims("-cpx-3", "first")
		d.refuses(claim, "still configuring")
		d.pause(2 * time.Minute)
		d.refuses(claim, "has not ended")
		d.unprepare(claim)
		d.got(d.claimFor("pci-0000-06-00-0-cpx-0", "other", ""))()
		if d.host.Mode(1) != "CPX" {
			t.Errorf("written: %q", d.host.ListWrites())
		}
		d.pause(5 * time.Minute)
		if d.host.Mode(1) != "SPX" {
			t.Errorf("not put together beside it; written: %q", d.host.ListWrites())
		}
		close(hangs)
		d.host.AcceptWrites()
		d.pause(10 * time.Minute)
		d.is("SPX SPX", 0)
		stop()
	})
}

// The agent waits for partitions that KFD lists late. A partition that KFD never lists is not
// allocated and has a taint; the other partitions are allocated.
func TestAgentWaitsForPartitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDividing(t)
		d.host.Late, d.host.Backwards = 3*time.Second, true
		stop := d.start()
		claim := d.claims("-cpx-7", "first")
		d.got(claim, 7)()
		d.pause(2 * time.Minute)
		d.is("SPX SPX", 0)
		d.host.Late, d.host.Few = 0, 6
		release := d.got(d.claims("-cpx-5", "fifth"), 5)
		d.pause(time.Minute)
		if taint := d.taint(); !strings.Contains(taint, "-cpx-7") || strings.Contains(taint, "-cpx-5") {
			t.Errorf("taints %q", taint)
		}
		never := d.claims("-cpx-6", "never")
		d.refuses(never, "did not appear")
		d.unprepare(never)
		release()
		d.pause(10 * time.Minute)
		d.is("SPX SPX", 0)
		stop()
	})
}

// The agent does not change the mode of a GPU while any process has the GPU open, or while the
// kernel refuses the change, and retries later.
func TestAgentKeepsGPUsInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDividing(t)
		stop := d.start()
		d.host.OpenNode("47", d.host.Node(0))
		claim := d.claims("-cpx-3", "first")
		d.refuses(claim, "process 47 (someone) has it open")
		if taint := d.taint(); strings.Contains(taint, "-dpx-") {
			t.Errorf("taints %s", taint)
		}
		d.host.OpenNode("47", "")
		d.got(claim, 3)()
		d.host.OpenNode("47", d.host.Node(6))
		d.pause(3 * time.Minute)
		d.is("CPX SPX", 1)
		var refuse atomic.Bool
		refuse.Store(true)
		d.host.Refuse = func(string, string) error {
			if refuse.Load() {
				return syscall.EBUSY
			}
			return nil
		}
		d.host.OpenNode("47", "")
		d.pause(3 * time.Minute)
		d.is("CPX SPX", 1)
		all := d.claims("", "all")
		d.refuses(all, "/dev/kfd")
		d.unprepare(all)
		refuse.Store(false)
		d.pause(10 * time.Minute)
		d.is("SPX SPX", 0)
		stop()
	})
}

// A GPU that an administrator has partitioned remains partitioned. A partition that is allocated
// when the configuration stops allowing partitions keeps its name until its release.
func TestAgentKeepsAGPUPartitionedByHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDividing(t)
		if err := d.host.Set(1, "DPX"); err != nil {
			t.Fatal(err)
		}
		stop := d.start()
		release := d.got(d.claims("-dpx-1", "first"), 1)
		d.got(d.claimFor("pci-0000-06-00-0-xcp-1", "by-hand", ""))()
		stop()
		config := d.config()
		config.Settings.Partition = nil
		stop = d.run(config)
		d.pause(3 * time.Minute)
		want := []string{parttest.Device + "-dpx-0", parttest.Device + "-dpx-1", "pci-0000-06-00-0-xcp-0", "pci-0000-06-00-0-xcp-1"}
		if !slices.Equal(d.published, want) || d.taint() != "" {
			t.Errorf("slices have %q, taints %s", d.published, d.taint())
		}
		release()
		d.pause(2 * time.Minute)
		if d.host.Mode(0) != "SPX" || d.host.Mode(1) != "DPX" {
			t.Errorf("written %q", d.host.ListWrites())
		}
		stop()
	})
}
