package legacy

import (
	"strings"

	"chandler.dev/discovery"
)

// know says what IDs may stand for: the devices of a host with all that they
// could be offered as. Shareable ones are never held.
func (h *holdings) know(devices []discovery.Device) {
	known, stems := make(map[string]*unit), make(map[string]*unit)
	for _, d := range devices {
		if d.Shareable {
			continue
		}
		for _, offer := range d.Offers {
			for _, id := range offer.IDs {
				known[id] = known[id].with(d, offer)
			}
			if offer.ShareStem != "" {
				stems[offer.ShareStem] = stems[offer.ShareStem].with(d, offer)
			}
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.known, h.stems = known, stems
}

// recognise returns the holding with its devices. Where they were not written
// down they are those of the ID, whatever the resource: the plugin that we
// replace, or an administrator before, may have given it another name. One
// that has none keeps none.
func (h *holdings) recognise(one *holding) *holding {
	if len(one.Devices) > 0 {
		return one
	}
	u, share := h.known[one.ID], false
	if u == nil {
		u, share = h.shared(one.ID), true
	}
	if u == nil {
		return one
	}
	recognised := newHolding(one.Resource, one.ID, u, one.Since)
	recognised.Container = one.Container
	recognised.Exclusive = recognised.Exclusive && !share
	return recognised
}

// shared returns what an ID that stands for nothing itself would be a share of,
// nil if nothing is known of it.
func (h *holdings) shared(id string) *unit {
	if stem := strings.TrimRight(id, "0123456789"); stem != id && h.stems[stem] != nil {
		return h.stems[stem]
	}
	device, _ := shareOf(id)
	return h.known[device]
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
