// Package handover keeps a device between two owners: until no process of the pods that had it has it
// open any more, and until it was reset, where the administrator asks for that. Whatever it cannot see
// keeps nothing. It knows no vendor, and leaves it to the ledger who may have a device.
package handover

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/overdue"
)

// Rule is how the administrator wants some devices handed over.
type Rule struct {
	Expression string // as the administrator wrote it
	Selects    func(discovery.Device) (bool, error)

	// Reset says that the device's PCI function is reset, and Methods by which of the kernel's
	// ways, the first that works; the kernel chooses if there are none.
	Reset   bool
	Methods []string
}

// Config is what a Custodian works with.
type Config struct {
	Host *discovery.Host

	// Write writes an attribute of the host, as of fs.FS. Nil means that the agent may not
	// change the host, and nothing can be reset.
	Write func(name, value string) error

	Journal journal.Config // the place of the records; no process and no need of a reset outlives a boot
	Earlier string         // the directory in which earlier versions kept the records

	Ledger *ledger.Ledger
	Stock  func() ledger.Stock // the devices of the host as both APIs offer them
	Rules  func() []Rule       // in force at present; the first that selects a device counts

	// Snapshot returns the devices of the host, nil before the first scan.
	Snapshot func() *discovery.Snapshot

	// PodOf returns the pod of a classic owner, "" if it is not known. It does not block.
	PodOf func(ledger.Owner) types.UID

	// Users returns the names of the pods that have a claim, by what the kubelet lists, and PodsOf asks the API server
	// for the pods of the node. Optional.
	Users  func(ledger.Owner) []string
	PodsOf func(context.Context) (map[types.NamespacedName]Pod, error)

	// Changed is called when a device may be offered that was not, or is not to be offered any
	// more. It must not block.
	Changed func()

	Limit time.Duration // how long a look or a reset may take before it is said that it hangs; 10 s if 0
}

// Intervals at which it is looked again: at devices that processes have open, at those whose reset
// failed, at who has what, and whether there is anything to do at all.
const (
	openInterval    = time.Second
	resetInterval   = 10 * time.Second
	refreshInterval = 5 * time.Second
	idleInterval    = 30 * time.Second
)

// askInterval is how long until the API server is asked again for the pods of the node, if it did not have one that the
// kubelet lists with a claim.
const askInterval = time.Minute

// How long the end of an owner waits for the hand-over, which takes no time if all processes
// have ended, and how long the kubelet waits that hands an ID out again.
const (
	endWait  = 300 * time.Millisecond
	passWait = 5 * time.Second
)

// begun is why a device is kept before it was looked at.
const begun = "it is being handed over"

// Custodian keeps devices between two owners. It is an [ledger.Output].
type Custodian struct {
	config  Config
	journal *journal.Journal[record]
	wake    chan struct{} // has one when Run is to look
	closing chan struct{} // closed when Run ends
	asking  atomic.Bool   // the API server is being asked
	reads   overdue.Calls // of the keys of devices, by their directories

	unwritten bool // a warning was logged that records cannot be written; used by [Custodian.Run] only

	filing chan struct{} // has one while a call writes or removes records; a simulation's clock stands while a mutex is waited for

	choosing sync.Mutex
	choices  choices

	mu      sync.Mutex
	closed  bool                      // Run ends: no look, reset or removal of a record begins any more
	works   sync.WaitGroup            // calls of work; none is added once closed is set
	records map[string]*record        // by name
	claims  map[types.UID]*claimUsers // the pods of claims that go on
	passed  map[string]string         // grants that are handed over and still in the ledger: their keys, by grantOf
	blind   map[string]bool           // records of which it was said that nothing can be seen
}

// record names a device and its consumer. It is in the journal before the consumer has the device, as far as is known,
// and until the next consumer may have it.
type record struct {
	Key    string       `json:"key"` // of the owner's entry
	Owner  ledger.Owner `json:"owner"`
	Grant  string       `json:"grant,omitempty"` // as of grantOf
	Hold   ledger.Hold  `json:"hold"`
	Source string       `json:"source"` // the device's directory, as of fs.FS

	// Device is the physical device. If another one has its name by now, that one is never reset.
	Device discovery.DeviceKey `json:"device,omitzero"`
	Nodes  []ledger.Node       `json:"nodes,omitempty"`
	users
	Ended bool `json:"ended,omitempty"`

	name  string
	why   string        // why the device is kept, since the last look
	since time.Time     // when it was first seen that it cannot be handed over
	after time.Time     // when to look again
	idle  bool          // no process has it open any more
	over  bool          // nothing of its claim is left, or is about to be
	ended time.Time     // when its owner had ended, or when this agent found that
	takes bool          // the kubelet has allocated its ID to another container, which waits
	early bool          // withheld since the agent started, since Run has not checked yet whether its claim goes on
	done  chan struct{} // closed when the look that goes on has ended, nil if none does
}

// New returns a Custodian. It is ready once it was loaded.
func New(config Config) *Custodian {
	if config.Limit == 0 {
		config.Limit = 10 * time.Second
	}
	return &Custodian{
		config: config, journal: journal.New(config.Journal, "reclaim", journal.Earlier[record]{Dir: config.Earlier, Convert: convert}),
		wake: make(chan struct{}, 1), closing: make(chan struct{}), filing: make(chan struct{}, 1),
		records: make(map[string]*record), claims: make(map[types.UID]*claimUsers),
		blind: make(map[string]bool), passed: make(map[string]string),
	}
}

// Run hands devices over until the context ends. It is called once. When it returns, nothing writes to a device or to
// the journal any more, except for a call that the kernel has not answered within Limit. The lease of such a call lasts
// until the kernel answers; see [ledger.Ledger.EndLeases].
func (c *Custodian) Run(ctx context.Context) {
	defer c.finish()
	var refreshed time.Time
	for {
		wait := idleInterval
		if len(c.config.Rules()) > 0 || c.any() || c.journal.Unread() {
			wait = refreshInterval
			if time.Since(refreshed) >= refreshInterval {
				c.refresh(ctx)
				refreshed = time.Now()
			}
		}
		for _, r := range c.ended() {
			wait = openInterval
			c.try(ctx, r)
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

// finish lets no work begin any more, and waits for the work that goes on.
func (c *Custodian) finish() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	close(c.closing)
	ended := make(chan struct{})
	go func() { c.works.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(c.config.Limit):
	}
}

// isClosed reports whether Run has ended, or is about to.
func (c *Custodian) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

func (c *Custodian) any() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.records) > 0
}

// ended returns the records of owners that have ended, in order.
func (c *Custodian) ended() (ended []*record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(c.records)) {
		if r := c.records[name]; r.Ended {
			ended = append(ended, r)
		}
	}
	return ended
}

// try looks whether a device can be handed over, unless that goes on already or is not due. The
// channel is closed when the look has ended.
func (c *Custodian) try(ctx context.Context, r *record) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case r.done != nil:
	case c.records[r.name] == r && !c.closed && !time.Now().Before(r.after):
		of, done := r.users, make(chan struct{})
		r.done = done
		c.works.Go(func() { c.work(context.WithoutCancel(ctx), r, of, done) })
	default:
		ended := make(chan struct{})
		close(ended)
		return ended
	}
	return r.done
}

// work hands a device over, or says why that cannot be yet.
func (c *Custodian) work(ctx context.Context, r *record, of users, done chan struct{}) {
	why, again := c.settle(ctx, r, of)
	if !c.isClosed() { // else the next agent looks again
		if why == "" && c.hasEnded(r) {
			if err := c.forget(r); err != nil {
				why, again = err.Error(), resetInterval
			}
		}
		c.say(ctx, r, why)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	r.after, r.done = time.Now().Add(again), nil
	close(done)
}

// settle returns why a device cannot be handed over yet, "" if it can, and when to look again.
func (c *Custodian) settle(ctx context.Context, r *record, of users) (why string, again time.Duration) {
	d, rule, why := c.rule(r)
	switch {
	case why != "":
		return why, openInterval
	case rule == nil, c.config.Ledger.Taken(r.name, r.Key, r.Owner):
		return "", 0 // the administrator wants nothing done, or somebody has it who may
	case c.isGiven(r):
		return begun, openInterval
	}
	uses, wanted := c.look(ctx, r, r.had(d), of)
	if !wanted {
		return "", 0
	}
	why, unseen := open(uses)
	if why != "" {
		return why, openInterval
	}
	if of.unknown() && unseen == nil {
		unseen = errUnknownPod
	}
	if unseen != nil {
		c.sayBlind(ctx, r, unseen)
		if left := c.terminates(r, of); left > 0 {
			return fmt.Sprintf("whether a process has it open is not known (%v), and containers may go on for a while", unseen), min(left, openInterval)
		}
		if of.unknown() {
			return "", 0 // without a reset, which would hit a process that goes on
		}
	}
	if !rule.Reset || r.Hold.Amount != nil || isPart(d) {
		return "", 0
	}
	if c.isClosed() {
		return begun, openInterval
	}
	c.setIdle(r)
	overdue := time.AfterFunc(c.config.Limit, func() { c.say(ctx, r, fmt.Sprintf("its reset has not ended after %s", c.config.Limit)) })
	defer overdue.Stop()
	if err := c.reset(r, d, rule); err != nil {
		return fmt.Sprintf("it cannot be reset: %v", err), resetInterval
	}
	klog.FromContext(ctx).V(2).Info("Reset a device before its next owner", "device", d.Name, "had", r.Owner.String())
	return "", 0
}

// isGiven reports whether the claim of a record is in the ledger still. Its end may fail, and then the device is the
// claim's once more.
func (c *Custodian) isGiven(r *record) bool {
	c.mu.Lock()
	over := r.over
	c.mu.Unlock()
	if over || r.Owner.UID == "" {
		return false
	}
	e, _ := c.config.Ledger.Get(r.Key)
	return e != nil && e.Owner() == r.Owner
}

// setIdle notes that no process has a device open any more.
func (c *Custodian) setIdle(r *record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.idle = true; c.records[r.name] == r {
		c.config.Ledger.Keep(r.kept(r.why))
	}
}

// rule returns the device of a record and what the administrator wants, nil if nothing. It says why if
// that cannot be told.
func (c *Custodian) rule(r *record) (d discovery.Device, rule *Rule, why string) {
	rules := c.config.Rules()
	if len(rules) == 0 {
		return d, nil, ""
	}
	d, rule, known := c.chosen(rules, r.Hold.Device)
	var key discovery.DeviceKey
	var unread error
	if known {
		key, unread = c.keyOf(d)
	}
	switch {
	case c.config.Snapshot() == nil:
		return d, nil, begun
	case known && r.Device.Same(key) && unread != nil && rule != nil:
		return d, nil, fmt.Sprintf("it cannot be described at present: %v", unread)
	case known && r.Device.Same(key):
		return d, rule, ""
	case known && rule != nil: // the device has another name by now; its nodes are looked for, and nothing is reset
		return discovery.Device{Name: r.Hold.Device, Source: r.Source}, &Rule{}, ""
	case r.Source != "" && !c.config.Host.Exists("/"+r.Source):
		return d, nil, "" // it was taken out
	case r.Source != "" && (c.isOther(r.Source) || c.isDivided(r.Source)):
		// It is no more, such as a partition of a GPU that was removed, or a function that has
		// virtual ones by now. Those of its processes that go on have open what is offered in its
		// place, or what that is part of.
		return discovery.Device{Name: r.Hold.Device, Source: r.Source}, &Rule{}, ""
	}
	return d, nil, "it cannot be described at present"
}

// keyLimit is how long reading the key of a device may take.
const keyLimit = time.Second

// keyOf returns the key of a device. A driver may keep a read of its function from ending. After the limit the read goes
// on alone, and the key has only what needs no read.
func (c *Custodian) keyOf(d discovery.Device) (discovery.DeviceKey, error) {
	read := make(chan discovery.DeviceKey, 1)
	err := c.reads.Of(d.Source)
	if err == nil {
		err = c.reads.Do(keyLimit, d.Source, "reading the IDs of its function", func() error {
			read <- discovery.KeyOf(c.config.Host, &d)
			return nil
		})
	}
	if err == nil {
		return <-read, nil
	}
	key := discovery.DeviceKey{Identity: d.Identity}
	if function, ok := functionOf(c.config.Host.FS, d); ok {
		key.Function = function.Name()
	}
	return key, err
}

// chosen returns a device of the present snapshot, and the first rule that selects it, nil if none does. That is
// found out once for each snapshot: who has what is looked at every few seconds.
func (c *Custodian) chosen(rules []Rule, name string) (d discovery.Device, rule *Rule, known bool) {
	s := c.config.Snapshot()
	if s == nil {
		return d, nil, false
	}
	if d, known = s.Lookup(name); !known || len(rules) == 0 {
		return d, nil, known
	}
	c.choosing.Lock()
	defer c.choosing.Unlock()
	if c.choices.of != s || c.choices.by != &rules[0] {
		c.choices = choices{of: s, by: &rules[0], rules: make(map[string]*Rule)}
	}
	rule, is := c.choices.rules[name]
	if !is {
		rule = ruleOf(rules, d)
		c.choices.rules[name] = rule
	}
	return d, rule, true
}

// choices are which rules select the devices of a snapshot, by their names.
type choices struct {
	of    *discovery.Snapshot
	by    *Rule // the first of all
	rules map[string]*Rule
}

// isOther reports whether some device is described in a directory in place of one that is not.
func (c *Custodian) isOther(source string) bool {
	s := c.config.Snapshot()
	return s != nil && slices.ContainsFunc(s.Devices, func(d discovery.Device) bool { return d.Source == source })
}

// isDivided reports whether a directory is of a function that has virtual ones, under which it is not offered.
func (c *Custodian) isDivided(source string) bool {
	function, ok := functionOf(c.config.Host.FS, discovery.Device{Source: source})
	if !ok {
		return false
	}
	divided, err := discovery.Divided(function)
	return divided && err == nil
}

// ruleOf returns the first rule that selects a device. A rule that cannot be evaluated for the
// device does not select it.
func ruleOf(rules []Rule, d discovery.Device) *Rule {
	for i := range rules {
		if selected, err := rules[i].Selects(d); err == nil && selected {
			return &rules[i]
		}
	}
	return nil
}

var errUnknownPod = errors.New("which pods had it is not known")

// terminates returns for how long containers of an owner that has ended may go on. A container whose ID the kubelet
// has allocated once more has ended by the kubelet's own account, and the next one would be rejected for good.
func (c *Custodian) terminates(r *record, of users) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.takes {
		return 0
	}
	return of.terminates() - time.Since(r.ended)
}

// look returns which processes of some pods have a device open. It waits for as long as that takes: a look
// hangs at a process of the pod that hangs in the kernel itself, and that is the one that may have the device.
// So a look that has not ended is no look that could not see. It reports false if the administrator wants
// nothing done any more.
func (c *Custodian) look(ctx context.Context, r *record, d discovery.Device, of users) (uses inuse.Uses, wanted bool) {
	if len(of.Pods) == 0 {
		return inuse.Uses{{Object: "the device", Unseen: errUnknownPod}}, true
	}
	looked := make(chan inuse.Uses, 1)
	go func() { looked <- inuse.ByPods(c.config.Host, d, of.Pods) }()
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
		if _, rule, why := c.rule(r); rule == nil && why == "" {
			return nil, false
		}
		c.say(ctx, r, fmt.Sprintf("looking at what the processes of its pod have open has not ended after %s", c.config.Limit))
	}
}

// open returns which process has a device open, "" if none is seen to have. It also returns why there may
// be one nevertheless.
func open(uses inuse.Uses) (why string, unseen error) {
	for _, use := range uses {
		if use.Unseen == nil {
			return use.Object + ": " + use.How, nil
		}
		unseen = use.Unseen
	}
	return "", unseen
}

// say says why a device is kept, or that it is not any more if there is no reason.
func (c *Custodian) say(ctx context.Context, r *record, why string) {
	c.mu.Lock()
	before, kept := r.why, c.records[r.name] == r
	if why == before || kept == (why == "") || !r.Ended {
		c.mu.Unlock()
		return
	}
	r.why = why
	if r.since.IsZero() {
		r.since = time.Now()
	}
	if kept {
		c.config.Ledger.Keep(r.kept(why)) // under the lock, so that it is not kept after it was released
	}
	c.mu.Unlock()
	if kept {
		klog.FromContext(ctx).Info("A device is kept from its next owner", "device", r.Hold.Device, "had", r.Owner.String(), "reason", why)
	} else if before != begun {
		klog.FromContext(ctx).Info("A device is handed over", "device", r.Hold.Device, "had", r.Owner.String())
	}
	c.config.Changed()
}

// sayBlind says once of a record that it cannot be told whether the device is open.
func (c *Custodian) sayBlind(ctx context.Context, r *record, unseen error) {
	c.mu.Lock()
	said := c.blind[r.name]
	c.blind[r.name] = true
	c.mu.Unlock()
	if unseen != nil && !said {
		klog.FromContext(ctx).Info("Warning: whether a process of a pod that has ended still has its device open is unknown", "device", r.Hold.Device, "had", r.Owner.String(), "reason", unseen.Error())
	}
}
