package exclusion

import (
	"slices"
	"strings"

	"chandler.dev/discovery/rules"
	"chandler.dev/internal/ledger/allocation"
)

// presentHolds returns the holds of an account as recorded, and a second time as they are at
// present if the device belongs to another physical device now. Functions become one physical
// device when passthrough is enabled for them, or when a function is plugged into their IOMMU
// group.
func presentHolds(holds []allocation.Hold, stock Stock) []allocation.Hold {
	all := make([]allocation.Hold, 0, len(holds))
	for _, h := range holds {
		h = Complete(h, stock)
		all = append(all, h)
		if device, found := FindPresent(h.Device, stock); found && device.Silicon() != h.Silicon {
			h.Silicon, h.Whole, h.Takes = device.Silicon(), device.PartOf == nil, device.Takes
			all = append(all, h)
		}
	}
	return all
}

// Complete fills in, from the present snapshot, the fields of a hold that its entry does not
// record.
func Complete(h allocation.Hold, stock Stock) allocation.Hold {
	if !h.Present {
		return h
	}
	device, found := FindPresent(h.Device, stock)
	switch {
	case found:
		h.Device, h.Silicon, h.Whole, h.Takes = device.Name, device.Silicon(), device.PartOf == nil, device.Takes
		h.Open = h.Open || device.Shareable
	case h.Silicon == "":
		h.Silicon, h.Whole = h.Device, true
	}
	return h
}

// FindPresent finds the device with a name from a CDI spec or a file. The name may be that of a
// numbered share of a device that is not shared by number any more.
func FindPresent(name string, stock Stock) (rules.Offered, bool) {
	device, found := stock.Device(name)
	if of, share := rules.ShareOf(name); !found && share {
		return stock.Device(of)
	}
	return device, found
}

// touchesHold reports whether both holds are on one physical device.
func touchesHold(h, w *allocation.Hold) bool { return h.Silicon == w.Silicon || h.Device == w.Device }

// excludesHold reports whether hold h excludes the wanted hold, whatever other holds exist. Two
// parts of one physical device do not exclude each other, nor do two shares of one form: the
// balance decides whether there is enough for both.
func excludesHold(h, w *allocation.Hold) bool {
	switch {
	case h.Device == w.Device:
		return h.Amount == nil || w.Amount == nil || !sameForm(h.Form, w.Form)
	case h.Silicon != w.Silicon:
		return false
	}
	return h.Whole || w.Whole || takesAll(h) || takesAll(w)
}

// sameForm reports whether shares of two forms are compatible. An entry of an older agent records
// only the beginning of the form, and is compatible with every form that begins so.
func sameForm(a, b string) bool {
	return a == b || strings.HasPrefix(a, b+" ") || strings.HasPrefix(b, a+" ")
}

// takesAll reports whether the hold is the whole of a device that has parts.
func takesAll(h *allocation.Hold) bool { return h.Device == h.Silicon && len(h.Takes) > 0 }

// hasNode reports whether the hold includes one of the nodes.
func hasNode(h *allocation.Hold, nodes []allocation.Node) bool {
	return slices.ContainsFunc(h.Nodes, func(mine allocation.Node) bool {
		return slices.ContainsFunc(nodes, func(n allocation.Node) bool {
			return mine.Path == n.Path || mine.HasNumbers() && mine.NumberText() == n.NumberText()
		})
	})
}
