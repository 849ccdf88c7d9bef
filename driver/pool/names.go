package pool

import (
	"fmt"
	"strconv"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

const (
	// numberedShares is how often a shared device is published to a server
	// that does not know of sharing.
	numberedShares = 64

	// shareInfix stands between the name of a shared device and the number.
	shareInfix = "-share-"
)

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
	i := strings.LastIndex(name, shareInfix)
	if i < 0 {
		return rules.Offered{}, false
	}
	number := name[i+len(shareInfix):]
	if number == "" || strings.Trim(number, "0123456789") != "" {
		return rules.Offered{}, false
	}
	return s.Lookup(name[:i])
}

// sharesOf returns as how many devices a shared one is published to a server
// that does not know of sharing, 0 if amounts of it are shared.
func sharesOf(d *rules.Offered) int {
	switch {
	case d.Open:
		return numberedShares
	case d.Sharing != nil && d.Sharing.Capacity == discovery.Shares:
		shares := d.Capacity[discovery.Shares].Value
		return int(shares.Value())
	}
	return 0
}

// shareName returns the name of one of the numbered shares of a device. Numbers
// have as many digits each, so that the order of names is theirs.
func shareName(device string, i, shares int) string {
	digits := max(2, len(strconv.Itoa(shares-1)))
	return fmt.Sprintf("%s%s%0*d", device, shareInfix, digits, i)
}
