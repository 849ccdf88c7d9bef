package pool

import "chandler.dev/discovery/rules"

// numberedShares is how often a shared device is published to a server that does
// not know of sharing.
const numberedShares = 64

// Device finds the device that an allocated name stands for: the device of that
// name, or the shared device of which it is a numbered share.
func Device(s *rules.Snapshot, name string) (rules.Offered, bool) {
	if device, found := s.Lookup(name); found {
		return device, true
	}
	device, found := shared(s, name)
	return device, found && sharesOf(&device) > 0
}

// Silicon finds the silicon that a name stands for. The name may be that of a
// numbered share of a device which is not shared by number any more.
func Silicon(s *rules.Snapshot, name string) (silicon string, found bool) {
	device, found := s.Lookup(name)
	if !found {
		device, found = shared(s, name)
	}
	return device.Silicon(), found
}

// shared finds the device of which a name is that of a numbered share.
func shared(s *rules.Snapshot, name string) (rules.Offered, bool) {
	device, share := rules.ShareOf(name)
	if !share {
		return rules.Offered{}, false
	}
	return s.Lookup(device)
}

// sharesOf returns as how many devices a shared one is published to a server
// that does not know of sharing, 0 if amounts of it are shared.
func sharesOf(d *rules.Offered) int {
	if d.Open {
		return numberedShares
	}
	return int(d.Shares())
}
