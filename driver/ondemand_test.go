package driver

import (
	"context"
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// divisible describes physical functions with their existing and possible virtual functions.
var divisible = &discovery.Family{
	Name: "divisible", Doc: "functions that can be divided, for tests",
	Match:  []discovery.Match{{Bus: "pci", PCIClass: "02"}},
	Create: pci.MakeVirtual,
	Remove: pci.UnmakeVirtual,
	Describe: func(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
		for _, function := range found {
			d, err := pci.DescribeFunction(host, function)
			virtual, unmadeErr := pci.UncreatedFunctions(host, d)
			for _, err := range []error{err, unmadeErr} {
				problems = append(problems, discovery.Problems(d.Name, err)...)
			}
			for i := range virtual {
				virtual[i].Attributes.SetString("kind", "nic")
			}
			d.Attributes.SetString("kind", "nic")
			if divided, _ := pci.HasVirtualFunctions(function); !divided {
				devices = append(devices, d)
			}
			devices = append(devices, virtual...)
		}
		return devices, problems
	},
}

// A physical function and a virtual function of it are never allocated at the same time, whether or
// not the virtual function exists already.
func TestSchedulerGivesOneForm(t *testing.T) {
	const physical = "pci-0000-03-00-0"
	k := passthroughtest.New(t)
	k.AddPhysical(&passthroughtest.Physical{Address: "0000:03:00.0", Total: 3})
	host := k.Host()
	host.VirtualFunctions = []discovery.Selection[int]{{Selects: func(d discovery.Device) (bool, error) { return d.Attributes.String("function") == "physical", nil }}}
	look := func() *rules.Snapshot {
		return (&rules.Rules{Mode: discovery.ModeDRA}).ApplyTo(scan.ReadHost(host, []*discovery.Family{divisible}))
	}
	before := look()
	if err := k.SetVirtual("0000:03:00.0", 3); err != nil {
		t.Fatal(err)
	}
	after := look()
	if len(before.Devices) != 4 || len(after.Devices) != 3 {
		t.Fatalf("%d devices before and %d after", len(before.Devices), len(after.Devices))
	}
	function := func(kind string) resourceapi.ExactDeviceRequest {
		return resourceapi.ExactDeviceRequest{Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf("device.attributes[%q].function == %q", discovery.Domain, kind)}}}}
	}
	for _, kept := range pooltest.FeatureSets() {
		for _, first := range []string{"physical", "virtual"} {
			published := func(s *rules.Snapshot) *pooltest.Scheduler {
				p, problems := pool.BuildPools(pool.Input{Node: "node", Snapshot: s, Features: kept})
				if len(problems) > 0 {
					t.Fatalf("problems: %v", problems)
				}
				return pooltest.NewScheduler(t, kept).Publish(p)
			}
			scheduler := published(before)
			_, given := scheduler.AllocateDevice("first", function(first))
			if !given && kept.Counters {
				t.Errorf("%+v: no %s function is given", kept, first)
			}
			for _, kind := range []string{"virtual", "physical", "virtual"} {
				scheduler.AllocateDevice(types.UID(fmt.Sprint(kind, len(scheduler.Claims))), function(kind))
			}
			if first == "virtual" && given { // the virtual functions are created then
				scheduler.Slices = published(after).Slices
				for i := range 3 {
					scheduler.AllocateDevice(types.UID(fmt.Sprint("later", i)), function("virtual"))
				}
			}
			has := make(map[bool][]string)
			for _, claim := range scheduler.Claims {
				device := claim.Status.Allocation.Devices.Results[0].Device
				has[device == physical] = append(has[device == physical], device)
			}
			if len(has[true]) > 0 && len(has[false]) > 0 || len(has[true]) > 1 {
				t.Errorf("%+v, first %s: given are %v", kept, first, has)
			}
			if first == "virtual" && kept.Counters && len(has[false]) != 3 {
				t.Errorf("%+v: virtual functions given: %s", kept, strings.Join(has[false], " "))
			}
		}
	}
}

// A reboot removes a created device, and the next Prepare of its claim creates the device again.
// The new device must have the same driver.
func TestCreatedAgainAfterReboot(t *testing.T) {
	for driver, want := range map[string]string{"amdgpu": "", "vfio-pci": `device a has changed drivers: "vfio-pci" is bound to it now and "amdgpu" was`} {
		b := newBench(t)
		unmade, made := gpu("a", 1), gpu("a", 1)
		unmade.Attributes, unmade.Edits, unmade.Identity = discovery.Attributes{}, specs.ContainerEdits{}, ""
		unmade.Creation = &discovery.Creation{Unit: "u"}
		b.config.Configure = func(d discovery.Device, _ discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
			if d.Creation == nil {
				return d, nil, nil
			}
			return d, func(context.Context) error { b.offers(made); return nil }, nil
		}
		b.restart().offers(unmade)
		c := claim("c", "a")
		mustPrepare(t, b, c)
		b.boot = "boot-2"
		made.Attributes = discovery.Attributes{}
		made.Attributes.SetString("driver", driver)
		b.restart().offers(unmade)
		if want == "" {
			mustPrepare(t, b, c)
		} else {
			mustRefuse(t, b, c, want)
		}
	}
}
