package ledger

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"chandler.dev/discovery"
)

// mayHave returns [*Blocked] for new claims while the devices of containers are not known yet.
func (l *Ledger) mayHave(q query) *Blocked {
	why := l.unknownOwnerReason()
	if why == "" || q.api != discovery.ModeDRA {
		return nil
	}
	for i := range q.wanted {
		if h := complete(q.wanted[i], q.stock); !h.Open {
			return &Blocked{Device: h.Device, ownerText: why}
		}
	}
	return nil
}

// GiveGrants gives containers IDs, all or none, or returns [*Blocked] or a disk error. The grants
// are on disk, and their files of the host are written, before GiveGrants returns. A newer grant of
// an ID replaces the older one. While the file of grants cannot be read, no grant can be added to
// the file, so containers get no IDs.
func (l *Ledger) GiveGrants(s Stock, grants []*Grant) error {
	if err := l.readGrants(); err != nil {
		return err
	}
	if err := l.passGrants(grants); err != nil {
		return err
	}
	before, err := l.reserveGrants(s, grants)
	if err != nil {
		return err
	}
	var holds []Hold
	for _, g := range grants {
		holds = append(holds, g.Holds()...)
	}
	if err := l.mayOpen(holds, nil, s); err != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.unreserveGrants(grants, before)
		return err
	}
	if err := l.saveGrants(); err != nil {
		// No later call would release these grants, so they end, whichever file is in place.
		l.restoreGrants(grants, before)
		return err
	}
	l.mu.Lock()
	for _, g := range grants {
		if a := l.accounts[g.Key()]; a != nil && a.entry == Entry(g) {
			l.put(newAccount(g, Allocated))
		}
	}
	l.mu.Unlock()
	for _, g := range grants {
		if err := l.Write(g.Key()); err != nil {
			l.restoreGrants(grants, before)
			return errors.Join(err, l.endReplaced(entriesOf(grants)))
		}
	}
	return nil
}

func entriesOf(grants []*Grant) (entries []Entry) {
	for _, g := range grants {
		entries = append(entries, g)
	}
	return entries
}

// reserveGrants enters grants unless one is blocked.
func (l *Ledger) reserveGrants(s Stock, grants []*Grant) (before []*account, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before = make([]*account, len(grants))
	blocked := func(g *Grant) *Blocked {
		return l.index.findBlocked(query{api: discovery.ModeDevicePlugin, owner: g.Owner(), ownKey: g.Key(), sameContainer: g.With, wanted: g.Holds(), stock: s})
	}
	shares := make(map[string]*Grant) // the last grant of each device
	for i, g := range grants {
		key := g.Key()
		before[i] = l.accounts[key]
		var b *Blocked
		if shares[g.shareKey()] == nil {
			b = blocked(g)
		}
		if a := before[i]; b == nil && a != nil && a.entry.(*Grant).isLost {
			b = &Blocked{Device: g.ID, Owner: a.entry.Owner(), ForgottenByKubelet: true, ownerText: fmt.Sprintf("%s, which runs with it and which the kubelet has forgotten to have it", a.entry.Owner())}
		}
		if b != nil {
			l.unreserveGrants(grants[:i], before)
			return nil, b
		}
		a := newAccount(g, Reserved)
		if before[i] != nil {
			earlier := before[i].entry.(*Grant)
			g.Until = laterOf(earlier.Until, time.Now().Add(l.gracePeriod(earlier.Container)))
			g.Earlier = slices.DeleteFunc(append(slices.Clone(earlier.Earlier), earlier.Container), func(name string) bool { return name == "" })
			l.replaced[key] = append(l.replaced[key], earlier)
		}
		l.put(a)
		if !g.Exclusive {
			shares[g.shareKey()] = g
		}
	}
	for _, g := range shares {
		if b := blocked(g); b != nil {
			l.unreserveGrants(grants, before)
			return nil, b
		}
	}
	return before, nil
}

// unreserveGrants reverts [Ledger.reserveGrants].
func (l *Ledger) unreserveGrants(grants []*Grant, before []*account) {
	for i, g := range slices.Backward(grants) {
		l.putBack(g.Key(), before[i])
		delete(l.replaced, g.Key())
	}
}

// shareKey identifies the device and the form of a shared grant; "" for an exclusive grant. Shares
// of the same device do not exclude each other as long as the device has enough, so among thousands
// of shares only the first and the last one are checked.
func (g *Grant) shareKey() string {
	if g.Exclusive {
		return ""
	}
	return strings.Join(append([]string{g.Resource, g.Form}, g.Devices...), " ")
}

// restoreAccount sets the account of a key back to an earlier account.
func (l *Ledger) restoreAccount(key string, before *account) {
	l.dropAccount(key)
	if before != nil {
		l.put(before)
	}
}

// restoreGrants reverts grants and schedules a write of the file of grants.
func (l *Ledger) restoreGrants(grants []*Grant, before []*account) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, g := range slices.Backward(grants) {
		if a := l.accounts[g.Key()]; a != nil && a.entry == Entry(g) {
			l.restoreAccount(g.Key(), before[i])
		}
		delete(l.replaced, g.Key())
	}
	l.grantsUnsaved = true
	notify(l.changed)
}

// EndGrants ends grants, except those that were given again or confirmed meanwhile.
func (l *Ledger) EndGrants(grants []*Grant) error {
	var ended []Entry
	l.mu.Lock()
	for _, g := range grants {
		if a := l.accounts[g.Key()]; a != nil && a.entry == Entry(g) {
			l.put(newAccount(g, Ending)) // until its outputs are removed
			ended = append(ended, g)
		}
	}
	l.grantsUnsaved = l.grantsUnsaved || len(ended) > 0
	l.mu.Unlock()
	if len(ended) == 0 {
		return nil
	}
	return l.endReplaced(ended)
}

// endReplaced removes the outputs of ended and replaced entries, except outputs that other entries
// share. A grant leaves the ledger after its outputs, so that a device which an output withholds is
// never free between the two. The file of grants is written last.
func (l *Ledger) endReplaced(entries []Entry) error {
	defer l.lockFiles(entries...)()
	var errs []error
	others := l.otherEntries(l.keysOf(entries))
	for _, e := range entries {
		if err := l.removeOutputs(e, others); err != nil {
			errs = append(errs, err)
			l.mu.Lock()
			if !slices.Contains(l.unremoved, e) {
				l.unremoved = append(l.unremoved, e) // Run tries again
			}
			l.mu.Unlock()
			continue
		}
		l.mu.Lock()
		if a := l.accounts[e.Key()]; a != nil && a.entry == e {
			l.dropAccount(e.Key())
		}
		l.mu.Unlock()
	}
	return errors.Join(append(errs, l.saveGrants())...)
}

// keysOf returns the keys of the entries that are still in the ledger.
func (l *Ledger) keysOf(entries []Entry) (keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range entries {
		if a := l.accounts[e.Key()]; a != nil && a.entry == e {
			keys = append(keys, e.Key())
		}
	}
	return keys
}

// saveGrants writes the file of grants, once the file has been read.
func (l *Ledger) saveGrants() error {
	defer l.saving.takeTurn()()
	l.mu.Lock()
	grants, unread := l.sortedGrants(), l.grantsUnread
	l.grantsUnsaved = unread
	l.mu.Unlock()
	if unread {
		return nil
	}
	data, err := encodeGrants(grants)
	if err == nil {
		err = l.writeSynced(grantsFile, data)
	}
	if err != nil {
		l.mu.Lock()
		l.grantsUnsaved = true
		l.mu.Unlock()
		return fmt.Errorf("write grants: %w", err)
	}
	return nil
}

// sortedGrants returns the grants for the file, by resource and ID.
func (l *Ledger) sortedGrants() []*Grant {
	grants := make([]*Grant, 0)
	for _, a := range l.accounts {
		if g, ok := a.entry.(*Grant); ok && l.listing.foreign[g.Key()] == nil {
			grants = append(grants, g)
		}
	}
	slices.SortFunc(grants, func(a, b *Grant) int { return strings.Compare(a.Key(), b.Key()) })
	return grants
}
