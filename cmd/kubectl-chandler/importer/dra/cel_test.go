package dra

import (
	"testing"

	"chandler.dev/discovery/rules"
)

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
			if _, err := rules.Compile(written); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err := parseCEL(written); err != nil {
			t.Fatalf("%q became %q: %v", text, written, err)
		}
	})
}
