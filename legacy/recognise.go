package legacy

import (
	"strings"

	"chandler.dev/discovery"
)

// catalogue says what IDs stand for, whatever the resource: the plugin that we
// replace, or an administrator before, may have given it another name.
type catalogue struct {
	known map[string]*unit // by ID
	stems map[string]*unit // what an ID may be a numbered share of, by what stands before the number
}

// catalogueOf returns what IDs may stand for: the devices of a host with all
// that they could be offered as. Shareable ones are never held.
func catalogueOf(devices []discovery.Device) catalogue {
	c := catalogue{make(map[string]*unit), make(map[string]*unit)}
	for _, d := range devices {
		if d.Shareable {
			continue
		}
		for _, offer := range d.Offers {
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

// find returns what an ID stands for, or would be a share of; nil if nothing is
// known of it.
func (c catalogue) find(id string) (u *unit, share bool) {
	if u := c.known[id]; u != nil {
		return u, false
	}
	if stem := strings.TrimRight(id, "0123456789"); stem != id && c.stems[stem] != nil {
		return c.stems[stem], true
	}
	device, _ := shareOf(id)
	return c.known[device], true
}

// know says what IDs may stand for.
func (h *holdings) know(devices []discovery.Device) {
	known := catalogueOf(devices)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.known = known
}

// recognise returns the holding with its devices. Where they were not written
// down they are those of the ID. One that has none keeps none.
func (c catalogue) recognise(one *holding) *holding {
	if len(one.Devices) > 0 {
		return one
	}
	u, share := c.find(one.ID)
	if u == nil {
		return one
	}
	recognised := newHolding(one.Resource, one.ID, u, one.Since)
	recognised.Container = one.Container
	recognised.Exclusive = recognised.Exclusive && !share
	return recognised
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
