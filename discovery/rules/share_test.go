package rules

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

const gib = 1 << 30

// everyGPU selects the devices that gpu returns.
const everyGPU = `device.attributes["chandler.dev"].kind == "gpu"`

func shareOf(t *testing.T, share Share, devices ...discovery.Device) *Snapshot {
	t.Helper()
	share.Selector = selector(t, everyGPU)
	rules := &Rules{Sharing: []Share{share}}
	return rules.ApplyTo(&discovery.Snapshot{Devices: devices})
}

func TestShareByNumber(t *testing.T) {
	gke := gpu("nvidia0", "acme", 80*gib)
	gke.PluginOffers[0].Infix = "/vgpu"
	s := shareOf(t, Share{Replicas: 2}, gpu("a", "acme", 80*gib), gke)
	want := [][]discovery.Offer{
		{{Resource: "acme.com/gpu", IDs: []string{"a::0", "a::1"}}},
		{{Resource: "acme.com/gpu", IDs: []string{"nvidia0/vgpu0", "nvidia0/vgpu1"}, Dialect: discovery.Dialect{Infix: "/vgpu"}}},
	}
	for i, d := range s.Devices {
		if diff := cmp.Diff(want[i], d.Offers); diff != "" {
			t.Errorf("%s: offers (-want +got):\n%s", d.Name, diff)
		}
		if n := d.Capacity[discovery.Shares].Value; d.Sharing == nil || d.Sharing.Capacity != discovery.Shares || n.Value() != 2 {
			t.Errorf("%s: sharing %v of %v", d.Name, d.Sharing, d.Capacity)
		}
	}
	if len(s.Problems) > 0 {
		t.Errorf("problems: %v", s.Problems)
	}
}

// If the replaced plugin numbers its only share, further shares continue the numbers.
func TestShareByStem(t *testing.T) {
	numbered := gpu("a", "acme", 80*gib)
	numbered.PluginOffers[0].IDs, numbered.PluginOffers[0].Stem = []string{"card1-0"}, "card1-"
	d := shareOf(t, Share{Replicas: 3}, numbered).Devices[0]
	want := []discovery.Offer{{Resource: "acme.com/gpu", IDs: []string{"card1-0", "card1-1", "card1-2"}, Dialect: discovery.Dialect{Stem: "card1-"}}}
	if diff := cmp.Diff(want, d.Offers); diff != "" {
		t.Errorf("offers (-want +got):\n%s", diff)
	}
	if d.Sharing == nil || d.Sharing.Capacity != discovery.Shares {
		t.Errorf("sharing %v", d.Sharing)
	}
}

// Sharing changes the number of IDs of an open device in the device plugin API. In DRA, the device
// keeps unlimited sharing.
func TestShareableRecounted(t *testing.T) {
	kvm := gpu("kvm", "acme", 0)
	kvm.Shareable = true
	kvm.PluginOffers[0].IDs, kvm.PluginOffers[0].Stem = discovery.CountedIDs("kvm", 1000), "kvm"
	for resource, want := range map[string]string{"": "acme.com/gpu", "example.com/kvm": "example.com/kvm"} {
		s := shareOf(t, Share{Replicas: 2, Resource: resource}, kvm)
		d := s.Devices[0]
		if diff := cmp.Diff([]discovery.Offer{{Resource: want, IDs: []string{"kvm0", "kvm1"}, Dialect: discovery.Dialect{Stem: "kvm"}}}, d.Offers); diff != "" {
			t.Errorf("offers (-want +got):\n%s", diff)
		}
		if _, limited := d.Capacity[discovery.Shares]; limited || d.Sharing != nil || !d.Shareable || len(s.Problems) > 0 {
			t.Errorf("sharing %v of %v, problems %v", d.Sharing, d.Capacity, s.Problems)
		}
	}
}

// SharedEdits apply once the device is shared, and not if sharing fails.
func TestSharedEdits(t *testing.T) {
	d := gpu("a", "acme", 80*gib)
	d.Edits = specs.ContainerEdits{Env: []string{"A=1"}}
	d.SharedEdits = specs.ContainerEdits{Env: []string{"PIPE=/mps"}, Mounts: []*specs.Mount{{HostPath: "/run/mps", ContainerPath: "/mps"}}}
	for name, test := range map[string]struct {
		share  Share
		shared bool
	}{
		"by number":           {Share{Replicas: 2}, true},
		"by memory":           {Share{Capacity: "memory", Unit: resource.MustParse("1Gi"), Resource: "a.b/c"}, true},
		"by what it lacks":    {Share{Capacity: "cores", Unit: resource.MustParse("1"), Resource: "a.b/c"}, false},
		"by more than it has": {Share{Capacity: "memory", Unit: resource.MustParse("1Ti"), Resource: "a.b/c"}, false},
	} {
		got := shareOf(t, test.share, d).Devices[0]
		want := d.Edits
		if test.shared {
			want = discovery.Join(d.Edits, d.SharedEdits)
		}
		if diff := cmp.Diff(want, got.Edits, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if alone := (&Rules{}).ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{d}}).Devices[0]; len(alone.Edits.Mounts) > 0 || len(d.Edits.Mounts) > 0 {
		t.Errorf("alone: %+v", alone.Edits)
	}
}

func TestConsumedAddsUp(t *testing.T) {
	amounts := func(memory, cores string) map[resourceapi.QualifiedName]resource.Quantity {
		return map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory), "cores": resource.MustParse(cores)}
	}
	one := amounts("1Gi", "2")
	c := make(discovery.Consumed)
	c.Add("a", one)
	c.Add("a", amounts("2Gi", "0"))
	c.Add("b", amounts("1Gi", "1"))
	c.Add("whole", nil)
	if diff := cmp.Diff(discovery.Consumed{"a": amounts("3Gi", "2"), "b": amounts("1Gi", "1")}, c); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if diff := cmp.Diff(amounts("1Gi", "2"), one); diff != "" {
		t.Errorf("what was added changed:\n%s", diff)
	}
}

func TestShareLeavesTheScanAlone(t *testing.T) {
	before := gpu("a", "acme", 80*gib)
	shareOf(t, Share{Replicas: 2}, before)
	if _, added := before.Capacity[discovery.Shares]; added || len(before.PluginOffers[0].IDs) != 1 {
		t.Errorf("the device of the scan was changed: %v", before)
	}
}

func TestShareOfAPool(t *testing.T) {
	s := shareOf(t, Share{Replicas: 3, Pool: true, Resource: "rdma/hca"}, gpu("a", "acme", 0), gpu("b", "acme", 0))
	for _, d := range s.Devices {
		want := []discovery.Offer{{Resource: "rdma/hca", IDs: []string{"0", "1", "2"}, Unit: "rdma/hca", Pool: true}}
		if diff := cmp.Diff(want, d.Offers); diff != "" {
			t.Errorf("%s: offers (-want +got):\n%s", d.Name, diff)
		}
	}
}

func TestShareByMemory(t *testing.T) {
	// 3.5 GiB are three units.
	s := shareOf(t, Share{Unit: resource.MustParse("1Gi"), Capacity: "memory", Resource: "aliyun.com/gpu-mem"}, gpu("a", "acme", 7*gib/2))
	d := s.Devices[0]
	want := []discovery.Offer{{Resource: "aliyun.com/gpu-mem", IDs: []string{"a-_-0", "a-_-1", "a-_-2"}, Counts: "memory"}}
	if diff := cmp.Diff(want, d.Offers); diff != "" {
		t.Errorf("offers (-want +got):\n%s", diff)
	}
	if d.Sharing.Default.Cmp(resource.MustParse("3Gi")) != 0 {
		t.Errorf("a claim that says nothing gets %s", d.Sharing.Default.String())
	}
}

// A device whose sharing fails is not offered under an extended resource: no container may get a
// whole device in place of a share.
func TestNotShared(t *testing.T) {
	gi := Share{Unit: resource.MustParse("1Gi"), Capacity: "memory", Resource: "aliyun.com/gpu-mem"}
	kvm := gpu("kvm", "acme", gib)
	kvm.Shareable = true
	numbered := kvm
	numbered.PluginOffers = []discovery.Offer{{Resource: "acme.com/gpu", IDs: []string{"kvm0"}, Dialect: discovery.Dialect{Stem: "kvm"}}}
	counted := gpu("counted", "acme", gib)
	counted.PluginOffers[0].IDs = []string{"0", "1"}
	for name, test := range map[string]struct {
		share  Share
		device discovery.Device
		want   string
	}{
		"unknown memory":  {gi, gpu("a", "acme", 0), "how much memory the device has is not known"},
		"less than one":   {gi, gpu("a", "acme", gib/2), "less than a unit"},
		"shareable":       {Share{Replicas: 2}, kvm, "any number of containers"},
		"of no amount":    {gi, numbered, "any number of containers"},
		"of no pool":      {Share{Replicas: 2, Pool: true, Resource: "a.b/c"}, numbered, "any number of containers"},
		"counted already": {gi, counted, "has 2 IDs"},
		"too many shares": {Share{Replicas: 4000}, counted, "at most 4096"},
	} {
		t.Run(name, func(t *testing.T) {
			s := shareOf(t, test.share, test.device)
			if len(s.Problems) != 1 || !strings.Contains(s.Problems[0].Error(), test.want) {
				t.Errorf("problems %v; want one that says %q", s.Problems, test.want)
			}
			if d := s.Devices[0]; d.Sharing != nil || len(d.Offers) > 0 {
				t.Errorf("shared all the same: %v %v", d.Sharing, d.Offers)
			}
		})
	}
}

func TestShareUnderANameOfTheAdministrator(t *testing.T) {
	rules := &Rules{
		Sharing:   []Share{{Selector: selector(t, everyGPU), Replicas: 2}},
		Resources: []Resource{{Selector: selector(t, everyGPU), Name: "example.com/shared-gpu"}},
	}
	unnamed := gpu("a", "acme", 0)
	unnamed.PluginOffers[0].Resource = "*"
	s := rules.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{unnamed}})
	want := []discovery.Offer{{Resource: "example.com/shared-gpu", IDs: []string{"a::0", "a::1"}}}
	if diff := cmp.Diff(want, s.Devices[0].Offers); diff != "" {
		t.Errorf("offers (-want +got):\n%s", diff)
	}
}

// A device with a configured count cannot be shared again.
func TestShareOfWhatIsCounted(t *testing.T) {
	d := gpu("port", "example", 0)
	d.Capacity.Set(discovery.Shares, 3)
	counted := (&Rules{}).ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{d}}).Devices[0]
	if shares := counted.Capacity[discovery.Shares].Value; counted.Sharing == nil || counted.Sharing.Capacity != discovery.Shares || shares.Value() != 3 {
		t.Errorf("%+v of %v", counted.Sharing, counted.Capacity)
	}
	if s := shareOf(t, Share{Replicas: 2}, d); len(s.Problems) != 1 || !strings.Contains(s.Problems[0].Error(), "already") {
		t.Errorf("shared again: %v", s.Problems)
	}
}

// A device for shared pools only is not offered in any other form, without problems.
func TestForPoolsAlone(t *testing.T) {
	adapter := gpu("a", "acme", 0)
	adapter.PoolOnly = discovery.SharedPools
	everything := selector(t, "true")
	for name, test := range map[string]struct {
		rules Rules
		want  string
	}{
		"unasked":          {Rules{}, ""},
		"named":            {Rules{Resources: []Resource{{Selector: everything, Name: "acme.com/gpu"}}}, ""},
		"shared":           {Rules{Sharing: []Share{{Selector: everything, Replicas: 2, Resource: "rdma/hca"}}}, ""},
		"pooled":           {Rules{Sharing: []Share{{Selector: everything, Replicas: 2, Resource: "rdma/hca", Pool: true}}}, "rdma/hca"},
		"of another shape": {Rules{Sharing: []Share{{Selector: selector(t, `device.attributes["chandler.dev"].ifName == "x"`), Replicas: 2, Resource: "rdma/hca", Pool: true}}}, ""},
	} {
		s := test.rules.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{adapter}})
		got := ""
		for _, d := range s.Devices {
			got += d.Resource()
		}
		if got != test.want || len(s.Problems) > 0 || (test.want == "") != (len(s.Devices) == 0) {
			t.Errorf("%s: offered as %q, problems %v; want %q", name, got, s.Problems, test.want)
		}
	}
}

// A device for SR-IOV pools only is offered if an entry is such a pool.
func TestForSRIOVPoolsAlone(t *testing.T) {
	physical := gpu("a", "acme", 0)
	physical.PoolOnly = discovery.SRIOVPools
	everything := selector(t, "true")
	none := selector(t, `device.attributes["chandler.dev"].ifName == "x"`) // fails for the device
	for name, test := range map[string]struct {
		rules Rules
		want  string
	}{
		"unasked":   {Rules{}, ""},
		"named":     {Rules{Resources: []Resource{{Selector: everything, Name: "example.com/a"}}}, ""},
		"shared":    {Rules{Sharing: []Share{{Selector: everything, Replicas: 2, Resource: "rdma/hca", Pool: true}}}, ""},
		"pool":      {Rules{Resources: []Resource{{Selector: everything, Name: "example.com/a", SRIOV: &discovery.SRIOVPool{}}}}, "example.com/a"},
		"the first": {Rules{Resources: []Resource{{Selector: everything, Name: "example.com/a"}, {Selector: everything, Name: "example.com/b", SRIOV: &discovery.SRIOVPool{}}}}, "example.com/b"},
		"not it":    {Rules{Resources: []Resource{{Selector: none, Name: "example.com/a", SRIOV: &discovery.SRIOVPool{}}}}, ""},
	} {
		s := test.rules.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{physical}})
		got := ""
		for _, d := range s.Devices {
			got += d.Resource()
		}
		if got != test.want || len(s.Problems) > 0 || (test.want == "") != (len(s.Devices) == 0) {
			t.Errorf("%s: offered as %q, problems %v; want %q", name, got, s.Problems, test.want)
		}
	}
}
