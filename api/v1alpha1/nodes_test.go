package v1alpha1

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// forNodes is a configuration with entries of each kind for some nodes.
const forNodes = header + `
mode: DevicePlugin
exclude:
- {cel: "1", nodes: {names: [a, b]}}
- {cel: "2", nodes: {matchLabels: {pool: big}}}
- {cel: "3", nodes: {names: [a], matchExpressions: [{key: pool, operator: DoesNotExist}]}}
sharing:
- {cel: "1", replicas: 2, resource: e.x/s, nodes: {matchLabels: {pool: big}}}
- {cel: "1", unit: 1Gi, resource: e.x/s}
resources:
- {cel: "1", name: e.x/one, nodes: {matchExpressions: [{key: zone, operator: In, values: [z1, z2]}]}}
allocation:
- {resource: e.x/s, policy: Packed, nodes: {names: [b]}}
- {resource: e.x/s, policy: Spread}
overhead:
- {cel: "1", perPod: {cpu: "1"}, nodes: {names: [c]}}
paths:
- {name: e.x/p, groups: [{paths: [{path: /dev/a}]}], nodes: {names: [a]}}
- {name: e.x/p, groups: [{paths: [{path: /dev/b}]}], nodes: {names: [a, b]}}
`

func TestOn(t *testing.T) {
	config, err := ParseDriverConfig([]byte(forNodes))
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		node Node
		want string // the entries that apply, in short
		err  string
	}{
		"by name":             {node: Node{"b", map[string]string{}}, want: "DevicePlugin exclude 1; allocation Packed Spread; path /dev/b"},
		"by labels":           {node: Node{"c", map[string]string{"pool": "big", "zone": "z2"}}, want: "DevicePlugin exclude 2; share 2; resource e.x/one; allocation Spread; overhead"},
		"all that is said":    {node: Node{"a", map[string]string{"pool": "small"}}, want: "DevicePlugin exclude 1; allocation Spread; path /dev/a"},
		"by both":             {node: Node{"a", map[string]string{LabelMode: "DRA"}}, want: "DRA exclude 1; exclude 3; allocation Spread; path /dev/a"},
		"labels are unknown":  {node: Node{"a", nil}, want: "DevicePlugin exclude 1; allocation Spread; path /dev/a", err: ErrNoLabels.Error()},
		"a wrong mode":        {node: Node{"a", map[string]string{LabelMode: "Sometimes"}}, err: `label chandler.dev/mode of node a: is "Sometimes"; want Auto, DRA, DevicePlugin or ReportOnly`},
		"a mode that is none": {node: Node{"a", map[string]string{LabelMode: ""}}, err: `is ""`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			on, err := config.ForNode(test.node)
			if (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("error %v, want %q", err, test.err)
			}
			got := ""
			if on != nil {
				got = inShort(on)
			}
			want := strings.Replace(test.want, " Packed Spread", " Packed", 1) // the first one wins
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func inShort(c *DriverConfig) string {
	parts := []string{}
	for _, e := range c.Exclude {
		parts = append(parts, "exclude "+e.CEL)
	}
	for _, s := range c.Sharing {
		if s.Replicas > 0 {
			parts = append(parts, "share 2")
		}
	}
	for _, r := range c.Resources {
		parts = append(parts, "resource "+r.Name)
	}
	for _, a := range c.Allocation {
		parts = append(parts, "allocation "+string(a.Policy))
	}
	for range c.Overhead {
		parts = append(parts, "overhead")
	}
	for _, p := range c.Paths {
		parts = append(parts, "path "+p.Groups[0].Paths[0].Path)
	}
	return string(c.Mode) + " " + strings.Join(parts, "; ")
}

// Entries for different nodes may contradict each other. Entries for a common node may not; if that
// depends on the node, ForNode reports the error.
func TestContradictionsOnNodes(t *testing.T) {
	share := func(cel, what, nodes string) string {
		return `- {cel: "` + cel + `", resource: e.x/s, ` + what + nodes + "}\n"
	}
	big, small := ", nodes: {matchLabels: {pool: big}}", ", nodes: {matchLabels: {zone: a}}"
	tests := map[string]struct{ text, always, both string }{
		"one for all nodes":    {text: "sharing:\n" + share("1", "replicas: 2", "") + share("2", "unit: 1Gi", big), always: "sharing[1].resource"},
		"on the same nodes":    {text: "sharing:\n" + share("1", "replicas: 2", big) + share("2", "unit: 1Gi", big), always: "sharing[1].resource"},
		"on perhaps the same":  {text: "sharing:\n" + share("1", "replicas: 2", big) + share("2", "unit: 1Gi", small), both: "sharing[1].resource"},
		"the first counts":     {text: "sharing:\n" + share("1", "replicas: 2", big) + share("1", "unit: 1Gi", "")},
		"a name of two things": {text: "sharing:\n" + share("1", "replicas: 2", big) + "resources: [{cel: '2', name: e.x/s" + small + "}]", both: "resources[0].name"},
		"allocation":           {text: "allocation: [{resource: e.x/s}, {resource: e.x/s" + big + "}]", always: "allocation[1].resource"},
		"paths":                {text: "paths: [{name: e.x/s, groups: [{paths: [{path: /a}]}]}, {name: e.x/s, groups: [{paths: [{path: /a}]}]" + big + "}]", always: "paths[1].name"},
		"no nodes":             {text: "exclude: [{cel: '1', nodes: {}}]", always: "exclude[0].nodes: must have names"},
		"no name":              {text: "exclude: [{cel: '1', nodes: {names: [A b]}}]", always: "exclude[0].nodes.names[0]"},
		"no selector":          {text: "exclude: [{cel: '1', nodes: {matchExpressions: [{key: a, operator: Is}]}}]", always: "exclude[0].nodes:"},
		"no label":             {text: "allocation: [{resource: e.x/s, nodes: {matchLabels: {a: b c}}}]", always: "allocation[0].nodes:"},
		"a field of none":      {text: "exclude: [{cel: '1', nodes: {matchNames: [a]}}]", always: `unknown field "exclude[0].nodes.matchNames"`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			config, err := ParseDriverConfig([]byte(header + test.text))
			if (err == nil) != (test.always == "") || err != nil && !strings.Contains(err.Error(), test.always) {
				t.Fatalf("error %v, want %q", err, test.always)
			}
			if err != nil {
				return
			}
			if _, err := config.ForNode(Node{"n", map[string]string{"pool": "big"}}); err != nil {
				t.Errorf("on a node of one of them: %v", err)
			}
			_, err = config.ForNode(Node{"n", map[string]string{"pool": "big", "zone": "a"}})
			if (err == nil) != (test.both == "") || err != nil && !strings.Contains(err.Error(), test.both) {
				t.Errorf("on a node of both: %v, want %q", err, test.both)
			}
		})
	}
}

// For every configuration that parses, ForNode returns a configuration, or an error other than
// [ErrNoLabels].
func FuzzOn(f *testing.F) {
	f.Add(forNodes, "pool", "big")
	f.Add(header, LabelMode, "DRA")
	f.Fuzz(func(t *testing.T, text, key, value string) {
		config, err := ParseDriverConfig([]byte(text))
		if err != nil {
			return
		}
		for _, labels := range []map[string]string{nil, {key: value}} {
			on, err := config.ForNode(Node{"node", labels})
			if (on == nil) != (err != nil && !errors.Is(err, ErrNoLabels)) {
				t.Errorf("%v and %v", on, err)
			}
			if on != nil {
				if err := on.Validate(); err != nil {
					t.Errorf("what counts is wrong: %v", err)
				}
			}
		}
	})
}
