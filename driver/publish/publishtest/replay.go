// Package publishtest publishes the devices of recorded hosts while the load of the devices changes,
// and counts the ResourceSlices that are written. It scans, settles and publishes as an agent does, in
// memory and without an API server.
package publishtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver/pool"
	"chandler.dev/driver/publish"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/stocktest"
)

// Replay changes the load of recorded hosts.
type Replay struct {
	Families []*discovery.Family
	Cycles   int // how often the load changes in each way, and pods start and end

	AllAttributes bool // the configuration lists all attributes that ResourceSlices lack by default
	NoClaims      bool // pods get network interfaces without a claim
}

// Result is the result of a replay.
type Result struct {
	Devices    int // in the ResourceSlices
	Interfaces int // that pods get
	Scans      int // after the first publication
	Writes     int // of ResourceSlices, after the first publication
}

// overheated is the recorded host with a device at its critical temperature. Its health changes with
// the temperature.
const overheated = "tenstorrent/testdata/broken.host"

// HostFiles returns the files of all recorded hosts below the directory of the families, except a host
// with an overheated device.
func HostFiles(families string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(families, "*/testdata/*.host"))
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("%s has no recorded hosts", families)
	}
	return slices.DeleteFunc(files, func(file string) bool { return strings.HasSuffix(file, overheated) }), err
}

// step is the state of a host before a scan.
type step struct {
	load   load
	inPods bool // pods have all network interfaces that claims move
	ended  bool // the claims of these pods have ended, and the interfaces have not returned yet
}

// cycle lists the steps of a cycle. After the last step, the host is as it was recorded.
var cycle = []step{{idle, false, false}, {suspended, false, false}, {suspended, true, false}, {busy, true, false}, {idle, true, false}, {idle, true, true}, {busy, false, false}}

// settleScans is the number of scans after which the health states of an unchanged host remain the
// same: a device that cannot be read becomes Unknown.
const settleScans = 3

// Run replays a host recording. The result does not depend on the speed of the machine.
func (r Replay) Run(ctx context.Context, file string) (result Result, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: %w", file, err)
		}
	}()
	tree, err := readTree(file)
	if err != nil {
		return Result{}, err
	}
	trees := map[load]*discoverytest.Tree{busy: tree}
	for _, l := range []load{idle, suspended} {
		trees[l], _ = withLoad(tree, l)
	}
	ctx, cancel := context.WithCancel(ctx)
	n := r.startNode(ctx, tree)
	defer func() {
		cancel()
		err = errors.Join(err, <-n.ended)
	}()
	for range settleScans {
		if err := n.scan(ctx, tree, pool.Input{}); err != nil {
			return Result{}, err
		}
	}
	result.Devices, n.slices.writes = n.slices.devices(), 0
	moved, claim := n.movableDevices()
	result.Interfaces = len(moved)
	for range r.Cycles {
		for _, s := range cycle {
			now, in := trees[s.load], pool.Input{Returning: make(map[string]bool)}
			if s.inPods {
				now = withoutInterfaces(now, moved)
			}
			switch {
			case !s.inPods || r.NoClaims:
			case s.ended:
				for i := range moved {
					in.Returning[moved[i].Name] = true
				}
			default:
				in.Claims = []*allocation.Claim{claim}
			}
			if err := n.scan(ctx, now, in); err != nil {
				return Result{}, err
			}
			result.Scans++
		}
	}
	result.Writes = n.slices.writes
	return result, nil
}

// readTree reads a host recording.
func readTree(file string) (*discoverytest.Tree, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	host, err := recorded.Parse(data)
	if err != nil {
		return nil, err
	}
	return discoverytest.ReadTree(host.FS())
}

// node is a node with the parts of an agent that scan and publish.
type node struct {
	host      discoverytest.ChangingTree
	events    chan scan.Changes
	snapshots chan *discovery.Snapshot // from the scans
	inputs    chan pool.Input          // to the publisher

	rules     rules.Rules
	settler   scan.Settler
	now       time.Time       // for the settler
	last      *rules.Snapshot // nil before the first scan
	publisher *publish.Publisher
	slices    published
	ended     chan error // receives the result of the publisher
}

const (
	nodeName = "node"
	never    = 1000 * time.Hour

	// scanInterval is the time between two scans for the settler.
	scanInterval = time.Minute
)

// startNode starts the scans and the publisher, which end with the context.
func (r Replay) startNode(ctx context.Context, tree *discoverytest.Tree) *node {
	n := &node{
		events: make(chan scan.Changes, 1), snapshots: make(chan *discovery.Snapshot), inputs: make(chan pool.Input),
		now: time.Unix(0, 0), ended: make(chan error, 1),
	}
	if r.AllAttributes {
		n.rules.Attributes = slices.Concat(discovery.OptionalAttributes, discovery.DistinctAttributes, discovery.ReplacedByModel)
	}
	n.host.Store(tree)
	n.publisher = publish.New(publish.Config{NodeName: nodeName, KubeClient: keepingServer(), PoolInput: func(time.Time) (pool.Input, time.Time) {
		select {
		case in := <-n.inputs:
			return in, time.Time{}
		case <-ctx.Done():
			return pool.Input{}, time.Time{}
		}
	}})
	watch := scan.Watch{Host: &discovery.Host{FS: &n.host}, Families: r.Families, Interval: never, Patience: never, Settle: time.Nanosecond, Events: n.events}
	go watch.Run(ctx, func(found *discovery.Snapshot) {
		select {
		case n.snapshots <- found:
		case <-ctx.Done():
		}
	})
	go func() { n.ended <- n.publisher.Run(ctx, &n.slices) }()
	return n
}

// scan replaces the host, and returns when the result of the next scan is published with the claims
// of the input.
func (n *node) scan(ctx context.Context, tree *discoverytest.Tree, in pool.Input) error {
	if n.last != nil { // the first scan needs no event
		n.host.Store(tree)
		scan.Changes{Everything: true}.Send(n.events)
	}
	var found *discovery.Snapshot
	select {
	case found = <-n.snapshots:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	n.now = n.now.Add(scanInterval)
	settled, _ := n.settler.SettleStates(found, n.now)
	n.last = n.rules.ApplyTo(settled) //nolint:contextcheck // evaluating an expression does not block
	in.Node, in.Snapshot, in.GoneEffect = nodeName, n.last, resourceapi.DeviceTaintEffectNoSchedule
	// The publisher reads its input before each action. The first action may be the detection of
	// features and the second one the publication. The third reading follows the publication.
	for range 3 {
		n.publisher.NoteChange()
		select {
		case n.inputs <- in:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// movableDevices returns the devices whose network interfaces claims move to pods, and a claim for
// them.
func (n *node) movableDevices() (devices []rules.Offered, claim *allocation.Claim) {
	for _, d := range n.last.Devices {
		if isMovable(&d) {
			devices = append(devices, d)
		}
	}
	claim = stocktest.Claim("pods", devices...)
	for i, d := range devices {
		if d.Interchangeable != "" && n.slices.has(d.Interchangeable) {
			claim.Results[i].Device = d.Interchangeable
		}
	}
	return devices, claim
}

// published are the published slices. It implements [publish.Helper].
type published struct {
	last   resourceslice.DriverResources
	writes int
}

// PublishResources counts the slices that differ from those published last, and those that are
// deleted. If the number of a pool's slices changes, all of them are written, because each contains the
// number.
func (p *published) PublishResources(_ context.Context, resources resourceslice.DriverResources) error {
	resources = *resources.DeepCopy()
	for _, pool := range []string{discovery.PoolName(nodeName, true), discovery.PoolName(nodeName, false)} {
		last, now := p.last.Pools[pool].Slices, resources.Pools[pool].Slices
		for i := range now {
			isEqual := func(s resourceslice.Slice) bool { return equality.Semantic.DeepEqual(s, now[i]) }
			if len(now) != len(last) || !slices.ContainsFunc(last, isEqual) {
				p.writes++
			}
		}
		p.writes += max(0, len(last)-len(now))
	}
	p.last = resources
	return nil
}

// devices returns the number of published devices.
func (p *published) devices() (n int) {
	for _, slice := range pool.SlicesOf(p.last) {
		n += len(slice.Devices)
	}
	return n
}

// has reports whether a device is published.
func (p *published) has(name string) bool {
	isNamed := func(d resourceapi.Device) bool { return d.Name == name }
	return slices.ContainsFunc(pool.SlicesOf(p.last), func(s resourceslice.Slice) bool { return slices.ContainsFunc(s.Devices, isNamed) })
}

// keepingServer returns a client of an API server that keeps all fields of slices.
func keepingServer() kubernetes.Interface {
	client := fake.NewClientset()
	client.PrependReactor("create", "resourceslices", func(action clienttesting.Action) (bool, runtime.Object, error) {
		create, ok := action.(clienttesting.CreateAction)
		if !ok {
			return false, nil, nil
		}
		return true, create.GetObject(), nil
	})
	return client
}
