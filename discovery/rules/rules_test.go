package rules

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// gpu returns a device with some attributes and one ID.
func gpu(name, vendor string, memory int64) discovery.Device {
	d := discovery.Device{Name: name, Attributes: discovery.Attributes{}, Capacity: discovery.Capacity{}, PluginOffers: []discovery.Offer{{Resource: vendor + ".com/gpu", IDs: []string{name}}}}
	d.Attributes.SetString("kind", "gpu")
	d.Attributes.SetString("vendor", vendor)
	if memory > 0 {
		d.Capacity.Set("memory", memory)
	}
	return d
}

func selector(t *testing.T, expression string) Selector {
	t.Helper()
	s, err := Compile(expression)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestRules(t *testing.T) {
	classic := discovery.ModeDevicePlugin
	rules := &Rules{
		Mode:    discovery.ModeDRA,
		Exclude: []Selector{selector(t, `device.attributes["chandler.dev"].vendor == "acme"`)},
		Resources: []Resource{
			{Selector: selector(t, `device.capacity["chandler.dev"].memory.compareTo(quantity("80Gi")) >= 0`), Name: "example.com/gpu-large", Mode: &classic, Want: discovery.Parameters{"acceleratorFunction": "1"}},
			{Selector: selector(t, `device.attributes["chandler.dev"].kind == "gpu"`), Name: "example.com/gpu"},
		},
	}
	got := rules.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{
		gpu("a", "acme", 1<<30),
		gpu("b", "amd", 192<<30),
		gpu("c", "amd", 16<<30),
		gpu("d", "nvidia", 0),
	}})
	type result struct {
		Name, Resource string
		Mode           discovery.Mode
		Want           discovery.Parameters
	}
	var results []result
	for _, d := range got.Devices {
		results = append(results, result{d.Name, d.Offers[0].Resource, d.Mode, d.Want})
	}
	want := []result{
		{"b", "example.com/gpu-large", discovery.ModeDevicePlugin, discovery.Parameters{"acceleratorFunction": "1"}},
		{"c", "example.com/gpu", discovery.ModeDRA, nil},
		{"d", "example.com/gpu", discovery.ModeDRA, nil},
	}
	if diff := cmp.Diff(want, results); diff != "" {
		t.Errorf("Apply (-want +got):\n%s", diff)
	}
	// The expression fails for the device without memory. The device is not selected, and the error
	// is reported.
	if len(got.Problems) != 1 || got.Problems[0].Device != "d" || !strings.Contains(got.Problems[0].Error(), "memory") {
		t.Errorf("Problems = %v; want one, of device d, that names memory", got.Problems)
	}
}

func TestRulesLeaveTheirInputAlone(t *testing.T) {
	rules := &Rules{Mode: discovery.ModeDRA, Resources: []Resource{{Selector: selector(t, "true"), Name: "example.com/gpu"}}}
	snapshot := &discovery.Snapshot{Devices: []discovery.Device{gpu("a", "amd", 0)}}
	rules.ApplyTo(snapshot)
	if diff := cmp.Diff([]discovery.Device{gpu("a", "amd", 0)}, snapshot.Devices); diff != "" {
		t.Errorf("the snapshot changed (-want +got):\n%s", diff)
	}
}

// A device with IDs but without a name is offered once the administrator names it.
func TestRulesNameWhatHasNoName(t *testing.T) {
	unnamed := func(name string) discovery.Device {
		d := gpu(name, "acme", 0)
		d.Attributes.SetString("model", name)
		d.PluginOffers[0].Resource = "*"
		return d
	}
	rules := &Rules{Resources: []Resource{{Selector: selector(t, `device.attributes["chandler.dev"].model == "b"`), Name: "example.com/pool"}}}
	snapshot := &discovery.Snapshot{Devices: []discovery.Device{unnamed("a"), unnamed("b")}}
	for _, d := range snapshot.Devices {
		if err := d.Validate(); err != nil {
			t.Error(err)
		}
	}
	got := rules.ApplyTo(snapshot)
	if len(got.Problems) > 0 || len(got.Devices) != 2 || len(got.Devices[0].Offers) != 0 {
		t.Fatalf("got the devices %+v and the problems %v; want both devices, a without an offer", got.Devices, got.Problems)
	}
	if diff := cmp.Diff([]discovery.Offer{{Resource: "example.com/pool", IDs: []string{"b"}}}, got.Devices[1].Offers); diff != "" {
		t.Errorf("offers of b (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]discovery.Device{unnamed("a"), unnamed("b")}, snapshot.Devices); diff != "" {
		t.Errorf("the snapshot changed (-want +got):\n%s", diff)
	}
}

// An OptIn device is offered only under one of its own names, regardless of the selectors.
func TestOptInDevices(t *testing.T) {
	monitor := gpu("monitor", "acme", 0)
	monitor.OptIn = true
	monitor.PluginOffers = []discovery.Offer{{Resource: "acme.com/monitor", IDs: []string{"all"}}}
	for name, test := range map[string]struct {
		resources []Resource
		want      []discovery.Offer
	}{
		"no rule":      {},
		"another name": {resources: []Resource{{Selector: selector(t, "true"), Name: "acme.com/gpu"}}},
		"not selected": {resources: []Resource{{Selector: selector(t, "false"), Name: "acme.com/monitor"}}},
		"its name": {
			resources: []Resource{{Selector: selector(t, "true"), Name: "acme.com/gpu"}, {Selector: selector(t, "true"), Name: "acme.com/monitor"}},
			want:      monitor.PluginOffers,
		},
	} {
		t.Run(name, func(t *testing.T) {
			// The device has no memory. The error is not reported unless the device is configured.
			rules := &Rules{Resources: test.resources}
			if !slices.ContainsFunc(test.resources, func(r Resource) bool { return r.Name == "acme.com/monitor" }) {
				rules.Exclude = []Selector{selector(t, `device.capacity["chandler.dev"].memory.compareTo(quantity("1Gi")) < 0`)}
			}
			got := rules.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{monitor}})
			if test.want == nil {
				if len(got.Devices) > 0 || len(got.Problems) > 0 {
					t.Errorf("got %+v and the problems %v; want no device and no problem", got.Devices, got.Problems)
				}
				return
			}
			if len(got.Devices) != 1 || !cmp.Equal(got.Devices[0].Offers, test.want) {
				t.Errorf("got %+v; want the device with the offers %+v", got.Devices, test.want)
			}
		})
	}
}

// An Optional offer is used if the administrator configures its name, and the first offer
// otherwise.
func TestRulesChooseAnOffer(t *testing.T) {
	part := discovery.Offer{Resource: "example.com/part", IDs: []string{"part0"}}
	card := discovery.Offer{Resource: "example.com/card", IDs: []string{"card0"}, Unit: "card0", Optional: true}
	for name, want := range map[string][]discovery.Offer{
		"":                 {part},
		"example.com/part": {part},
		"example.com/card": {{Resource: card.Resource, IDs: card.IDs, Unit: card.Unit}},
		"example.com/any":  {{Resource: "example.com/any", IDs: part.IDs}},
	} {
		rules := &Rules{}
		if name != "" {
			rules.Resources = []Resource{{Selector: selector(t, "true"), Name: name}}
		}
		snapshot := &discovery.Snapshot{Devices: []discovery.Device{{Name: "a", PluginOffers: []discovery.Offer{part, card}}}}
		if diff := cmp.Diff(want, rules.ApplyTo(snapshot).Devices[0].Offers); diff != "" {
			t.Errorf("named %q (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff([]discovery.Offer{part, card}, snapshot.Devices[0].PluginOffers); diff != "" {
			t.Errorf("named %q: the snapshot changed (-want +got):\n%s", name, diff)
		}
	}
}

// The partitions of a physical device cannot be offered by two APIs.
func TestRulesRefuseToSplitAWhole(t *testing.T) {
	first, second, other := gpu("a", "amd", 0), gpu("b", "amd", 0), gpu("c", "amd", 0)
	whole := &discovery.Silicon{Name: "card"}
	first.PartOf, second.PartOf = whole, whole
	classic := discovery.ModeDevicePlugin
	rules := &Rules{Mode: discovery.ModeDRA, Resources: []Resource{
		{Selector: selector(t, `device.attributes["chandler.dev"].name == "b"`), Name: "example.com/gpu", Mode: &classic},
	}}
	second.Attributes.SetString("name", "b")
	got := rules.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{first, second, other}})
	if len(got.Devices) != 1 || got.Devices[0].Name != "c" {
		t.Errorf("got %d devices; want c alone", len(got.Devices))
	}
	for _, name := range []string{"a", "b"} {
		if !slices.ContainsFunc(got.Problems, func(p discovery.Problem) bool {
			return p.Device == name && strings.Contains(p.Error(), "two APIs")
		}) {
			t.Errorf("no problem says that %s is split: %v", name, got.Problems)
		}
	}
}

func TestCompile(t *testing.T) {
	for _, expression := range []string{
		"device.attributes[",            // incomplete expression
		"device.nonsense == 1",          // unknown field
		`"text"`,                        // not a boolean
		`device.attributes["a"].b == 1`, // compiles, because any domain is possible
	} {
		_, err := Compile(expression)
		if valid := strings.HasPrefix(expression, `device.attributes["a"]`); (err == nil) != valid {
			t.Errorf("Compile(%q): %v", expression, err)
		} else if err != nil && !strings.Contains(err.Error(), strings.ReplaceAll(expression, `"`, `\"`)) {
			t.Errorf("Compile(%q): error does not name the expression: %v", expression, err)
		}
	}
}

// A configured device yields to a device of another family unless the other device is excluded.
// Nodes of Shareable devices and common nodes cause no conflict.
func TestConfiguredGivesWay(t *testing.T) {
	device := func(name, family string, nodes ...string) discovery.Device {
		d := discovery.Device{Name: name, Family: family, Attributes: discovery.Attributes{}, FromConfig: family == "paths"}
		d.Attributes.SetString("family", family)
		d.CommonNodes = []string{"/dev/all"}
		for _, node := range nodes {
			d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, &specs.DeviceNode{Path: node, HostPath: node})
		}
		return d
	}
	kvm := device("kvm", "hypervisor", "/dev/kvm")
	kvm.Shareable = true
	snapshot := &discovery.Snapshot{Devices: []discovery.Device{
		device("gpu-0", "gpus", "/dev/dri/card0", "/dev/all"), device("gpu-1", "gpus", "/dev/dri/card1"), kvm,
		device("paths-all", "paths", "/dev/all"), device("paths-kvm", "paths", "/dev/kvm"), device("paths-video", "paths", "/dev/fuse", "/dev/dri/card1"),
	}}
	names := func(rules *Rules) (names []string, problems []discovery.Problem) {
		applied := rules.ApplyTo(snapshot)
		for _, d := range applied.Devices {
			names = append(names, d.Name)
		}
		return names, applied.Problems
	}
	got, problems := names(&Rules{})
	if want := []string{"gpu-0", "gpu-1", "kvm", "paths-all", "paths-kvm"}; !slices.Equal(got, want) {
		t.Errorf("kept %q, want %q", got, want)
	}
	if len(problems) != 1 || !strings.Contains(problems[0].Error(), "paths-video: config: /dev/dri/card1 is that of device gpu-1 of family gpus") {
		t.Errorf("problems %v", problems)
	}
	excluded := selector(t, `device.attributes["chandler.dev"].family == "gpus"`)
	got, problems = names(&Rules{Exclude: []Selector{excluded}})
	if want := []string{"kvm", "paths-all", "paths-kvm", "paths-video"}; !slices.Equal(got, want) || len(problems) > 0 {
		t.Errorf("with the GPUs excluded: kept %q, want %q; %v", got, want, problems)
	}
}

// A device uses the IDs of the plugin with names in the configured domain.
func TestNamesWithinADomain(t *testing.T) {
	d := gpu("a", "acme", 0)
	d.PluginOffers = []discovery.Offer{{Resource: "acme.com/*", IDs: []string{"0000:01:00.0"}}, {Resource: "*", IDs: []string{"12"}}, {Resource: "acme.com/own", IDs: []string{"own"}, Optional: true}}
	for name, want := range map[string]string{"acme.com/big": "0000:01:00.0", "example.com/big": "12", "not-acme.com/big": "12", "acme.com/own": "own"} {
		rules := &Rules{Resources: []Resource{{Selector: selector(t, everyGPU), Name: name}}}
		got := rules.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{d}}).Devices[0].Offers
		if diff := cmp.Diff([]discovery.Offer{{Resource: name, IDs: []string{want}}}, got); diff != "" {
			t.Errorf("%s: offers (-want +got):\n%s", name, diff)
		}
	}
	d.PluginOffers = d.PluginOffers[:1]
	other := &Rules{Resources: []Resource{{Selector: selector(t, everyGPU), Name: "example.com/big"}}}
	if s := other.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{d}}); len(s.Devices[0].Offers) > 0 || len(s.Problems) != 1 {
		t.Errorf("no ID but within acme.com, and offered as %+v", s.Devices[0].Offers)
	}
	if s := (&Rules{}).ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{d}}); len(s.Devices[0].Offers) > 0 {
		t.Errorf("unnamed, and offered as %+v", s.Devices[0].Offers)
	}
}

// Counted units without a device on the host yield to available devices of the same kind from
// another family.
func TestCountedGiveWay(t *testing.T) {
	device := func(name, family, kind string, nodes ...string) discovery.Device {
		d := discovery.Device{Name: name, Family: family, Attributes: discovery.Attributes{}, Source: discovery.Unseen, FromConfig: family == "paths"}
		d.Attributes.SetString("family", family)
		d.Attributes.SetString("kind", kind)
		if d.FromConfig {
			d.Attributes.SetString("resource", "example.com/unit")
		}
		for _, node := range nodes {
			d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, &specs.DeviceNode{Path: node, HostPath: node})
		}
		return d
	}
	snapshot := &discovery.Snapshot{Devices: []discovery.Device{
		device("fpga", "aws", "fpga", "/dev/xdma0_user"), device("idle", "aws", "npu"), device("vfio", "vfio", "other", "/dev/vfio/1"),
		device("u0", "paths", "fpga"), device("u1", "paths", "fpga"), device("n", "paths", "npu"), device("o", "paths", "other"),
	}}
	for expression, want := range map[string]string{"false": "fpga idle vfio n o", "device.attributes[\"chandler.dev\"].family == \"aws\"": "vfio u0 u1 n o"} {
		applied := (&Rules{Exclude: []Selector{selector(t, expression)}}).ApplyTo(snapshot)
		var names []string
		for _, d := range applied.Devices {
			names = append(names, d.Name)
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("exclude %s: kept %q, want %q", expression, got, want)
		}
		given := expression == "false"
		if given != (len(applied.Problems) == 1) || given && !strings.Contains(applied.Problems[0].Error(), "example.com/unit: config: its units may be of device fpga of family aws") {
			t.Errorf("exclude %s: problems %v", expression, applied.Problems)
		}
	}
}

// On a host without accelerators, DRA publishes the nodes for virtual machines only if configured to.
// Another device, or a mode of the administrator, has the usual effect.
func TestRulesWithoutAccelerators(t *testing.T) {
	kvm := discovery.Device{Name: "kvm", Shareable: true, Attributes: discovery.Attributes{}, PluginOffers: []discovery.Offer{{Resource: "devices.kubevirt.io/kvm", IDs: []string{"kvm0"}}}}
	kvm.Attributes.SetString("kind", "virtualization")
	tun := kvm
	tun.Name, tun.PluginOffers = "tun", []discovery.Offer{{Resource: "devices.kubevirt.io/tun", IDs: []string{"tun0"}}}
	dra, all := discovery.ModeDRA, selector(t, "true")
	for name, test := range map[string]struct {
		rules   Rules
		devices []discovery.Device
		want    map[string]discovery.Mode
		reason  string
	}{
		"no accelerators":     {Rules{}, nil, map[string]discovery.Mode{"kvm": discovery.ModeDevicePlugin, "tun": discovery.ModeDevicePlugin}, NoAccelerators},
		"an accelerator":      {Rules{}, []discovery.Device{gpu("gpu", "acme", 0)}, map[string]discovery.Mode{"gpu": "", "kvm": "", "tun": ""}, ""},
		"mode DRA":            {Rules{Mode: dra}, nil, map[string]discovery.Mode{"kvm": dra, "tun": dra}, ""},
		"mode DRA of entries": {Rules{Resources: []Resource{{Selector: all, Name: "devices.kubevirt.io/kvm", Mode: &dra}, {Selector: all, Name: "devices.kubevirt.io/tun", Mode: &dra}}}, nil, map[string]discovery.Mode{"kvm": dra, "tun": dra}, ""},
	} {
		got := test.rules.ApplyTo(&discovery.Snapshot{Devices: append(slices.Clone(test.devices), kvm, tun)})
		modes := make(map[string]discovery.Mode)
		for _, d := range got.Devices {
			modes[d.Name] = d.Mode
			if d.ModeReason != test.reason {
				t.Errorf("%s: reason %q of device %s; want %q", name, d.ModeReason, d.Name, test.reason)
			}
		}
		if diff := cmp.Diff(test.want, modes); diff != "" {
			t.Errorf("%s: modes (-want +got):\n%s", name, diff)
		}
	}
}

func TestRulesPublishTheNameOfAResource(t *testing.T) {
	d := gpu("a", "acme", 0)
	d.PluginOffers = []discovery.Offer{{Resource: "*", IDs: []string{"1"}, NameAs: "example.com/resourceName"}}
	full := gpu("b", "acme", 0)
	full.PluginOffers = d.PluginOffers
	for len(full.Attributes)+len(full.Capacity) < 32 {
		full.Attributes.SetInt(resourceapi.QualifiedName(fmt.Sprintf("a%d", len(full.Attributes))), 1)
	}
	rules := &Rules{Resources: []Resource{{Selector: selector(t, "true"), Name: "intel.com/net"}}}
	for _, given := range []discovery.Device{d, full} {
		got := rules.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{given}})
		want := ""
		if given.Name == "a" {
			want = "intel.com/net"
		}
		if name := got.Devices[0].Attributes.String("example.com/resourceName"); name != want {
			t.Errorf("%s: attribute %q; want %q", given.Name, name, want)
		}
		if (len(got.Problems) == 0) != (want != "") {
			t.Errorf("%s: problems %v", given.Name, got.Problems)
		}
		if got.Devices[0].Resource() != "intel.com/net" {
			t.Errorf("%s: resource %q", given.Name, got.Devices[0].Resource())
		}
	}
	if got := (&Rules{}).ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{d}}); len(got.Devices[0].Attributes) != len(d.Attributes) {
		t.Errorf("unnamed: attributes %v", got.Devices[0].Attributes)
	}
	if d.Attributes.String("example.com/resourceName") != "" {
		t.Error("the device that was given is modified")
	}
}

// A resource name that some devices of a family offer themselves is not given to the family's other
// devices, regardless of the expression.
func TestRulesDoNotMixGranularities(t *testing.T) {
	chip, core, other := gpu("chip", "acme", 0), gpu("core", "acme", 0), gpu("other", "acme", 0)
	chip.Family, core.Family, other.Family = "neuron", "neuron", "another"
	core.PluginOffers = []discovery.Offer{{Resource: "acme.com/core", IDs: []string{"0"}, Optional: true}}
	rules := &Rules{Resources: []Resource{{Selector: selector(t, `true`), Name: "acme.com/core"}}}
	s := rules.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{chip, core, other}})
	for name, want := range map[string]discovery.Offer{
		"chip":  {Resource: "acme.com/gpu", IDs: []string{"chip"}},
		"core":  {Resource: "acme.com/core", IDs: []string{"0"}},
		"other": {Resource: "acme.com/core", IDs: []string{"other"}}, // another family, so the administrator's name applies
	} {
		d, _ := s.Lookup(name)
		if diff := cmp.Diff([]discovery.Offer{want}, d.Offers); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// A unit with Members is offered with all of them or not at all. A unit without Members is offered
// with the remaining devices.
func TestRulesKeepUnitsWhole(t *testing.T) {
	member := func(name, unit string) discovery.Device {
		d := gpu(name, "acme", 0)
		d.PluginOffers = []discovery.Offer{{Resource: "acme.com/card", IDs: []string{unit}, Unit: unit}}
		return d
	}
	devices := []discovery.Device{member("a", "one"), member("b", "one"), member("c", "two"), member("d", "two"), member("e", "three")}
	discovery.CountMembers(devices)
	snapshot := &discovery.Snapshot{Devices: append(devices, member("f", "group"), member("g", "group"))}
	excluded := func(name string) Selector {
		return selector(t, fmt.Sprintf(`device.attributes["chandler.dev"].?model.orValue("") == %q`, name))
	}
	for i := range snapshot.Devices {
		snapshot.Devices[i].Attributes.SetString("model", snapshot.Devices[i].Name)
	}
	rules := &Rules{Exclude: []Selector{excluded("b"), excluded("g")}}
	got := rules.ApplyTo(snapshot)
	var offered []string
	for _, d := range got.Devices {
		if len(d.Offers) > 0 {
			offered = append(offered, d.Name)
		}
	}
	if diff := cmp.Diff([]string{"c", "d", "e", "f"}, offered); diff != "" {
		t.Errorf("offered (-want +got):\n%s", diff)
	}
	want := "[a: config: resource acme.com/card: one is given with all of its 2 devices, of which 1 have the name]"
	if fmt.Sprint(got.Problems) != want {
		t.Errorf("problems %v; want %s", got.Problems, want)
	}
	if len(snapshot.Devices[0].PluginOffers) != 1 {
		t.Error("the input was changed")
	}
}

// Devices have a common resource if it is the only resource of each of them.
func TestResourceOf(t *testing.T) {
	named := func(resources ...string) (d Offered) {
		for _, resource := range resources {
			d.Offers = append(d.Offers, discovery.Offer{Resource: resource})
		}
		return d
	}
	for want, devices := range map[string][]Offered{
		"a.com/one": {named("a.com/one"), named("a.com/one")},
		"":          {named("a.com/one"), named()},
	} {
		if got := ResourceOf(devices); got != want {
			t.Errorf("got %q; want %q", got, want)
		}
	}
	if got := ResourceOf([]Offered{named("a.com/one", "a.com/two")}); got != "" {
		t.Errorf("of two names %q is chosen", got)
	}
}

// If matchAttributes requires equal values of a resource's devices and two differ, the resource has no devices. Other
// resources are not affected. An attribute that no device has is equal for all.
func TestAlike(t *testing.T) {
	whole, half, other := gpu("a", "acme", 0), gpu("b", "acme", 0), gpu("c", "amd", 0)
	half.Attributes.SetString("profile", "half")
	half.Attributes.SetInt("index", 1)
	for name, test := range map[string]struct {
		alike   []resourceapi.QualifiedName
		sharing []Share
		want    string // the reason, "" if all are offered
	}{
		"not asked for":  {},
		"alike":          {alike: []resourceapi.QualifiedName{"vendor", "kind", "colour"}},
		"one has it":     {alike: []resourceapi.QualifiedName{"vendor", "profile"}, want: "acme.com/gpu: config: no device is offered under this name, since matchAttributes requires equal values: device a has no profile, device b has profile half"},
		"shared as well": {alike: []resourceapi.QualifiedName{"index"}, sharing: []Share{{Selector: selector(t, everyGPU), Replicas: 2}}, want: "acme.com/gpu: config: no device is offered under this name, since matchAttributes requires equal values: device a has no index, device b has index 1"},
	} {
		rules := &Rules{Sharing: test.sharing, Allocation: map[string]Allocation{"acme.com/gpu": {MatchAttributes: test.alike}, "amd.com/gpu": {MatchAttributes: test.alike}, "none.com/gpu": {MatchAttributes: test.alike}}}
		got := rules.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{whole, half, other}})
		var reasons, offered []string
		for _, problem := range got.Problems {
			reasons = append(reasons, problem.Error())
		}
		for _, d := range got.Devices {
			if len(d.Offers) > 0 {
				offered = append(offered, d.Name)
			}
		}
		want := []string{"a", "b", "c"}
		if test.want != "" {
			want = want[2:]
		}
		if len(got.Devices) != 3 || strings.Join(reasons, "; ") != test.want || !slices.Equal(offered, want) {
			t.Errorf("%s: of %d devices %v are offered; problems %q", name, len(got.Devices), offered, reasons)
		}
	}
	if len(whole.PluginOffers) != 1 {
		t.Error("the input was changed")
	}
}

// Pools of the SR-IOV network device plugin use IDs that no other name uses. For a family without
// such IDs, pools use the other IDs.
func TestPoolsOfTheSRIOVPlugin(t *testing.T) {
	both := gpu("a", "acme", 0)
	both.PluginOffers = []discovery.Offer{{Resource: "*", IDs: []string{"12"}}, {Resource: "acme.com/*", IDs: []string{"acme"}}, {Resource: "*", IDs: []string{"0000:01:00.0"}, SRIOV: true}}
	own, only := gpu("a", "acme", 0), gpu("a", "acme", 0)
	only.PluginOffers = both.PluginOffers[2:]
	pool := &discovery.SRIOVPool{NeedVhostNet: true}
	for name, test := range map[string]struct {
		device discovery.Device
		name   string
		pool   *discovery.SRIOVPool
		want   string // the ID, "" for none
	}{
		"pool":              {both, "example.com/pool", pool, "0000:01:00.0"},
		"pool of a domain":  {both, "acme.com/pool", pool, "0000:01:00.0"},
		"no pool":           {both, "example.com/pool", nil, "12"},
		"no pool, a domain": {both, "acme.com/pool", nil, "acme"},
		"family's own IDs":  {own, "example.com/pool", pool, "a"},
		"for pools alone":   {only, "example.com/pool", nil, ""},
	} {
		rules := &Rules{Resources: []Resource{{Selector: selector(t, everyGPU), Name: test.name, SRIOV: test.pool}}}
		got := rules.ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{test.device}}).Devices[0]
		var want []discovery.Offer
		if test.want != "" {
			want = []discovery.Offer{{Resource: test.name, IDs: []string{test.want}}}
		}
		if diff := cmp.Diff(want, got.Offers); diff != "" || got.SRIOV != test.pool {
			t.Errorf("%s: pool %v, offers (-want +got):\n%s", name, got.SRIOV, diff)
		}
	}
	if got := (&Rules{}).ApplyTo(&discovery.Snapshot{Devices: []discovery.Device{both}}).Devices[0].Offers; len(got) > 0 {
		t.Errorf("unnamed, and offered as %+v", got)
	}
}
