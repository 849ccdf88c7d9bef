package reclaim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// Rule configures the reclaim of some devices.
type Rule struct {
	// Reset requests a reset of the device's PCI function. Methods are the kernel's reset methods to
	// try, in order. Without Methods the kernel chooses one.
	Reset   bool
	Methods []string
}

// Config configures a [Manager].
type Config struct {
	Host *discovery.Host

	// Finder finds the processes of pods that have a device open. While its answers wrap
	// [inuse.ErrUnanswered], devices are withheld. Nil means the Host.
	Finder inuse.Finder

	// Write writes an attribute of the host; the name is a path of fs.FS. With nil, the agent has no
	// permission to change the host and resets nothing.
	Write func(name, value string) error

	Journal journal.Config // configuration of the journal; processes and pending resets end with the boot
	Earlier string         // records directory of earlier versions

	Ledger *ledger.Ledger
	Stock  func() exclusion.Stock             // devices of the host as both APIs offer them
	Rules  func() []discovery.Selection[Rule] // rules in force

	// Snapshot returns the devices of the host, nil before the first scan.
	Snapshot func() *discovery.Snapshot

	// PodOf returns the pod of an owner by the device plugin API, "" if unknown. It does not block.
	PodOf func(allocation.Owner) types.UID

	// Users returns the names of the pods with a claim from the kubelet's list, and PodsOf requests
	// the pods of the node from the API server. Both are optional.
	Users  func(allocation.Owner) []string
	PodsOf func(context.Context) (map[types.NamespacedName]Pod, error)

	// Changed is called when the set of devices to offer may have changed. It must not block.
	Changed func()

	Limit time.Duration // time after which a check or a reset is reported as hanging; 10 s if 0
}

// Intervals between checks: of devices with open files, of devices after a failed reset, of all
// allocations, and while there are no rules and no records.
const (
	openInterval    = time.Second
	resetInterval   = 10 * time.Second
	refreshInterval = 5 * time.Second
	idleInterval    = 30 * time.Second
)

// askInterval is the time between two requests to the API server for the pods of the node, if the
// previous answer lacked a pod that the kubelet lists with a claim.
const askInterval = time.Minute

// endWait is the longest wait of an owner's end for reclaim, which is immediate if all processes
// have ended. passWait is the longest wait of a kubelet's repeated allocation of an ID.
const (
	endWait  = 300 * time.Millisecond
	passWait = 5 * time.Second
)

// reasonChecking is the reason for withholding a device before the first check.
const reasonChecking = "it is being reclaimed"

// Manager withholds devices between two owners. It implements [ledger.Output].
type Manager struct {
	config  Config
	journal *journal.Journal[record]
	rules   ruleSelector
	resets  resetter
	pods    claimPods
	unseen  unseenContainers
	wake    chan struct{} // holds a value when Run must check again
	closing chan struct{} // closed when Run ends

	warnedUnwritten bool // a warning about unwritable records was logged; used by [Manager.Run] only

	recordLock chan struct{} // held during writes and removals of records; a mutex would stop a simulation's clock

	mu          sync.Mutex
	isClosing   bool               // Run ends: no check, reset or removal of a record starts any more
	workers     sync.WaitGroup     // calls of work; no call starts once isClosing is set
	records     map[string]*record // by name
	handedOver  map[string]string  // keys of grants whose devices are reclaimed and still in the ledger, by grantOf
	warnedBlind map[string]bool    // records with a logged warning that open files are not visible
}

// record describes a device and its consumer. The journal has the record before the consumer gets
// the device, as far as the agent can tell, and until the next consumer may get it.
type record struct {
	Key    string           `json:"key"` // of the owner's entry
	Owner  allocation.Owner `json:"owner"`
	Grant  string           `json:"grant,omitempty"` // as grantOf returns
	Hold   allocation.Hold  `json:"hold"`
	Source string           `json:"source"` // the device's directory, a path of fs.FS

	// Device is the physical device. If another device has the name by now, that device is never
	// reset.
	Device discovery.DeviceKey `json:"device,omitzero"`
	Nodes  []allocation.Node   `json:"nodes,omitempty"`
	users
	Ended bool `json:"ended,omitempty"`

	name          string
	reason        string        // reason for withholding the device, from the last check
	notReadySince time.Time     // time of the first check that found the device not ready
	nextCheck     time.Time     // earliest time of the next check
	notOpen       bool          // no process has the device open any more
	claimRemoved  bool          // the claim is removed completely, or is about to be
	endTime       time.Time     // time when the owner ended, or when this agent noticed that
	idTaken       bool          // the kubelet has allocated the ID to another container, which waits
	sinceStart    bool          // withheld since the start of the agent, because it is not known yet whether the owner continues
	checkDone     chan struct{} // closed when the check in progress ends, nil if there is none
}

// New returns a [Manager]. It is ready after loading its records.
func New(config Config) *Manager {
	if config.Limit == 0 {
		config.Limit = 10 * time.Second
	}
	if config.Finder == nil {
		config.Finder = inuse.HostFinder{Host: config.Host}
	}
	c := &Manager{
		config: config, journal: journal.New(config.Journal, "reclaim", journal.Earlier[record]{Dir: config.Earlier, Convert: convert}),
		wake: make(chan struct{}, 1), closing: make(chan struct{}), recordLock: make(chan struct{}, 1),
		records: make(map[string]*record), warnedBlind: make(map[string]bool), handedOver: make(map[string]string),
	}
	c.rules = ruleSelector{config: &c.config}
	c.resets = resetter{config: &c.config, isClosed: c.isClosed}
	c.pods = claimPods{config: &c.config, claims: make(map[types.UID]*claimUsers)}
	c.unseen = unseenContainers{until: make(map[string]time.Time)}
	return c
}

// Run hands devices over until the context ends. It is called once. After Run has returned, nothing
// writes to a device or to the journal any more, except a call that the kernel has not answered
// within Limit. The lease of such a call lasts until the kernel answers; see
// [ledger.Leases.EndLeases].
func (c *Manager) Run(ctx context.Context) {
	defer c.finishWork()
	var refreshed time.Time
	for {
		wait := idleInterval
		if len(c.config.Rules()) > 0 || c.any() || c.journal.MayLack() {
			wait = refreshInterval
			if time.Since(refreshed) >= refreshInterval {
				c.refreshRecords(ctx)
				refreshed = time.Now()
			}
		}
		for _, r := range c.endedRecords() {
			wait = openInterval
			c.tryReclaim(ctx, r)
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-c.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// finishWork prevents new work and waits for the work in progress.
func (c *Manager) finishWork() {
	c.mu.Lock()
	c.isClosing = true
	c.mu.Unlock()
	close(c.closing)
	ended := make(chan struct{})
	go func() { c.workers.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(c.config.Limit):
	}
}

// isClosed reports whether Run has ended, or is about to end.
func (c *Manager) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.isClosing
}

func (c *Manager) any() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.records) > 0
}

// endedRecords returns the records of ended owners, sorted by name.
func (c *Manager) endedRecords() (ended []*record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(c.records)) {
		if r := c.records[name]; r.Ended {
			ended = append(ended, r)
		}
	}
	return ended
}

// tryReclaim checks whether a device can be released, unless a check is in progress or not yet due.
// It returns a channel that is closed when the check has ended.
func (c *Manager) tryReclaim(ctx context.Context, r *record) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case r.checkDone != nil:
	case c.records[r.name] == r && !c.isClosing && !time.Now().Before(r.nextCheck):
		of, done := r.users, make(chan struct{})
		r.checkDone = done
		c.workers.Go(func() { c.runReclaim(context.WithoutCancel(ctx), r, of, done) })
	default:
		ended := make(chan struct{})
		close(ended)
		return ended
	}
	return r.checkDone
}

// runReclaim hands a device over, or records the reason for withholding it.
func (c *Manager) runReclaim(ctx context.Context, r *record, of users, done chan struct{}) {
	why, again := c.checkReclaim(ctx, r, of)
	if !c.isClosed() { // otherwise the next agent checks again
		if why == "" && c.hasEnded(r) {
			if err := c.removeRecord(r); err != nil {
				why, again = err.Error(), resetInterval
			}
		}
		c.setReason(ctx, r, why)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	r.nextCheck, r.checkDone = time.Now().Add(again), nil
	close(done)
}

// checkReclaim returns the reason for withholding a device, "" if the device is ready, and the time
// until the next check.
func (c *Manager) checkReclaim(ctx context.Context, r *record, of users) (why string, again time.Duration) {
	d, rule, why := c.rules.ruleOf(r)
	switch {
	case why != "":
		return why, openInterval
	case rule == nil, c.config.Ledger.Leases.IsTaken(r.name, r.Key, r.Owner):
		return "", 0 // no rule applies, or another owner has the device rightfully
	case c.isGiven(r):
		return reasonChecking, openInterval
	}
	uses, wanted := c.openProcesses(ctx, r, r.withNodes(d), of)
	if !wanted {
		return "", 0
	}
	why, unseen := open(uses)
	if why != "" {
		return why, openInterval
	}
	isUnknown := of.isUnknown()
	if isUnknown && unseen == nil {
		unseen = errUnknownPod
	}
	resets := rule.Reset && r.Hold.Amount == nil && !isPart(d)
	if resets && unseen == nil {
		unseen = c.config.unknownUse(ctx, r, r.withNodes(d))
		isUnknown = unseen != nil
	}
	if errors.Is(unseen, inuse.ErrUnanswered) && !c.isTaken(r) {
		return unseen.Error(), openInterval
	}
	if unseen != nil {
		c.sayBlind(ctx, r, unseen)
		left := c.remainingGrace(r, of)
		switch takes := c.isTaken(r); {
		case left > 0 && !takes:
			return fmt.Sprintf("it is unknown whether a process has it open (%v), and containers may run for a while", unseen), min(left, openInterval)
		case left > 0:
			c.unseen.note(r.Hold.Device, left)
			return "", 0
		case isUnknown:
			return "", 0 // no reset, which could hit a running process
		}
	}
	if !resets {
		return "", 0
	}
	if left := c.unseen.remaining(r.Hold.Device); left > 0 {
		if c.isTaken(r) {
			return "", 0
		}
		return "it is unknown whether a process of an earlier container has it open, and that container may run for a while", min(left, openInterval)
	}
	if c.isClosed() {
		return reasonChecking, openInterval
	}
	c.setIdle(r)
	overdue := time.AfterFunc(c.config.Limit, func() { c.setReason(ctx, r, fmt.Sprintf("its reset has not ended after %s", c.config.Limit)) })
	defer overdue.Stop()
	if err := c.resets.reset(r, d, rule); err != nil {
		return fmt.Sprintf("it cannot be reset: %v", err), resetInterval
	}
	klog.FromContext(ctx).V(2).Info("Reset a device before its next owner", "device", d.Name, "had", r.Owner.String())
	return "", 0
}

// isGiven reports whether the ledger still has the claim of a record. If the end of a claim fails,
// the claim keeps its device.
func (c *Manager) isGiven(r *record) bool {
	c.mu.Lock()
	over := r.claimRemoved
	c.mu.Unlock()
	if over || r.Owner.UID == "" {
		return false
	}
	e, _ := c.config.Ledger.Get(r.Key)
	return e != nil && e.Owner() == r.Owner
}

// setIdle records that no process has a device open any more.
func (c *Manager) setIdle(r *record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.notOpen = true; c.records[r.name] == r {
		c.config.Ledger.Leases.KeepDevice(r.toKept(r.reason))
	}
}

// remainingGrace returns the remaining grace period of an ended owner's containers.
func (c *Manager) remainingGrace(r *record, of users) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return of.maxLifetime() - time.Since(r.endTime)
}

// isTaken reports whether the kubelet has allocated a container's ID again. The kubelet considers
// the container ended, and would permanently reject a next container that waits.
func (c *Manager) isTaken(r *record) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return r.idTaken
}

// openProcesses returns the processes of pods with the device open. It has no time limit: a check
// hangs at a process that hangs in the kernel itself, and that process may be the one with the
// device. So an unfinished check is different from a check without permission. wanted is false if
// the rule was removed in the meantime.
func (c *Manager) openProcesses(ctx context.Context, r *record, d discovery.Device, of users) (uses inuse.Uses, wanted bool) {
	if len(of.Pods) == 0 {
		return inuse.Uses{{Object: "the device", ReadError: errUnknownPod}}, true
	}
	looked := make(chan inuse.Uses, 1)
	go func() { looked <- c.config.Finder.PodUses(d, of.Pods) }()
	overdue := time.NewTicker(c.config.Limit)
	defer overdue.Stop()
	for {
		select {
		case uses := <-looked:
			return uses, true
		case <-c.closing:
			return nil, false
		case <-overdue.C:
		}
		if _, rule, why := c.rules.ruleOf(r); rule == nil && why == "" {
			return nil, false
		}
		c.setReason(ctx, r, fmt.Sprintf("looking at what the processes of its pod have open has not ended after %s", c.config.Limit))
	}
}

// setReason records the reason for withholding a device, or releases the device if there is none.
func (c *Manager) setReason(ctx context.Context, r *record, why string) {
	c.mu.Lock()
	before, kept := r.reason, c.records[r.name] == r
	if why == before || kept == (why == "") || !r.Ended {
		c.mu.Unlock()
		return
	}
	r.reason = why
	if r.notReadySince.IsZero() {
		r.notReadySince = time.Now()
	}
	if kept {
		c.config.Ledger.Leases.KeepDevice(r.toKept(why)) // under the lock, so that a released device is not withheld again
	}
	c.mu.Unlock()
	if kept {
		klog.FromContext(ctx).Info("A device is withheld from its next consumer", "device", r.Hold.Device, "had", r.Owner.String(), "reason", why)
	} else if before != reasonChecking {
		klog.FromContext(ctx).Info("A device has been reclaimed", "device", r.Hold.Device, "had", r.Owner.String())
	}
	c.config.Changed()
}

// sayBlind logs once per record that open files of the device are not visible.
func (c *Manager) sayBlind(ctx context.Context, r *record, unseen error) {
	c.mu.Lock()
	said := c.warnedBlind[r.name]
	c.warnedBlind[r.name] = true
	c.mu.Unlock()
	if unseen != nil && !said {
		klog.FromContext(ctx).Info("Warning: whether a process of a pod that has ended still has its device open is unknown", "device", r.Hold.Device, "had", r.Owner.String(), "reason", unseen.Error())
	}
}
