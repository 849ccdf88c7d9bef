package list

import (
	"testing"

	"chandler.dev/discovery"
)

// IDs are recognised as IDs of devices or of shares, in the dialects of the devices' plugins and in
// the common dialects.
func TestCatalogue(t *testing.T) {
	var devices []discovery.Device
	add := func(id string, dialect discovery.Dialect) {
		devices = append(devices, discovery.Device{Name: id, PluginOffers: []discovery.Offer{{IDs: []string{id}, Dialect: dialect}}})
	}
	add("GPU-1", discovery.Dialect{})
	add("a::1", discovery.Dialect{})
	add("nvidia0", discovery.Dialect{Infix: "/vgpu"})
	add("card1-0", discovery.Dialect{Stem: "card1-"})
	open := discovery.Device{Name: "kvm", Shareable: true, PluginOffers: []discovery.Offer{{IDs: []string{"kvm0"}}}}
	c := CatalogueOf(append(devices, open))
	for id, want := range map[string]string{
		"GPU-1": "GPU-1", "card1-0": "card1-0",
		"GPU-1::3": "GPU-1 shared", "GPU-1-_-7": "GPU-1 shared", "GPU-1-0": "GPU-1 shared", "a::1::2": "a::1 shared",
		"nvidia0/vgpu1": "nvidia0 shared", "nvidia0::1": "nvidia0 shared", "card1-2": "card1-0 shared",
		"GPU-1::": "", "GPU-1::x": "", "GPU-1/vgpu1": "", "GPU-2::1": "", "card2-0": "", "kvm0": "", "kvm1": "", "7": "", "": "",
	} {
		got := ""
		if u, share := c.Find(id); u != nil {
			got = u.Name
			if share {
				got += " shared"
			}
		}
		if got != want {
			t.Errorf("%s: %q; want %q", id, got, want)
		}
	}
}
