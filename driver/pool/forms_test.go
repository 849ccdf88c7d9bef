package pool

import (
	"maps"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool/pooltest"
	"chandler.dev/internal/ledger/allocation"
)

// While claims have a device in one form, the pool does not publish the device in another form,
// because the driver would refuse such allocations. The device stays published in its present form.
func TestForms(t *testing.T) {
	has := func(name string, amounts map[string]string) *allocation.Claim {
		r := allocation.Result{Device: name, Source: "a", Silicon: "a", Whole: true}
		for capacity, amount := range amounts {
			if r.Consumes == nil {
				r.Consumes = make(allocation.Amounts)
			}
			r.Consumes[resourceapi.QualifiedName(capacity)] = resource.MustParse(amount)
		}
		return &allocation.Claim{Namespace: "default", Name: "c", Results: []allocation.Result{r}}
	}
	plain := byMemory("a", 8)
	plain.Sharing = nil
	replicas := byMemory("a", 8)
	replicas.Capacity.Set(discovery.Shares, 4)
	replicas.Sharing = byNumber("a", 4).Sharing
	units := byMemory("a", 8)
	alone, some := has("a", nil), has("a", map[string]string{"memory": "2Gi", "cores": "0"})
	share := has("a", map[string]string{"memory": "0", "cores": "0", "shares": "1"})
	numbered, beyond := has("a-share-01", map[string]string{"shares": "1"}), has("a-share-07", map[string]string{"shares": "1"})
	today, before := features.All(), without("DRAConsumableCapacity")
	const all = "a b"
	for name, test := range map[string]struct {
		claim  *allocation.Claim
		now    rules.Offered
		server features.Set
		want   string
	}{
		"alone":                    {alone, plain, today, all},
		"units":                    {some, units, today, all},
		"replicas":                 {share, replicas, today, all},
		"numbered":                 {numbered, replicas, before, "a-share-00 a-share-01 a-share-02 a-share-03 b"},
		"units where none can be":  {alone, units, before, all},
		"alone, then units":        {alone, units, today, "b"},
		"alone, then replicas":     {alone, replicas, today, "b"},
		"alone, then numbered":     {alone, replicas, before, "b"},
		"units, then replicas":     {some, replicas, today, "b"},
		"units, then alone":        {some, plain, today, "b"},
		"replicas, then units":     {share, units, today, "b"},
		"replicas, then alone":     {share, plain, today, "b"},
		"numbered, then alone":     {numbered, plain, today, "b"},
		"numbered, then fewer":     {beyond, replicas, before, "b"},
		"1.35 to 1.36, replicas":   {numbered, replicas, today, "b"},
		"1.35 to 1.36, units":      {alone, units, today, "b"},
		"1.36 to 1.35, replicas":   {share, replicas, before, "b"},
		"1.36 to 1.35, units":      {some, units, before, "b"},
		"for administration alone": {admin(alone), units, today, all},
	} {
		t.Run(name, func(t *testing.T) {
			in := Input{Node: "node", Snapshot: &rules.Snapshot{Devices: []rules.Offered{test.now, {Device: discovery.Device{Name: "b"}}}}, Features: test.server, Claims: []*allocation.Claim{test.claim}}
			pool, problems := BuildPools(in)
			if got := namesIn(pool); got != test.want {
				t.Errorf("published %q, want %q", got, test.want)
			}
			if left := test.want == "b"; left != (len(problems) == 1) || left && !strings.Contains(problems[0].Error(), "claim default/c has it") {
				t.Errorf("problems %v", problems)
			}
			in.Claims = nil
			if pool, _ := BuildPools(in); namesIn(pool) == "b" {
				t.Error("left out though the claim has ended")
			}
		})
	}
}

// A device with unlimited sharing has no form, however it is published. Devices that compete for
// counters are not published while the scheduler cannot see the consumption of one of them.
func TestFormsOfOthers(t *testing.T) {
	kvm := rules.Offered{Device: discovery.Device{Name: "a", Shareable: true}}
	claim := &allocation.Claim{Results: []allocation.Result{{Pool: "node/other", Device: "a-share-07", Source: "a", Silicon: "a", Whole: true, Shared: true}}}
	pool, _ := BuildPools(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: []rules.Offered{kvm}}, Features: features.All(), Claims: []*allocation.Claim{claim}})
	if got := namesIn(pool); got != "a" {
		t.Errorf("of an open device there is %q", got)
	}

	part := pooltest.PartDevice("gpu", "a", 3)
	part.Capacity = discovery.Capacity{}
	part.Capacity.Set(discovery.Shares, 4)
	part.Sharing = byNumber("a", 4).Sharing
	devices := []rules.Offered{part, pooltest.PartDevice("gpu", "b", 3), pooltest.PartDevice("other", "c", 3)}
	claim = hold("a", "gpu", false, part.Takes)
	pool, _ = BuildPools(Input{Node: "node", Snapshot: &rules.Snapshot{Devices: devices}, Features: features.All(), Claims: []*allocation.Claim{claim}})
	if got := namesIn(pool); got != "c" {
		t.Errorf("beside a part in another form there is %q", got)
	}
}

func admin(c *allocation.Claim) *allocation.Claim {
	now := *c
	now.Results = append([]allocation.Result{}, c.Results...)
	now.Results[0].Admin = true
	return &now
}

// namesIn returns the names of the devices in a pool.
func namesIn(pool resourceslice.DriverResources) string {
	return strings.Join(slices.Sorted(maps.Keys(devicesOf(pool))), " ")
}
