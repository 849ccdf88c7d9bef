package reclaim

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
)

var _ interface {
	ledger.Output
	ledger.GrantReplacer
} = &Manager{}

// Load reads the records of earlier agents of this boot. It must be called before the ledger is
// opened. The devices of the records are withheld from other consumers until Run has checked which
// claims still exist: an agent that was killed after the end of a claim may not have recorded the
// end. A record that cannot be read withholds nothing.
func (c *Manager) Load() (problems []error) {
	problems = c.journal.Open()
	for _, r := range c.journal.All() {
		problems = append(problems, c.load(r))
	}
	return slices.DeleteFunc(problems, func(err error) bool { return err == nil })
}

// load adds a record of an earlier agent of this boot.
func (c *Manager) load(j *journal.Record[record]) error {
	r := j.Body
	r.name = j.Group
	if !r.isValid() {
		return fmt.Errorf("record %s withholds nothing: it is of no device", c.journal.File(j.Group))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.records[r.name] != nil {
		return nil // a consumer got the device before the record could be read
	}
	c.records[r.name] = &r
	if r.Ended {
		r.endTime = time.Now()
	}
	r.sinceStart = !r.Ended && !r.isHeld(c.config.Ledger)
	if r.reason = reasonChecking; r.Ended || r.sinceStart {
		c.config.Ledger.Leases.KeepDevice(r.toKept(reasonChecking))
	}
	return nil
}

// readAgain reads the records that could not be listed or read when the agent started.
func (c *Manager) readAgain(ctx context.Context) {
	if !c.journal.MayLack() {
		return
	}
	defer c.takeTurn()()
	found, problems, _ := c.journal.ReadAgain()
	for _, r := range found {
		problems = append(problems, c.load(r))
	}
	for _, problem := range problems {
		if problem != nil {
			klog.FromContext(ctx).Error(problem, "Reading the records of reclaim")
		}
	}
}

// convert converts a record of an earlier version.
func convert(name string, data []byte) (*journal.Record[record], error) {
	var r struct {
		Boot string `json:"boot"`
		record
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("its device is not withheld: %w", err)
	}
	if r.name = name; !r.isValid() {
		return nil, errors.New("its device is not withheld: it is of no device")
	}
	return &journal.Record[record]{Boot: r.Boot, Group: name, Silicon: r.Hold.Silicon, Devices: []string{r.Hold.Device}, Body: r.record}, nil
}

// isValid reports whether a record names a device, and has the name that follows from its device
// and owner.
func (r *record) isValid() bool {
	return r.Hold.Device != "" && r.Key != "" && r.nameOf() == r.name
}

// takeTurn waits until no other call writes or removes records.
func (c *Manager) takeTurn() (done func()) {
	c.recordLock <- struct{}{}
	return func() { <-c.recordLock }
}

// nameOf returns the name of a record, which follows from its device and owner.
func (r *record) nameOf() string {
	sum := sha256.Sum256([]byte(r.Key + " " + r.Owner.String() + " " + string(r.Owner.UID)))
	return r.Hold.Device + "." + hex.EncodeToString(sum[:6])
}

// toKept converts a record for [ledger.Leases.KeepDevice].
func (r *record) toKept(why string) *ledger.KeptDevice {
	return &ledger.KeptDevice{Name: r.name, Consumer: r.Key, Previous: r.Owner, Hold: r.Hold, Reason: why, Idle: r.notOpen}
}

// withNodes adds the nodes that the owner was given to a device.
func (r *record) withNodes(d discovery.Device) discovery.Device {
	var nodes []*specs.DeviceNode
	for _, n := range r.Nodes {
		nodes = append(nodes, &specs.DeviceNode{Path: n.Path, HostPath: n.Path, Type: n.Type, Major: int64(n.Major), Minor: int64(n.Minor)})
	}
	d.Edits.DeviceNodes = append(nodes, d.Edits.DeviceNodes...)
	return d
}

// NoteUsers records the pods of a claim that is about to be prepared.
func (c *Manager) NoteUsers(claim types.UID, pods []types.UID) {
	if len(c.config.Rules()) == 0 {
		return
	}
	c.pods.note(claim, pods)
}

// Write implements [ledger.Output]: it records the devices of a claim. The containers of new grants
// are not known yet. The devices of an earlier grant that were withheld since the start of the agent
// are released: otherwise the kubelet would find the ID of a running container unhealthy.
func (c *Manager) Write(e allocation.Entry) error {
	if _, ok := e.(*allocation.Claim); ok {
		_, err := c.recordEntry(e, nil, false)
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range e.Holds() {
		of := record{Key: e.Key(), Owner: e.Owner(), Hold: h}
		if r := c.records[of.nameOf()]; r != nil && r.sinceStart {
			c.config.Ledger.Leases.Release(r.name)
			r.sinceStart = false
		}
	}
	return nil
}

// Remove implements [ledger.Output]: it withholds the devices of an ending owner, except devices
// that the owner has by another entry too.
func (c *Manager) Remove(e allocation.Entry, others []allocation.Entry) error {
	has := func(device string) bool {
		return slices.ContainsFunc(others, func(other allocation.Entry) bool {
			return other.Key() == e.Key() && other.Owner() == e.Owner() && holdsDevice(other, device)
		})
	}
	kept, err := c.recordEntry(e, has, true)
	if sealed, ok := e.(*allocation.Sealed); ok {
		err = c.end(sealed.UID)
	}
	if _, ok := e.(*allocation.Grant); ok {
		c.reclaimDevices(kept, endWait)
	}
	c.pods.forget(e.Owner().UID)
	return err
}

// ForgetClaim implements [ledger.ClaimForgetter]: it reclaims the devices of a claim once nothing
// else of the claim is left. Before that point the end may still fail, so no device is reset.
func (c *Manager) ForgetClaim(claim types.UID) error {
	kept := c.recordsOf(claim)
	kept = slices.DeleteFunc(kept, func(r *record) bool { return !c.hasEnded(r) })
	c.mu.Lock()
	for _, r := range kept {
		r.claimRemoved, r.nextCheck = true, time.Time{}
	}
	c.mu.Unlock()
	c.reclaimDevices(kept, endWait)
	return nil
}

// recordsOf returns the records of a claim, in order.
func (c *Manager) recordsOf(claim types.UID) (records []*record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(c.records)) {
		if r := c.records[name]; claim != "" && r.Owner.UID == claim {
			records = append(records, r)
		}
	}
	return records
}

// end withholds the devices of an ending claim whose other records could not be decoded, or are
// missing.
func (c *Manager) end(claim types.UID) error {
	var errs []error
	for _, r := range c.recordsOf(claim) {
		errs = append(errs, c.withholdLost(r))
	}
	return errors.Join(errs...)
}

// GrantsReplaced implements [ledger.GrantReplacer].
func (c *Manager) GrantsReplaced(earlier []*allocation.Grant) error {
	var kept []*record
	var errs []error
	for _, g := range earlier {
		more, err := c.recordEntry(g, nil, true)
		c.mu.Lock()
		for _, r := range more {
			r.idTaken = true
		}
		c.mu.Unlock()
		kept, errs = append(kept, more...), append(errs, err)
	}
	c.reclaimDevices(kept, passWait)
	return errors.Join(errs...)
}

// RemoveOrphans implements [ledger.Output]. It does nothing, because Run checks the records of
// ended owners.
func (c *Manager) RemoveOrphans(func(types.UID, func() error) (bool, error)) error { return nil }

// holdsDevice reports whether an entry has a device.
func holdsDevice(e allocation.Entry, device string) bool {
	return slices.ContainsFunc(e.Holds(), func(h allocation.Hold) bool { return h.Device == device })
}

// handOver starts to reclaim devices, all at once, and waits for at most the given time.
func (c *Manager) reclaimDevices(kept []*record, wait time.Duration) {
	if len(kept) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	var looks []<-chan struct{}
	for _, r := range kept {
		looks = append(looks, c.tryReclaim(ctx, r))
	}
	for _, look := range looks {
		select {
		case <-look:
		case <-ctx.Done():
		}
	}
	notify(c.wake)
}

// isReclaimable reports whether the devices of an entry's owner are to be reclaimed. A claim that
// is Configuring matters only for existing records: the claim was given before, and its pods may be
// running.
func isReclaimable(e allocation.Entry, boot string) bool {
	switch e := e.(type) {
	case *allocation.Claim:
		return e.Boot == boot
	case *allocation.Grant:
		return e.Container != ""
	}
	return false
}

// recordEntry records the present or past devices of an entry, except the devices that has reports.
// It returns the records of the devices to withhold if the owner has ended.
func (c *Manager) recordEntry(e allocation.Entry, has func(device string) bool, ended bool) (kept []*record, err error) {
	rules := c.config.Rules()
	if !isReclaimable(e, c.config.Journal.Boot) || len(rules) == 0 && !c.any() {
		return nil, nil
	}
	defer c.takeTurn()()
	if !ended && !c.isPresent(e) {
		return nil, nil // the owner has ended since it was listed
	}
	var errs []error
	for _, h := range e.Holds() {
		if h.Open || has != nil && has(h.Device) {
			continue
		}
		r := c.recordOf(rules, e, h)
		if r == nil {
			continue
		}
		err := c.saveRecord(r, c.usersBy(r), ended || r.Grant != "" && c.hasEnded(r))
		errs = append(errs, err)
		if ended {
			kept = append(kept, r)
		}
	}
	return kept, errors.Join(errs...)
}

// isPresent reports whether the ledger still has an owner that is not ending. An ending owner may be
// reclaimed already.
func (c *Manager) isPresent(e allocation.Entry) bool {
	now, state := c.config.Ledger.Get(e.Key())
	return now != nil && now.Owner() == e.Owner() && state != allocation.Ending
}

// recordOf returns the record of an owner's device. If there is none, it returns a new record if
// the administrator wants the device reclaimed, and nil otherwise.
func (c *Manager) recordOf(rules []discovery.Selection[Rule], e allocation.Entry, h allocation.Hold) *record {
	r := &record{Key: e.Key(), Owner: e.Owner(), Grant: grantOf(e), Hold: h}
	r.name = r.nameOf()
	c.mu.Lock()
	before, passed := c.records[r.name], r.Grant != "" && c.handedOver[r.Grant] != ""
	c.mu.Unlock()
	claim, isClaim := e.(*allocation.Claim)
	if before != nil || passed || isClaim && claim.Configuring {
		return before
	}
	d, rule, _ := c.rules.selectRule(rules, h.Device)
	if rule == nil {
		return nil
	}
	r.Source, r.Nodes = d.Source, allocation.NodesIn(d.OwnNodes())
	if isClaim { // a grant has the nodes of all its devices together
		r.Nodes = append(r.Nodes, ownOf(h.Nodes, &d, r.Nodes)...)
	}
	r.Device, _ = c.rules.keyOf(d) // unknown fields do not distinguish devices
	return r
}

// ownOf returns the given nodes that belong to the device alone, such as the node of its IOMMU
// group while the device is bound to vfio, without the known nodes.
func ownOf(given []allocation.Node, d *discovery.Device, known []allocation.Node) (nodes []allocation.Node) {
	for _, n := range given {
		common := slices.Contains(d.CommonNodes, n.Path) || slices.Contains(pci.VFIOControl(), n.Path)
		if !common && !slices.Contains(known, n) {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// hasEnded reports whether the owner of a record has ended.
func (c *Manager) hasEnded(r *record) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return r.Ended
}

// usersBy returns the pods of a record, including pods that became known since.
func (c *Manager) usersBy(r *record) users {
	pod := types.UID("")
	if r.Owner.API == discovery.ModeDevicePlugin {
		pod = c.config.PodOf(r.Owner)
	}
	c.mu.Lock()
	of := r.users
	c.mu.Unlock()
	if pod != "" {
		return of.with(&claimUsers{reserved: []types.UID{pod}})
	}
	return c.pods.addTo(of, r.Owner.UID)
}

func union(a, b []types.UID) []types.UID {
	all := slices.Concat(a, b)
	slices.Sort(all)
	return slices.Compact(all)
}

// saveRecord writes a record with the pods and whether the owner has ended, unless the same record
// is on disk. The device of an ended owner is withheld in any case. If that record cannot be
// written but an earlier record of the owner is on disk, saveRecord returns no error: the next
// agent finds that the owner has ended, and the journal writes the record later. A record of the
// owner that cannot be read at present may name further pods, so it is not replaced before the owner
// ends. The caller has the turn.
func (c *Manager) saveRecord(r *record, of users, ended bool) error {
	lacks := c.config.Journal.Files.IsMissing(c.journal.File(r.name))
	c.mu.Lock()
	unread := c.records[r.name] == nil && !lacks && c.journal.MayLack()
	of.Unknown = of.Unknown || unread
	now := record{Key: r.Key, Owner: r.Owner, Grant: r.Grant, Hold: r.Hold, Source: r.Source, Device: r.Device, Nodes: r.Nodes, users: of, Ended: ended}
	same := c.records[r.name] == r && of.sameUsers(r.users) && now.Ended == r.Ended
	c.mu.Unlock()
	if same && !lacks || unread && !ended {
		return nil
	}
	written := &journal.Record[record]{Group: r.name, Silicon: r.Hold.Silicon, Devices: []string{r.Hold.Device}, Body: now}
	var err error
	if ended {
		if err = c.journal.AmendRecord(written); err != nil && !lacks {
			err = nil
		}
	} else {
		err = c.journal.Put(written)
	}
	if err != nil {
		err = fmt.Errorf("write down who had device %s: %w", r.Hold.Device, err)
	}
	if err != nil && !ended {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.records[r.name] = r
	r.users = of
	switch {
	case ended && !r.Ended:
		r.Ended, r.reason, r.endTime = true, reasonChecking, time.Now()
		c.config.Ledger.Leases.KeepDevice(r.toKept(reasonChecking))
	case !ended && r.Ended: // the claim could not be ended, and remains given
		r.Ended, r.reason, r.notOpen, r.claimRemoved, r.nextCheck = false, "", false, false, time.Time{}
		c.config.Ledger.Leases.Release(r.name)
	}
	return err
}

// removeRecord removes a record after its device was reclaimed.
func (c *Manager) removeRecord(r *record) error {
	defer c.takeTurn()()
	if err := c.journal.Remove(r.name); err != nil {
		return fmt.Errorf("remove who had it: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.records, r.name)
	delete(c.warnedBlind, r.name)
	if r.Grant != "" {
		c.handedOver[r.Grant] = r.Key
	}
	c.config.Ledger.Leases.Release(r.name)
	return nil
}

// refreshRecords records the present devices of all owners, and withholds the devices of owners
// whose end was missed.
func (c *Manager) refreshRecords(ctx context.Context) {
	c.readAgain(ctx)
	view := c.config.Ledger.View(nil)
	c.pods.askAll(ctx, view.Claims())
	var entries []allocation.Entry
	for _, claim := range view.Claims() {
		entries = append(entries, claim)
	}
	for _, grant := range view.OwnGrants() {
		entries = append(entries, grant)
	}
	var errs []error
	for _, e := range entries {
		_, err := c.recordEntry(e, nil, false)
		errs = append(errs, err)
	}
	c.mu.Lock()
	maps.DeleteFunc(c.handedOver, func(grant, key string) bool {
		e, _ := c.config.Ledger.Get(key)
		return grantOf(e) != grant
	})
	var lost []*record
	released := false
	for _, r := range c.records {
		if !r.Ended && !r.isHeld(c.config.Ledger) {
			lost = append(lost, r)
		} else if r.sinceStart && !r.Ended {
			c.config.Ledger.Leases.Release(r.name)
			released = true
		}
		r.sinceStart = false
	}
	c.mu.Unlock()
	if released {
		c.config.Changed()
	}
	for _, r := range lost {
		errs = append(errs, c.withholdLost(r))
	}
	for _, r := range c.endedRecords() {
		errs = append(errs, c.restoreRecord(r))
	}
	errs = append(errs, c.journal.RestoreRecords())
	c.logUnwritten(ctx, errors.Join(errs...))
}

// logUnwritten logs a failure to write records once, until a write succeeds. It does not compare
// errors, because each error names a different temporary file.
func (c *Manager) logUnwritten(ctx context.Context, err error) {
	if err != nil && !c.warnedUnwritten {
		klog.FromContext(ctx).Error(err, "Who has devices is not written down; trying again", "interval", refreshInterval)
	}
	c.warnedUnwritten = err != nil
}

// withholdLost withholds a device whose owner has ended, as far as the agent can tell.
func (c *Manager) withholdLost(r *record) error {
	defer c.takeTurn()()
	return c.saveRecord(r, c.usersBy(r), true)
}

// restoreRecord writes the record of a withheld device again if the record was removed: without the
// record, the next agent would give the device to its next owner at once.
func (c *Manager) restoreRecord(r *record) error {
	defer c.takeTurn()()
	c.mu.Lock()
	there := c.records[r.name] == r
	c.mu.Unlock()
	if !there {
		return nil // the device was reclaimed
	}
	return c.saveRecord(r, c.usersBy(r), true)
}

// grantOf identifies a grant, also among grants of the same ID; "" for other entries. A grant stays
// in the ledger for a while after its container has ended.
func grantOf(e allocation.Entry) string {
	g, ok := e.(*allocation.Grant)
	if !ok {
		return ""
	}
	return fmt.Sprintf("%s %s %d", g.Key(), g.Container, g.Since.UnixNano())
}

// isHeld reports whether a record's owner still has the device.
func (r *record) isHeld(l *ledger.Ledger) bool {
	e, state := l.Get(r.Key)
	if r.Grant != "" && state == allocation.Ending {
		return false
	}
	return e != nil && e.Owner() == r.Owner && holdsDevice(e, r.Hold.Device) || r.Owner.UID != "" && l.IsSealed(r.Owner.UID)
}

func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
