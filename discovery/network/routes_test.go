package network

import (
	"slices"
	"strings"
	"testing"
)

func FuzzRoutes(f *testing.F) {
	f.Add("eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0")
	f.Add("Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT")
	f.Add("00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth0")
	f.Add("")
	f.Fuzz(func(t *testing.T, line string) {
		r := make(Routes)
		fields := strings.Fields(line)
		four, six := r.addLine(fields), r.addLine6(fields)
		if len(r) > 0 && !four && !six {
			t.Errorf("no route, and yet the interfaces %v", r)
		}
		for name := range r {
			if !slices.Contains(fields, name) {
				t.Errorf("interface %q is not in the line", name)
			}
		}
	})
}

func FuzzRepresentedBy(f *testing.F) {
	for _, name := range []string{"pf0vf1", "pf1sf88", "p0", "c1pf0vf0", "pf0", "pf0vf99999999999", ""} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		p, ok := representedBy(name)
		if ok && (!strings.HasPrefix(name, "pf") || p.number < 0) || !ok && p != (part{}) {
			t.Errorf("%q: %+v, %v", name, p, ok)
		}
	})
}
