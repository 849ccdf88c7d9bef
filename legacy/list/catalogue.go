package list

import (
	"strings"

	"chandler.dev/discovery"
)

// Catalogue says what IDs stand for, whatever the resource: the plugin that we
// replace, or an administrator before, may have given it another name.
type Catalogue struct {
	known map[string]*Unit // by ID
	stems map[string]*Unit // what an ID may be a numbered share of, by what stands before the number
}

// CatalogueOf returns what IDs may stand for: the devices of a host with all
// that they could be offered as. Open ones are never held.
func CatalogueOf(devices []discovery.Device) Catalogue {
	c := Catalogue{make(map[string]*Unit), make(map[string]*Unit)}
	for _, d := range devices {
		if d.Open {
			continue
		}
		for _, offer := range d.Classic {
			for _, id := range offer.IDs {
				c.known[id] = c.known[id].with(d, offer)
			}
			if offer.ShareStem != "" {
				c.stems[offer.ShareStem] = c.stems[offer.ShareStem].with(d, offer)
			}
		}
	}
	return c
}

// Find returns what an ID stands for, or would be a share of; nil if nothing is
// known of it.
func (c Catalogue) Find(id string) (u *Unit, share bool) {
	if u := c.known[id]; u != nil {
		return u, false
	}
	if stem := strings.TrimRight(id, "0123456789"); stem != id && c.stems[stem] != nil {
		return c.stems[stem], true
	}
	device, _ := shareOf(id)
	return c.known[device], true
}

// shareInfixes stand between the ID of a device and the number of a share of
// it: for NVIDIA's plugin, Aliyun's, GKE's and HAMi's.
var shareInfixes = []string{"::", "-_-", "/vgpu", "-"}

// shareOf returns the ID of the device that an ID such as "GPU-1::3" would be a
// share of.
func shareOf(id string) (device string, share bool) {
	for _, infix := range shareInfixes {
		if i := strings.LastIndex(id, infix); i > 0 {
			if number := id[i+len(infix):]; number != "" && digits(number) == len(number) {
				return id[:i], true
			}
			return "", false
		}
	}
	return "", false
}
