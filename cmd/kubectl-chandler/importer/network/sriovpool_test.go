package network

import (
	"testing"

	"go.yaml.in/yaml/v3"

	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
	"chandler.dev/discovery/rules"
)

// FuzzParts reads names of physical functions with numbers.
func FuzzParts(f *testing.F) {
	for _, seed := range []string{"ens1f0", "ens1f0#0,2-7", "0000:16:00.0#1", "a#99999999999999999999-1", `"#0`} {
		f.Add(seed, false)
	}
	f.Fuzz(func(t *testing.T, said string, sub bool) {
		p := &pool{im: plugin.NewImport()}
		if sub {
			p.kind = "auxnetdevice"
		}
		list := source.Value{Node: &yaml.Node{Kind: yaml.SequenceNode, Content: []*yaml.Node{yamlnode.NewScalar(said, 1), yamlnode.NewScalar("other#1", 1)}}}
		if p.addParts(expression.Text("pfName"), list) {
			if _, err := rules.Compile(expression.BindDomain(expression.All(p.cel))); err != nil {
				t.Fatal(err)
			}
		}
	})
}
