package labels_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/labels"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
)

// gpu returns a device with the given model, name and physical device.
func gpu(model, name, silicon string) rules.Offered {
	d := discovery.Device{Name: name, Family: "x", Attributes: discovery.Attributes{}, Capacity: discovery.Capacity{}}
	d.Attributes.SetString("model", model)
	if silicon != "" {
		d.PartOf = &discovery.Silicon{Name: silicon}
	}
	return rules.Offered{Device: d}
}

// family returns a family with labels.
func family(l ...discovery.Labels) []*discovery.Family {
	return []*discovery.Family{{Name: "x", Labels: l}}
}

// others returns all labels except Chandler's own.
func others(t *testing.T, s *rules.Snapshot, families []*discovery.Family) string {
	t.Helper()
	made, err := labels.NodeLabels(s, families)
	if err != nil {
		t.Error(err)
	}
	var lines []string
	for line := range strings.Lines(labels.Lines(made)) {
		if !strings.HasPrefix(line, "chandler.dev/") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, " ")
}

func TestOf(t *testing.T) {
	set := func(name, value string) map[string]string { return map[string]string{name: value} }
	a, b, a2 := gpu("A 1", "a", ""), gpu("B", "b", ""), gpu("A 1", "c", "")
	p0, p1 := gpu("A 1", "p-0", "p"), gpu("A 1", "p-1", "p")
	for name, test := range map[string]struct {
		labels  discovery.Labels
		devices []rules.Offered
		want    string
	}{
		"nothing":                           {discovery.Labels{Set: set("x.io/a", "true")}, nil, ""},
		"one device":                        {discovery.Labels{Set: set("x.io/a", "{model}-{count}")}, []rules.Offered{a}, "x.io/a=A-1-1"},
		"what is not known":                 {discovery.Labels{Set: set("x.io/a", "{serial}")}, []rules.Offered{a}, ""},
		"what most have":                    {discovery.Labels{Set: set("x.io/a", "{model}.{count}")}, []rules.Offered{b, a, a2}, "x.io/a=A-1.2"},
		"the first of equals":               {discovery.Labels{Set: set("x.io/a", "{model}")}, []rules.Offered{b, a}, "x.io/a=B"},
		"parts of one are one":              {discovery.Labels{Set: set("x.io/a", "{model}")}, []rules.Offered{b, p0, p1}, "x.io/a=B"},
		"parts count and silicon":           {discovery.Labels{Set: set("x.io/a", "{count}.{silicon}")}, []rules.Offered{a, p0, p1}, "x.io/a=3.2"},
		"a label for each value":            {discovery.Labels{Set: set("x.io/a.{model}", "{count}")}, []rules.Offered{b, a, a2}, "x.io/a.A-1=2 x.io/a.B=1"},
		"agreed":                            {discovery.Labels{If: discovery.Agreed, Set: set("x.io/a", "{model}")}, []rules.Offered{a, a2}, "x.io/a=A-1"},
		"not agreed":                        {discovery.Labels{If: discovery.Agreed, Set: set("x.io/a", "{model}")}, []rules.Offered{a, b}, ""},
		"disputed":                          {discovery.Labels{If: discovery.Disputed, Set: set("x.io/{model}", "{count}")}, []rules.Offered{a, b}, "x.io/A-1=1 x.io/B=1"},
		"not disputed":                      {discovery.Labels{If: discovery.Disputed, Set: set("x.io/{model}", "{count}")}, []rules.Offered{a, a2}, ""},
		"where":                             {discovery.Labels{Where: set("model", "B"), Set: set("x.io/a", "{count}")}, []rules.Offered{a, b, a2}, "x.io/a=1"},
		"where not":                         {discovery.Labels{Where: set("model", "!B"), Set: set("x.io/a", "{count}")}, []rules.Offered{a, b, a2}, "x.io/a=2"},
		"where there is none":               {discovery.Labels{Where: set("serial", ""), Set: set("x.io/a", "{count}")}, []rules.Offered{a}, "x.io/a=1"},
		"where there is any":                {discovery.Labels{Where: set("serial", "!"), Set: set("x.io/a", "{count}")}, []rules.Offered{a}, ""},
		"the main ones":                     {discovery.Labels{Main: "model", Set: set("x.io/a", "{count}")}, []rules.Offered{b, a, a2}, "x.io/a=2"},
		"the main ones have a word":         {discovery.Labels{Main: "serial", Set: set("x.io/a", "{count}")}, []rules.Offered{a}, ""},
		"another space":                     {discovery.Labels{Space: "_", Set: set("x.io/a", "{model}")}, []rules.Offered{a}, "x.io/a=A_1"},
		"characters that no label can have": {discovery.Labels{Set: set("x.io/a", "{model}")}, []rules.Offered{gpu("GTX(R) 1650  / Max-Q™ ", "g", "")}, "x.io/a=GTXR-1650-Max-Q"},
		"nothing is left":                   {discovery.Labels{Set: set("x.io/a", "{model}")}, []rules.Offered{gpu("/", "g", "")}, ""},
		"too long": {
			discovery.Labels{Set: set("x.io/a", "{model}")},
			[]rules.Offered{gpu(strings.Repeat("x", 62)+" y", "g", "")},
			"x.io/a=" + strings.Repeat("x", 62),
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := others(t, &rules.Snapshot{Devices: test.devices}, family(test.labels)); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// If several labels have the same name, the last one wins. Chandler's own labels count devices that
// are not accelerators only if there are no others. A device that cannot be allocated is only in the
// total.
func TestOrder(t *testing.T) {
	channel := gpu("channel", "channel", "")
	channel.Attributes.SetString("kind", "other")
	a := gpu("A", "a", "")
	a.Attributes.SetString("kind", "gpu")
	a.Capacity.Set("memory", 3<<30)
	bad, slow := a, a
	bad.Name, bad.Health = "bad", discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionDriverUnbound}
	slow.Name, slow.Health = "slow", discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionLinkDegraded}
	for want, devices := range map[string][]rules.Offered{
		"chandler.dev/x.count=2\nchandler.dev/x.memory=3072\nchandler.dev/x.model=A\nchandler.dev/x.total=3\nx.io/a=last\n": {a, bad, slow, channel},
		"chandler.dev/x.memory=3072\nchandler.dev/x.model=A\nchandler.dev/x.total=1\nx.io/a=last\n":                         {bad, channel},
		"chandler.dev/x.count=1\nchandler.dev/x.memory=3072\nchandler.dev/x.model=A\nchandler.dev/x.total=1\nx.io/a=last\n": {a, channel},
		"chandler.dev/x.count=1\nchandler.dev/x.total=1\nx.io/a=last\n":                                                     {channel},
	} {
		made, err := labels.NodeLabels(&rules.Snapshot{Devices: devices}, family(
			discovery.Labels{Set: map[string]string{"x.io/a": "first"}},
			discovery.Labels{Set: map[string]string{"x.io/a": "last"}},
			discovery.Labels{Where: map[string]string{"model": "none"}, Set: map[string]string{"x.io/a": "never"}},
		))
		if err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(want, labels.Lines(made)); diff != "" {
			t.Error(diff)
		}
	}
}

// The two FPGAs of one card are two physical devices.
func TestCountOfCards(t *testing.T) {
	devices := []rules.Offered{gpu("A", "pci-0000-0b-00-1", "card"), gpu("A", "pci-0000-0c-00-1", "card")}
	for i := range devices {
		devices[i].Attributes.SetString("function", "physical")
	}
	made, err := labels.NodeLabels(&rules.Snapshot{Devices: devices}, family())
	if err != nil || made["chandler.dev/x.count"] != "2" || made["chandler.dev/x.total"] != "2" {
		t.Errorf("labels %v, error %v, want two devices", made, err)
	}
}

// A device with a value that is invalid in a label name leads to an error, and the label is left
// out.
func TestNameTooLong(t *testing.T) {
	s := &rules.Snapshot{Devices: []rules.Offered{gpu(strings.Repeat("x", 63), "g", "")}}
	made, err := labels.NodeLabels(s, family(discovery.Labels{Set: map[string]string{"x.io/a.{model}": "true", "x.io/b": "true"}}))
	if err == nil || made["x.io/b"] != "true" || len(made) != 4 {
		t.Errorf("labels %v, error %v", made, err)
	}
}

// Labels reflect the administrator's sharing and naming of GPUs, like the labels of
// gpu-feature-discovery.
func TestSharing(t *testing.T) {
	all := `device.attributes["chandler.dev"].kind == "gpu"`
	selector, err := rules.Compile(all)
	if err != nil {
		t.Fatal(err)
	}
	share := func(s rules.Share) *rules.Rules {
		s.Selector = selector
		return &rules.Rules{Sharing: []rules.Share{s}}
	}
	renamed := share(rules.Share{Replicas: 4, Resource: "nvidia.com/gpu.shared"})
	for name, test := range map[string]struct {
		host  string
		rules *rules.Rules
		want  []string
	}{
		"not shared":   {"gb200", &rules.Rules{}, []string{"gpu.product=NVIDIA-GB200", "gpu.replicas=1", "gpu.sharing-strategy=none", "mps.capable=false"}},
		"by number":    {"gb200", share(rules.Share{Replicas: 4}), []string{"gpu.product=NVIDIA-GB200-SHARED", "gpu.replicas=4", "gpu.sharing-strategy=time-slicing", "mps.capable=false"}},
		"by one":       {"gb200", share(rules.Share{Replicas: 1}), []string{"gpu.product=NVIDIA-GB200", "gpu.replicas=1", "gpu.sharing-strategy=none"}},
		"renamed":      {"gb200", renamed, []string{"gpu.product=NVIDIA-GB200", "gpu.replicas=4", "gpu.sharing-strategy=time-slicing"}},
		"by units":     {"gb200", share(rules.Share{Capacity: "memory", Unit: resource.MustParse("10Gi")}), []string{"gpu.product=NVIDIA-GB200-SHARED", "gpu.replicas=18"}},
		"MPS":          {"mps", share(rules.Share{Replicas: 2}), []string{"gpu.product=NVIDIA-A100-SXM4-40GB-SHARED", "gpu.replicas=2", "gpu.sharing-strategy=mps", "mps.capable=true"}},
		"MPS unshared": {"mps", &rules.Rules{}, []string{"gpu.sharing-strategy=none", "mps.capable=false"}},
		"MIG": {"a100-single", share(rules.Share{Replicas: 3}), []string{
			"gpu.replicas=0", "gpu.sharing-strategy=none", "mig.strategy=mixed",
			"mig-2g.10gb.product=NVIDIA-A100-SXM4-40GB-MIG-2g.10gb-SHARED", "mig-2g.10gb.replicas=3", "mig-2g.10gb.sharing-strategy=time-slicing",
		}},
		"single": {"a100-single", selected(t, all, "nvidia.com/gpu"), []string{
			"gpu.count=5", "gpu.product=NVIDIA-A100-SXM4-40GB-MIG-2g.10gb", "gpu.memory=9984", "gpu.replicas=1", "gpu.slices.gi=2", "gpu.multiprocessors=28", "mig.strategy=single",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			host := discoverytest.ReadHost(t, fmt.Sprintf("../families/nvidia/testdata/%s.host", test.host))
			made, err := labels.NodeLabels(test.rules.ApplyTo(scan.ReadHost(host, families.All)), families.All)
			if err != nil {
				t.Error(err)
			}
			for _, want := range test.want {
				name, value, _ := strings.Cut(want, "=")
				if got := made["nvidia.com/"+name]; got != value {
					t.Errorf("%s is %q, want %q", name, got, value)
				}
			}
			if _, mixed := made["nvidia.com/mig-2g.10gb.count"]; mixed != (name == "MIG") {
				t.Error("labels of another MIG strategy")
			}
		})
	}
}

// A GPU that the administrator excludes adds no labels.
func TestExcluded(t *testing.T) {
	selector, err := rules.Compile(`device.attributes["chandler.dev"].family == "nvidia"`)
	if err != nil {
		t.Fatal(err)
	}
	r := &rules.Rules{Exclude: []rules.Selector{selector}}
	found := scan.ReadHost(discoverytest.ReadHost(t, "../families/nvidia/testdata/h100x8.host"), families.All)
	if made, err := labels.NodeLabels(r.ApplyTo(found), families.All); len(made) > 0 || err != nil {
		t.Errorf("labels %v, error %v", made, err)
	}
}

// File returns an error for a file that Node Feature Discovery would refuse.
func TestFile(t *testing.T) {
	many := make(map[string]string)
	for i := range 3000 {
		many[fmt.Sprintf("x.io/%d", i)] = strings.Repeat("v", 20)
	}
	for name, test := range map[string]struct {
		labels map[string]string
		want   string // the file without the comment, or part of the error
	}{
		"none":                {nil, ""},
		"in order":            {map[string]string{"x.io/b": "1", "feature.node.kubernetes.io/a": "", "a.feature.node.kubernetes.io/c": "x"}, "a.feature.node.kubernetes.io/c=x\nfeature.node.kubernetes.io/a=\nx.io/b=1\n"},
		"too long":            {many, "at most 65536"},
		"no domain":           {map[string]string{"a": "1"}, "has no domain"},
		"Kubernetes' domain":  {map[string]string{"node.kubernetes.io/a": "1"}, "Kubernetes' own"},
		"a name with a space": {map[string]string{"x.io/a b": "1"}, "label \"x.io/a b\""},
		"a long value":        {map[string]string{"x.io/a": strings.Repeat("x", 64)}, "must be no more than 63"},
		"a value with a line": {map[string]string{"x.io/a": "1\nx.io/b=2"}, "value \"1\\nx.io/b=2\""},
	} {
		t.Run(name, func(t *testing.T) {
			file, err := labels.File(test.labels)
			if err != nil {
				if test.want == "" || !strings.Contains(err.Error(), test.want) {
					t.Errorf("error %v, want %q", err, test.want)
				}
				return
			}
			comment, rest, _ := strings.Cut(string(file), "\n")
			if rest != test.want || !strings.HasPrefix(comment, "# ") || strings.HasPrefix(comment, "# +") {
				t.Errorf("file:\n%s\nwant:\n%s", file, test.want)
			}
		})
	}
}

// Validate refuses a family with labels that are always invalid.
func TestValidate(t *testing.T) {
	for name, test := range map[string]struct{ name, value, want string }{
		"a brace":          {"x.io/{model", "true", "{ without a word and }"},
		"another brace":    {"x.io/a", "model}", "} without {"},
		"no word":          {"x.io/a", "{}", "{ without a word and }"},
		"no domain":        {"gpu", "true", "has no domain"},
		"a reserved name":  {"kubernetes.io/gpu", "true", "Kubernetes' own"},
		"a value":          {"x.io/gpu", "a b", "value \"a b\""},
		"as it should be":  {"x.io/gpu.{model}", "{count}", ""},
		"without anything": {"", "", "name part must be non-empty"},
	} {
		f := family(discovery.Labels{Set: map[string]string{test.name: test.value}})[0]
		f.Doc, f.Match = "doc", []discovery.Match{{Bus: "pci"}}
		f.Describe = families.All[0].Describe
		err := discovery.Validate([]*discovery.Family{f})
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}
