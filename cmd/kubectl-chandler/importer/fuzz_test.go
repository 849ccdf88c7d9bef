package importer

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

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

// FuzzPlainJSON checks that comments and trailing commas do not change the content of JSON.
func FuzzPlainJSON(f *testing.F) {
	f.Add(`{"a": "// no comment", "b": [1, {"c": null}], "d": "\\\""}`)
	f.Add(`[]`)
	f.Fuzz(func(t *testing.T, text string) {
		var want, got any
		if json.Unmarshal([]byte(text), &want) != nil || !strings.HasPrefix(text, "{") && !strings.HasPrefix(text, "[") {
			plainJSON(text)
			return
		}
		littered := "// here\n" + strings.TrimRight(text, " \n\t\r") + " /* and\nhere */,\n"
		for _, text := range []string{text, littered} {
			plain, ok := plainJSON(text)
			if !ok {
				t.Fatalf("no JSON: %s", text)
			}
			if err := json.Unmarshal([]byte(strings.TrimRight(plain, " \n,")), &got); err != nil || !reflect.DeepEqual(want, got) {
				t.Fatalf("%v: %s became %s", err, text, plain)
			}
		}
	})
}

// FuzzWords checks that words reverses the quoting for a shell.
func FuzzWords(f *testing.F) {
	f.Add("--device", `{"name": "it's"}`)
	f.Add("a b", "--c=\\d")
	f.Fuzz(func(t *testing.T, a, b string) {
		splitWords(a, 1)
		text := ""
		for _, word := range []string{a, b} {
			text += " '" + strings.ReplaceAll(word, "'", `'\''`) + "'"
		}
		got := splitWords(text, 1)
		if len(got) != 2 || got[0].Value != a || got[1].Value != b {
			t.Fatalf("%q became %v", text, got)
		}
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
		list := value{node: &yaml.Node{Kind: yaml.SequenceNode, Content: []*yaml.Node{newScalar(said, 1), newScalar("other#1", 1)}}}
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
		x.readAlias(value{node: newScalar(alias, 1), path: "[" + key + "]"})
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
