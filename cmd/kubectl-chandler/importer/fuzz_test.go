package importer

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
	"chandler.dev/discovery/rules"
)

// FuzzImport imports any text: there is no panic, and the result is a valid configuration.
func FuzzImport(f *testing.F) {
	entries, err := os.ReadDir("testdata")
	if err != nil {
		f.Fatal(err)
	}
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), ".golden") || entry.Name() == "fuzz" {
			continue
		}
		for _, file := range filesOf(f, filepath.Join("testdata", entry.Name())) {
			f.Add(file.Data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<14 {
			return
		}
		_, _, _ = read(t, Options{Only: true}, File{Name: "fuzz", Data: data})
	})
}

// FuzzParts reads names of physical functions with numbers.
func FuzzParts(f *testing.F) {
	for _, seed := range []string{"ens1f0", "ens1f0#0,2-7", "0000:16:00.0#1", "a#99999999999999999999-1", `"#0`} {
		f.Add(seed, false)
	}
	f.Fuzz(func(t *testing.T, said string, sub bool) {
		p := &pool{im: newImporter(Options{})}
		if sub {
			p.kind = "auxnetdevice"
		}
		list := source.Value{Node: &yaml.Node{Kind: yaml.SequenceNode, Content: []*yaml.Node{yamlnode.NewScalar(said, 1), yamlnode.NewScalar("other#1", 1)}}}
		if p.addParts(text("pfName"), list) {
			compile(t, bindDomain(all(p.cel)))
		}
	})
}

// FuzzAlias reads naming rules of the Xilinx plugin.
func FuzzAlias(f *testing.F) {
	f.Add("u30-*-*", "'ama_'+deviceType")
	f.Add("*-xilinx_u50_gen3x16_xdma_201920_3-1579649056", "'u50-'+timestamp")
	f.Fuzz(func(t *testing.T, key, alias string) {
		im := newImporter(Options{})
		x := &xilinx{im: im}
		x.readAlias(source.Value{Node: yamlnode.NewScalar(alias, 1), Path: "[" + key + "]"})
		if len(im.config.Resources)+len(im.notes) == 0 {
			t.Error("neither carried over nor noted")
		}
		for _, r := range im.config.Resources {
			compile(t, r.CEL)
		}
	})
}

func compile(t *testing.T, cel string) {
	t.Helper()
	if _, err := rules.Compile(cel); err != nil {
		t.Fatal(err)
	}
}

// FuzzTranslateCEL translates CEL expressions: the result compiles if the expression compiles, and
// names no other driver.
func FuzzTranslateCEL(f *testing.F) {
	for _, seed := range []string{
		`device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type in ['gpu', 'mig']`,
		`cel.bind(a, device.attributes['gpu.nvidia.com'], has(a.profile) && a[?'profile'].orValue('') != a.uuid)`,
		`!(device.driver in ["dra.net", "gpu.amd.com"]) || device.attributes["gpu.amd.com"].?isVF.orValue(true)`,
		`device.capacity['gpu.amd.com'].computeUnits.isGreaterThan(quantity('1')) ? "x" in [device.attributes[?'a'].?b.orValue("")] : true`,
		`'ifName' in device.attributes["dra.net"] && [1, 2].exists(a, a == device.attributes['dra.net'].numaNode)`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) > 1<<12 {
			return
		}
		written, _, err := translateCEL(text)
		if err != nil {
			return
		}
		if _, err := rules.Compile(text); err == nil {
			compile(t, written)
		}
		if _, _, err := parseCEL(written); err != nil {
			t.Fatalf("%q became %q: %v", text, written, err)
		}
	})
}
