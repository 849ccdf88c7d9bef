package driver

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/claimstatus"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

// commonName is the common name of the interchangeable devices in tests.
const commonName = "channels"

// channels returns n interchangeable devices.
func channels(n int) (devices []rules.Offered) {
	for i := range n {
		d := gpu(fmt.Sprint("channel-", i), int64(i))
		d.Interchangeable, d.Identity = commonName, ""
		d.Attributes.SetInt("channel", int64(i))
		devices = append(devices, d)
	}
	slices.SortFunc(devices, func(a, b rules.Offered) int { return strings.Compare(a.Name, b.Name) })
	return devices
}

// anyChannel returns a claim with n allocations by the common name.
func anyChannel(name string, n int) *resourceapi.ResourceClaim {
	return taking(claim(name, slices.Repeat([]string{commonName}, n)...), discovery.Shares, "1")
}

// severalChannels returns a claim with one allocation of n devices.
func severalChannels(name string, n int) *resourceapi.ResourceClaim {
	return taking(claim(name, commonName), discovery.Shares, fmt.Sprint(n))
}

// expectChosen reports an error unless a claim has the devices, by its record and by its spec.
func expectChosen(t *testing.T, b *bench, c *resourceapi.ResourceClaim, want ...string) {
	t.Helper()
	record, _ := b.ledger.Claim(c.UID)
	var got, nodes []string
	for _, r := range record.Results {
		got = append(got, r.Source)
		if r.Silicon != r.Source || !r.Whole || r.Consumes != nil {
			t.Errorf("the record of claim %s is not of a whole device: %+v", c.Name, r)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("claim %s has %q, want %q", c.Name, got, want)
	}
	for _, edits := range b.specOf(c) {
		for _, node := range edits.DeviceNodes {
			nodes = append(nodes, strings.TrimPrefix(node.Path, "/dev/"))
		}
		if !slices.Contains(edits.Env, "CHANDLER_DEVICES="+strings.Join(want, ",")) {
			t.Errorf("claim %s has the variables %q", c.Name, edits.Env)
		}
	}
	slices.Sort(nodes)
	if sorted := slices.Sorted(slices.Values(want)); !slices.Equal(nodes, sorted) {
		t.Errorf("claim %s has the nodes %q, want %q", c.Name, nodes, sorted)
	}
}

// Each allocation by a common name gets the first free device in numeric order. A claim keeps its
// device when it is prepared again, also by another agent, and after a reboot.
func TestChooseDevice(t *testing.T) {
	b := newBench(t).restart().offers(channels(11)...)
	one, two, three := anyChannel("one", 1), anyChannel("two", 2), anyChannel("three", 1)
	mustPrepare(t, b, one)
	mustPrepare(t, b, two)
	expectChosen(t, b, one, "channel-0")
	expectChosen(t, b, two, "channel-1", "channel-2")
	mustUnprepare(t, b, one)
	for _, again := range []func(){func() {}, func() { b.restart() }, func() { b.boot = "boot-2"; b.restart() }} {
		again()
		b.offers(channels(11)...)
		answer := mustPrepare(t, b, two)
		expectChosen(t, b, two, "channel-1", "channel-2")
		if len(answer) != 2 || answer[0].DeviceName != commonName || answer[0].ShareID == nil || *answer[0].ShareID == *answer[1].ShareID {
			t.Errorf("the kubelet's answer is %+v", answer)
		}
	}
	mustPrepare(t, b, three)
	expectChosen(t, b, three, "channel-0")
	rest := anyChannel("rest", 8)
	mustPrepare(t, b, rest)
	expectChosen(t, b, rest, "channel-3", "channel-4", "channel-5", "channel-6", "channel-7", "channel-8", "channel-9", "channel-10")
	mustRefuse(t, b, anyChannel("late", 1), "0 of its 11 devices are free", "in use by claim default/three")
	mustUnprepare(t, b, three)
	mustPrepare(t, b, anyChannel("late", 1))
}

// An allocation of several devices gets as many, whether the claim is new, prepared again, or of
// before a restart.
func TestChooseSeveralDevices(t *testing.T) {
	b := newBench(t).restart().offers(channels(5)...)
	first, c := anyChannel("first", 1), severalChannels("c", 3)
	mustPrepare(t, b, first)
	mustPrepare(t, b, c)
	mustUnprepare(t, b, first)
	for range 2 {
		answer := mustPrepare(t, b, c)
		expectChosen(t, b, c, "channel-1", "channel-2", "channel-3")
		var ids []string
		for i, device := range answer {
			ids = append(ids, device.CDIDeviceIDs...)
			if device.DeviceName != commonName || *device.ShareID != *answer[0].ShareID {
				t.Errorf("device %d of the kubelet's answer is %+v", i, device)
			}
		}
		if slices.Sort(ids); len(slices.Compact(ids)) != 3 {
			t.Errorf("the CDI devices are %q", ids)
		}
		b.restart().offers(channels(5)...)
	}
	mustRefuse(t, b, severalChannels("d", 3), "2 of its 5 devices are free, want 3", "in use by claim default/c")
	mustRefuse(t, b, severalChannels("none", 0), "0 of its devices")
	mustRefuse(t, b, severalChannels("many", 33), "33 of its devices")
	mustPrepare(t, b, severalChannels("e", 2))

	b.offers(slices.Delete(channels(5), 2, 3)...)
	if written := conditionsOf(b, c); len(written) != 1 || written[0].Reason != claimstatus.ReasonGone {
		t.Errorf("with one of its devices gone, the claim has the conditions %+v", written)
	}
}

// After a reboot, other claims get the device of a claim that is not prepared again yet only if no other
// device is free. Then the claim gets another device.
func TestChooseDeviceAfterReboot(t *testing.T) {
	b := newBench(t).restart().offers(channels(2)...)
	one, two, three := anyChannel("one", 1), anyChannel("two", 1), anyChannel("three", 1)
	mustPrepare(t, b, one)
	b.boot = "boot-2"
	b.restart().offers(channels(2)...)
	mustPrepare(t, b, two)
	expectChosen(t, b, two, "channel-1")
	mustPrepare(t, b, one)
	expectChosen(t, b, one, "channel-0")
	b.boot = "boot-3"
	b.restart().offers(channels(2)...)
	mustPrepare(t, b, three)
	expectChosen(t, b, three, "channel-0")
	mustPrepare(t, b, two)
	mustUnprepare(t, b, two)
	mustPrepare(t, b, one)
	expectChosen(t, b, one, "channel-1")
}

// After a reboot, a claim keeps an unhealthy device: its pod may not start with another one.
func TestChooseUnhealthyDeviceAfterReboot(t *testing.T) {
	b := newBench(t).restart().offers(channels(2)...)
	c := anyChannel("c", 1)
	mustPrepare(t, b, c)
	b.boot = "boot-2"
	devices := channels(2)
	devices[0].Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionUnhealthy}
	b.restart().offers(devices...)
	mustPrepare(t, b, c)
	expectChosen(t, b, c, "channel-0")
}

// The driver does not choose a device that has another consumer by any name or API, or that is not
// usable. It chooses a withheld device last, and before that a device that lacks an attribute.
func TestChooseFreeDevice(t *testing.T) {
	for name, others := range map[string]func(b *bench, first *rules.Offered) map[string]string{
		"by its own name": func(b *bench, _ *rules.Offered) map[string]string {
			mustPrepare(t, b, claim("earlier", "channel-0"))
			b.restart()
			return nil
		},
		"by the device plugin API": func(b *bench, _ *rules.Offered) map[string]string {
			grant := &allocation.Grant{Resource: "nvidia.com/imex", ID: "channel0", Devices: []string{"channel-0"}, Silicon: []string{"channel-0"}, Exclusive: true, Container: "default/training main"}
			if err := b.config.Ledger.Grants.AllocateIDs(b.view.Load(), []*allocation.Grant{grant}); err != nil {
				t.Fatal(err)
			}
			return nil
		},
		"unhealthy": func(_ *bench, first *rules.Offered) map[string]string {
			first.Health = discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionUnhealthy}
			return nil
		},
		"without an attribute": func(b *bench, first *rules.Offered) map[string]string {
			first.Attributes = maps.Clone(first.Attributes)
			delete(first.Attributes, "channel")
			return map[string]string{}
		},
		"withheld": func(*bench, *rules.Offered) map[string]string { return map[string]string{"channel-0": "it moves"} },
	} {
		t.Run(name, func(t *testing.T) {
			devices := channels(2)
			b := newBench(t).restart().offers(devices...)
			withheld := others(b, &devices[0])
			b.Publish(&rules.Snapshot{Devices: devices}, withheld)
			one, two := anyChannel("one", 1), anyChannel("two", 1)
			mustPrepare(t, b, one)
			expectChosen(t, b, one, "channel-1")
			if withheld == nil {
				mustRefuse(t, b, two)
				return
			}
			mustPrepare(t, b, two)
			expectChosen(t, b, two, "channel-0")
		})
	}
}

// Claims of one call get different devices, and as many as there are.
func TestChooseConcurrently(t *testing.T) {
	const all = 40
	b := newBench(t).restart().offers(channels(all)...)
	var claims []*resourceapi.ResourceClaim
	for i := range all {
		claims = append(claims, anyChannel(fmt.Sprint("c-", i), 1))
	}
	results, err := b.PrepareResourceClaims(t.Context(), claims)
	if err != nil {
		t.Fatal(err)
	}
	owners := make(map[string]types.UID)
	for _, c := range claims {
		if err := results[c.UID].Err; err != nil {
			t.Fatal(err)
		}
		record, _ := b.ledger.Claim(c.UID)
		if other, taken := owners[record.Results[0].Source]; taken {
			t.Errorf("%s has two owners, %s and %s", record.Results[0].Source, c.UID, other)
		}
		owners[record.Results[0].Source] = c.UID
	}
}

// A device that has vanished remains with its claim, and the claim gets no other device.
func TestChosenDeviceIsGone(t *testing.T) {
	b := newBench(t).restart().offers(channels(3)...)
	c := anyChannel("c", 1)
	mustPrepare(t, b, c)
	b.offers(channels(3)[1:]...)
	mustRefuse(t, b, c, "channel-0 is gone")
	if health := b.healthFor(c); health.Key() != discovery.ConditionGone {
		t.Errorf("the health is %+v", health)
	}
	other := anyChannel("other", 1)
	mustPrepare(t, b, other)
	expectChosen(t, b, other, "channel-1")
}

// A claim with admin access gets a device that other claims may have, and keeps no claim from it.
func TestChooseForAdmin(t *testing.T) {
	b := newBench(t).restart().offers(channels(1)...)
	admin, other := anyChannel("admin", 1), anyChannel("other", 1)
	admin.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	mustPrepare(t, b, other)
	mustPrepare(t, b, admin)
	expectChosen(t, b, admin, "channel-0")
	mustUnprepare(t, b, other)
	mustPrepare(t, b, other)
	expectChosen(t, b, other, "channel-0")
}

// The scheduler allocates as many interchangeable devices as the driver can give, whatever their
// names were when claims got them.
func TestSchedulerAndDriverAgreeOnInterchangeable(t *testing.T) {
	for _, kept := range pooltest.FeatureSets() {
		t.Run(fmt.Sprintf("%+v", kept), func(t *testing.T) {
			b := newBench(t).restart().offers(channels(6)...)
			mustPrepare(t, b, claim("earlier", "channel-0"))
			mustPrepare(t, b, anyChannel("chosen", 2))
			in, _ := b.poolInput(time.Now())
			in.Features = kept
			published, _ := pool.BuildPools(in)
			s := pooltest.NewScheduler(t, kept).Publish(published)
			for _, c := range []*resourceapi.ResourceClaim{claim("earlier", "channel-0"), anyChannel("chosen", 2)} {
				s.Claims[c.UID] = c
			}
			for i := range 3 {
				c, allocated := s.AllocateDevice(types.UID(fmt.Sprint("new-", i)), resourceapi.ExactDeviceRequest{})
				if !allocated {
					t.Fatalf("%d of 3 devices can be allocated", i)
				}
				mustPrepare(t, b, c)
			}
			if c, allocated := s.AllocateDevice("late", resourceapi.ExactDeviceRequest{}); allocated {
				t.Errorf("a device is allocated that no claim can have: %v", c.Status.Allocation)
			}
		})
	}
}

// functions returns n interchangeable virtual functions of an adapter.
func functions(n int) []rules.Offered {
	devices := channels(n)
	for i := range devices {
		devices[i].PartOf = &discovery.Silicon{Name: "adapter"}
	}
	return devices
}

// Interchangeable parts of a physical device are allocated together and exclude the whole device. A
// claim keeps its part, by its own name or chosen by the common name, while the server or the
// configuration changes the names that are published.
func TestChooseFunction(t *testing.T) {
	b := newBench(t).restart().offers(functions(3)...)
	earlier, one := claim("earlier", "channel-1"), anyChannel("one", 1)
	mustPrepare(t, b, earlier)
	for _, listed := range []resourceapi.QualifiedName{"channel", "", "channel"} {
		b.Publish(&rules.Snapshot{Devices: functions(3), Attributes: []resourceapi.QualifiedName{listed}}, nil)
		for _, c := range []*resourceapi.ResourceClaim{earlier, one} {
			mustPrepare(t, b, c)
		}
		record, _ := b.ledger.Claim(one.UID)
		if r := record.Results[0]; r.Source != "channel-0" || r.Silicon != "adapter" || r.Whole {
			t.Errorf("the record is not of a part: %+v", r)
		}
		b.restart()
	}
	b.offers(functions(3)...)
	if written := conditionsOf(b, one); len(written) != 1 || written[0].Message != "channel-0" {
		t.Errorf("the claim has the conditions %+v", written)
	}
	mustPrepare(t, b, anyChannel("two", 1))
	mustRefuse(t, b, anyChannel("three", 1), "0 of its 3 devices are free")
	mustUnprepare(t, b, earlier)
	mustPrepare(t, b, anyChannel("three", 1))
	mustUnprepare(t, b, one)

	whole := gpu("adapter", 9)
	b.offers(append([]rules.Offered{whole}, functions(3)...)...)
	mustRefuse(t, b, claim("whole", "adapter"), "in use by claim")
}

// No part of a physical device is chosen while a claim has the whole device.
func TestChooseFunctionOfWhole(t *testing.T) {
	b := newBench(t).restart().offers(append([]rules.Offered{gpu("adapter", 9)}, functions(3)...)...)
	mustPrepare(t, b, claim("whole", "adapter"))
	mustRefuse(t, b, anyChannel("one", 1), "0 of its 3 devices are free", "in use by claim default/whole")
}

// A claim keeps its chosen device when the devices lose their common name, as by another driver or by
// on-demand creation. A claim that has no device yet is refused.
func TestChosenDeviceLosesCommonName(t *testing.T) {
	b := newBench(t).restart().offers(functions(3)...)
	one := anyChannel("one", 1)
	mustPrepare(t, b, one)
	named := functions(3)
	for i := range named {
		named[i].Interchangeable = ""
	}
	for range 2 {
		b.offers(named...)
		mustPrepare(t, b, one)
		record, _ := b.ledger.Claim(one.UID)
		if r := record.Results[0]; r.Source != "channel-0" || r.Silicon != "adapter" || r.Whole || !r.IsChosen() {
			t.Errorf("the record is not of a part: %+v", r)
		}
		if written := conditionsOf(b, one); len(written) != 1 || written[0].Message != "channel-0" {
			t.Errorf("the claim has the conditions %+v", written)
		}
		in, _ := b.poolInput(time.Now())
		in.Features = features.All()
		published, _ := pool.BuildPools(in)
		for _, device := range pool.SlicesOf(published)[0].Devices {
			if device.Name == "channel-0" {
				t.Error("the device of the claim is published for other claims")
			}
		}
		b.restart()
	}
	b.offers(named...)
	mustRefuse(t, b, anyChannel("two", 1), commonName)
	mustUnprepare(t, b, one)
}

// Claims that were allocated before a change of the published names, and are prepared after it, get
// devices: those that they name, or any by the common name. A device never has two claims.
func TestChooseAfterChangeOfNames(t *testing.T) {
	b := newBench(t).restart().offers(channels(3)...)
	b.Publish(&rules.Snapshot{Devices: channels(3), Attributes: []resourceapi.QualifiedName{"channel"}}, nil)
	one := anyChannel("one", 1) // allocated while the devices were published as one
	mustPrepare(t, b, one)
	expectChosen(t, b, one, "channel-0")
	b.restart().offers(channels(3)...)
	named, late := claim("named", "channel-1"), claim("late", "channel-0") // allocated while they were published one by one
	mustPrepare(t, b, named)
	mustRefuse(t, b, late, "in use by claim default/one")
	two := anyChannel("two", 1)
	mustPrepare(t, b, two)
	expectChosen(t, b, two, "channel-2")
	mustRefuse(t, b, anyChannel("three", 1), "0 of its 3 devices are free")
	mustUnprepare(t, b, one)
	mustPrepare(t, b, late)
}

// A claim keeps its devices if the API server no longer has the fields of consumable capacity in its
// allocation, as after a downgrade to a version without them.
func TestChosenDevicesWithoutConsumableCapacity(t *testing.T) {
	b := newBench(t).restart().offers(channels(4)...)
	c := severalChannels("c", 2)
	mustPrepare(t, b, c)
	downgraded := c.DeepCopy()
	for i := range downgraded.Status.Allocation.Devices.Results {
		r := &downgraded.Status.Allocation.Devices.Results[i]
		r.ShareID, r.ConsumedCapacity = nil, nil
	}
	for range 2 {
		mustPrepare(t, b, downgraded)
		expectChosen(t, b, c, "channel-0", "channel-1")
		b.restart().offers(channels(4)...)
	}
	mustUnprepare(t, b, c)
}
