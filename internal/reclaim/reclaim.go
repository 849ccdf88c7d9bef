package reclaim

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
	"chandler.dev/discovery/pci"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/overdue"
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
	Stock  func() ledger.Stock                // devices of the host as both APIs offer them
	Rules  func() []discovery.Selection[Rule] // rules in force

	// Snapshot returns the devices of the host, nil before the first scan.
	Snapshot func() *discovery.Snapshot

	// PodOf returns the pod of an owner by the device plugin API, "" if unknown. It does not block.
	PodOf func(ledger.Owner) types.UID

	// Users returns the names of the pods with a claim from the kubelet's list, and PodsOf requests
	// the pods of the node from the API server. Both are optional.
	Users  func(ledger.Owner) []string
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
	config         Config
	journal        *journal.Journal[record]
	wake           chan struct{} // holds a value when Run must check again
	closing        chan struct{} // closed when Run ends
	requestPending atomic.Bool   // a request to the API server is in progress
	reads          overdue.Calls // reads of device keys, by the device's directory

	warnedUnwritten bool // a warning about unwritable records was logged; used by [Manager.Run] only

	recordLock chan struct{} // held during writes and removals of records; a mutex would stop a simulation's clock

	choicesLock sync.Mutex
	choices     choices

	mu          sync.Mutex
	isClosing   bool                      // Run ends: no check, reset or removal of a record starts any more
	workers     sync.WaitGroup            // calls of work; no call starts once isClosing is set
	records     map[string]*record        // by name
	claims      map[types.UID]*claimUsers // pods of present claims
	handedOver  map[string]string         // keys of grants whose devices are reclaimed and still in the ledger, by grantOf
	warnedBlind map[string]bool           // records with a logged warning that open files are not visible
	unseen      map[string]time.Time      // until when containers of earlier owners may go on unseen, by device
}

// record describes a device and its consumer. The journal has the record before the consumer gets
// the device, as far as the agent can tell, and until the next consumer may get it.
type record struct {
	Key    string       `json:"key"` // of the owner's entry
	Owner  ledger.Owner `json:"owner"`
	Grant  string       `json:"grant,omitempty"` // as grantOf returns
	Hold   ledger.Hold  `json:"hold"`
	Source string       `json:"source"` // the device's directory, a path of fs.FS

	// Device is the physical device. If another device has the name by now, that device is never
	// reset.
	Device discovery.DeviceKey `json:"device,omitzero"`
	Nodes  []ledger.Node       `json:"nodes,omitempty"`
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
	sinceStart    bool          // withheld since the start of the agent, because Run has not yet checked whether the claim continues
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
	return &Manager{
		config: config, journal: journal.New(config.Journal, "reclaim", journal.Earlier[record]{Dir: config.Earlier, Convert: convert}),
		wake: make(chan struct{}, 1), closing: make(chan struct{}), recordLock: make(chan struct{}, 1),
		records: make(map[string]*record), claims: make(map[types.UID]*claimUsers),
		warnedBlind: make(map[string]bool), handedOver: make(map[string]string), unseen: make(map[string]time.Time),
	}
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
	d, rule, why := c.ruleOf(r)
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
		unseen = c.unknownUse(ctx, r, r.withNodes(d))
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
			c.noteUnseen(r, left)
			return "", 0
		case isUnknown:
			return "", 0 // no reset, which could hit a running process
		}
	}
	if !resets {
		return "", 0
	}
	if left := c.unseenFor(r); left > 0 {
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
	if err := c.reset(r, d, rule); err != nil {
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

// ruleOf returns the device of a record and the administrator's rule, or nil without a rule. why is
// set if the rule cannot be determined.
func (c *Manager) ruleOf(r *record) (d discovery.Device, rule *Rule, why string) {
	rules := c.config.Rules()
	if len(rules) == 0 {
		return d, nil, ""
	}
	d, rule, known := c.selectRule(rules, r.Hold.Device)
	var key discovery.DeviceKey
	var unread error
	if known {
		key, unread = c.keyOf(d)
	}
	switch {
	case c.config.Snapshot() == nil:
		return d, nil, reasonChecking
	case known && r.Device.MayEqual(key) && unread != nil && rule != nil:
		return d, nil, fmt.Sprintf("it cannot be described at present: %v", unread)
	case known && r.Device.MayEqual(key):
		return d, rule, ""
	case known && rule != nil: // the device has another name by now: its nodes are checked, and nothing is reset
		return discovery.Device{Name: r.Hold.Device, Source: r.Source}, &Rule{}, ""
	case r.Source != "" && !c.config.Host.FileExists("/"+r.Source):
		return d, nil, "" // the device was removed
	case r.Source != "" && (c.isOther(r.Source) || c.isDivided(r.Source)):
		// The device does not exist any more: a partition of a GPU that was removed, or a function that
		// now has virtual functions. Its remaining processes have the replacement open, or a device
		// that contains the replacement.
		return discovery.Device{Name: r.Hold.Device, Source: r.Source}, &Rule{}, ""
	}
	return d, nil, "it cannot be described at present"
}

// keyLimit is the time limit for reading the key of a device.
const keyLimit = time.Second

// keyOf returns the key of a device. A driver may block a read of its function. After the limit the
// read continues in the background, and the key has only the parts that need no read.
func (c *Manager) keyOf(d discovery.Device) (discovery.DeviceKey, error) {
	read := make(chan discovery.DeviceKey, 1)
	err := c.reads.OverdueCall(d.Source)
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

// selectRule returns a device of the present snapshot, and the first rule that selects the device, or
// nil. The rules are evaluated once per snapshot, because allocations are checked every few seconds.
func (c *Manager) selectRule(rules []discovery.Selection[Rule], name string) (d discovery.Device, rule *Rule, known bool) {
	s := c.config.Snapshot()
	if s == nil {
		return d, nil, false
	}
	if d, known = s.Lookup(name); !known || len(rules) == 0 {
		return d, nil, known
	}
	c.choicesLock.Lock()
	defer c.choicesLock.Unlock()
	if c.choices.snapshot != s || c.choices.by != &rules[0] {
		c.choices = choices{snapshot: s, by: &rules[0], rules: make(map[string]*Rule)}
	}
	rule, is := c.choices.rules[name]
	if !is {
		rule, _ = discovery.FirstSelected(rules, d)
		c.choices.rules[name] = rule
	}
	return d, rule, true
}

// choices are the rules that select the devices of a snapshot, by device name.
type choices struct {
	snapshot *discovery.Snapshot
	by       *discovery.Selection[Rule] // the first of all rules
	rules    map[string]*Rule
}

// isOther reports whether the snapshot describes another device in a directory.
func (c *Manager) isOther(source string) bool {
	s := c.config.Snapshot()
	return s != nil && slices.ContainsFunc(s.Devices, func(d discovery.Device) bool { return d.Source == source })
}

// isDivided reports whether a directory is of a function with virtual functions. Such a function is
// not offered.
func (c *Manager) isDivided(source string) bool {
	function, ok := functionOf(c.config.Host.FS, discovery.Device{Source: source})
	if !ok {
		return false
	}
	divided, err := pci.HasVirtualFunctions(function)
	return divided && err == nil
}

var errUnknownPod = errors.New("its previous pods are unknown")

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

// noteUnseen records that containers of an owner may go on unseen for a while although the next
// container has the device. The kubelet allocates the device of a pod that was deleted by force
// while the containers of that pod still run.
func (c *Manager) noteUnseen(r *record, left time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(c.unseen, func(_ string, until time.Time) bool { return now.After(until) })
	if until := now.Add(left); until.After(c.unseen[r.Hold.Device]) {
		c.unseen[r.Hold.Device] = until
	}
}

// unseenFor returns for how long containers of earlier owners of a device may go on unseen.
func (c *Manager) unseenFor(r *record) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Until(c.unseen[r.Hold.Device])
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
		if _, rule, why := c.ruleOf(r); rule == nil && why == "" {
			return nil, false
		}
		c.setReason(ctx, r, fmt.Sprintf("looking at what the processes of its pod have open has not ended after %s", c.config.Limit))
	}
}

// unknownUse returns an error if a device is open in a pod that may be an unknown consumer of a
// record's owner. These pods exist:
//   - A pod joined a claim between two lists of the kubelet. If the pod was deleted by force since,
//     the API server does not list it either. A kubelet up to 1.36 starts a pod with a claim that is
//     being unprepared, without a call; see [ledger.Ledger.End].
//   - A pod got the device's ID, and the kubelet lost its checkpoint before PodResources listed the
//     pod with the ID. The kubelet then allocates the ID again while the pod runs (Allocate does not
//     name the pod: ContainerAllocateRequest in k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1).
//
// Other pods may have the device open as well, such as monitors.
func (c *Manager) unknownUse(ctx context.Context, r *record, d discovery.Device) error {
	if c.config.PodsOf == nil {
		return nil
	}
	if why, unseen := open(c.config.Finder.UnlistedPodUses(d, nil)); why == "" {
		return unseen
	}
	ctx, cancel := context.WithTimeout(ctx, c.config.Limit)
	defer cancel()
	pods, err := c.config.PodsOf(ctx)
	if err != nil {
		return fmt.Errorf("the pods of the node are unknown: %w", err)
	}
	others := make([]types.UID, 0, len(pods))
	for name, pod := range pods {
		if !r.mayBeOf(name, pod) {
			others = append(others, pod.UID)
		}
	}
	why, unseen := open(c.config.Finder.UnlistedPodUses(d, others))
	if why != "" {
		return fmt.Errorf("a pod that was not known as its consumer: %s", why)
	}
	return unseen
}

// mayBeOf reports whether a pod may have been a consumer of a record's owner: the pod names the
// claim, or requests the resource.
func (r *record) mayBeOf(name types.NamespacedName, pod Pod) bool {
	if r.Owner.API == discovery.ModeDevicePlugin {
		return slices.Contains(pod.Resources, ledger.GrantResource(r.Key))
	}
	return name.Namespace == r.Owner.Namespace && slices.Contains(pod.Claims, r.Owner.Name)
}

// open returns the process that has a device open, or "". unseen is the reason why there may be an
// invisible one.
func open(uses inuse.Uses) (why string, unseen error) {
	for _, use := range uses {
		if use.ReadError == nil {
			return use.Object + ": " + use.How, nil
		}
		unseen = use.ReadError
	}
	return "", unseen
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
