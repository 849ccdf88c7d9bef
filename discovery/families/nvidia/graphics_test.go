package nvidia_test

import (
	"fmt"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/scan"
)

// A claim with a graphics capability gets the GPU's nodes below /dev/dri, with links by PCI
// address. Other claims get none, and neither do claims whose driver files come from the NVIDIA
// runtime.
func TestGraphics(t *testing.T) {
	scan := func(change func(h *discovery.Host)) []discovery.Device {
		host := discoverytest.ReadHost(t, "testdata/l40s-userspace.host")
		change(host)
		return scan.ReadHost(host, []*discovery.Family{nvidia.Family}).Devices
	}
	whole := scan(func(*discovery.Host) {})
	hookless := scan(func(h *discovery.Host) { h.Hooks = "" })
	runtime := scan(func(h *discovery.Host) { h.Roots = nil })
	const nodes = "/dev/dri/card1 226:1 /dev/dri/renderD128 226:128"
	const links = " --link=../card1::/dev/dri/by-path/pci-0000:01:00.0-card --link=../renderD128::/dev/dri/by-path/pci-0000:01:00.0-render"
	for name, test := range map[string]struct {
		given        []discovery.Device
		capabilities string
		want         string
	}{
		"graphics":      {whole, "compute,graphics", nodes + links},
		"all":           {whole, "all", nodes + links},
		"display":       {whole, "display", nodes + links},
		"compute alone": {whole, "compute,utility", ""},
		"nothing said":  {whole, "", ""},
		"no hooks":      {hookless, "all", nodes},
		"the runtime":   {runtime, "all", ""},
	} {
		t.Run(name, func(t *testing.T) {
			grant := discovery.Grant{API: discovery.ModeDRA, Parameters: discovery.Parameters{discovery.EnvironmentParameter("NVIDIA_DRIVER_CAPABILITIES"): test.capabilities}}
			edits := nvidia.Family.Grant(test.given, grant)
			var got []string
			for _, n := range edits.DeviceNodes {
				got = append(got, fmt.Sprintf("%s %d:%d", n.Path, n.Major, n.Minor))
			}
			for _, h := range edits.Hooks {
				got = append(got, h.Args[3:]...)
			}
			if strings.Join(got, " ") != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
