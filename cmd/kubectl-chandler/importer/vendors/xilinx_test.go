package vendors

import (
	"testing"

	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
	"chandler.dev/discovery/rules"
)

// FuzzAlias reads naming rules of the Xilinx plugin.
func FuzzAlias(f *testing.F) {
	f.Add("u30-*-*", "'ama_'+deviceType")
	f.Add("*-xilinx_u50_gen3x16_xdma_201920_3-1579649056", "'u50-'+timestamp")
	f.Fuzz(func(t *testing.T, key, alias string) {
		im := plugin.NewImport()
		x := &xilinx{im: im}
		x.readAlias(source.Value{Node: yamlnode.NewScalar(alias, 1), Path: "[" + key + "]"})
		if len(im.Config.Driver.Resources)+len(im.Notes.Sorted()) == 0 {
			t.Error("neither carried over nor noted")
		}
		for _, r := range im.Config.Driver.Resources {
			if _, err := rules.Compile(r.CEL); err != nil {
				t.Fatal(err)
			}
		}
	})
}
