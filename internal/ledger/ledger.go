// Package ledger says who has which devices, by either API: it writes down what
// claims and containers are given before they get it, keeps others out, and
// keeps the files that go with it as they should be. It knows no device's
// vendor and speaks to nobody.
package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// The files of a ledger: claims/<uid>.record, claims/<uid>.bad<n> for one that
// is not understood, grants/grants.json, and boot, which says in which boot
// claims were last given.
const (
	claimsDir  = "claims"
	grantsFile = "grants/grants.json"
	bootFile   = "boot"

	// wipedWord is in the file boot if claims' files were lost in this boot.
	wipedWord = "wiped"

	claimExtension = ".record"
	badExtension   = ".bad"
)

// endedFor is for how long it is remembered that a claim has ended: longer than the kubelet
// names it after that, and than PodResources takes to answer.
const endedFor = time.Minute

// Config says where a ledger is.
type Config struct {
	Dir  string  // the agent's own; outlives it
	Boot string  // the kernel's boot ID: claims of another boot keep nobody out
	Disk disk.FS // the operating system's if nil

	// Beside are directories in Dir in which others write, whose temporary files are
	// removed too. Nobody writes there before the ledger was opened.
	Beside []string

	// Listings says that PodResources is asked and [Ledger.Observe] called.
	// Until the first whole answer no new claim is given anything that is not
	// open: a container may have it.
	Listings bool

	// Patience is how long whole answers of PodResources must leave out what a
	// container had before another gets it; 10 s if 0.
	Patience time.Duration

	// Termination returns how long the containers of a pod may go on once it
	// is deleted, and whether that is known. Optional.
	Termination func(namespace, pod string) (time.Duration, bool)

	// Asks reports whether a pod that has not ended asks for a resource, and whether
	// that is known. Optional.
	Asks func(namespace, pod, resource string) (asks, known bool)

	// Opened returns which process has a device open that only one process at a time can open, "" if none is seen. The
	// processes of the consumer's own pods do not count: they have the device already if the files of the ledger were
	// lost. It is called before a consumer gets the device, and may read the host. Optional.
	Opened func(d *discovery.Device, own []types.UID) string
}

// Ledger is the ledger of a node. Only the one agent that may write has it open.
type Ledger struct {
	config  Config
	claims  disk.Files // claims' files, which no reboot outlives
	synced  disk.Files // the other files, which a reboot leaves as they are
	outputs []Output
	opened  chan struct{} // closed once it is open
	changed chan struct{} // has one when Run is to look

	locks  locks
	filing turn // one entry at a time writes or removes files of the host
	saving turn // one read or write of grants at a time, so that the last one is the newest
	saying turn // one write of the boot at a time

	mu       sync.Mutex // guards what follows, and is never held during I/O
	accounts map[string]*account
	index    index
	version  int                // counts changes of the accounts; 1 at first, since a view of no ledger has 0
	view     *View              // as of some version, nil before the first
	replaced map[string][]Entry // by key, entries whose outputs the present one replaces
	said     listed
	unread   bool                 // the file of grants may say more than the accounts
	unsaved  bool                 // the file of grants is not what the accounts say
	booted   bool                 // the file boot says the present boot
	wiped    bool                 // claims' files were lost in this boot
	left     []Entry              // entries that are no more, whose outputs could not be removed
	ended    map[string]time.Time // when claims have ended, by key
	freed    chan struct{}        // closed when an entry is no more; nil if nobody waits for that

	leasesEnd chan struct{} // closed when the next lease ends
	closed    bool          // no lease begins any more
}

// New returns a ledger that is not open yet.
func New(config Config) *Ledger {
	if config.Patience == 0 {
		config.Patience = 10 * time.Second
	}
	return &Ledger{
		config:   config,
		claims:   disk.Files{FS: config.Disk},
		synced:   disk.Files{FS: config.Disk, Synced: true},
		filing:   newTurn(),
		saving:   newTurn(),
		saying:   newTurn(),
		opened:   make(chan struct{}),
		changed:  make(chan struct{}, 1),
		accounts: make(map[string]*account),
		index:    newIndex(),
		replaced: make(map[string][]Entry),
		ended:    make(map[string]time.Time),
		unread:   true,
		version:  1,

		leasesEnd: make(chan struct{}),
	}
}

// AddOutput has files written and removed with entries. Outputs are written in
// the order in which they were added, and removed in the opposite one. It is
// called before the ledger is opened.
func (l *Ledger) AddOutput(o Output) { l.outputs = append(l.outputs, o) }

// Opened is closed once the ledger is open.
func (l *Ledger) Opened() <-chan struct{} { return l.opened }

func (l *Ledger) isOpen() bool {
	select {
	case <-l.opened:
		return true
	default:
		return false
	}
}

// Lock keeps other calls for a claim, or for one grant, away.
func (l *Ledger) Lock(ctx context.Context, key string) (unlock func(), err error) {
	return l.locks.lock(ctx, key)
}

// NewClaim returns a claim of this boot that has nothing yet.
func (l *Ledger) NewClaim(uid types.UID, namespace, name string) *Claim {
	return &Claim{Version: Version, ReadableBy: readableBy, UID: uid, Namespace: namespace, Name: name, Boot: l.config.Boot, Since: time.Now().UTC().Truncate(time.Second)}
}

// Give makes a claim Configuring or Given, or returns [*Blocked] or the error
// of the disk. After an error of the disk the claim is in the state that its
// file, read back, says. The caller has the claim's lock. It implements the
// beginning of Prepare; outputs are for [Ledger.Write].
func (l *Ledger) Give(c *Claim, to State, s Stock) error {
	if err := l.Settle(c.Key()); err != nil {
		return err
	}
	c.Configuring = to == Configuring
	l.conform(c)
	data, err := c.file()
	if err != nil {
		return fmt.Errorf("record of claim %s: %w", c.UID, err)
	}
	before, err := l.reserve(c, s)
	if err != nil {
		return err
	}
	if to == Given && (before == nil || before.state != Given) {
		if err := l.mayOpen(c.Holds(), c.Users, s); err != nil {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.putBack(c.Key(), before)
			return err
		}
	}
	there := disk.Old
	if err = l.sayBoot(); err == nil {
		there, err = l.claims.Write(l.claimFile(c.UID), data, 0o600)
	}
	if err != nil {
		err = fmt.Errorf("write record %s: %w", l.claimFile(c.UID), err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.enter(there, c, to, before)
	return err
}

// conform gives shares the form in which others have the same device. The administrator
// may want another number of shares since. The device is not published as long as it is
// had in the earlier form, so a claim that comes now was allocated by that.
func (l *Ledger) conform(c *Claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range c.Results {
		r := &c.Results[i]
		for _, a := range l.index.of[r.Source] {
			for _, h := range a.holds {
				if a.state != Past && h.Device == r.Source && h.Shares > 0 && r.Shares > 0 {
					r.Shares = h.Shares
				}
			}
		}
	}
}

// reserve enters a claim unless it is blocked. It decides in one step, so of
// several owners who want a device one wins, and nobody waits.
func (l *Ledger) reserve(c *Claim, s Stock) (before *account, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before = l.accounts[c.Key()]
	a := newAccount(c, Reserved)
	q := question{by: discovery.ModeDRA, owner: c.Owner(), own: c.Key(), want: a.holds, stock: s}
	if !before.has() {
		if b := l.mayHave(q); b != nil {
			return nil, b
		}
	}
	if b := l.index.blocked(q); b != nil {
		return nil, b
	}
	if before != nil && before.state != Past {
		a.holds = slices.Concat(a.holds, before.holds)
	}
	l.put(a)
	return before, nil
}

// enter makes a claim what its file says after it was written.
func (l *Ledger) enter(there disk.InPlace, c *Claim, to State, before *account) {
	switch there {
	case disk.New:
		if before != nil {
			l.replaced[c.Key()] = append(l.replaced[c.Key()], before.entry)
		}
		l.put(newAccount(c, to))
	case disk.Old:
		l.drop(c.Key())
		if before != nil {
			l.put(before)
		}
	case disk.Unknown:
		a := newAccount(c, Unsure)
		a.to, a.before = to, before
		if before != nil && before.state != Past {
			a.holds = slices.Concat(a.holds, before.holds)
		}
		l.put(a)
	}
}

// Settle finds out what became of a claim whose file could not be read after it
// was written. The caller has the claim's lock.
func (l *Ledger) Settle(key string) error {
	a := l.account(key)
	if a == nil || a.state != Unsure {
		return nil
	}
	c := a.entry.(*Claim)
	data, err := l.claims.Read(l.claimFile(c.UID))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read record %s, which may not have been written: %w", l.claimFile(c.UID), err)
	}
	there := disk.Old
	if wanted, encodeErr := c.file(); err == nil && encodeErr == nil && bytes.Equal(wanted, data) {
		there = disk.New
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.enter(there, c, a.to, a.before)
	return nil
}

// Get returns the entry of a key, and its state; nil and None if there is none.
func (l *Ledger) Get(key string) (Entry, State) {
	a := l.account(key)
	if a == nil {
		return nil, None
	}
	return a.entry, a.state
}

// Claim returns the entry of a claim, nil if there is none that is understood,
// and its state.
func (l *Ledger) Claim(uid types.UID) (*Claim, State) {
	e, state := l.Get(string(uid))
	c, _ := e.(*Claim)
	return c, state
}

// Since returns since when a claim has its devices. If its record does not say, it asks the disk
// when that was written; zero if it cannot be told.
func (l *Ledger) Since(uid types.UID) time.Time {
	if c, _ := l.Claim(uid); c != nil && !c.Since.IsZero() {
		return c.Since
	}
	info, err := l.claims.Lstat(l.claimFile(uid))
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// IsSealed reports whether there is something of a claim that is not understood.
func (l *Ledger) IsSealed(uid types.UID) bool { return l.account(sealedKey(string(uid))) != nil }

// Write makes the outputs of an entry what they should be. The caller has its
// lock. If there is an error it is tried again by [Ledger.Run].
func (l *Ledger) Write(key string) error {
	l.mu.Lock()
	a, replaced := l.accounts[key], l.replaced[key]
	l.mu.Unlock()
	if a == nil || a.state != Given {
		return nil
	}
	defer l.alone(append(slices.Clone(replaced), a.entry)...)()
	for _, o := range l.outputs {
		if err := o.Write(a.entry); err != nil {
			return err
		}
	}
	for _, e := range replaced {
		if err := l.removeOutputs(e, l.others(nil)); err != nil {
			return err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.replaced, key)
	return nil
}

// End removes the outputs of a claim, and then its file. It is no error
// if any is missing. The caller has the claim's lock. The stock, which may be nil, has the files
// of devices for a sealed entry that does not name them.
//
// A claim that could not be ended is given still, and its outputs are written again: a kubelet to 1.36 whose call
// to unprepare it failed starts the claim's next pod without another call, since it takes the claim for prepared
// (pkg/kubelet/cm/dra/manager.go, PrepareResources, read in 1.36.0; since 1.37.0 it rejects the pod until the claim is
// unprepared). The kubelet calls again when that pod has ended.
func (l *Ledger) End(uid types.UID, s Stock) error {
	err := l.end(uid, s)
	if err == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.accounts[string(uid)]; a != nil && a.state == Ending {
		if c, ok := a.entry.(*Claim); ok {
			l.put(newAccount(c, l.stateOf(c)))
			notify(l.changed)
		}
	}
	return err
}

func (l *Ledger) end(uid types.UID, s Stock) error {
	key := string(uid)
	entries, sealed := l.ending(key, s)
	defer l.alone(entries...)()
	for _, e := range entries {
		if err := l.removeOutputs(e, l.others([]string{key, sealedKey(key)})); err != nil {
			return err
		}
	}
	files := []string{l.claimFile(uid)}
	if sealed {
		aside, err := l.asideOf(uid)
		if err != nil {
			return fmt.Errorf("remove record of claim %s: %w", uid, err)
		}
		files = append(aside, files...)
	}
	for _, file := range files {
		if err := l.claims.Remove(file); err != nil {
			return fmt.Errorf("remove record %s: %w", file, err)
		}
	}
	for _, o := range slices.Backward(l.outputs) {
		if k, ok := o.(Keeper); ok {
			if err := k.Forget(uid); err != nil {
				return err
			}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop(key)
	l.drop(sealedKey(key))
	delete(l.replaced, key)
	now := time.Now()
	maps.DeleteFunc(l.ended, func(_ string, at time.Time) bool { return now.Sub(at) > endedFor })
	l.ended[key] = now
	return nil
}

// ending makes a claim one that is Ending, and returns whose outputs are to go.
// Of a claim that is not known there may be some all the same.
func (l *Ledger) ending(key string, s Stock) (entries []Entry, sealed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.accounts[sealedKey(key)]; a != nil {
		entries, sealed = append(entries, a.entry.(*Sealed).describedBy(s)), true
	} else if l.accounts[key] == nil {
		entries = append(entries, &Sealed{UID: types.UID(key)})
	}
	if a := l.accounts[key]; a != nil {
		if a.state != Past { // which keeps nobody out, whether it can be ended or not
			ending := *a
			ending.state = Ending
			l.put(&ending)
		}
		entries = append(entries, a.entry)
		if a.before != nil {
			entries = append(entries, a.before.entry)
		}
	}
	return append(entries, l.replaced[key]...), sealed
}

// removeOutputs removes the outputs of an entry, less those that others have
// too, the last written first.
func (l *Ledger) removeOutputs(e Entry, others []Entry) error {
	for _, o := range slices.Backward(l.outputs) {
		if err := o.Remove(e, others); err != nil {
			return err
		}
	}
	return nil
}

// others returns the entries whose outputs are to stay, without some.
func (l *Ledger) others(without []string) []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	entries := make([]Entry, 0, len(l.accounts))
	for key, a := range l.accounts {
		if a.state != Past && !slices.Contains(without, key) && (a.state != Ending || a.entry.API() == discovery.ModeDevicePlugin) {
			entries = append(entries, a.entry)
		}
	}
	return entries
}

// alone keeps others from files of the host, if there are any of the entries: of
// two that end at once and have one file, the second sees that the first is
// gone, and no file is written while another thinks that nobody has it.
func (l *Ledger) alone(entries ...Entry) (done func()) {
	if !slices.ContainsFunc(entries, func(e Entry) bool { return len(e.Files()) > 0 }) {
		return func() {}
	}
	return l.filing.take()
}

func (l *Ledger) file(name string) string { return filepath.Join(l.config.Dir, name) }

func (l *Ledger) claimFile(uid types.UID) string {
	return l.file(filepath.Join(claimsDir, string(uid)+claimExtension))
}

// asideOf returns the files of a claim that were set aside.
func (l *Ledger) asideOf(uid types.UID) ([]string, error) {
	entries, err := l.claims.List(l.file(claimsDir))
	if err != nil {
		return nil, err
	}
	var files []string
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), string(uid)+badExtension) {
			files = append(files, l.file(filepath.Join(claimsDir, entry.Name())))
		}
	}
	return files, nil
}
