package nvidia

import (
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
)

// sharedBy returns the GPUs of a host with MPS, shared as the administrator configured.
func sharedBy(t *testing.T, share rules.Share) (a100, l40s discovery.Device) {
	t.Helper()
	var err error
	if share.Selector, err = rules.Compile("true"); err != nil {
		t.Fatal(err)
	}
	var wanted rules.Rules
	if share.Replicas > 0 || share.Capacity != "" {
		wanted.Sharing = []rules.Share{share}
	}
	host := discoverytest.ReadHost(t, "testdata/mps.host")
	snapshot := wanted.ApplyTo(scan.ReadHost(host, []*discovery.Family{Family}))
	first, found := snapshot.Lookup("pci-0000-01-00-0")
	second, both := snapshot.Lookup("pci-0000-41-00-0")
	if !found || !both {
		t.Fatalf("%+v", snapshot)
	}
	return first.Device, second.Device
}

// consumed returns the consumed amounts of one capacity, by device.
func consumed(capacity resourceapi.QualifiedName, amounts map[string]string) discovery.Consumed {
	c := make(discovery.Consumed)
	for device, amount := range amounts {
		c.Add(device, map[resourceapi.QualifiedName]resource.Quantity{capacity: resource.MustParse(amount)})
	}
	return c
}

var (
	byMemory = rules.Share{Capacity: "memory", Unit: resource.MustParse("1Gi"), Resource: "example.com/gpu-mem"}
	byFour   = rules.Share{Replicas: 4}
	half     = discovery.Parameters{ComputePercentage: "50"}
)

// Consumers of a shared GPU get MPS; a consumer of a whole GPU does not.
func TestMPSMounts(t *testing.T) {
	options := []string{"rw", "nosuid", "nodev", "rbind", "rprivate"}
	want := specs.ContainerEdits{
		Env: []string{"CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu/pipe"},
		Mounts: []*specs.Mount{
			{HostPath: "/run/nvidia/mps/nvidia.com/gpu/pipe", ContainerPath: "/mps/nvidia.com/gpu/pipe", Options: options},
			{HostPath: "/run/nvidia/mps/shm", ContainerPath: "/dev/shm", Options: options},
		},
	}
	for name, share := range map[string]rules.Share{"by memory": byMemory, "by number": byFour} {
		d, _ := sharedBy(t, share)
		if diff := cmp.Diff(want, specs.ContainerEdits{Env: d.Edits.Env, Mounts: d.Edits.Mounts}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if d, _ := sharedBy(t, rules.Share{}); len(d.Edits.Env)+len(d.Edits.Mounts) > 0 {
		t.Errorf("alone: %+v", d.Edits)
	}
}

// TestMPSRoots covers the possible locations of the daemon's pipes and the resulting mounts.
func TestMPSRoots(t *testing.T) {
	for name, test := range map[string]struct {
		root  string
		files []string
		want  string // mounts, or the error
	}{
		"no root":         {"", []string{"pipe/control"}, ""},
		"NVIDIA's":        {"/run/mps", []string{"run/mps/nvidia.com/gpu/pipe/control", "run/mps/shm/x"}, "/run/mps/nvidia.com/gpu/pipe:/mps/nvidia.com/gpu/pipe /run/mps/shm:/dev/shm"},
		"under a suffix":  {"/run/mps", []string{"run/mps/nvidia.com/gpu.shared/pipe/control", "run/mps/shm/x"}, "/run/mps/nvidia.com/gpu.shared/pipe:/mps/nvidia.com/gpu.shared/pipe /run/mps/shm:/dev/shm"},
		"a pipe":          {"/run/mps", []string{"run/mps/pipe/control"}, "/run/mps/pipe:/mps/pipe"},
		"the default":     {"/tmp/nvidia-mps", []string{"tmp/nvidia-mps/control"}, "/tmp/nvidia-mps:/mps"},
		"not started":     {"/run/mps", []string{"run/mps/nvidia.com/gpu/log/x", "run/mps/shm/x"}, "no control daemon has its pipes below /run/mps"},
		"not there":       {"/run/mps", nil, "no control daemon"},
		"of another name": {"/run/mps", []string{"run/mps/pipe/control.old"}, "no control daemon"},
	} {
		fsys := make(fstest.MapFS)
		for _, file := range test.files {
			fsys[file] = &fstest.MapFile{}
		}
		edits, err := readMPS(&discovery.Host{FS: fsys, Roots: map[string]string{mpsRoot: test.root}})
		var got []string
		for _, m := range edits.Mounts {
			got = append(got, m.HostPath+":"+m.ContainerPath)
		}
		if err != nil {
			got = []string{err.Error()}
		}
		if text := strings.Join(got, " "); !strings.Contains(text, test.want) || (test.want == "") != (text == "") {
			t.Errorf("%s: %q; want %q", name, text, test.want)
		}
	}
}

// CUDA gets the allocated amount of each GPU by the GPU's index in the request.
func TestLimits(t *testing.T) {
	a, l := sharedBy(t, byMemory)
	na, nl := sharedBy(t, byFour)
	alone, other := sharedBy(t, rules.Share{})
	channel := discovery.Device{Name: "channel", Attributes: discovery.Attributes{}}
	channel.Attributes.SetString("kind", "other")
	for name, test := range map[string]struct {
		given      []discovery.Device
		consumed   discovery.Consumed
		parameters discovery.Parameters
		want       string
	}{
		"memory":          {[]discovery.Device{a}, consumed("memory", map[string]string{a.Name: "4Gi"}), nil, memoryLimit + "=0=4096M"},
		"least":           {[]discovery.Device{a}, consumed("memory", map[string]string{a.Name: "1k"}), nil, memoryLimit + "=0=1M"},
		"with a channel":  {[]discovery.Device{channel, a}, consumed("memory", map[string]string{a.Name: "4Gi"}), nil, memoryLimit + "=0=4096M"},
		"two shares":      {[]discovery.Device{a, a}, consumed("memory", map[string]string{a.Name: "6Gi"}), nil, memoryLimit + "=0=6144M"},
		"two GPUs":        {[]discovery.Device{l, a}, consumed("memory", map[string]string{a.Name: "1Gi", l.Name: "2Gi"}), nil, memoryLimit + "=0=1024M,1=2048M " + deviceOrder + "=PCI_BUS_ID"},
		"one of two":      {[]discovery.Device{a, l}, consumed("memory", map[string]string{l.Name: "2Gi"}), nil, memoryLimit + "=1=2048M " + deviceOrder + "=PCI_BUS_ID"},
		"all of it":       {[]discovery.Device{a}, nil, nil, ""},
		"percentage":      {[]discovery.Device{a}, nil, half, threadLimit + "=50"},
		"both":            {[]discovery.Device{a}, consumed("memory", map[string]string{a.Name: "4Gi"}), half, memoryLimit + "=0=4096M " + threadLimit + "=50"},
		"by number":       {[]discovery.Device{na}, consumed(discovery.Shares, map[string]string{na.Name: "1"}), nil, memoryLimit + "=0=10240M " + threadLimit + "=25"},
		"three of four":   {[]discovery.Device{na}, consumed(discovery.Shares, map[string]string{na.Name: "3"}), half, memoryLimit + "=0=30720M " + threadLimit + "=50"},
		"less than asked": {[]discovery.Device{na}, consumed(discovery.Shares, map[string]string{na.Name: "1"}), half, memoryLimit + "=0=10240M " + threadLimit + "=25"},
		"the least share": {[]discovery.Device{na, nl}, consumed(discovery.Shares, map[string]string{na.Name: "2", nl.Name: "1"}), nil, memoryLimit + "=0=20480M,1=11517M " + deviceOrder + "=PCI_BUS_ID " + threadLimit + "=25"},
		"without MPS":     {[]discovery.Device{alone}, consumed("memory", map[string]string{alone.Name: "4Gi"}), half, ""},
		"partly MPS":      {[]discovery.Device{a, other}, consumed("memory", map[string]string{a.Name: "4Gi"}), half, ""},
	} {
		got := grant(test.given, discovery.Grant{Consumed: test.consumed, Parameters: test.parameters}).Env
		i := slices.IndexFunc(got, func(v string) bool { return strings.HasPrefix(v, "NVIDIA_VISIBLE_DEVICES=GPU-") })
		if i != 0 {
			t.Errorf("%s: the GPUs are not named: %q", name, got)
			continue
		}
		if text := strings.Join(got[1:], " "); text != test.want {
			t.Errorf("%s: %q; want %q", name, text, test.want)
		}
	}
}

// A compute percentage is accepted only if MPS enforces it.
func TestAccept(t *testing.T) {
	shared, other := sharedBy(t, byMemory)
	alone, _ := sharedBy(t, rules.Share{})
	for name, test := range map[string]struct {
		given      []discovery.Device
		parameters discovery.Parameters
		want       string
	}{
		"shared by MPS": {[]discovery.Device{shared, other}, half, ""},
		"alone":         {[]discovery.Device{other, alone}, half, "computePercentage: device " + alone.Name + ": only MPS keeps to it"},
		"not asked for": {[]discovery.Device{alone}, discovery.Parameters{discovery.EnvironmentParameter("NCCL_DEBUG"): "INFO"}, ""},
	} {
		err := discovery.JoinAcceptors([]*discovery.Family{Family})(test.given, test.parameters)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want %q", name, err, test.want)
		}
	}
}
