package pool

import (
	"cmp"
	"slices"
	"strings"

	"chandler.dev/discovery/rules"
)

// numberedShares is the number of names under which a device with unlimited sharing is published to
// a server without sharing.
const numberedShares = 64

// LookupDevice returns the device for an allocated name, which is the name of a device or of a
// numbered share of a shared device.
func LookupDevice(s *rules.Snapshot, name string) (rules.Offered, bool) {
	if device, found := s.Lookup(name); found {
		return device, true
	}
	device, found := lookupShare(s, name)
	return device, found && sharesOf(&device) > 0
}

// LookupSilicon returns the name of the physical device for an allocated name, which may be that of
// a numbered share even if the device is no longer shared by number.
func LookupSilicon(s *rules.Snapshot, name string) (silicon string, found bool) {
	device, found := s.Lookup(name)
	if !found {
		device, found = lookupShare(s, name)
	}
	return device.Silicon(), found
}

// lookupShare returns the device for the name of a numbered share.
func lookupShare(s *rules.Snapshot, name string) (rules.Offered, bool) {
	device, share := rules.ShareOf(name)
	if !share {
		return rules.Offered{}, false
	}
	return s.Lookup(device)
}

// sharesOf returns the number of shares that are published to a server without sharing. It returns
// 0 if claims share amounts of the device.
func sharesOf(d *rules.Offered) int {
	if d.Shareable {
		return numberedShares
	}
	return int(d.Shares())
}

// LookupInterchangeable returns the devices of a common name, the shortest names first, so that
// devices with a number are in the order of their numbers.
func LookupInterchangeable(s *rules.Snapshot, name string) (devices []*rules.Offered) {
	for i := range s.Devices {
		if d := &s.Devices[i]; d.Interchangeable == name {
			devices = append(devices, d)
		}
	}
	slices.SortFunc(devices, func(a, b *rules.Offered) int {
		return cmp.Or(cmp.Compare(len(a.Name), len(b.Name)), strings.Compare(a.Name, b.Name))
	})
	return devices
}
