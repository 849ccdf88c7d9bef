package ledger

import (
	"cmp"

	"chandler.dev/discovery"
)

// work is the entry of a device that the agent changes for the device-plugin API, or gives back
// to its driver.
// It has no file, so it ends with the process.
type work struct {
	device, silicon string
	part            discovery.Mode // the API by which it is only the device's part of the silicon, "" for all of it
}

var _ Entry = (*work)(nil)

// Key implements [Entry].
func (w *work) Key() string { return w.device + " changes" }

// API implements [Entry].
func (w *work) API() discovery.Mode { return cmp.Or(w.part, discovery.ModeDevicePlugin) }

// Owner implements [Entry].
func (w *work) Owner() Owner { return Owner{} }

// Holds implements [Entry].
func (w *work) Holds() []Hold {
	return []Hold{{Device: w.device, Silicon: w.silicon, Whole: w.part == "", Present: w.part != ""}}
}

// Files implements [Entry].
func (w *work) Files() []discovery.HostFile { return nil }

// Reserve keeps everybody, by either API, from the silicon of a device until it is
// released, so that the agent can change the device. It returns who has any of the
// silicon if somebody does.
func (l *Ledger) Reserve(device, silicon string, s Stock) (release func(), blocked *Blocked) {
	return l.reserveWork(&work{device: device, silicon: silicon}, s)
}

// ReserveDevice is as Reserve, and leaves others the silicon that the device does not take, such
// as other virtual functions of one adapter. They are offered by an API.
func (l *Ledger) ReserveDevice(api discovery.Mode, device, silicon string, s Stock) (release func(), blocked *Blocked) {
	return l.reserveWork(&work{device, silicon, api}, s)
}

func (l *Ledger) reserveWork(w *work, s Stock) (release func(), blocked *Blocked) {
	q := question{by: discovery.ModeDRA, own: w.Key(), want: w.Holds(), stock: s}
	l.mu.Lock()
	defer l.mu.Unlock()
	if b := l.mayHave(q); b != nil {
		return nil, b
	}
	q.by, q.ending = cmp.Or(w.part, q.by), true
	if b := l.index.blocked(q); b != nil {
		return nil, b
	}
	l.put(newAccount(w, Reserved))
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.drop(w.Key())
	}, nil
}
