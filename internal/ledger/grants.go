package ledger

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/kubeletapi"
)

// unheard is who has what nobody is known to have before PodResources has named
// all pods for the first time.
const unheard = "a container perhaps: the kubelet has not said yet what containers have"

// Termination is how long the containers of a deleted pod go on where that is
// not known: Kubernetes' default (pkg/apis/core/v1/defaults.go,
// DefaultTerminationGracePeriodSeconds, in 1.31 to 1.37).
const Termination = 30 * time.Second

// listed is what PodResources said.
type listed struct {
	whole     bool                // whether it has named all pods once
	since     time.Time           // since when each answer has named all pods, zero if the last one did not
	asked     time.Time           // when it was last asked, zero if it did not answer in full
	ids       map[string]sighting // which container has what, of whatever resource
	strangers map[string]*Grant   // what of it other plugins gave
}

// sighting is an ID that PodResources lists, or listed until a moment ago.
type sighting struct {
	resource, id, container string
	missing                 time.Time // when PodResources first left it out again
}

// perhaps says why a container may have what nobody is known to have, "" if it is
// known what containers have.
func (l *Ledger) perhaps() string {
	switch {
	case l.unread:
		return fmt.Sprintf("a container perhaps: %s, which says what containers have, cannot be read", l.file(grantsFile))
	case l.config.Listings && !l.said.whole:
		return unheard
	}
	return ""
}

// mayHave says that new claims wait, as long as it is not known what containers
// have.
func (l *Ledger) mayHave(q question) *Blocked {
	why := l.perhaps()
	if why == "" || q.by != discovery.ModeDRA {
		return nil
	}
	for i := range q.want {
		if h := complete(q.want[i], q.stock); !h.Open {
			return &Blocked{Device: h.Device, why: why}
		}
	}
	return nil
}

// GiveGrants gives containers IDs, all or none, or returns [*Blocked] or the
// error of the disk. The grants are on disk, and their files of the host are
// written, before it returns. A newer grant of an ID takes the place of the
// older one. While the file of grants cannot be read, nothing can be added to it,
// so containers are given nothing.
func (l *Ledger) GiveGrants(s Stock, grants []*Grant) error {
	if err := l.readGrants(); err != nil {
		return err
	}
	before, err := l.reserveGrants(s, grants)
	if err != nil {
		return err
	}
	if _, err := l.saveGrants(); err != nil {
		// Nobody comes back for them: they end, whichever file is in place.
		l.restoreGrants(grants, before)
		return err
	}
	l.mu.Lock()
	for _, g := range grants {
		if a := l.accounts[g.Key()]; a != nil && a.entry == Entry(g) {
			l.put(newAccount(g, Given))
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
	undo := func() {
		for i, g := range slices.Backward(grants) {
			l.restore(g.Key(), before[i])
		}
	}
	for i, g := range grants {
		key := g.Key()
		before[i] = l.accounts[key]
		q := question{by: discovery.ModeDevicePlugin, owner: g.Owner(), own: key, want: g.Holds(), stock: s}
		b := l.index.blocked(q)
		if a := before[i]; b == nil && a != nil && a.entry.(*Grant).lost {
			b = &Blocked{Device: g.ID, By: a.entry.Owner(), why: fmt.Sprintf("%s, which runs with it and which the kubelet has forgotten to have it", a.entry.Owner())}
		}
		if b != nil {
			before = before[:i+1]
			grants = grants[:i]
			undo()
			return nil, b
		}
		a := newAccount(g, Reserved)
		if before[i] != nil {
			earlier := before[i].entry.(*Grant)
			g.Until = later(earlier.Until, time.Now().Add(l.termination(earlier.Container)))
			l.replaced[key] = append(l.replaced[key], earlier)
		}
		l.put(a)
	}
	return before, nil
}

// restore makes the account of a key what it was before.
func (l *Ledger) restore(key string, before *account) {
	l.drop(key)
	if before != nil {
		l.put(before)
	}
}

// restoreGrants takes grants back. The file of grants is written again.
func (l *Ledger) restoreGrants(grants []*Grant, before []*account) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, g := range slices.Backward(grants) {
		if a := l.accounts[g.Key()]; a != nil && a.entry == Entry(g) {
			l.restore(g.Key(), before[i])
		}
		delete(l.replaced, g.Key())
	}
	l.unsaved = true
	notify(l.changed)
}

// EndGrants ends grants, less those that were made anew or confirmed meanwhile.
func (l *Ledger) EndGrants(grants []*Grant) error {
	var ended []Entry
	l.mu.Lock()
	for _, g := range grants {
		if a := l.accounts[g.Key()]; a != nil && a.entry == Entry(g) {
			l.drop(g.Key())
			ended = append(ended, g)
		}
	}
	l.unsaved = l.unsaved || len(ended) > 0
	l.mu.Unlock()
	if len(ended) == 0 {
		return nil
	}
	return l.endReplaced(ended)
}

// endReplaced removes the outputs of entries that are no more, less those that
// others have too, before they are off the disk, so that none is forgotten.
func (l *Ledger) endReplaced(entries []Entry) error {
	defer l.alone(entries...)()
	var errs []error
	for _, e := range entries {
		if err := l.removeOutputs(e, l.others(nil)); err != nil {
			errs = append(errs, err)
			l.mu.Lock()
			l.left = append(l.left, e) // tried again
			l.mu.Unlock()
		}
	}
	_, err := l.saveGrants()
	return errors.Join(append(errs, err)...)
}

// saveGrants writes the file of grants, once it has been read.
func (l *Ledger) saveGrants() (disk.InPlace, error) {
	l.saving.Lock()
	defer l.saving.Unlock()
	l.mu.Lock()
	grants := l.grants()
	l.unsaved = l.unread
	unread := l.unread
	l.mu.Unlock()
	if unread {
		return disk.Old, nil
	}
	data, err := encodeGrants(grants)
	there := disk.Old
	if err == nil {
		there, err = l.synced.Write(l.file(grantsFile), data, 0o600)
	}
	if err != nil {
		l.mu.Lock()
		l.unsaved = true
		l.mu.Unlock()
		return there, fmt.Errorf("write grants: %w", err)
	}
	return there, nil
}

// grants returns the grants that are on disk, by resource and ID.
func (l *Ledger) grants() []*Grant {
	grants := make([]*Grant, 0)
	for _, a := range l.accounts {
		if g, ok := a.entry.(*Grant); ok && l.said.strangers[g.Key()] == nil {
			grants = append(grants, g)
		}
	}
	slices.SortFunc(grants, func(a, b *Grant) int { return strings.Compare(a.Key(), b.Key()) })
	return grants
}

// Observe enters what PodResources said when it was asked at a time, nil if it
// did not answer. Grants that it names get their container, and end when whole
// answers have left them out for long enough.
func (l *Ledger) Observe(at time.Time, said *kubeletapi.Listing, s Stock) error {
	ended, adopted, changed := l.observe(at, said, s)
	if !changed {
		return nil
	}
	var errs []error
	for _, key := range adopted {
		errs = append(errs, l.Write(key))
	}
	return errors.Join(append(errs, l.endReplaced(ended))...)
}

func (l *Ledger) observe(at time.Time, said *kubeletapi.Listing, s Stock) (ended []Entry, adopted []string, changed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.said.asked = time.Time{}
	if said == nil || !said.Whole {
		l.said.since = time.Time{}
	} else if l.said.since.IsZero() {
		l.said.since = at
	}
	if said == nil {
		return nil, nil, false
	}
	ids, running := idsIn(said)
	l.list(at, ids, said.Whole)
	changed = l.confirm(at, ids)
	if said.Whole {
		l.said.whole, l.said.asked = true, at
		var more bool
		ended, more = l.dismiss(at, ids, running)
		changed = changed || more
	}
	adopted = l.adopt(at, s)
	l.noteClaims(at, said)
	return ended, adopted, changed || len(adopted) > 0 || l.unsaved
}

// idsIn returns which container has what, by key, and which containers there
// are.
func idsIn(said *kubeletapi.Listing) (ids map[string]sighting, running map[string]map[string]bool) {
	ids, running = make(map[string]sighting), make(map[string]map[string]bool)
	for _, pod := range said.Pods {
		for _, container := range pod.Containers {
			name := kubeletapi.PodName(pod) + " " + container.Name
			running[name] = make(map[string]bool)
			for _, devices := range container.Devices {
				running[name][devices.ResourceName] = true
				for _, id := range devices.DeviceIds {
					ids[GrantKey(devices.ResourceName, id)] = sighting{resource: devices.ResourceName, id: id, container: name}
				}
			}
		}
	}
	return ids, running
}

// list remembers what was said, and for a while what no longer is.
func (l *Ledger) list(at time.Time, ids map[string]sighting, whole bool) {
	now := maps.Clone(ids)
	for key, before := range l.said.ids {
		if _, named := now[key]; named {
			continue
		}
		if whole && before.missing.IsZero() {
			before.missing = at
		}
		if !whole || at.Sub(l.leftOut(before.missing)) < l.config.Patience+l.termination(before.container) {
			now[key] = before
		}
	}
	l.said.ids = now
}

// leftOut returns since when nothing but whole answers has left something out that
// was first missing at a time. While the kubelet does not answer, it ends no
// containers either.
func (l *Ledger) leftOut(missing time.Time) time.Time { return later(missing, l.said.since) }

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// termination returns how long the container of a deleted pod may go on.
func (l *Ledger) termination(container string) time.Duration {
	if l.config.Termination != nil {
		o := (&Grant{Container: container}).Owner()
		if d, known := l.config.Termination(o.Namespace, o.Name); known {
			return d
		}
	}
	return Termination
}

// confirm enters which container has what was granted, and reports whether any
// of it is new.
func (l *Ledger) confirm(at time.Time, ids map[string]sighting) (changed bool) {
	for key, s := range ids {
		a := l.accounts[key]
		if a == nil {
			continue
		}
		g := a.entry.(*Grant)
		// An answer that was asked for before the grant tells of the container
		// that had the ID before.
		if a.state == Reserved || g.Since.After(at) || g.Container == s.container && g.missing.IsZero() && !g.lost {
			continue
		}
		confirmed := *g
		changed = changed || g.Container != s.container
		confirmed.Container, confirmed.missing, confirmed.lost = s.container, time.Time{}, false
		l.replace(&confirmed, Given)
	}
	return changed
}

// replace makes another version of a grant the one that counts. Its outputs are
// the same.
func (l *Ledger) replace(g *Grant, state State) {
	if l.said.strangers[g.Key()] != nil {
		l.said.strangers[g.Key()] = g
	}
	l.put(newAccount(g, state))
}

// dismiss ends what was confirmed and has been left out for long enough, and
// reports whether there was any. Those of the same API may have the ID earlier
// than those of the other: the kubelet itself knows when its containers are gone,
// and a pod that is deleted by force leaves its books at once, while containers
// use up their time.
func (l *Ledger) dismiss(at time.Time, ids map[string]sighting, running map[string]map[string]bool) (ended []Entry, changed bool) {
	for _, a := range sorted(l.accounts) {
		g, ok := a.entry.(*Grant)
		if !ok || g.Container == "" || a.state == Reserved {
			continue
		}
		key := g.Key()
		if _, named := ids[key]; named {
			continue
		}
		if l.runsStill(g, running) {
			if !g.lost {
				lost := *g
				lost.lost, lost.missing = true, time.Time{}
				l.replace(&lost, Given)
			}
			continue
		}
		if g.missing.IsZero() || g.lost {
			left := *g
			left.missing, left.lost = at, false
			l.replace(&left, Given)
			continue
		}
		left := l.leftOut(g.missing)
		switch until := left.Add(l.config.Patience + l.termination(g.Container)); {
		case at.Sub(left) < l.config.Patience:
		case at.Before(later(until, g.Until)):
			l.put(newAccount(g, Ending))
		default:
			if l.said.strangers[key] == nil {
				ended, changed = append(ended, g), true
			}
			delete(l.said.strangers, key)
			l.drop(key)
		}
	}
	return ended, changed
}

// runsStill reports whether the kubelet lists the container of a grant, and has
// forgotten that it has anything of the resource that its pod asks for, as one
// does whose checkpoint was lost.
func (l *Ledger) runsStill(g *Grant, running map[string]map[string]bool) bool {
	resources, listed := running[g.Container]
	if !listed || resources[g.Resource] || l.config.Asks == nil {
		return false
	}
	o := g.Owner()
	return l.config.Asks(o.Namespace, o.Name, g.Resource)
}

// adopt enters what PodResources lists and nobody was granted: as a grant, if
// its resource is ours, and else for as long as it is listed. A grant without
// devices gets those that its ID stands for. It returns the keys of
// grants that have become ours.
func (l *Ledger) adopt(at time.Time, s Stock) (adopted []string) {
	for _, a := range sorted(l.accounts) {
		g, ok := a.entry.(*Grant)
		if !ok || len(g.Devices) > 0 || a.state == Reserved {
			continue
		}
		if known, ours := s.WithID(g.Resource, g.ID); known != nil {
			completed := *known
			completed.Resource, completed.ID, completed.Since, completed.Container = g.Resource, g.ID, g.Since, g.Container
			completed.missing, completed.lost, completed.Until = g.missing, g.lost, g.Until
			l.replace(&completed, a.state)
			if ours {
				adopted = append(adopted, g.Key())
			}
		}
	}
	for key, seen := range l.said.ids {
		if l.accounts[key] != nil {
			continue
		}
		known, ours := s.WithID(seen.resource, seen.id)
		if known == nil && !ours {
			continue
		}
		g := &Grant{}
		if known != nil {
			*g = *known
		}
		g.Resource, g.ID, g.Container, g.missing = seen.resource, seen.id, seen.container, seen.missing
		if ours {
			g.Since, adopted = at, append(adopted, key)
		} else {
			if l.said.strangers == nil {
				l.said.strangers = make(map[string]*Grant)
			}
			g.HostFiles = nil // they are of the plugin that gave it
			l.said.strangers[key] = g
		}
		l.put(newAccount(g, Given))
	}
	return adopted
}

// noteClaims keeps the devices of claims of which there is nothing but that
// containers have their CDI devices, by an agent whose files were lost, until
// they are unprepared. The kubelet names CDI devices of the containers of active
// pods since Kubernetes 1.34 (pkg/kubelet/apis/podresources/server_v1.go, List).
func (l *Ledger) noteClaims(at time.Time, said *kubeletapi.Listing) {
	if !l.wiped {
		return // what it names besides was prepared in an earlier boot, and is prepared anew
	}
	for uid, devices := range claimsIn(said) {
		if !l.ended[uid].After(at) && l.accounts[uid] == nil && l.accounts[sealedKey(uid)] == nil {
			l.put(newAccount(seal(types.UID(uid), nil, devices, l.config.Boot, false), Given))
		}
	}
}

// claimsIn returns the devices of ours that containers have by claims, by the
// claims' UIDs.
func claimsIn(said *kubeletapi.Listing) map[string][]string {
	claims := make(map[string][]string)
	for _, name := range said.CDIDevices() {
		if uid, device, ok := cdi.ParseID(name); ok {
			claims[string(uid)] = append(claims[string(uid)], device)
		}
	}
	return claims
}

// Unconfirmed returns the grants from before a time that PodResources never
// named, by resource. It leaves out init containers
// (pkg/kubelet/apis/podresources/server_v1.go, List), so that a grant may be
// one's.
func (l *Ledger) Unconfirmed(before time.Time) map[string][]*Grant {
	l.mu.Lock()
	defer l.mu.Unlock()
	found := make(map[string][]*Grant)
	for _, g := range l.grants() {
		if g.Container == "" && g.Since.Before(before) {
			found[g.Resource] = append(found[g.Resource], g)
		}
	}
	return found
}

// Asked returns when PodResources was last asked, zero if it did not answer in
// full.
func (l *Ledger) Asked() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.said.asked
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// NodesOf returns the nodes that a device and no other silicon has now.
func NodesOf(device string, s Stock) []Node { return nodesOf(device, s) }

// Adopt enters as grants what PodResources last listed of resources that are
// ours now. It is for the moment before the kubelet is told of a resource: a list
// without what pods have would fail them.
func (l *Ledger) Adopt(s Stock) error {
	l.mu.Lock()
	for key, g := range l.said.strangers {
		if _, ours := s.WithID(g.Resource, g.ID); ours {
			delete(l.said.strangers, key)
			l.drop(key)
		}
	}
	adopted := l.adopt(time.Now(), s)
	l.mu.Unlock()
	if len(adopted) == 0 {
		return nil
	}
	var errs []error
	for _, key := range adopted {
		errs = append(errs, l.Write(key))
	}
	_, err := l.saveGrants()
	return errors.Join(append(errs, err)...)
}
