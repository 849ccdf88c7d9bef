package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// endedFor is for how long the ledger remembers the end of a claim. It is longer than the kubelet
// lists the claim after its end, and longer than a PodResources call takes.
const endedFor = time.Minute

// Config is the configuration of a ledger.
type Config struct {
	Dir  string  // the ledger's own directory, which survives a reboot
	Boot string  // the kernel's boot ID; claims of another boot exclude no consumer
	Disk disk.FS // the operating system's if nil

	// OtherDirs are directories in Dir that other code writes to. The ledger removes their temporary
	// files too. No other code writes there before the ledger was opened.
	OtherDirs []string

	// Listings means that the caller polls PodResources and calls [Grants.ObserveListing]. Until the
	// first complete answer, new claims get only open devices, because a container may have any other
	// device.
	Listings bool

	// Patience is for how long complete answers of PodResources must omit a container's device
	// before another container gets the device; 10 s if 0.
	Patience time.Duration

	// Termination returns for how long the containers of a deleted pod may continue to run, and
	// whether that time is known. Optional.
	Termination func(namespace, pod string) (time.Duration, bool)

	// RequestsResource reports whether a pod that has not ended requests a resource, and whether the
	// answer is known. Optional.
	RequestsResource func(namespace, pod, resource string) (asks, known bool)

	// OpenBy returns the process that has a device open, if only one process at a time can open the
	// device; "" if there is none. Processes of the consumer's own pods are ignored: they already
	// have the device if the files of the ledger were lost. OpenBy is called before a consumer gets
	// the device, and may read the host. Optional.
	OpenBy func(d *discovery.Device, own []types.UID) string
}

// Ledger is the ledger of a node. Only one agent may have it open. Its own methods are those of
// claims and of the whole ledger.
type Ledger struct {
	*core
	Grants *Grants
	Leases *Leases

	locks       locks
	writingBoot turn // serializes writes of the file boot

	// The mutex guards the following fields.
	view         *View // the view of an earlier or the present version, nil before the first
	bootRecorded bool  // the file boot names the present boot
}

// New returns a ledger that is not open yet.
func New(config Config) *Ledger {
	if config.Patience == 0 {
		config.Patience = 10 * time.Second
	}
	c := &core{
		config:       config,
		files:        allocation.NewFiles(config.Dir, config.Disk),
		openedSignal: make(chan struct{}),
		changed:      make(chan struct{}, 1),
		filing:       newTurn(),
		accounts:     newAccounts(),
		replaced:     make(map[string][]allocation.Entry),
		endTimes:     make(map[string]time.Time),
		grantsUnread: true,
	}
	return &Ledger{
		core:        c,
		Grants:      &Grants{core: c, saving: newTurn()},
		Leases:      &Leases{core: c},
		writingBoot: newTurn(),
	}
}

// SetOutputs sets the outputs whose files are written and removed with entries. Outputs are written in
// the given order, and removed in reverse order. SetOutputs must be called before Open.
func (l *Ledger) SetOutputs(outputs ...Output) { l.outputs = outputs }

// WaitOpen returns a channel that is closed once the ledger is open.
func (l *Ledger) WaitOpen() <-chan struct{} { return l.openedSignal }

// Lock excludes other calls for the same claim or grant until unlock is called.
func (l *Ledger) Lock(ctx context.Context, key string) (unlock func(), err error) {
	return l.locks.lock(ctx, key)
}

// NewClaim returns a claim of this boot without devices.
func (l *Ledger) NewClaim(uid types.UID, namespace, name string) *allocation.Claim {
	return allocation.NewClaim(uid, namespace, name, l.config.Boot)
}

// AllocateClaim puts a claim into the state Configuring or Allocated, or returns
// [*exclusion.Blocked] or a disk error. After a disk error, the state of the claim follows from its
// file, which is read back. The caller has the claim's lock. AllocateClaim is the first half of
// Prepare; [Ledger.Write] writes the outputs.
func (l *Ledger) AllocateClaim(c *allocation.Claim, to allocation.State, s exclusion.Stock) error {
	if err := l.SettleClaim(c.Key()); err != nil {
		return err
	}
	c.Configuring = to == allocation.Configuring
	l.adaptShares(c)
	l.keepSealedNodes(c)
	data, err := c.Encode()
	if err != nil {
		return fmt.Errorf("record of claim %s: %w", c.UID, err)
	}
	before, err := l.reserve(c, s)
	if err != nil {
		return err
	}
	if to == allocation.Allocated && (before == nil || before.State != allocation.Allocated) {
		if err := l.mayOpen(c.Holds(), c.Users, s); err != nil {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.accounts.putBack(c.Key(), before)
			return err
		}
	}
	there := disk.Old
	if err = l.recordBoot(); err == nil {
		there, err = l.files.WriteClaim(c, data)
	}
	if err != nil {
		err = fmt.Errorf("write record %s: %w", l.files.ClaimFile(c.UID), err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.applyWritten(there, c, to, before)
	return err
}

// adaptShares gives the shares of a claim the form that other consumers of the same device have.
// The administrator may have changed the number of shares since. The device is not published while
// it is in use in the earlier form, so the scheduler allocated this claim by the earlier form too.
// A device that is only kept after the end of its consumer is published in the present form.
func (l *Ledger) adaptShares(c *allocation.Claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range c.Results {
		r := &c.Results[i]
		for _, a := range l.accounts.index.AccountsOf(r.Source) {
			if _, leased := a.Entry.(*allocation.LeaseEntry); leased || a.State == allocation.Ended {
				continue
			}
			for _, h := range a.Holds {
				if h.Device == r.Source && h.Shares > 0 && r.Shares > 0 {
					r.Shares = h.Shares
				}
			}
		}
	}
}

// keepSealedNodes adds the nodes in the sealed entry of a claim to the claim's results. Earlier
// containers may still use these nodes, and the sealed entry's file may be lost, while the CDI spec
// is replaced by a spec with the present nodes.
func (l *Ledger) keepSealedNodes(c *allocation.Claim) {
	a := l.accountOf(allocation.SealedKey(c.Key()))
	if a == nil || a.State == allocation.Ended {
		return
	}
	for _, d := range a.Entry.(*allocation.Sealed).Devices {
		for i := range c.Results {
			if r := &c.Results[i]; d.Name == r.Device || d.Name == r.Source {
				r.KeepNodes(d.Nodes)
			}
		}
	}
}

// reserve enters a claim unless it is blocked. The decision is one step under the mutex, so one of
// several owners that want a device gets it, and no caller waits.
func (l *Ledger) reserve(c *allocation.Claim, s exclusion.Stock) (before *exclusion.Account, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before = l.accounts.byKey[c.Key()]
	a := exclusion.NewAccount(c, allocation.Reserved)
	q := exclusion.Query{API: discovery.ModeDRA, Owner: c.Owner(), OwnKey: c.Key(), Wanted: a.Holds, Stock: s}
	if !isInUse(before) {
		if b := l.mayHave(q); b != nil {
			return nil, b
		}
	}
	if b := l.accounts.index.FindBlocked(q); b != nil {
		return nil, b
	}
	if before != nil && before.State != allocation.Ended {
		a.Holds = slices.Concat(a.Holds, before.Holds)
	}
	l.accounts.put(a)
	return before, nil
}

// applyWritten sets the state of a claim according to the file in place after a write.
func (l *Ledger) applyWritten(there disk.InPlace, c *allocation.Claim, to allocation.State, before *exclusion.Account) {
	switch there {
	case disk.New:
		if before != nil {
			l.replaced[c.Key()] = append(l.replaced[c.Key()], before.Entry)
		}
		l.accounts.put(exclusion.NewAccount(c, to))
	case disk.Old:
		l.accounts.restore(c.Key(), before)
	case disk.Unknown:
		a := exclusion.NewAccount(c, allocation.Uncertain)
		a.To, a.Before = to, before
		if before != nil && before.State != allocation.Ended {
			a.Holds = slices.Concat(a.Holds, before.Holds)
		}
		l.accounts.put(a)
	}
}

// SettleClaim determines the state of a claim whose file could not be read back after a write. The
// caller has the claim's lock.
func (l *Ledger) SettleClaim(key string) error {
	a := l.accountOf(key)
	if a == nil || a.State != allocation.Uncertain {
		return nil
	}
	c := a.Entry.(*allocation.Claim)
	data, err := l.files.Claims.Read(l.files.ClaimFile(c.UID))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read record %s, which may not have been written: %w", l.files.ClaimFile(c.UID), err)
	}
	there := disk.Old
	if wanted, encodeErr := c.Encode(); err == nil && encodeErr == nil && bytes.Equal(wanted, data) {
		there = disk.New
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.applyWritten(there, c, a.To, a.Before)
	return nil
}

// Get returns the entry of a key and its state; nil and None if there is none.
func (l *Ledger) Get(key string) (allocation.Entry, allocation.State) {
	a := l.accountOf(key)
	if a == nil {
		return nil, allocation.None
	}
	return a.Entry, a.State
}

// Claim returns the entry of a claim and its state. The entry is nil if there is none or if its
// record could not be decoded.
func (l *Ledger) Claim(uid types.UID) (*allocation.Claim, allocation.State) {
	e, state := l.Get(string(uid))
	c, _ := e.(*allocation.Claim)
	return c, state
}

// Claims returns the prepared claims, and the claims in configuration, sorted by UID. Before the
// ledger is open, there are none.
func (l *Ledger) Claims() []*allocation.Claim {
	if !l.isOpen() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return claimsOf(l.accounts.sorted())
}

// AllOwners returns all claims with an entry, of any boot, with their names if known.
func (l *Ledger) AllOwners() []allocation.Owner {
	l.mu.Lock()
	defer l.mu.Unlock()
	seen := make(map[types.UID]allocation.Owner)
	for _, a := range l.accounts.sorted() {
		if o := a.Entry.Owner(); o.UID != "" && (seen[o.UID].Name == "") {
			seen[o.UID] = o
		}
	}
	owners := make([]allocation.Owner, 0, len(seen))
	for _, o := range seen {
		owners = append(owners, o)
	}
	slices.SortFunc(owners, func(a, b allocation.Owner) int { return strings.Compare(string(a.UID), string(b.UID)) })
	return owners
}

// IsPrepared reports whether a claim has an entry of the present boot. Such an entry includes all
// devices of the claim.
func (l *Ledger) IsPrepared(uid types.UID) bool {
	c, state := l.Claim(uid)
	return c != nil && state != allocation.Ended
}

// Since returns when a claim got its devices. If the record has no time, Since returns the
// modification time of its file; zero if the file cannot be read.
func (l *Ledger) Since(uid types.UID) time.Time {
	if c, _ := l.Claim(uid); c != nil && !c.Since.IsZero() {
		return c.Since
	}
	info, err := l.files.Claims.Lstat(l.files.ClaimFile(uid))
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// IsSealed reports whether the ledger has files of a claim that it could not decode.
func (l *Ledger) IsSealed(uid types.UID) bool {
	return l.accountOf(allocation.SealedKey(string(uid))) != nil
}

// Write brings the outputs of an entry up to date. The caller has the entry's lock. After an error,
// [Ledger.Run] tries again.
func (l *Ledger) Write(key string) error { return l.writeOutputs(key) }

// End removes the outputs of a claim, and then its record. A missing file is not an error. The
// caller has the claim's lock. The stock, which may be nil, supplies the files of devices for a
// sealed entry that does not name them.
//
// A claim that could not be ended remains given, and its outputs are written again: if the call to
// unprepare a claim fails, a kubelet up to 1.36 starts the claim's next pod without another call,
// since it regards the claim as prepared (pkg/kubelet/cm/dra/manager.go, PrepareResources, read in
// 1.36.0; since 1.37.0 it rejects the pod until the claim is unprepared). The kubelet calls again
// when that pod has ended.
func (l *Ledger) End(uid types.UID, s exclusion.Stock) error {
	err := l.end(uid, s)
	if err == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.accounts.byKey[string(uid)]; a != nil && a.State == allocation.Ending {
		if c, ok := a.Entry.(*allocation.Claim); ok {
			again := *a
			if again.State = allocation.Uncertain; a.To == allocation.None {
				again.State = l.config.stateOf(c)
			}
			l.accounts.put(&again)
			notify(l.changed)
		}
	}
	return err
}

func (l *Ledger) end(uid types.UID, s exclusion.Stock) error {
	key := string(uid)
	entries, sealed := l.startEnding(key, s)
	defer l.lockFiles(entries...)()
	for _, e := range entries {
		if err := l.outputs.removeEntry(e, l.otherEntries([]string{key, allocation.SealedKey(key)})); err != nil {
			return err
		}
	}
	files := []string{l.files.ClaimFile(uid)}
	if sealed {
		aside, err := l.files.AsideFiles(uid)
		if err != nil {
			return fmt.Errorf("remove record of claim %s: %w", uid, err)
		}
		files = append(aside, files...)
	}
	for _, file := range files {
		if err := l.files.Claims.Remove(file); err != nil {
			return fmt.Errorf("remove record %s: %w", file, err)
		}
	}
	for _, o := range slices.Backward(l.outputs) {
		if k, ok := o.(ClaimForgetter); ok {
			if err := k.ForgetClaim(uid); err != nil {
				return err
			}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.accounts.drop(key)
	l.accounts.drop(allocation.SealedKey(key))
	delete(l.replaced, key)
	now := time.Now()
	maps.DeleteFunc(l.endTimes, func(_ string, at time.Time) bool { return now.Sub(at) > endedFor })
	l.endTimes[key] = now
	return nil
}

// startEnding puts a claim into the state Ending and returns the entries whose outputs must be
// removed. A claim without an entry may have outputs too.
func (l *Ledger) startEnding(key string, s exclusion.Stock) (entries []allocation.Entry, sealed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.accounts.byKey[allocation.SealedKey(key)]; a != nil {
		entries, sealed = append(entries, describeSealed(a.Entry.(*allocation.Sealed), s)), true
	} else if l.accounts.byKey[key] == nil {
		entries = append(entries, &allocation.Sealed{UID: types.UID(key)})
	}
	if a := l.accounts.byKey[key]; a != nil {
		if a.State != allocation.Ended { // a Past claim excludes no consumer, whether it can be ended or not
			ending := *a
			ending.State = allocation.Ending
			l.accounts.put(&ending)
		}
		entries = append(entries, a.Entry)
		if a.Before != nil {
			entries = append(entries, a.Before.Entry)
		}
	}
	return append(entries, l.replaced[key]...), sealed
}

// describeSealed returns a sealed entry with the files of its devices from the snapshot, which take
// precedence over the files in a damaged record. If the claim's devices are unknown, the entry gets
// the files of all devices, because the claim may have any device.
func describeSealed(s *allocation.Sealed, stock exclusion.Stock) *allocation.Sealed {
	if stock == nil {
		return s
	}
	described := *s
	described.Devices = slices.Clone(s.Devices)
	if s.AnyDevice {
		for _, name := range stock.Names() {
			described.Devices = append(described.Devices, allocation.SealedDevice{Name: name})
		}
	}
	for i := range described.Devices {
		if device, found := exclusion.FindPresent(described.Devices[i].Name, stock); found {
			described.Devices[i].Files = device.FilesAs(device.Resource())
		}
	}
	return &described
}
