// Package sharing runs NVIDIA's programs for claims with GPUs: an MPS control daemon for each claim
// that requests one, and programs for the time slices of GPUs. The agent gives the orders over a
// unix socket of the node; see package wire. The supervisor is a separate process because the agent
// is updated while pods run, and daemons must survive the update.
//
// Each claim has a directory with a record, which is written before any change. The record, and an
// environment variable, identify the processes of a killed predecessor. Nothing is started without
// an order of the agent, because only the agent has the list of existing claims.
package sharing

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"chandler.dev/internal/hostservice/wire"
)

// Config configures a Supervisor.
type Config struct {
	// Dir has the socket and a directory for each claim, with the same path here and on the host.
	Dir string

	// Root is the directory of NVIDIA's programs and all files they need, and their root directory
	// unless it is "/".
	Root string

	// Private gives each daemon its own mount namespace, with the claim's shared memory as
	// /dev/shm. Mounting needs privileges.
	Private bool

	Log *log.Logger

	Begin time.Duration // limit until a daemon answers, and for changing a GPU; 15 s if 0
	Ask   time.Duration // limit for one command to a daemon; 3 s if 0
	Quit  time.Duration // limit until a daemon ends, before it is killed; 5 s if 0
}

func (c *Config) log() *log.Logger {
	if c.Log == nil {
		return log.New(os.Stderr, "", 0)
	}
	return c.Log
}

// Supervisor runs the daemons and settings of the agent's orders.
type Supervisor struct {
	config Config
	boot   string // the ID of the kernel's boot

	mu       sync.Mutex
	claims   map[string]*claim
	stopping bool // orders are refused
}

// claim is the state of a claim. busy is held while a call works on the claim.
type claim struct {
	busy sync.Mutex
	next []string // the GPUs of the order that a call follows, guarded by the supervisor's mutex

	mu sync.Mutex
	wire.Claim
	isTouched bool // this process or an earlier one may have changed something
}

var uidForm = regexp.MustCompile(`^[A-Za-z0-9-]{1,64}$`)

// New returns a Supervisor that has taken over the claims of an earlier process.
func New(config Config) (*Supervisor, error) {
	config.Begin, config.Ask, config.Quit = cmp.Or(config.Begin, 15*time.Second), cmp.Or(config.Ask, 3*time.Second), cmp.Or(config.Quit, 5*time.Second)
	config.Root = cmp.Or(config.Root, "/")
	config.Log = config.log()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("boot ID: %w", err)
	}
	k := &Supervisor{config: config, boot: strings.TrimSpace(string(boot)), claims: make(map[string]*claim)}
	if err := os.MkdirAll(config.Dir, 0o711); err != nil {
		return nil, fmt.Errorf("make directory: %w", err)
	}
	entries, err := os.ReadDir(config.Dir)
	if err != nil {
		return nil, fmt.Errorf("list claims: %w", err)
	}
	for _, entry := range entries {
		if entry.IsDir() && uidForm.MatchString(entry.Name()) {
			k.adoptClaim(entry.Name())
		}
	}
	return k, nil
}

// adoptClaim takes over a claim of an earlier process. An unreadable record counts as the record of
// an incomplete claim: its processes are found without it.
func (k *Supervisor) adoptClaim(uid string) {
	c := &claim{Claim: wire.Claim{UID: uid}, isTouched: true}
	k.claims[uid] = c
	data, err := os.ReadFile(filepath.Join(k.dir(uid), wire.Record))
	if err == nil {
		err = json.Unmarshal(data, &c.Claim)
	}
	c.UID = uid
	switch {
	case err != nil:
		c.Broken = fmt.Sprintf("its record cannot be read: %v", err)
	case !c.Begun: // its daemon, if it has one, may lack its limits
		c.Broken = "an earlier process ended before all was done"
	case !c.hasDaemon():
	case isAlive(c.Process):
		defer func(p wire.Process) { go k.attendDaemon(c, p, nil) }(c.Process)
	default:
		c.Broken = "its daemon ended while chandler-host was not running"
	}
	k.config.Log.Printf("claim %s: taken over: %s", uid, cmp.Or(c.Broken, "all is well"))
}

// hasDaemon reports whether the claim has a daemon.
func (c *claim) hasDaemon() bool { return c.How[mps] != "" }

func (k *Supervisor) dir(uid string) string { return filepath.Join(k.config.Dir, uid) }

// Claims returns the state of all claims, in order.
func (k *Supervisor) Claims() []wire.Claim {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := make([]wire.Claim, 0, len(k.claims))
	for _, uid := range slices.Sorted(maps.Keys(k.claims)) {
		all = append(all, k.claims[uid].copy())
	}
	return all
}

func (c *claim) copy() wire.Claim {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.Claim
}

// errOrder is the error for invalid orders.
var errOrder = errors.New("the order makes no sense")

// Begin follows an order for a claim, and returns once all settings are in force. If another order was
// in force, it is ended first. If ctx ends before the first change, Begin changes nothing: the client
// has given up, and may have ended the claim since. Afterwards the work continues, and the next
// request finds it done.
func (k *Supervisor) Begin(ctx context.Context, uid string, order wire.Order) error {
	wanted, err := parse(order.How)
	if err == nil && !uidForm.MatchString(uid) {
		err = errors.New("no UID")
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errOrder, err)
	}
	c, err := k.enterClaim(uid, wanted, order.How)
	if err != nil {
		return err
	}
	defer k.leaveClaim(c)
	now := c.copy()
	if now.Begun && now.Broken == "" && maps.Equal(now.How, order.How) {
		return nil
	}
	if err := ctx.Err(); err != nil {
		if !now.Begun && !c.isTouched { // nothing has begun for the claim
			k.mu.Lock()
			delete(k.claims, uid)
			k.mu.Unlock()
		}
		return fmt.Errorf("claim %s: not begun: %w", uid, err)
	}
	ctx = context.WithoutCancel(ctx)
	if c.isTouched {
		if err := k.undoClaim(ctx, c, maps.Equal(now.How, order.How)); err != nil {
			return fmt.Errorf("end what was before: %w", err)
		}
	}
	err = k.begin(ctx, c, wanted, order.How)
	if err != nil {
		k.config.Log.Printf("claim %s: not begun: %v", uid, err)
		if undoErr := k.undoClaim(ctx, c, true); undoErr != nil {
			err = errors.Join(err, undoErr)
		}
		c.set(func() { c.Broken = err.Error() })
	}
	return err
}

// errStopping is the error for an order while this process ends. The agent repeats the order to the
// next process.
var errStopping = errors.New("the supervisor of daemons is ending")

// enterClaim returns the claim with the given UID, with its busy lock held. It refuses GPUs of
// another claim: a claim has its GPUs from the call of enterClaim until [Supervisor.End] has read
// back the restored settings, so there is one daemon per GPU.
func (k *Supervisor) enterClaim(uid string, wanted *settings, how map[string]string) (*claim, error) {
	for {
		c, err := k.reserve(uid, wanted, how)
		if err != nil {
			return nil, err
		}
		c.busy.Lock()
		if err = k.current(c); err == nil {
			err = k.takeGPUs(c, wanted)
		}
		if err == nil {
			return c, nil
		}
		c.busy.Unlock()
		if !errors.Is(err, errEnded) {
			return nil, err
		}
		// The claim ended while this call waited; it begins again.
	}
}

// takeGPUs reserves the GPUs of an order until [Supervisor.leaveClaim]. The claim may still have the
// GPUs of another order.
func (k *Supervisor) takeGPUs(c *claim, wanted *settings) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.checkGPUs(c.UID, wanted); err != nil {
		return err
	}
	c.next = wanted.gpus
	return nil
}

// leaveClaim ends the work of a call on a claim.
func (k *Supervisor) leaveClaim(c *claim) {
	k.mu.Lock()
	c.next = nil
	k.mu.Unlock()
	c.busy.Unlock()
}

// reserve returns the claim with the given UID, a new one if there is none.
func (k *Supervisor) reserve(uid string, wanted *settings, how map[string]string) (*claim, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.checkGPUs(uid, wanted); err != nil {
		return nil, err
	}
	c := k.claims[uid]
	if c == nil {
		c = &claim{Claim: wire.Claim{UID: uid}}
		k.claims[uid] = c
	}
	if len(c.copy().How) == 0 {
		c.set(func() { c.How = how }) // reserves the GPUs
	}
	return c, nil
}

// checkGPUs returns an error if another claim has one of the wanted GPUs. The caller must hold the
// mutex.
func (k *Supervisor) checkGPUs(uid string, wanted *settings) error {
	for _, other := range k.claims {
		if other.UID == uid {
			continue
		}
		taken := other.next
		if has, err := parse(other.copy().How); err == nil {
			taken = slices.Concat(taken, has.gpus)
		}
		for _, gpu := range wanted.gpus {
			if slices.Contains(taken, gpu) {
				return fmt.Errorf("GPU %s: claim %s has it still", gpu, other.UID)
			}
		}
	}
	return nil
}

// errEnded is the error for a claim that ended while a call waited.
var errEnded = errors.New("the claim has ended")

// current returns an error if a claim must not be changed, nil otherwise. The caller must hold the
// claim's busy lock.
func (k *Supervisor) current(c *claim) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.stopping:
		return errStopping
	case k.claims[c.UID] != c:
		return errEnded
	}
	return nil
}

func (c *claim) set(change func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change()
}

// End ends a claim's daemon and settings, and returns once nothing remains of them.
func (k *Supervisor) End(ctx context.Context, uid string) error {
	k.mu.Lock()
	c := k.claims[uid]
	k.mu.Unlock()
	if c == nil {
		return nil
	}
	c.busy.Lock()
	defer c.busy.Unlock()
	if err := k.current(c); err != nil {
		if errors.Is(err, errEnded) {
			return nil // by another call
		}
		return err
	}
	if err := k.undoClaim(ctx, c, false); err != nil {
		k.config.Log.Printf("claim %s: not ended: %v", uid, err)
		c.set(func() {
			if !c.Begun { // the agent restarts the daemon, since the claim remains
				c.Broken = fmt.Sprintf("it could not be ended: %v", err)
			}
		})
		return err
	}
	k.mu.Lock()
	delete(k.claims, uid)
	k.mu.Unlock()
	k.config.Log.Printf("claim %s: ended", uid)
	return nil
}

// Stop ends all daemons before this process ends, and refuses all later orders. The directories
// stay: they are mounted in containers, which find the next daemon there after the agent's order to
// the next process.
func (k *Supervisor) Stop(ctx context.Context) {
	k.mu.Lock()
	k.stopping = true
	all := slices.Collect(maps.Values(k.claims))
	k.mu.Unlock()
	var group sync.WaitGroup
	for _, c := range all {
		group.Go(func() {
			c.busy.Lock()
			defer c.busy.Unlock()
			if err := k.quit(ctx, c); err != nil {
				k.config.Log.Printf("claim %s: %v", c.UID, err)
			}
		})
	}
	group.Wait()
}

// saveClaim writes the record of a claim.
func (k *Supervisor) saveClaim(c *claim) error {
	data, err := json.Marshal(c.copy())
	if err != nil {
		return err
	}
	file := filepath.Join(k.dir(c.UID), wire.Record)
	if err := os.WriteFile(file+".new", data, 0o600); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	return os.Rename(file+".new", file)
}

// undoClaim ends the daemon of a claim, and restores the GPUs' defaults. With keep, the directory
// stays for the containers that use it.
//
// A daemon that is in order goes on if a GPU cannot be restored: the claim then does not end, and a
// kubelet up to 1.36 may start its next pod without another call. Otherwise, the processes of the
// claim end first, because an nvidia-smi that an earlier process has left could change the GPU last.
func (k *Supervisor) undoClaim(ctx context.Context, c *claim, keep bool) error {
	now := c.copy()
	wanted, parseErr := parse(now.How)
	if parseErr == nil && now.Begun && now.Broken == "" {
		if err := k.reset(ctx, c, wanted); err != nil {
			return err
		}
	}
	if err := k.quit(ctx, c); err != nil {
		return err
	}
	if parseErr == nil {
		if err := k.reset(ctx, c, wanted); err != nil {
			return err
		}
	}
	c.isTouched = keep
	if keep {
		return nil
	}
	dir := k.dir(c.UID)
	if err := unix.Unmount(filepath.Join(dir, sharedMemory), unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("unmount shared memory: %w", err)
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove directory: %w", err)
	}
	c.set(func() { c.How, c.Broken = nil, "" })
	return nil
}
