package telemetry

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
)

// sharedNode returns a node with two GPUs that are shared by number, and six that are shared by
// memory. A claim has two of eight shares, a pod has two other shares by IDs of the device-plugin
// API, and a claim of two pods has 10 GiB.
func sharedNode(t *testing.T) *scraped {
	t.Helper()
	s := newScraped(t, "mi-2", "amdgpu/testdata/mi210x8.host", &rules.Rules{Sharing: []rules.Share{
		{Selector: rulestest.CompileSelector(t, `device.attributes["resource.kubernetes.io"].pciBusID in ["0000:23:00.0", "0000:24:00.0"]`), Replicas: 8},
		{Selector: rulestest.CompileSelector(t, `true`), Capacity: "memory", Unit: resource.MustParse("2Gi"), Resource: "aliyun.com/gpu-mem"},
	}})
	s.share("serving", "small", "pci-0000-23-00-0", map[resourceapi.QualifiedName]string{discovery.Shares: "2"}, "small-0")
	s.share("serving", "llm", "pci-0000-43-00-0", map[resourceapi.QualifiedName]string{"memory": "10Gi"}, "llm-0", "llm-1")
	s.share("research", "all", "pci-0000-44-00-0", nil, "train-0")
	for _, id := range []string{"0000:24:00.0::0", "0000:24:00.0::1"} {
		s.entries = append(s.entries, &allocation.Grant{Resource: "amd.com/gpu", ID: id, Devices: []string{"pci-0000-24-00-0"}, Silicon: []string{"pci-0000-24-00-0"}, Container: "lab/notebook main"})
	}
	return s
}

// share allocates amounts of a device, or for nil the whole device, to a claim of pods.
func (s *scraped) share(namespace, name, device string, amounts map[resourceapi.QualifiedName]string, pods ...string) {
	s.t.Helper()
	c := &allocation.Claim{UID: types.UID("uid-" + name), Namespace: namespace, Name: name}
	r := allocation.Result{Request: "gpu", Pool: s.state.Node, Device: device, Source: device, Silicon: device, Whole: true, CDI: cdi.Name(c.UID, 0, device, "")}
	for capacity, amount := range amounts {
		r.Consumes = allocation.Amounts{capacity: resource.MustParse(amount)}
	}
	c.Results = []allocation.Result{r}
	s.entries = append(s.entries, c)
	used := &podresourcesapi.ClaimResource{CdiDevices: []*podresourcesapi.CDIDevice{{Name: cdi.ID(r.CDI)}}}
	for _, pod := range pods {
		s.said.Pods = append(s.said.Pods, &podresourcesapi.PodResources{Namespace: namespace, Name: pod, Containers: []*podresourcesapi.ContainerResources{
			{Name: "main", DynamicResources: []*podresourcesapi.DynamicResource{{ClaimNamespace: namespace, ClaimName: name, ClaimResources: []*podresourcesapi.ClaimResource{used}}}},
			{Name: "side", DynamicResources: []*podresourcesapi.DynamicResource{{ClaimNamespace: namespace, ClaimName: name, ClaimResources: []*podresourcesapi.ClaimResource{used}}}},
		}})
	}
}

// The allocated and the free shares of a device add up to its capacity. Containers with a common
// claim count once.
func TestMetricsOfSharedDevices(t *testing.T) {
	text := sharedNode(t).scrape()
	expectLines(t, text,
		`chandler_shared_capacity{capacity="shares",device="pci-0000-23-00-0",node="mi-2",unit="integer"} 8`,
		`chandler_shared_capacity_free{capacity="shares",device="pci-0000-23-00-0",node="mi-2",unit="integer"} 6`,
		`chandler_shared_capacity_allocated{api="DRA",capacity="shares",claim="small",device="pci-0000-23-00-0",namespace="serving",node="mi-2",pod="small-0",request="gpu",resource="",unit="integer"} 2`,
		`chandler_shared_capacity_allocated{api="DevicePlugin",capacity="shares",claim="",device="pci-0000-24-00-0",namespace="lab",node="mi-2",pod="notebook",request="",resource="amd.com/gpu",unit="integer"} 2`,
		`chandler_shared_capacity_free{capacity="shares",device="pci-0000-24-00-0",node="mi-2",unit="integer"} 6`,
		`chandler_shared_capacity_allocated{api="DRA",capacity="memory",claim="llm",device="pci-0000-43-00-0",namespace="serving",node="mi-2",pod="",request="gpu",resource="",unit="byte"} 1.073741824e+10`,
		`chandler_shared_capacity_free{capacity="memory",device="pci-0000-44-00-0",node="mi-2",unit="byte"} 0`,
	)
}

// A shared whole device has no free capacity while a consumer has a partition, or while the device
// is named in a record that cannot be read.
func TestSharedDevicesThatOthersExclude(t *testing.T) {
	whole := rules.Offered{Device: discovery.Device{Name: "gpu"}, Sharing: &rules.Sharing{Capacity: "memory", Unit: resource.MustParse("1Gi"), Default: resource.MustParse("80Gi")}}
	part := rules.Offered{Device: discovery.Device{Name: "gpu-0", PartOf: &discovery.Silicon{Name: "gpu"}}}
	devices := []rules.Offered{whole, part}
	for name, test := range map[string]struct {
		entries []allocation.Entry
		free    float64
	}{
		"nobody":         {nil, 80 << 30},
		"a part":         {[]allocation.Entry{&allocation.Claim{UID: "u", Results: []allocation.Result{{Source: "gpu-0"}}}}, 0},
		"sealed":         {[]allocation.Entry{&allocation.Sealed{UID: "u", Devices: []allocation.SealedDevice{{Name: "gpu"}}}}, 0},
		"admin":          {[]allocation.Entry{&allocation.Claim{UID: "u", Results: []allocation.Result{{Source: "gpu", Admin: true}}}}, 80 << 30},
		"half a unit":    {[]allocation.Entry{&allocation.Claim{UID: "u", Results: []allocation.Result{{Source: "gpu", Consumes: allocation.Amounts{"memory": resource.MustParse("512Mi")}}}}}, 79 << 30},
		"more than all":  {[]allocation.Entry{&allocation.Claim{UID: "u", Results: []allocation.Result{{Source: "gpu", Consumes: allocation.Amounts{"memory": resource.MustParse("96Gi")}}}}}, 0},
		"alone by an ID": {[]allocation.Entry{&allocation.Grant{Resource: "r", ID: "1", Devices: []string{"gpu"}, Exclusive: true}}, 0},
	} {
		uses := sharedUses(devices, ledger.ViewOf(nil, test.entries...), nil)
		if len(uses) != 1 || uses[0].all != 80<<30 || uses[0].free != test.free {
			t.Errorf("%s: %+v", name, uses)
		}
	}
}
