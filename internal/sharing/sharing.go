// Package sharing controls the vendors' programs that keep daemons running for claims. The
// programs run beside the agent and continue during an update of the agent. Each program
// listens on a socket below a common directory. The package ends the work for claims that no
// longer exist, and restarts work that has ended unexpectedly. It is independent of vendors.
// The ledger determines which claims exist.
package sharing

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/hostservice"
	"chandler.dev/internal/hostservice/wire"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
)

// Config is the configuration of a [Manager].
type Config struct {
	Host     *discovery.Host
	Files    disk.Files
	Boot     string   // the ID of the kernel's boot
	Dir      string   // parent of the directories of the families' programs
	Families []string // families with a program
	Ledger   *ledger.Ledger

	// Transport sends requests to a program, whose family is the host of the URL. Nil means the
	// socket of the program.
	Transport http.RoundTripper

	// Changed is called after a change of Describe's result. It must not block.
	Changed func()
}

// Manager sends orders to the programs, and supervises the ordered work.
type Manager struct {
	config Config

	mu       sync.Mutex
	started  map[types.UID]bool    // claims with an order, which may not have a directory yet
	troubles map[types.UID]trouble // claims whose work has ended unexpectedly
}

// trouble describes an unexpected end of the work for a claim.
type trouble struct {
	reason  string
	at      time.Time
	devices []string
}

const (
	checkInterval = 5 * time.Second  // between two checks of the programs
	troubleMemory = time.Minute      // how long devices remain unhealthy after an unexpected end
	patience      = 5 * time.Second  // for the restart of a crashed program
	askLimit      = 5 * time.Second  // for the response to a query
	workLimit     = 35 * time.Second // for the execution of an order
)

// New returns a [Manager]. The caller must also call Run.
func New(config Config) *Manager {
	return &Manager{config: config, started: make(map[types.UID]bool), troubles: make(map[types.UID]trouble)}
}

// Begin orders the work for a claim, and returns after the programs have completed the orders.
// Orders for running work succeed without effect.
func (o *Manager) Begin(ctx context.Context, uid types.UID, orders []discovery.Order) error {
	for _, order := range orders {
		o.noteStarted(uid)
		if err := o.call(ctx, order.Family, http.MethodPut, wire.ClaimsPath+"/"+string(uid), wire.Order{How: order.How}, nil); err != nil {
			return err
		}
	}
	return nil
}

// noteStarted records that a program may have work for a claim, with or without a directory.
func (o *Manager) noteStarted(uid types.UID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.started[uid] = true
}

var _ ledger.Output = (*Manager)(nil)

// Write implements [ledger.Output]. It does nothing, since the driver calls Begin before other
// outputs.
func (o *Manager) Write(allocation.Entry) error { return nil }

// Remove implements [ledger.Output]: it ends the work for a claim without other allocations.
func (o *Manager) Remove(e allocation.Entry, others []allocation.Entry) error {
	uid := e.Owner().UID
	if uid == "" || slices.ContainsFunc(others, func(other allocation.Entry) bool { return other.Owner().UID == uid }) {
		return nil
	}
	return o.end(uid)
}

// RemoveOrphans implements [ledger.Output]. It does nothing: Run ends the work for claims that no
// longer exist, because a program may start later than the agent.
func (o *Manager) RemoveOrphans(func(types.UID, func() error) (bool, error)) error { return nil }

func (o *Manager) end(uid types.UID) error {
	o.mu.Lock()
	ordered := o.started[uid]
	o.mu.Unlock()
	for _, family := range o.config.Families {
		dir := filepath.Join(o.config.Dir, family, string(uid))
		if _, err := o.config.Files.Lstat(dir); err != nil && !ordered {
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			return fmt.Errorf("list the claims with sharing daemons: %w", err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), workLimit)
		err := o.call(ctx, family, http.MethodDelete, wire.ClaimsPath+"/"+string(uid), nil, nil)
		cancel()
		if errors.Is(err, errNoListener) && o.hasEnded(dir) {
			err = nil // the program removes its files after a restart
		}
		if err != nil {
			return err
		}
	}
	o.mu.Lock()
	_, hadTrouble := o.troubles[uid]
	delete(o.started, uid)
	delete(o.troubles, uid)
	o.mu.Unlock()
	if hadTrouble {
		o.config.Changed()
	}
	return nil
}

// hasEnded reports whether nothing remains of the work for a claim, according to the program's
// record: the daemons of a program end with the program, and the settings of GPUs end with the boot.
func (o *Manager) hasEnded(dir string) bool {
	data, err := o.config.Files.Read(filepath.Join(dir, wire.Record))
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	var claim wire.Claim
	if err != nil || json.Unmarshal(data, &claim) != nil {
		return false
	}
	if claim.Changed && (claim.Boot == "" || claim.Boot == o.config.Boot) {
		return false
	}
	if claim.Process.PID == 0 {
		return true
	}
	stat, err := o.config.Host.ReadText("/proc/" + strconv.Itoa(claim.Process.PID) + "/stat")
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	return err == nil && len(fields) > 19 && (fields[19] != claim.Process.Start || fields[0] == "Z")
}

// Run supervises the ordered work until ctx is done.
func (o *Manager) Run(ctx context.Context) {
	ticker := time.NewTicker(checkInterval)
	defer ticker.Stop()
	for {
		for _, family := range o.config.Families {
			o.checkProgram(ctx, family)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// checkProgram queries a program. It ends the work for claims that no longer exist, and restarts
// work that has ended unexpectedly.
func (o *Manager) checkProgram(ctx context.Context, family string) {
	if entries, err := o.config.Files.ListDir(filepath.Join(o.config.Dir, family)); err != nil || len(entries) == 0 {
		return // the node has never had the program
	}
	var claims []wire.Claim
	asking, cancel := context.WithTimeout(ctx, askLimit)
	err := o.call(asking, family, http.MethodGet, wire.ClaimsPath, nil, &claims)
	cancel()
	if err != nil {
		klog.FromContext(ctx).V(2).Info("The sharing daemons of claims are unknown", "family", family, "reason", err.Error())
		return
	}
	for _, claim := range claims {
		uid := types.UID(claim.UID)
		known, err := o.config.Ledger.RemoveUnknown(uid, func() error { //nolint:contextcheck // as for [ledger.Output]
			o.noteStarted(uid)
			return o.end(uid)
		})
		switch {
		case err != nil:
			klog.FromContext(ctx).Error(err, "The sharing daemons of a claim that no longer exists have not ended", "uid", uid)
		case !known:
			klog.FromContext(ctx).Info("Ended the sharing daemons of a claim that no longer exists", "uid", uid)
		case claim.Broken != "":
			o.restartWork(ctx, family, &claim)
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for uid, t := range o.troubles {
		if time.Since(t.at) > troubleMemory {
			delete(o.troubles, uid)
			o.config.Changed()
		}
	}
}

// restartWork restarts the work for a claim after an unexpected end. The claim cannot end meanwhile:
// otherwise, the program could receive this order after the order to end the work, and the device's
// next owner would find the work.
func (o *Manager) restartWork(ctx context.Context, family string, claim *wire.Claim) {
	uid := types.UID(claim.UID)
	beginning, cancel := context.WithTimeout(ctx, workLimit)
	defer cancel()
	unlock, err := o.config.Ledger.Lock(beginning, string(uid))
	if err != nil {
		return // a call for the claim is in progress
	}
	defer unlock()
	entry, state := o.config.Ledger.Claim(uid)
	if entry == nil || state != allocation.Allocated {
		return // the driver's call for the claim orders the work
	}
	logger := klog.FromContext(ctx).WithValues("claim", klog.KRef(entry.Namespace, entry.Name), "uid", uid)
	if len(claim.How) == 0 {
		err = fmt.Errorf("%s; what was ordered is unknown until the kubelet prepares the claim again", claim.Broken)
	} else {
		err = o.Begin(beginning, uid, []discovery.Order{{Family: family, How: claim.How}})
	}
	t := trouble{reason: claim.Broken, at: time.Now()}
	for i := range entry.Results {
		t.devices = append(t.devices, entry.Results[i].Source)
	}
	if err != nil {
		t.reason = err.Error()
	}
	o.mu.Lock()
	before, known := o.troubles[uid]
	o.troubles[uid] = t
	o.mu.Unlock()
	if !known || before.reason != t.reason {
		if err != nil {
			logger.Error(err, "A sharing daemon of a claim has ended and cannot be started again", "ended", claim.Broken)
		} else {
			logger.Info("Warning: a sharing daemon of a claim ended unexpectedly and was started again; programs that used the daemon have failed", "ended", claim.Broken)
		}
		o.config.Changed()
	}
}

// DeviceFaults returns the health of devices whose claim had work that ended unexpectedly, by name.
func (o *Manager) DeviceFaults() map[string]discovery.Health {
	o.mu.Lock()
	defer o.mu.Unlock()
	faults := make(map[string]discovery.Health)
	for _, t := range o.troubles {
		for _, name := range t.devices {
			faults[name] = discovery.Health{Status: discovery.Unhealthy, Reason: t.reason}
		}
	}
	return faults
}

// errNoListener means a socket without a listener.
var errNoListener = errors.New("no program answers")

// call sends a request to a family's program. A refused connection means that the program
// crashed. The program often restarts within seconds, so call retries for that time: after an
// error, the kubelet would repeat its call a minute later.
func (o *Manager) call(ctx context.Context, family, method, path string, body, into any) error {
	for began := time.Now(); ; {
		err := o.ask(ctx, family, method, path, body, into)
		if !errors.Is(err, syscall.ECONNREFUSED) || time.Since(began) > patience {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func (o *Manager) ask(ctx context.Context, family, method, path string, body, into any) error {
	socket := filepath.Join(o.config.Dir, family, wire.Socket)
	transport := o.config.Transport
	if transport == nil {
		transport = hostservice.SocketTransport(socket)
	}
	response, err := hostservice.Send(ctx, transport, "http://"+family+path, method, body)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%w at %s: %w: chandler-host --sharing-daemons has ended", errNoListener, socket, syscall.ECONNREFUSED)
	case errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("%w at %s: chandler-host --sharing-daemons does not run on this node; in the chart, sharingDaemons.enabled runs it", errNoListener, socket)
	case err != nil:
		return fmt.Errorf("ask at %s: %w", socket, err)
	}
	return response.Decode(into)
}
