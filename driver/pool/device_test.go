package pool

import (
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
)

const gib = 1 << 30

// byMemory returns a device with the given memory in GiB, shared in units of 1 GiB.
func byMemory(name string, memory int64) rules.Offered {
	d := rules.Offered{Device: discovery.Device{Name: name, Capacity: discovery.Capacity{}}}
	d.Capacity.Set("memory", memory*gib)
	d.Capacity.Set("cores", 100)
	d.Sharing = &rules.Sharing{Capacity: "memory", Unit: resource.MustParse("1Gi"), Default: resource.MustParse(fmt.Sprint(memory, "Gi"))}
	return d
}

// byNumber returns a device for the given number of claims.
func byNumber(name string, shares int64) rules.Offered {
	d := rules.Offered{Device: discovery.Device{Name: name, Capacity: discovery.Capacity{}}}
	d.Capacity.Set(discovery.Shares, shares)
	d.Sharing = &rules.Sharing{Capacity: discovery.Shares, Unit: resource.MustParse("1"), Default: resource.MustParse("1")}
	return d
}

func TestSlicesOfSharedDevices(t *testing.T) {
	all := func(kept features.Set, devices ...rules.Offered) map[string]resourceapi.Device {
		out, problems := BuildPools(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: devices}, Features: kept})
		if len(problems) > 0 {
			t.Errorf("problems: %v", problems)
		}
		return devicesOf(out)
	}
	d := all(features.All(), byMemory("a", 8))["a"]
	memory, cores := d.Capacity["memory"].RequestPolicy, d.Capacity["cores"].RequestPolicy
	if d.AllowMultipleAllocations == nil || !*d.AllowMultipleAllocations || memory == nil || cores == nil {
		t.Fatalf("not shared: %v", d)
	}
	for name, quantities := range map[string][2]*resource.Quantity{
		"default":       {memory.Default, new(resource.MustParse("8Gi"))},
		"minimum":       {memory.ValidRange.Min, new(resource.MustParse("1Gi"))},
		"step":          {memory.ValidRange.Step, new(resource.MustParse("1Gi"))},
		"maximum":       {memory.ValidRange.Max, new(resource.MustParse("8Gi"))},
		"cores, unsaid": {cores.Default, new(resource.MustParse("0"))},
	} {
		if quantities[0].Cmp(*quantities[1]) != 0 {
			t.Errorf("%s is %s, want %s", name, quantities[0], quantities[1])
		}
	}
	// A device with a single unit has no step.
	for name, one := range map[string]rules.Offered{"memory": byMemory("a", 1), "shares": byNumber("a", 1)} {
		capacity := all(features.All(), one)["a"].Capacity[resourceapi.QualifiedName(name)]
		if policy := capacity.RequestPolicy; policy.ValidRange.Step != nil || policy.ValidRange.Max.Cmp(*policy.Default) != 0 {
			t.Errorf("%s, one unit: %v", name, policy)
		}
	}
	// A server without sharing cannot express amounts. Numbered shares need no sharing.
	if d := all(without("DRAConsumableCapacity"), byMemory("a", 8)); len(d) != 1 || d["a"].AllowMultipleAllocations != nil || d["a"].Capacity["memory"].RequestPolicy != nil {
		t.Errorf("without sharing, by memory: %v", d)
	}
	if d := all(without("DRAConsumableCapacity"), byNumber("a", 101)); len(d) != 101 || d["a-share-007"].Name == "" {
		t.Errorf("without sharing, by number: %d devices", len(d))
	}
	long := strings.Repeat("a", 54) // leaves room for a number of two digits
	if d := all(without("DRAConsumableCapacity"), byNumber(long, 2)); len(d) != 2 {
		t.Errorf("without sharing, of a long name: %v", d)
	}
	if d := all(without("DRAConsumableCapacity"), byNumber(long+"a", 2)); len(d) != 1 || d[long+"a"].Name == "" {
		t.Errorf("without sharing, of a name that has no room for a number: %v", d)
	}
}
