package ledger

import (
	"slices"

	"chandler.dev/discovery"
)

// Kept is the entry of a device whose owner has ended, and which nobody else may have
// yet. It has no file here: whoever keeps the device remembers it, and says it again before
// the ledger is opened.
type Kept struct {
	Name string // tells it from all others that are kept
	Had  Owner  // who had the device
	Hold Hold   // what of it
	Why  string // why it is kept: "process 47 (train) has /dev/nvidia0 open"
}

var _ Entry = (*Kept)(nil)

// Key implements [Entry].
func (k *Kept) Key() string { return keptKey(k.Name) }

func keptKey(name string) string { return name + " kept" }

// API implements [Entry].
func (k *Kept) API() discovery.Mode { return k.Had.API }

// Owner implements [Entry]. It has no UID, since all else of the claim is gone.
func (k *Kept) Owner() Owner {
	o := k.Had
	o.UID, o.left = "", k.Why
	return o
}

// Holds implements [Entry].
func (k *Kept) Holds() []Hold { return []Hold{k.Hold} }

// Files implements [Entry].
func (k *Kept) Files() []discovery.HostFile { return nil }

// Keep keeps a device from everybody until [Ledger.Release]. It may be said again with
// another reason.
func (l *Ledger) Keep(k *Kept) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.put(newAccount(k, Reserved))
}

// Release says that a device is not kept any more.
func (l *Ledger) Release(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop(keptKey(name))
}

// Kept says why devices are kept though nobody has them any more, "" if none is.
func (v *View) Kept(devices ...string) string {
	for _, a := range v.accounts {
		if k, ok := a.entry.(*Kept); ok && slices.Contains(devices, k.Hold.Device) {
			return k.Owner().String()
		}
	}
	return ""
}

// Taken reports whether somebody else has any of a device that is kept. The entry of a key does not
// count if it is the former owner's, which is ending, also where its record is not understood.
func (l *Ledger) Taken(name, key string, had Owner) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	kept := l.accounts[keptKey(name)]
	if kept == nil {
		return false
	}
	for _, own := range []string{key, sealedKey(key)} {
		if a := l.accounts[own]; a != nil && (a.entry.Owner() == had || own != key) {
			l.index.remove(a)
			defer l.index.add(a)
		}
	}
	return l.index.blocked(question{by: had.API, own: kept.key, want: kept.holds, stock: &Present{}}) != nil
}

// Passer is an Output that has a say when an ID passes from one container to the next and
// nobody saw the first one end. It keeps what the next one may not have yet.
type Passer interface {
	// Pass says that earlier grants have ended, since the kubelet hands their IDs out.
	Pass(earlier []*Grant) error
}

// pass says that the containers have ended which had the IDs of new grants before. A container
// goes on if the kubelet lists it and has only forgotten that it has the ID.
func (l *Ledger) pass(grants []*Grant) error {
	var ended []*Grant
	for _, g := range grants {
		if a := l.account(g.Key()); a != nil {
			if earlier, ok := a.entry.(*Grant); ok && earlier.Container != "" && !earlier.lost {
				ended = append(ended, earlier)
			}
		}
	}
	if len(ended) == 0 {
		return nil
	}
	for _, o := range l.outputs {
		if p, ok := o.(Passer); ok {
			if err := p.Pass(ended); err != nil {
				return err
			}
		}
	}
	return nil
}
