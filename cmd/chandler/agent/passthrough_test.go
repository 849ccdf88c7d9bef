package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/cmd/chandler/agent/changes"
	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families/vfio"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/driver/pool"
	"chandler.dev/internal/passthrough/passthroughtest"
)

const (
	diskFunction = "0000:03:00.0"
	diskName     = "pci-0000-03-00-0"
	diskNode     = "/dev/nvme0"
)

// disks offers functions that have their own driver. It does not find functions under vfio.
var disks = &discovery.Family{
	Name:  "disks",
	Doc:   "disks, for tests",
	Match: []discovery.Match{{Bus: "pci", Driver: "nvme"}},
	Describe: func(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
		for _, function := range found {
			d, err := pci.DescribeFunction(host, function)
			if err != nil {
				problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
			}
			d.Attributes.SetString("kind", "other")
			number := function.Name()[len(function.Name())-1:]
			minor, _ := strconv.ParseInt(number, 10, 32)
			d.Edits.DeviceNodes = []*specs.DeviceNode{{Path: "/dev/nvme" + number, HostPath: "/dev/nvme" + number, Type: "c", Major: 240, Minor: minor, Permissions: "rw"}}
			d.PluginOffers = []discovery.Offer{{Resource: discovery.AnyName, IDs: []string{function.Name()}}}
			devices = append(devices, d)
		}
		return devices, problems
	},
}

// rebinding is a node with a disk that allows passthrough.
type rebinding struct {
	*node
	*passthroughtest.Kernel

	boot     string
	families []*discovery.Family
}

func newRebinding(t *testing.T) *rebinding {
	r := &rebinding{newNode(t), passthroughtest.New(t), "first", []*discovery.Family{disks, vfio.Family}}
	r.File(strings.TrimPrefix(diskNode, "/"), "c 240:0")
	r.Add(diskFunction, "nvme", "3")
	return r
}

// config returns the configuration of an agent that allows passthrough for every device.
func (r *rebinding) config(wanted *rules.Rules) Config {
	config := r.node.config(wanted)
	config.FS, config.Families, config.Write, config.BootID = r.FS(), r.families, r.Write, r.boot
	config.Settings.Passthrough = everything
	config.ReadParameters = func(raw []byte) (discovery.Parameters, error) {
		return discovery.Parameters{discovery.Driver: strings.Trim(string(raw), `"`)}, nil
	}
	return config
}

var everything = []discovery.Selection[string]{{Expression: "true", Value: "vfio-pci", Selects: func(discovery.Device) (bool, error) { return true, nil }}}

// start runs an agent, and waits until the disk is offered.
func (r *rebinding) start() (stop func()) {
	r.t.Helper()
	stop = r.run(r.config(&rules.Rules{Mode: discovery.ModeDRA}))
	r.offers(diskName, "")
	return stop
}

// claim returns a claim for the disk as "vfio", or with its own driver for "".
func (r *rebinding) claim(name, as string) *resourceapi.ResourceClaim {
	r.t.Helper()
	return r.claimFor(diskName, name, as)
}

// claimFor returns a claim for a device.
func (r *rebinding) claimFor(device, name, as string) *resourceapi.ResourceClaim {
	r.t.Helper()
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)}}
	allocated := resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{Request: "r", Driver: discovery.Domain, Pool: r.poolOf(device), Device: device}}}
	if as != "" {
		opaque := &resourceapi.OpaqueDeviceConfiguration{Driver: discovery.Domain, Parameters: runtime.RawExtension{Raw: []byte(`"` + as + `"`)}}
		allocated.Config = []resourceapi.DeviceAllocationConfiguration{{Source: resourceapi.AllocationConfigSourceClaim, DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: opaque}}}
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: allocated}
	if _, err := r.client.ResourceV1().ResourceClaims("default").Create(r.t.Context(), claim, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
	return claim
}

// gives prepares a claim, and checks the nodes in its CDI spec.
func (r *rebinding) gives(claim *resourceapi.ResourceClaim, nodes ...string) {
	r.t.Helper()
	if err := r.prepareAgain(claim); err != nil {
		r.t.Errorf("prepare claim %s: %v\nwrites: %q", claim.Name, err, r.ListWrites())
		return
	}
	specs, _ := filepath.Glob(filepath.Join(r.dir, "cdi/*"+claim.Name+"*"))
	if len(specs) != 1 {
		r.t.Errorf("specs of claim %s: %q", claim.Name, specs)
		return
	}
	text, err := os.ReadFile(specs[0])
	if err != nil {
		r.t.Fatal(err)
	}
	for _, node := range []string{"/dev/vfio/3", "/dev/vfio/vfio", diskNode, "/dev/infiniband/uverbs2"} {
		if has := strings.Contains(string(text), `"`+node+`"`); has != slices.Contains(nodes, node) {
			r.t.Errorf("the spec of claim %s has %s: %v\n%s", claim.Name, node, has, text)
		}
	}
}

// refuses checks that a claim cannot be prepared, and the reason.
func (r *rebinding) refuses(claim *resourceapi.ResourceClaim, why string) {
	r.t.Helper()
	if err := r.prepareAgain(claim); err == nil || !strings.Contains(err.Error(), why) {
		r.t.Errorf("claim %s: error %v, want %q", claim.Name, err, why)
	}
}

// wipes removes a directory of the agent's records, after the agent has finished its writes: a file
// that appears during the removal would keep the directory.
func (r *rebinding) wipes(dir string) {
	r.t.Helper()
	synctest.Wait()
	if err := os.RemoveAll(filepath.Join(r.dir, dir)); err != nil {
		r.t.Fatal(err)
	}
}

// bound waits, and checks the driver of the disk and whether the disk has a record.
func (r *rebinding) bound(driver string, after time.Duration) {
	r.t.Helper()
	time.Sleep(after)
	synctest.Wait()
	records, _ := filepath.Glob(filepath.Join(r.dir, "run/chandler/journal/rebind/*"))
	if got := r.Driver(diskFunction); got != driver || (len(records) > 0) != (driver != "nvme") || driver == "nvme" && r.DriverOverride(diskFunction) != "(null)" {
		r.t.Errorf("driver %q, override %q, written down %q; want driver %q\nwrites: %q", got, r.DriverOverride(diskFunction), records, driver, r.ListWrites())
	}
}

// taint returns the taint of the disk in the slices.
func (r *rebinding) taint() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var said []string
	for _, slice := range pool.SlicesOf(r.pools) {
		for _, d := range slice.Devices {
			for _, taint := range d.Taints {
				said = append(said, fmt.Sprintf("%s %s: %s", d.Name, taint.Key, taint.Value))
			}
		}
	}
	return strings.Join(said, ", ")
}

// A claim has the disk under vfio. The slices show the same device meanwhile. After the claim has
// ended, the disk returns to its driver, and no consumer gets it with that driver before.
func TestAgentBindsToVFIO(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		stop := r.start()
		vm, pod := r.claim("vm", "vfio"), r.claim("pod", "")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		r.bound("vfio-pci", 0)
		writes := len(r.ListWrites())
		r.offers(diskName, "")
		r.bound("vfio-pci", 0)
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		r.refuses(pod, "until it is returned to driver nvme")
		if now := r.ListWrites(); len(now) != writes || r.taint() != "" {
			t.Errorf("written while a claim has it: %q; taints %q", now[writes:], r.taint())
		}

		r.OpenNode("47", "qemu", "/dev/vfio/3")
		r.unprepare(vm)
		// What follows happens between two attempts to return the device, which are changes.RetryInterval apart.
		r.bound("vfio-pci", time.Minute+changes.RetryInterval/2)
		r.refuses(pod, "it is not returned to driver nvme: function 0000:03:00.0: in use: /dev/vfio/3: process 47 (qemu) has it open")
		if got := r.taint(); !strings.Contains(got, string(discovery.ConditionDriverUnbound)) {
			t.Errorf("taint %q while it is not returned", got)
		}
		again := r.claim("again", "vfio")
		r.refuses(again, "in use by an earlier consumer or a program of the host: in use: /dev/vfio/3: process 47 (qemu) has it open")
		r.EndProcess("47")
		r.gives(again, "/dev/vfio/3", "/dev/vfio/vfio")
		time.Sleep(time.Minute)
		if got := r.taint(); got != "" {
			t.Errorf("taint %q while a claim has it", got)
		}
		r.OpenNode("48", "qemu", "/dev/vfio/3")
		r.gives(again, "/dev/vfio/3", "/dev/vfio/vfio") // the claim's own pod has it open
		r.unprepare(again)
		r.EndProcess("48")
		r.bound("nvme", changes.RetryInterval+time.Second)
		r.gives(pod, diskNode)
		r.refuses(vm, "claim default/pod")
		r.unprepare(pod)
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		r.unprepare(vm)
		r.bound("nvme", 2*time.Second)
		stop()
	})
}

// The agent does not bind a device that is in use. The claim waits, and the error names the user.
func TestAgentTakesNothingInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		r.OpenNode("47", "dd", diskNode)
		stop := r.start()
		vm := r.claim("vm", "vfio")
		r.refuses(vm, diskNode+": process 47 (dd) has it open")
		if writes := r.ListWrites(); len(writes) > 0 {
			t.Errorf("written: %q", writes)
		}
		r.EndProcess("47")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		stop()
	})
}

// An agent that starts continues with the bound devices of the earlier agent.
func TestAgentRestartsWithDevicesUnderVFIO(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		stop := r.start()
		vm, pod := r.claim("vm", "vfio"), r.claim("pod", "")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		writes := len(r.ListWrites())
		stop()
		stop = r.start()
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		if now := r.ListWrites(); len(now) != writes || r.taint() != "" {
			t.Errorf("written: %q; taints %q", now[writes:], r.taint())
		}
		r.refuses(pod, "until it is returned to driver nvme")
		r.OpenNode("47", "qemu", "/dev/vfio/3")
		r.unprepare(vm)
		stop()
		stop = r.start()
		r.refuses(pod, "process 47 (qemu)")
		r.EndProcess("47")
		r.bound("nvme", changes.RetryInterval+time.Second)
		r.gives(pod, diskNode)
		stop()
	})
}

// The agent's directory is removed while a claim has a device. The agent writes the record again,
// and the next agent returns the device.
func TestAgentRewritesPassthroughRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		stop := r.start()
		vm := r.claim("vm", "vfio")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		r.wipes("run/chandler/journal/rebind")
		time.Sleep(changes.RetryInterval + time.Second)
		stop()
		stop = r.start()
		r.unprepare(vm)
		r.bound("nvme", time.Second)
		stop()
	})
}

// The next agent continues after an agent that was killed before any of its writes, whether the
// claim still exists or not.
func TestAgentIsKilledDuringPassthrough(t *testing.T) {
	for step := range 7 {
		for _, wanted := range []bool{true, false} {
			t.Run(fmt.Sprintf("%d %v", step, wanted), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := newRebinding(t)
					stop := r.start()
					vm, pod := r.claim("vm", "vfio"), r.claim("pod", "")
					r.Kill(step)
					err := r.prepareAgain(vm)
					if (step < 3) != (err != nil) {
						t.Fatalf("prepare: %v", err)
					}
					if step >= 3 {
						r.unprepare(vm)
						time.Sleep(time.Second)
					}
					stop()
					r.Kill(-1)
					stop = r.start()
					if wanted {
						r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
						r.bound("vfio-pci", time.Minute)
					}
					r.unprepare(vm)
					r.bound("nvme", changes.RetryInterval+time.Second)
					r.gives(pod, diskNode)
					stop()
				})
			})
		}
	}
}

// A driver refuses the returned disk. The disk is unhealthy, with the driver's reason, until the
// driver accepts it.
func TestAgentIsRefusedByADriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		stop := r.start()
		vm, pod := r.claim("vm", "vfio"), r.claim("pod", "")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		r.RefuseProbes("nvme", syscall.ENODEV)
		r.unprepare(vm)
		r.offers(diskName, "")
		if got := r.taint(); !strings.Contains(got, string(discovery.ConditionDriverUnbound)) {
			t.Errorf("taint %q", got)
		}
		r.refuses(pod, "it is not returned to driver nvme: driver nvme did not take it")
		r.RefuseProbes("nvme", nil)
		r.bound("nvme", changes.RetryInterval+time.Second)
		r.gives(pod, diskNode)
		r.offers(diskName, "")
		if got := r.taint(); got != "" {
			t.Errorf("taint %q", got)
		}
		stop()
	})
}

// A reboot ends all bindings. The next agent has nothing to return, and binds the device of a claim
// that pods still have again.
func TestAgentBindsToVFIOAfterAReboot(t *testing.T) {
	for _, ends := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			r := newRebinding(t)
			stop := r.start()
			vm := r.claim("vm", "vfio")
			r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
			stop()
			r.Reboot()
			r.boot = "second"
			writes := len(r.ListWrites())
			stop = r.start()
			if now := r.ListWrites(); len(now) != writes {
				t.Errorf("written after the boot: %q", now[writes:])
			}
			r.bound("nvme", 0)
			if !ends {
				r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
				r.bound("vfio-pci", 0)
			}
			r.unprepare(vm)
			r.bound("nvme", 2*time.Second)
			if now := r.ListWrites(); ends && len(now) != writes {
				t.Errorf("written: %q", now[writes:])
			}
			stop()
		})
	}
}

// classicVFIO returns rules that offer the disk under vfio by the device plugin API.
func classicVFIO(t *testing.T) *rules.Rules {
	classic := discovery.ModeDevicePlugin
	entry := rules.Resource{Selector: rulestest.CompileSelector(t, `device.attributes["chandler.dev"].?vfioDriver.hasValue()`), Name: "example.com/disk", Mode: &classic, Want: discovery.Parameters{discovery.Driver: discovery.DriverVFIO}}
	return &rules.Rules{Mode: discovery.ModeDRA, Resources: []rules.Resource{entry}}
}

// A resource of the device plugin API has its devices under vfio as long as the resource is
// configured, and as long as a pod has a device.
func TestAgentBindsToVFIOForAResource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		with := classicVFIO(t)
		r.OpenNode("47", "dd", diskNode)
		stop := r.run(r.config(with))
		has := func(ids ...string) {
			t.Helper()
			r.mu.Lock()
			defer r.mu.Unlock()
			if !slices.Equal(r.healthy["example.com/disk"], ids) {
				t.Errorf("healthy: %q, want %q", r.healthy, ids)
			}
		}
		r.offers("", "") // the disk is in use
		r.bound("nvme", 0)
		r.EndProcess("47")
		r.bound("vfio-pci", placement.WorkInterval+time.Minute)
		has(diskFunction)
		r.allocate("example.com/disk", diskFunction, "/dev/vfio/3")
		time.Sleep(time.Minute)
		stop()
		stop = r.run(r.config(with))
		r.offers("", "example.com/disk")
		has(diskFunction)
		r.bound("vfio-pci", 0)

		r.changes <- Change{Settings: Settings{Rules: &rules.Rules{Mode: discovery.ModeDRA}, Passthrough: everything}}
		r.bound("vfio-pci", time.Minute)
		r.mu.Lock()
		clear(r.allocated) // the pod has ended
		r.mu.Unlock()
		r.bound("nvme", 2*time.Minute)
		r.offers(diskName, "")
		r.gives(r.claim("pod", ""), diskNode)
		stop()
	})
}

// If the record of the original state cannot be read, a resource gets its device back once no pod
// has it.
func TestAgentBindsToVFIOForAResourceWithoutTheRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		with := classicVFIO(t)
		with.Resources[0].Selector = rulestest.CompileSelector(t, `device.attributes["resource.kubernetes.io"].pciBusID == "`+diskFunction+`"`)
		stop := r.run(r.config(with))
		r.offers("", "example.com/disk")
		r.bound("vfio-pci", time.Minute)
		r.allocate("example.com/disk", diskFunction, "/dev/vfio/3")
		time.Sleep(time.Minute)
		stop()
		writes := len(r.ListWrites())
		record := filepath.Join(r.dir, "run/chandler/journal/rebind/iommu-group-3.json")
		if err := os.WriteFile(record, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		stop = r.run(r.config(with))
		time.Sleep(time.Minute)
		if now := r.ListWrites(); len(now) != writes {
			t.Errorf("written while a pod has it: %q", now[writes:])
		}
		r.mu.Lock()
		clear(r.healthy)   // from the earlier agent
		clear(r.allocated) // the pod has ended
		r.mu.Unlock()
		time.Sleep(placement.WorkInterval + time.Minute)
		r.bound("vfio-pci", 0)
		r.mu.Lock()
		if got := r.healthy["example.com/disk"]; !slices.Equal(got, []string{diskFunction}) {
			t.Errorf("healthy: %q", got)
		}
		r.mu.Unlock()
		stop()
	})
}

// A driver that does not release a device delays only that device.
func TestAgentBindsToVFIOWhileADriverHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		r.File("dev/nvme1", "c 240:1")
		r.Add("0000:04:00.1", "nvme", "4")
		hangs := make(chan struct{})
		r.Hangs["nvme"] = hangs
		stop := r.run(r.config(&rules.Rules{Mode: discovery.ModeDRA}))
		r.offers(diskName+" pci-0000-04-00-1", "")
		vm, pod := r.claim("vm", "vfio"), r.claimFor("pci-0000-04-00-1", "pod", "")
		r.refuses(vm, "unbind it from nvme has not ended after 20s")
		if err := r.prepareAgain(pod); err != nil {
			t.Error(err)
		}
		r.refuses(vm, "has not ended yet")
		close(hangs)
		synctest.Wait()
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		r.unprepare(vm)
		r.bound("nvme", 2*time.Second)
		stop()
	})
}

// The administrator disables passthrough while a claim has the disk under vfio. The claim
// continues. An agent without privilege reports that it cannot return the disk, and an agent with
// privilege returns it.
func TestAgentThatMayNotGiveBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		stop := r.start()
		vm, pod := r.claim("vm", "vfio"), r.claim("pod", "")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		stop()
		config := r.config(&rules.Rules{Mode: discovery.ModeDRA})
		config.Write, config.Settings.Passthrough = nil, nil
		stop = r.run(config)
		r.offers(diskName, "")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		if got := r.taint(); got != "" {
			t.Errorf("taint %q", got)
		}
		r.unprepare(vm)
		r.bound("vfio-pci", time.Minute)
		if got := r.taint(); !strings.Contains(got, string(discovery.ConditionDriverUnbound)) {
			t.Errorf("taint %q", got)
		}
		r.refuses(pod, "the agent may not change the host")
		stop()
		stop = r.start()
		r.bound("nvme", changes.RetryInterval)
		r.gives(pod, diskNode)
		stop()
	})
}

// The node reboots while the agent binds a device. The next agent changes nothing on its own
// initiative.
func TestAgentRebootsWhileItBindsToVFIO(t *testing.T) {
	for step := range 7 {
		synctest.Test(t, func(t *testing.T) {
			r := newRebinding(t)
			stop := r.start()
			vm := r.claim("vm", "vfio")
			r.Kill(step)
			if err := r.prepareAgain(vm); err == nil {
				r.unprepare(vm)
				time.Sleep(time.Second)
			}
			stop()
			r.Kill(-1)
			r.Reboot()
			r.boot = "second"
			writes := len(r.ListWrites())
			stop = r.start()
			r.bound("nvme", time.Minute)
			if now := r.ListWrites(); len(now) != writes {
				t.Errorf("after %d writes: written after the boot: %q", step, now[writes:])
			}
			r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
			r.unprepare(vm)
			r.bound("nvme", 2*time.Second)
			stop()
		})
	}
}
