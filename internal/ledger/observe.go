package ledger

import (
	"errors"
	"fmt"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cdi"
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

// Observe enters what PodResources said when it was asked at a time, nil if it
// did not answer. Grants that it names get their container, and end when whole
// answers have left them out for long enough. It asks for the stock when nobody else
// can change the account: what [Ledger.Recognise] is told meanwhile comes after it.
func (l *Ledger) Observe(at time.Time, said *kubeletapi.Listing, stock func() Stock) error {
	ended, adopted, changed := l.observe(at, said, stock)
	if !changed {
		return nil
	}
	var errs []error
	for _, key := range adopted {
		errs = append(errs, l.Write(key))
	}
	return errors.Join(append(errs, l.endReplaced(ended))...)
}

func (l *Ledger) observe(at time.Time, said *kubeletapi.Listing, stock func() Stock) (ended []Entry, adopted []string, changed bool) {
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
	adopted = l.adopt(at, stock())
	l.noteClaims(said)
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
		confirmed.Container, confirmed.missing, confirmed.lost, confirmed.ended = s.container, time.Time{}, false, false
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

// Lost returns the grants of containers that PodResources lists without them: the
// kubelet's checkpoint was lost, or the pod has ended. Kubelets to 1.33 list ended
// pods too, without what they had (pkg/kubelet/apis/podresources/server_v1.go,
// List, in 1.28 to 1.32).
func (l *Ledger) Lost() (lost []*Grant) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range sorted(l.accounts) {
		if g, ok := a.entry.(*Grant); ok && g.lost {
			lost = append(lost, g)
		}
	}
	return lost
}

// PodsEnded says that the pods of lost grants have ended, so that PodResources
// leaves the grants out for good.
func (l *Ledger) PodsEnded(grants []*Grant) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, g := range grants {
		if a := l.accounts[g.Key()]; a == nil || a.entry != Entry(g) {
			continue
		}
		ended := *g
		ended.lost, ended.ended, ended.missing = false, true, time.Now()
		l.replace(&ended, Given)
	}
}

// dismiss ends what was confirmed and has been left out for long enough, and
// reports whether there was any. Those of the same API may have the ID earlier
// than those of the other: the kubelet itself knows when its containers are gone,
// and a pod that is deleted by force leaves its books at once, while containers
// use up their time.
func (l *Ledger) dismiss(at time.Time, ids map[string]sighting, running map[string]map[string]bool) (ended []Entry, changed bool) {
	for _, a := range sorted(l.accounts) {
		g, ok := a.entry.(*Grant)
		if !ok || a.state == Reserved {
			continue
		}
		if still := l.still(g, running); len(still) < len(g.Earlier) {
			alone := *g
			alone.Earlier, changed = still, true
			l.replace(&alone, a.state)
			g = &alone
		}
		if g.Container == "" {
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
		case at.Before(later(until, g.Until)) || len(g.Earlier) > 0:
			l.put(newAccount(g, Ending))
		case l.said.strangers[key] != nil:
			delete(l.said.strangers, key)
			l.drop(key)
		default:
			l.put(newAccount(g, Ending)) // until its outputs are removed
			ended, changed = append(ended, g), true
		}
	}
	return ended, changed
}

// still returns the containers that had the ID of a grant before and are listed, and
// whose pods have not ended.
func (l *Ledger) still(g *Grant, running map[string]map[string]bool) (still []string) {
	for _, name := range g.Earlier {
		o := (&Grant{Container: name}).Owner()
		if _, listed := running[name]; listed && (l.config.Asks == nil || l.mayAsk(o, g.Resource)) {
			still = append(still, name)
		}
	}
	return still
}

// runsStill reports whether the kubelet lists the container of a grant, and has
// forgotten that it has anything of the resource that its pod asks for, as one
// does whose checkpoint was lost.
func (l *Ledger) runsStill(g *Grant, running map[string]map[string]bool) bool {
	resources, listed := running[g.Container]
	if !listed || g.ended || resources[g.Resource] || l.config.Asks == nil {
		return false
	}
	return l.mayAsk(g.Owner(), g.Resource)
}

// mayAsk reports whether a pod asks for a resource, or whether it does is not known.
func (l *Ledger) mayAsk(pod Owner, resource string) bool {
	asks, known := l.config.Asks(pod.Namespace, pod.Name, resource)
	return asks || !known
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
			completed.missing, completed.lost, completed.ended, completed.Until = g.missing, g.lost, g.ended, g.Until
			completed.Earlier = g.Earlier
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

// Recognise enters what PodResources last listed of the devices of a stock, before anybody
// is offered these. It writes nothing, so that nobody waits for the disk; that is for
// [Ledger.Run]. Before the ledger is open it does nothing.
func (l *Ledger) Recognise(s Stock) {
	if !l.isOpen() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.adopt(time.Now(), s)) > 0 {
		l.unsaved = true
		notify(l.changed)
	}
}

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
	unsaved := l.unsaved
	l.mu.Unlock()
	if len(adopted) == 0 && !unsaved {
		return nil
	}
	var errs []error
	for _, key := range adopted {
		errs = append(errs, l.Write(key))
	}
	return errors.Join(append(errs, l.saveGrants())...)
}

// noteClaims keeps the devices of claims of which there is nothing but that
// containers have their CDI devices, by an agent whose files were lost, until
// they are unprepared. The kubelet names CDI devices of the containers of active
// pods since Kubernetes 1.34 (pkg/kubelet/apis/podresources/server_v1.go, List).
//
// It also names claims that have just ended, until all claims of a pod are unprepared
// (pkg/kubelet/cm/dra/manager.go, unprepareResources, read in 1.34 and 1.37).
func (l *Ledger) noteClaims(said *kubeletapi.Listing) {
	if !l.wiped {
		return // what it names besides was prepared in an earlier boot, and is prepared anew
	}
	for uid, devices := range claimsIn(said) {
		if _, ended := l.ended[uid]; !ended && l.accounts[uid] == nil && l.accounts[sealedKey(uid)] == nil {
			l.put(newAccount(seal(types.UID(uid), nil, devices, l.config.Boot, false), Given))
			notify(l.changed) // it is to be written down
		}
	}
}

// claimsIn returns the devices of ours that containers have by claims, by the
// claims' UIDs.
func claimsIn(said *kubeletapi.Listing) map[string][]SealedDevice {
	claims := make(map[string][]SealedDevice)
	for _, name := range said.CDIDevices() {
		if uid, device, ok := cdi.ParseID(name); ok {
			claims[string(uid)] = append(claims[string(uid)], SealedDevice{Name: device})
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
		if g.Container == "" && len(g.Earlier) == 0 && g.Since.Before(before) {
			found[g.Resource] = append(found[g.Resource], g)
		}
	}
	return found
}

// Asked returns when PodResources was last asked, zero if it did not answer in
// full. It is zero too while the file of grants cannot be read: PodResources leaves
// out init containers, so that the file alone tells of what these have.
func (l *Ledger) Asked() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.unread {
		return time.Time{}
	}
	return l.said.asked
}
