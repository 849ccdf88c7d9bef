package ledger

import (
	"errors"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cdi"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// unlistedFor is the reason to block devices without a recorded owner until PodResources has listed
// all pods once.
const unlistedFor = "a container perhaps: the kubelet has not yet reported the devices of containers"

// DefaultTermination is the default grace period of a deleted pod's containers, which is the
// default of Kubernetes (pkg/apis/core/v1/defaults.go, DefaultTerminationGracePeriodSeconds, in
// 1.31 to 1.37).
const DefaultTermination = 30 * time.Second

// listingState is the content of PodResources.
type listingState struct {
	whole       bool                         // PodResources has listed all pods at least once
	wholeSince  time.Time                    // time since when each answer has listed all pods, zero after an incomplete answer
	lastRequest time.Time                    // time of the last request, zero if its answer was incomplete
	ids         map[string]listedID          // allocated IDs of any resource, with their containers
	foreign     map[string]*allocation.Grant // allocations of other plugins
}

// listedID is a present or recent ID in PodResources.
type listedID struct {
	resource, id, container string
	missingSince            time.Time // time when PodResources first left out the ID
}

// ObserveListing records a PodResources listing with the time of the request. said is nil if
// PodResources did not answer. Listed grants get their container. Grants end when complete listings
// have left them out for long enough. ObserveListing calls stock while the ledger is locked, so a
// concurrent [Grants.RecogniseListed] runs afterwards.
func (gs *Grants) ObserveListing(at time.Time, said *kubeletapi.Listing, stock func() exclusion.Stock) error {
	ended, adopted, changed := gs.observeListing(at, said, stock)
	if !changed {
		return nil
	}
	var errs []error
	for _, key := range adopted {
		errs = append(errs, gs.writeOutputs(key))
	}
	return errors.Join(append(errs, gs.endReplaced(ended))...)
}

func (gs *Grants) observeListing(at time.Time, said *kubeletapi.Listing, stock func() exclusion.Stock) (ended []allocation.Entry, adopted []string, changed bool) {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	gs.listing.lastRequest = time.Time{}
	if said == nil || !said.Whole {
		gs.listing.wholeSince = time.Time{}
	} else if gs.listing.wholeSince.IsZero() {
		gs.listing.wholeSince = at
	}
	if said == nil {
		return nil, nil, false
	}
	ids, running := idsIn(said)
	gs.storeListing(at, ids, said.Whole)
	changed = gs.confirmContainers(at, ids)
	if said.Whole {
		gs.listing.whole, gs.listing.lastRequest = true, at
		var more bool
		ended, more = gs.endAbsent(at, ids, running)
		changed = changed || more
	}
	adopted = gs.adoptListed(at, stock())
	gs.noteClaims(said)
	return ended, adopted, changed || len(adopted) > 0 || gs.unsaved
}

// idsIn returns the IDs of containers, by key, and the resources of each container.
func idsIn(said *kubeletapi.Listing) (ids map[string]listedID, running map[string]map[string]bool) {
	ids, running = make(map[string]listedID), make(map[string]map[string]bool)
	for _, pod := range said.Pods {
		for _, container := range pod.Containers {
			name := kubeletapi.PodName(pod) + " " + container.Name
			running[name] = make(map[string]bool)
			for _, devices := range container.Devices {
				running[name][devices.ResourceName] = true
				for _, id := range devices.DeviceIds {
					ids[allocation.GrantKey(devices.ResourceName, id)] = listedID{resource: devices.ResourceName, id: id, container: name}
				}
			}
		}
	}
	return ids, running
}

// storeListing stores the listing, and keeps missing IDs for a while.
func (gs *Grants) storeListing(at time.Time, ids map[string]listedID, whole bool) {
	now := maps.Clone(ids)
	for key, before := range gs.listing.ids {
		if _, named := now[key]; named {
			continue
		}
		if whole && before.missingSince.IsZero() {
			before.missingSince = at
		}
		if !whole || at.Sub(gs.listing.leftOut(before.missingSince)) < gs.config.Patience+gs.config.gracePeriod(before.container) {
			now[key] = before
		}
	}
	gs.listing.ids = now
}

// leftOut returns the start of an uninterrupted absence of an ID from complete answers. missing is
// the time of the first absence. A kubelet that does not answer does not end containers either.
func (s *listingState) leftOut(missing time.Time) time.Time {
	return laterOf(missing, s.wholeSince)
}

func laterOf(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// gracePeriod returns the grace period of a deleted pod's container.
func (c *Config) gracePeriod(container string) time.Duration {
	if c.Termination != nil {
		o := (&allocation.Grant{Container: container}).Owner()
		if d, known := c.Termination(o.Namespace, o.Name); known {
			return d
		}
	}
	return DefaultTermination
}

// confirmContainers sets the containers of grants, and reports whether any of them is new.
func (gs *Grants) confirmContainers(at time.Time, ids map[string]listedID) (changed bool) {
	for key, s := range ids {
		a := gs.accounts.byKey[key]
		if a == nil {
			continue
		}
		g := a.Entry.(*allocation.Grant)
		// An answer to a request before the grant still has the previous container of the ID.
		if a.State == allocation.Reserved || g.Since.After(at) || g.Container == s.container && g.MissingSince.IsZero() && !g.IsLost {
			continue
		}
		confirmed := *g
		changed = changed || g.Container != s.container
		confirmed.Container, confirmed.MissingSince, confirmed.IsLost, confirmed.PodEnded = s.container, time.Time{}, false, false
		gs.replace(&confirmed, allocation.Allocated)
	}
	return changed
}

// replace stores another version of a grant. The outputs of both versions are the same.
func (gs *Grants) replace(g *allocation.Grant, state allocation.State) {
	if gs.listing.foreign[g.Key()] != nil {
		gs.listing.foreign[g.Key()] = g
	}
	gs.accounts.put(exclusion.NewAccount(g, state))
}

// LostGrants returns the grants whose containers PodResources lists without them: the kubelet lost
// its checkpoint, or the pod has ended. Kubelets up to 1.33 list ended pods too, without their
// devices (pkg/kubelet/apis/podresources/server_v1.go, List, in 1.28 to 1.32).
func (gs *Grants) LostGrants() (lost []*allocation.Grant) {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	for _, a := range gs.accounts.sorted() {
		if g, ok := a.Entry.(*allocation.Grant); ok && g.IsLost {
			lost = append(lost, g)
		}
	}
	return lost
}

// PodsEnded records the end of the pods of lost grants: PodResources will never list the grants
// again.
func (gs *Grants) PodsEnded(grants []*allocation.Grant) {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	for _, g := range grants {
		if a := gs.accounts.byKey[g.Key()]; a == nil || a.Entry != allocation.Entry(g) {
			continue
		}
		ended := *g
		ended.IsLost, ended.PodEnded, ended.MissingSince = false, true, time.Now()
		gs.replace(&ended, allocation.Allocated)
	}
}

// endAbsent ends confirmed grants after a sufficient absence, and reports whether there were any.
// The device plugin API may reuse the ID earlier than DRA may use the device: the kubelet waits for
// its own containers, but removes a force-deleted pod from its records at once, while the
// containers still use up their grace period.
func (gs *Grants) endAbsent(at time.Time, ids map[string]listedID, running map[string]map[string]bool) (ended []allocation.Entry, changed bool) {
	for _, a := range gs.accounts.sorted() {
		g, ok := a.Entry.(*allocation.Grant)
		if !ok || a.State == allocation.Reserved {
			continue
		}
		if still := gs.config.remainingContainers(g, running); len(still) < len(g.Earlier) {
			alone := *g
			alone.Earlier, changed = still, true
			gs.replace(&alone, a.State)
			g = &alone
		}
		if g.Container == "" {
			continue
		}
		key := g.Key()
		if _, named := ids[key]; named {
			continue
		}
		if gs.config.runsStill(g, running) {
			if !g.IsLost {
				lost := *g
				lost.IsLost, lost.MissingSince = true, time.Time{}
				gs.replace(&lost, allocation.Allocated)
			}
			continue
		}
		if g.MissingSince.IsZero() || g.IsLost {
			left := *g
			left.MissingSince, left.IsLost = at, false
			gs.replace(&left, allocation.Allocated)
			continue
		}
		left := gs.listing.leftOut(g.MissingSince)
		switch until := left.Add(gs.config.Patience + gs.config.gracePeriod(g.Container)); {
		case at.Sub(left) < gs.config.Patience:
		case at.Before(laterOf(until, g.Until)) || len(g.Earlier) > 0:
			gs.accounts.put(exclusion.NewAccount(g, allocation.Ending))
		case gs.listing.foreign[key] != nil:
			delete(gs.listing.foreign, key)
			gs.accounts.drop(key)
		default:
			gs.accounts.put(exclusion.NewAccount(g, allocation.Ending)) // until the outputs are removed
			ended, changed = append(ended, g), true
		}
	}
	return ended, changed
}

// remainingContainers returns the listed earlier containers of a grant's ID, except containers of
// ended pods.
func (c *Config) remainingContainers(g *allocation.Grant, running map[string]map[string]bool) (still []string) {
	for _, name := range g.Earlier {
		o := (&allocation.Grant{Container: name}).Owner()
		if _, listed := running[name]; listed && (c.RequestsResource == nil || c.mayAsk(o, g.Resource)) {
			still = append(still, name)
		}
	}
	return still
}

// runsStill reports whether the kubelet lists the container of a grant without a resource of its
// pod's requests, as a kubelet does after the loss of its checkpoint.
func (c *Config) runsStill(g *allocation.Grant, running map[string]map[string]bool) bool {
	resources, listed := running[g.Container]
	if !listed || g.PodEnded || resources[g.Resource] || c.RequestsResource == nil {
		return false
	}
	return c.mayAsk(g.Owner(), g.Resource)
}

// mayAsk reports whether a pod requests a resource or its requests are unknown.
func (c *Config) mayAsk(pod allocation.Owner, resource string) bool {
	asks, known := c.RequestsResource(pod.Namespace, pod.Name, resource)
	return asks || !known
}

// adoptListed records listed IDs without a grant: as a grant if the resource is ours, otherwise for
// as long as the ID is listed. A grant without devices gets the devices of its ID. adoptListed
// returns the keys of the adopted grants.
func (gs *Grants) adoptListed(at time.Time, s exclusion.Stock) (adopted []string) {
	for _, a := range gs.accounts.sorted() {
		g, ok := a.Entry.(*allocation.Grant)
		if !ok || len(g.Devices) > 0 || a.State == allocation.Reserved {
			continue
		}
		if known, ours := s.WithID(g.Resource, g.ID); known != nil {
			completed := *known
			completed.Resource, completed.ID, completed.Since, completed.Container = g.Resource, g.ID, g.Since, g.Container
			completed.MissingSince, completed.IsLost, completed.PodEnded, completed.Until = g.MissingSince, g.IsLost, g.PodEnded, g.Until
			completed.Earlier = g.Earlier
			gs.replace(&completed, a.State)
			if ours {
				adopted = append(adopted, g.Key())
			}
		}
	}
	for key, seen := range gs.listing.ids {
		if gs.accounts.byKey[key] != nil {
			continue
		}
		known, ours := s.WithID(seen.resource, seen.id)
		if known == nil && !ours {
			continue
		}
		g := &allocation.Grant{}
		if known != nil {
			*g = *known
		}
		g.Resource, g.ID, g.Container, g.MissingSince = seen.resource, seen.id, seen.container, seen.missingSince
		if ours {
			g.Since, adopted = at, append(adopted, key)
		} else {
			if gs.listing.foreign == nil {
				gs.listing.foreign = make(map[string]*allocation.Grant)
			}
			g.HostFiles = nil // the files of the other plugin
			gs.listing.foreign[key] = g
		}
		gs.accounts.put(exclusion.NewAccount(g, allocation.Allocated))
	}
	return adopted
}

// RecogniseListed records what the last PodResources listing contains of the devices of a stock,
// before any API offers the devices. RecogniseListed writes nothing, so the caller does not wait
// for the disk; [Ledger.Run] writes. Before the ledger is open, RecogniseListed does nothing.
func (gs *Grants) RecogniseListed(s exclusion.Stock) {
	if !gs.isOpen() {
		return
	}
	gs.mu.Lock()
	defer gs.mu.Unlock()
	if len(gs.adoptListed(time.Now(), s)) > 0 {
		gs.unsaved = true
		notify(gs.changed)
	}
}

// AdoptListed records grants for the IDs in the last PodResources listing whose resources have
// become ours. The agent calls AdoptListed before the registration of a resource with the kubelet:
// a device list without the allocated IDs would make the pods fail.
func (gs *Grants) AdoptListed(s exclusion.Stock) error {
	gs.mu.Lock()
	for key, g := range gs.listing.foreign {
		if _, ours := s.WithID(g.Resource, g.ID); ours {
			delete(gs.listing.foreign, key)
			gs.accounts.drop(key)
		}
	}
	adopted := gs.adoptListed(time.Now(), s)
	unsaved := gs.unsaved
	gs.mu.Unlock()
	if len(adopted) == 0 && !unsaved {
		return nil
	}
	var errs []error
	for _, key := range adopted {
		errs = append(errs, gs.writeOutputs(key))
	}
	return errors.Join(append(errs, gs.save())...)
}

// noteClaims records claims from the CDI devices of containers, if the agent's files were lost.
// Such claims keep their devices until they are unprepared. The kubelet lists the CDI devices of
// active pods since Kubernetes 1.34 (pkg/kubelet/apis/podresources/server_v1.go, List).
//
// The kubelet also lists recently ended claims, until all claims of a pod are unprepared
// (pkg/kubelet/cm/dra/manager.go, unprepareResources, read in 1.34 and 1.37).
func (gs *Grants) noteClaims(said *kubeletapi.Listing) {
	if !gs.recordsLost {
		return // other listed claims were prepared in an earlier boot, and are prepared again
	}
	for uid, devices := range claimsIn(said) {
		if _, ended := gs.endTimes[uid]; !ended && gs.accounts.byKey[uid] == nil && gs.accounts.byKey[allocation.SealedKey(uid)] == nil {
			gs.accounts.put(exclusion.NewAccount(allocation.Seal(types.UID(uid), nil, devices, gs.config.Boot, false), allocation.Allocated))
			notify(gs.changed) // Run writes the entry
		}
	}
}

// claimsIn returns containers' devices from our claims, by the UID of the claim.
func claimsIn(said *kubeletapi.Listing) map[string][]allocation.SealedDevice {
	claims := make(map[string][]allocation.SealedDevice)
	for _, name := range said.CDIDevices() {
		if uid, device, ok := cdi.ParseID(name); ok {
			claims[string(uid)] = append(claims[string(uid)], allocation.SealedDevice{Name: device})
		}
	}
	return claims
}

// UnconfirmedGrants returns the grants from before a time without any PodResources listing, by
// resource. Such a grant may belong to an init container, which PodResources leaves out
// (pkg/kubelet/apis/podresources/server_v1.go, List).
func (gs *Grants) UnconfirmedGrants(before time.Time) map[string][]*allocation.Grant {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	found := make(map[string][]*allocation.Grant)
	for _, g := range gs.sorted() {
		if g.Container == "" && len(g.Earlier) == 0 && g.Since.Before(before) {
			found[g.Resource] = append(found[g.Resource], g)
		}
	}
	return found
}

// LastListing returns the time of the last PodResources request, zero if its answer was incomplete.
// LastListing also returns zero while the file of grants is unreadable: PodResources leaves out
// init containers, so their devices are only in the file.
func (gs *Grants) LastListing() time.Time {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	if gs.grantsUnread {
		return time.Time{}
	}
	return gs.listing.lastRequest
}
