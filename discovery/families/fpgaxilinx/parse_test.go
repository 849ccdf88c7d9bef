package fpgaxilinx

import (
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

func FuzzResourceSuffix(f *testing.F) {
	for _, shell := range []string{
		"xilinx_u50_gen3x16_xdma_201920_3-0", "xilinx_aws-vu9p-f1_shell-v04261818_201920_3-0",
		"xilinx:u200 xdma-1561465320", "", "-", "___", "é", "a-very-long-name-of-a-shell-that-goes-on-and-on-and-on-and-on-1561465320",
	} {
		f.Add(shell)
	}
	f.Fuzz(func(t *testing.T, shell string) {
		suffix := resourceSuffix(shell)
		if suffix == "" {
			return
		}
		if messages := validation.IsQualifiedName("amd.com/" + suffix); len(messages) > 0 {
			t.Errorf("%q becomes %q: %v", shell, suffix, messages)
		}
	})
}

func FuzzParseInfo(f *testing.F) {
	f.Add("Product name = Alveo MA35D\nProduct serial number = XFL1AB\nPCIe device ID=0x5070\n")
	f.Add("=\n==\nno equals sign")
	f.Fuzz(func(t *testing.T, text string) {
		for key, value := range parseInfo(text) {
			if len(key)+len(value) >= len(text) {
				t.Errorf("%q = %q of a text of %d bytes", key, value, len(text))
			}
		}
	})
}
