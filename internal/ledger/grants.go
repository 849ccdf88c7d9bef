package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// Grants are the allocations of a ledger by the device plugin API, and the containers that
// PodResources lists with them.
type Grants struct {
	*core

	saving turn // serializes reads and writes of the file of grants, so that the last write is the newest

	// The mutex guards the following fields.
	unsaved   bool               // the file of grants differs from the accounts
	unremoved []allocation.Entry // ended entries whose outputs could not be removed
}

// AllocateIDs gives containers IDs, all or none, or returns [*exclusion.Blocked] or a disk error.
// The grants are on disk, and their files of the host are written, before AllocateIDs returns. A
// newer grant of an ID replaces the older one. While the file of grants cannot be read, no grant
// can be added to the file, so containers get no IDs.
func (gs *Grants) AllocateIDs(s exclusion.Stock, grants []*allocation.Grant) error {
	if err := gs.read(); err != nil {
		return err
	}
	if err := gs.passReplaced(grants); err != nil {
		return err
	}
	before, err := gs.reserve(s, grants)
	if err != nil {
		return err
	}
	var holds []allocation.Hold
	for _, g := range grants {
		holds = append(holds, g.Holds()...)
	}
	if err := gs.mayOpen(holds, nil, s); err != nil {
		gs.mu.Lock()
		defer gs.mu.Unlock()
		gs.unreserve(grants, before)
		return err
	}
	if err := gs.save(); err != nil {
		// No later call would release these grants, so they end, whichever file is in place.
		gs.restore(grants, before)
		return err
	}
	gs.mu.Lock()
	for _, g := range grants {
		if a := gs.accounts.byKey[g.Key()]; a != nil && a.Entry == allocation.Entry(g) {
			gs.accounts.put(exclusion.NewAccount(g, allocation.Allocated))
		}
	}
	gs.mu.Unlock()
	for _, g := range grants {
		if err := gs.writeOutputs(g.Key()); err != nil {
			gs.restore(grants, before)
			return errors.Join(err, gs.endReplaced(entriesOf(grants)))
		}
	}
	return nil
}

func entriesOf(grants []*allocation.Grant) (entries []allocation.Entry) {
	for _, g := range grants {
		entries = append(entries, g)
	}
	return entries
}

// reserve enters grants unless one is blocked.
func (gs *Grants) reserve(s exclusion.Stock, grants []*allocation.Grant) (before []*exclusion.Account, err error) {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	before = make([]*exclusion.Account, len(grants))
	blocked := func(g *allocation.Grant) *exclusion.Blocked {
		return gs.accounts.index.FindBlocked(exclusion.Query{API: discovery.ModeDevicePlugin, Owner: g.Owner(), OwnKey: g.Key(), SameContainer: g.With, Wanted: g.Holds(), Stock: s})
	}
	shares := make(map[string]*allocation.Grant) // the last grant of each device
	for i, g := range grants {
		key := g.Key()
		before[i] = gs.accounts.byKey[key]
		var b *exclusion.Blocked
		if shares[shareKey(g)] == nil {
			b = blocked(g)
		}
		if a := before[i]; b == nil && a != nil && a.Entry.(*allocation.Grant).IsLost {
			b = &exclusion.Blocked{Device: g.ID, Owner: a.Entry.Owner(), Kind: exclusion.ForgottenByKubelet, OwnerText: fmt.Sprintf("%s, which runs with it and which the kubelet has forgotten to have it", a.Entry.Owner())}
		}
		if b != nil {
			gs.unreserve(grants[:i], before)
			return nil, b
		}
		a := exclusion.NewAccount(g, allocation.Reserved)
		if before[i] != nil {
			earlier := before[i].Entry.(*allocation.Grant)
			g.Until = laterOf(earlier.Until, time.Now().Add(gs.config.gracePeriod(earlier.Container)))
			g.Earlier = slices.DeleteFunc(append(slices.Clone(earlier.Earlier), earlier.Container), func(name string) bool { return name == "" })
			gs.replaced[key] = append(gs.replaced[key], earlier)
		}
		gs.accounts.put(a)
		if !g.Exclusive {
			shares[shareKey(g)] = g
		}
	}
	for _, g := range shares {
		if b := blocked(g); b != nil {
			gs.unreserve(grants, before)
			return nil, b
		}
	}
	return before, nil
}

// unreserve reverts [Grants.reserve].
func (gs *Grants) unreserve(grants []*allocation.Grant, before []*exclusion.Account) {
	for i, g := range slices.Backward(grants) {
		gs.accounts.putBack(g.Key(), before[i])
		delete(gs.replaced, g.Key())
	}
}

// shareKey identifies the device and the form of a shared grant; "" for an exclusive grant. Shares
// of the same device do not exclude each other as long as the device has enough, so among thousands
// of shares only the first and the last one are checked.
func shareKey(g *allocation.Grant) string {
	if g.Exclusive {
		return ""
	}
	return strings.Join(append([]string{g.Resource, g.Form}, g.Devices...), " ")
}

// restore reverts grants and schedules a write of the file of grants.
func (gs *Grants) restore(grants []*allocation.Grant, before []*exclusion.Account) {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	for i, g := range slices.Backward(grants) {
		if a := gs.accounts.byKey[g.Key()]; a != nil && a.Entry == allocation.Entry(g) {
			gs.accounts.restore(g.Key(), before[i])
		}
		delete(gs.replaced, g.Key())
	}
	gs.unsaved = true
	notify(gs.changed)
}

// EndGrants ends grants, except those that were given again or confirmed meanwhile.
func (gs *Grants) EndGrants(grants []*allocation.Grant) error {
	var ended []allocation.Entry
	gs.mu.Lock()
	for _, g := range grants {
		if a := gs.accounts.byKey[g.Key()]; a != nil && a.Entry == allocation.Entry(g) {
			gs.accounts.put(exclusion.NewAccount(g, allocation.Ending)) // until its outputs are removed
			ended = append(ended, g)
		}
	}
	gs.unsaved = gs.unsaved || len(ended) > 0
	gs.mu.Unlock()
	if len(ended) == 0 {
		return nil
	}
	return gs.endReplaced(ended)
}

// endReplaced removes the outputs of ended and replaced entries, except outputs that other entries
// share. A grant leaves the ledger after its outputs, so that a device which an output withholds is
// never free between the two. The file of grants is written last.
func (gs *Grants) endReplaced(entries []allocation.Entry) error {
	defer gs.lockFiles(entries...)()
	var errs []error
	others := gs.otherEntries(gs.keysOf(entries))
	for _, e := range entries {
		if err := gs.outputs.removeEntry(e, others); err != nil {
			errs = append(errs, err)
			gs.mu.Lock()
			if !slices.Contains(gs.unremoved, e) {
				gs.unremoved = append(gs.unremoved, e) // Run tries again
			}
			gs.mu.Unlock()
			continue
		}
		gs.mu.Lock()
		if a := gs.accounts.byKey[e.Key()]; a != nil && a.Entry == e {
			gs.accounts.drop(e.Key())
		}
		gs.mu.Unlock()
	}
	return errors.Join(append(errs, gs.save())...)
}

// keysOf returns the keys of the entries that are still in the ledger.
func (gs *Grants) keysOf(entries []allocation.Entry) (keys []string) {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	for _, e := range entries {
		if a := gs.accounts.byKey[e.Key()]; a != nil && a.Entry == e {
			keys = append(keys, e.Key())
		}
	}
	return keys
}

// save writes the file of grants, once the file has been read.
func (gs *Grants) save() error {
	defer gs.saving.takeTurn()()
	gs.mu.Lock()
	grants, unread := gs.sorted(), gs.grantsUnread
	gs.unsaved = unread
	gs.mu.Unlock()
	if unread {
		return nil
	}
	data, err := allocation.EncodeGrants(grants)
	if err == nil {
		err = gs.files.WriteSynced(allocation.GrantsFile, data)
	}
	if err != nil {
		gs.mu.Lock()
		gs.unsaved = true
		gs.mu.Unlock()
		return fmt.Errorf("write grants: %w", err)
	}
	return nil
}

// sorted returns the grants for the file, by resource and ID.
func (gs *Grants) sorted() []*allocation.Grant {
	grants := make([]*allocation.Grant, 0)
	for _, a := range gs.accounts.byKey {
		if g, ok := a.Entry.(*allocation.Grant); ok && gs.listing.foreign[g.Key()] == nil {
			grants = append(grants, g)
		}
	}
	slices.SortFunc(grants, func(a, b *allocation.Grant) int { return strings.Compare(a.Key(), b.Key()) })
	return grants
}

// read reads the file of grants, unless it was read before. An invalid file is set aside;
// PodResources still lists the containers' devices. While the file cannot be read or set aside, it
// is not written either.
func (gs *Grants) read() error {
	defer gs.saving.takeTurn()()
	gs.mu.Lock()
	unread := gs.grantsUnread
	gs.mu.Unlock()
	if !unread {
		return nil
	}
	data, err := gs.files.Read(allocation.GrantsFile)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read grants: %w; they are read again, and until then no container and no new claim gets what others may have", err)
	}
	var grants []*allocation.Grant
	var damaged error
	if err == nil {
		grants, damaged = allocation.DecodeGrants(data)
	}
	if damaged != nil {
		file, aside := gs.files.Path(allocation.GrantsFile), gs.files.Path(allocation.GrantsFile)+".unreadable"
		damaged = fmt.Errorf("read grants: %s, set aside as %s: %w", file, aside, damaged)
		if err := gs.files.Synced.Rename(file, aside); err != nil {
			return errors.Join(damaged, err)
		}
	}
	gs.mu.Lock()
	defer gs.mu.Unlock()
	gs.grantsUnread = false
	for _, g := range grants {
		delete(gs.listing.foreign, g.Key())
		gs.accounts.put(exclusion.NewAccount(g, allocation.Allocated))
	}
	if gs.isOpen() {
		notify(gs.changed) // their outputs may be missing
	}
	return damaged
}

// passReplaced calls each [GrantReplacer] with the grants that new grants replace. It leaves out the
// grants of containers that continue to run: the kubelet lists the container, but has forgotten its
// ID.
func (gs *Grants) passReplaced(grants []*allocation.Grant) error {
	var ended []*allocation.Grant
	for _, g := range grants {
		if a := gs.accountOf(g.Key()); a != nil {
			if earlier, ok := a.Entry.(*allocation.Grant); ok && earlier.Container != "" && !earlier.IsLost {
				ended = append(ended, earlier)
			}
		}
	}
	if len(ended) == 0 {
		return nil
	}
	for _, o := range gs.outputs {
		if p, ok := o.(GrantReplacer); ok {
			if err := p.GrantsReplaced(ended); err != nil {
				return err
			}
		}
	}
	return nil
}
