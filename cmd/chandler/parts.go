package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	kubediscovery "k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/driver"
	"chandler.dev/legacy"
)

// parts are what the agent is made of.
type parts struct {
	options    runOptions
	rules      *discovery.Rules
	severity   discovery.Severity // of conditions
	host       *discovery.Host
	informants []*informant
	events     chan struct{} // something about the host's devices changed
	client     kubernetes.Interface
	statuses   kubernetes.Interface
	discovery  kubediscovery.ServerGroupsInterfaceWithContext
	metrics    *agentMetrics
	driver     *driver.Driver
	classic    *legacy.Plugin
	active     chan struct{} // closed once this is the active instance
	stateDir   string
	snapshots  chan *discovery.Snapshot

	watching atomic.Pointer[time.Time]          // when the first scan began
	scanned  atomic.Pointer[time.Time]          // when the host was last scanned to the end
	settled  atomic.Pointer[discovery.Snapshot] // its devices with their states, nil until they are known
	resaid   chan struct{}                      // has one when that says something else

	offered    atomic.Pointer[discovery.Snapshot] // by DRA, nil before that is known
	withoutDRA atomic.Bool                        // the API server said that it does not serve DRA
}

// watch scans the host, once this is the active instance, and hands the
// snapshots on, with the states that devices have settled in.
func (p *parts) watch(ctx context.Context, group *errgroup.Group) error {
	group.Go(func() error {
		if err := discovery.Listen(ctx, p.events); err != nil {
			klog.FromContext(ctx).Error(err, "The kernel's events cannot be heard; changes are seen at the next scan", "interval", p.options.rescanInterval)
		}
		return nil
	})
	watch := discovery.Watch{Host: p.host, Families: families.All, Interval: p.options.rescanInterval, Events: p.events}
	for _, n := range p.informants {
		waitFor(ctx, n.ready, informantFirstWord)
	}
	select {
	case <-ctx.Done():
		return nil
	case <-p.active:
	}
	var last *discovery.Snapshot
	settling := newSettling(ctx, p.severity, p.stateDir, func() { notify(p.events) })
	defer settling.stop()
	settling.settler.Held = p.held
	begun := time.Now()
	p.watching.Store(&begun)
	watch.Run(ctx, func(s *discovery.Snapshot) {
		at := s.Scanned
		p.scanned.Store(&at)
		s = settling.settle(ctx, s)
		if discovery.Same(last, s) {
			return
		}
		last = s
		klog.FromContext(ctx).V(2).Info("The host's devices changed", "devices", len(s.Devices), "problems", len(s.Problems))
		if len(s.Devices) == 0 {
			klog.FromContext(ctx).Info("This host has no accelerators at present; one that appears is offered")
		}
		p.settled.Store(s)
		notify(p.resaid)
		replace(p.snapshots, s)
	})
	return nil
}

// held reports whether a claim or a pod has the device.
func (p *parts) held(device string) bool {
	return len(p.classic.InUse()[device]) > 0 ||
		slices.ContainsFunc(p.driver.InUse(&discovery.Snapshot{}), func(u driver.Use) bool { return u.Device == device })
}

// lastScan returns when the host was last scanned to the end, zero if it was not
// yet.
func (p *parts) lastScan() time.Time {
	if at := p.scanned.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

// notify puts a value into a channel with room for one, unless one waits in it.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// waitFor returns when the channel is closed, after a time, or when the context
// ends.
func waitFor(ctx context.Context, c <-chan struct{}, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-c:
	case <-timer.C:
	}
}

// replace puts a value into a channel with room for one, in place of one that
// waits in it. It has one caller at a time.
func replace[T any](c chan T, value T) {
	select {
	case <-c:
	default:
	}
	c <- value
}

// runDRA runs the driver as soon as the cluster may have DRA. Where there are
// records of claims it had, and the kubelet must be able to unprepare them
// whatever the API server says now, or does not say.
func (p *parts) runDRA(ctx context.Context) error {
	for {
		if p.hasRecords() {
			return p.driver.Run(ctx)
		}
		served, err := p.servesDRA(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			klog.FromContext(ctx).Info("The API server cannot be asked whether it serves DRA; taking it that it may", "reason", err)
		}
		p.withoutDRA.Store(!served && err == nil)
		if !p.withoutDRA.Load() {
			return p.driver.Run(ctx)
		}
		klog.FromContext(ctx).V(2).Info("The API server does not serve resource.k8s.io; asking again later", "interval", askInterval)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(askInterval):
		}
	}
}

// hasRecords reports whether there may be records of claims.
func (p *parts) hasRecords() bool {
	records, err := os.ReadDir(p.recordDir())
	return len(records) > 0 || err != nil && !errors.Is(err, fs.ErrNotExist)
}

func (p *parts) recordDir() string { return filepath.Join(p.stateDir, "claims") }

func (p *parts) servesDRA(ctx context.Context) (bool, error) { return servesDRA(ctx, p.discovery) }

// runAgent hands devices to the two APIs, once this is the active instance.
func (p *parts) runAgent(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-p.active:
	}
	claimed := nodeClaims{client: draclient.New(p.client), node: p.options.nodeName}
	a := &agent{
		rules:     p.rules,
		auto:      newAuto(ctx, p.servesDRA, p.driver.Registration, p.stateDir),
		sides:     newSides(ctx, draHolder{p}, p.classic, claimed, p.stateDir),
		fitter:    newFitter(discovery.Configurers(p.host, families.All), discovery.Acceptors(families.All), draHolder{p}, p.classic),
		dra:       noting{p.driver, &p.offered},
		classic:   p.classic,
		ready:     p.ready,
		snapshots: p.snapshots,
	}
	return a.run(ctx)
}

// noting is a publisher that notes what it published last.
type noting struct {
	publisher
	last *atomic.Pointer[discovery.Snapshot]
}

// Publish implements publisher.
func (n noting) Publish(s *discovery.Snapshot) {
	n.last.Store(s)
	n.publisher.Publish(s)
}

// checkClasses warns of DeviceClasses, once this is the active instance.
func (p *parts) checkClasses(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-p.active:
		check := classCheck{client: draclient.New(p.client), offered: p.offered.Load}
		check.run(ctx)
	}
}

// ready reports whether both sides know what was held before.
func (p *parts) ready() bool {
	return closed(p.classic.Ready()) && (p.withoutDRA.Load() || closed(p.driver.Ready()))
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// draHolder tells what claims hold. Where the cluster has no DRA and no record
// was left of the time when it had, none do.
type draHolder struct{ *parts }

func (h draHolder) Holder(silicon string) (string, bool) {
	if h.withoutDRA.Load() {
		return "", false
	}
	return h.driver.Holder(silicon)
}

// ignoreEnd returns nil for the error of a context that was ended from outside.
func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}
