package ledger

import (
	"chandler.dev/discovery"
)

// work is the entry of a device that the agent changes for the device-plugin API.
// It has no file, so it ends with the process.
type work struct{ device, silicon string }

var _ Entry = (*work)(nil)

// Key implements [Entry].
func (w *work) Key() string { return w.device + " changes" }

// API implements [Entry].
func (w *work) API() discovery.Mode { return discovery.ModeDevicePlugin }

// Owner implements [Entry].
func (w *work) Owner() Owner { return Owner{} }

// Holds implements [Entry].
func (w *work) Holds() []Hold {
	return []Hold{{Device: w.device, Silicon: w.silicon, Whole: true}}
}

// Files implements [Entry].
func (w *work) Files() []discovery.HostFile { return nil }

// Reserve keeps everybody, by either API, from the silicon of a device until it is
// released, so that the agent can change the device. It returns who has any of the
// silicon if somebody does.
func (l *Ledger) Reserve(device, silicon string, s Stock) (release func(), blocked *Blocked) {
	w := &work{device, silicon}
	q := question{by: discovery.ModeDRA, own: w.Key(), want: w.Holds(), stock: s}
	l.mu.Lock()
	defer l.mu.Unlock()
	if b := l.mayHave(q); b != nil {
		return nil, b
	}
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
