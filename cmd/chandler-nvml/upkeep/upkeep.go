// Package upkeep does for claims, as long as they have GPUs, what NVIDIA has programs for: it runs
// a control daemon of MPS for each claim that wants one, and sets the time slice of GPUs. The
// agent says what, over a unix socket of the node; see package wire. It is a process of its own
// because the agent is updated while pods run, and a daemon must not end with it.
//
// Each claim has a directory, with a record that is written before anything is done. Processes
// that a killed predecessor has left are found by that record, and by a variable in their
// environment. Nothing is begun anew without an order of the agent, who alone knows which claims
// there are.
package upkeep

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
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"chandler.dev/internal/upkeep/wire"
)

// Config says how claims are kept up.
type Config struct {
	// Dir has the socket and a directory for each claim. It has the same path here and on
	// the host.
	Dir string

	// Root is the directory in which NVIDIA's programs are at home, with all that they
	// need. They run with it as their root unless it is "/".
	Root string

	// Private gives each daemon a view of its own of the file system, with the claim's shared
	// memory as /dev/shm. It takes the privilege to mount.
	Private bool

	Log *log.Logger

	Begin time.Duration // how long until a daemon must answer, and a GPU be changed; 15 s if 0
	Ask   time.Duration // how long one command to a daemon may take; 3 s if 0
	Quit  time.Duration // how long a daemon may take to end before it is killed; 5 s if 0
}

func (c *Config) log() *log.Logger {
	if c.Log == nil {
		return log.New(os.Stderr, "", 0)
	}
	return c.Log
}

// Keeper keeps up what the agent orders.
type Keeper struct {
	config Config

	mu       sync.Mutex
	claims   map[string]*claim
	stopping bool // no order is followed any more
}

// claim is what is done for a claim. While one call works on it, others wait.
type claim struct {
	busy sync.Mutex

	mu sync.Mutex
	wire.Claim
	touched bool // something may have been done, by this process or an earlier one
}

var uidForm = regexp.MustCompile(`^[A-Za-z0-9-]{1,64}$`)

// New returns a Keeper that has taken over what an earlier one has left.
func New(config Config) (*Keeper, error) {
	config.Begin, config.Ask, config.Quit = cmp.Or(config.Begin, 15*time.Second), cmp.Or(config.Ask, 3*time.Second), cmp.Or(config.Quit, 5*time.Second)
	config.Root = cmp.Or(config.Root, "/")
	config.Log = config.log()
	k := &Keeper{config: config, claims: make(map[string]*claim)}
	if err := os.MkdirAll(config.Dir, 0o711); err != nil {
		return nil, fmt.Errorf("make directory: %w", err)
	}
	entries, err := os.ReadDir(config.Dir)
	if err != nil {
		return nil, fmt.Errorf("list claims: %w", err)
	}
	for _, entry := range entries {
		if entry.IsDir() && uidForm.MatchString(entry.Name()) {
			k.adopt(entry.Name())
		}
	}
	return k, nil
}

// adopt takes over a claim of an earlier process. A record that cannot be read is as one of a
// claim for which nothing was begun: its processes are found all the same.
func (k *Keeper) adopt(uid string) {
	c := &claim{Claim: wire.Claim{UID: uid}, touched: true}
	k.claims[uid] = c
	data, err := os.ReadFile(filepath.Join(k.dir(uid), wire.Record))
	if err == nil {
		err = json.Unmarshal(data, &c.Claim)
	}
	c.UID = uid
	switch {
	case err != nil:
		c.Broken = fmt.Sprintf("its record cannot be read: %v", err)
	case !c.Begun: // its daemon, if it has one, may not know its limits
		c.Broken = "an earlier process ended before all was done"
	case !c.daemon():
	case alive(c.Process):
		defer func(p wire.Process) { go k.attend(c, p, nil) }(c.Process)
	default:
		c.Broken = "its daemon ended while nobody looked"
	}
	k.config.Log.Printf("claim %s: taken over: %s", uid, cmp.Or(c.Broken, "all is well"))
}

// daemon reports whether the claim has a daemon.
func (c *claim) daemon() bool { return c.How[mps] != "" }

func (k *Keeper) dir(uid string) string { return filepath.Join(k.config.Dir, uid) }

// Claims returns all that is done, in order.
func (k *Keeper) Claims() []wire.Claim {
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

// errOrder is of orders that nobody could follow.
var errOrder = errors.New("the order makes no sense")

// Begin does what is ordered for a claim, and returns once it is so. A context that ends calls
// off what is waited for. If something else was ordered before, that is ended first.
func (k *Keeper) Begin(ctx context.Context, uid string, order wire.Order) error {
	wanted, err := parse(order.How)
	if err == nil && !uidForm.MatchString(uid) {
		err = errors.New("no UID")
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errOrder, err)
	}
	c, err := k.enter(uid, wanted, order.How)
	if err != nil {
		return err
	}
	defer c.busy.Unlock()
	now := c.copy()
	if now.Begun && now.Broken == "" && maps.Equal(now.How, order.How) {
		return nil
	}
	if c.touched {
		if err := k.undo(ctx, c, maps.Equal(now.How, order.How)); err != nil {
			return fmt.Errorf("end what was before: %w", err)
		}
	}
	err = k.begin(ctx, c, wanted, order.How)
	if err != nil {
		k.config.Log.Printf("claim %s: not begun: %v", uid, err)
		if undoErr := k.undo(ctx, c, true); undoErr != nil {
			err = errors.Join(err, undoErr)
		}
		c.set(func() { c.Broken = err.Error() })
	}
	return err
}

// errStopping is returned for an order that comes while this process ends. The agent orders again of the next one.
var errStopping = errors.New("the supervisor of daemons is ending")

// enter returns the claim of that UID, with its busy lock held. It refuses GPUs that another claim has: a claim has its
// GPUs from here until [Keeper.End] has read back that they are as they were, so there is one daemon for a GPU.
func (k *Keeper) enter(uid string, wanted *wish, how map[string]string) (*claim, error) {
	for {
		c, err := k.reserve(uid, wanted, how)
		if err != nil {
			return nil, err
		}
		c.busy.Lock()
		if err := k.current(c); !errors.Is(err, errEnded) {
			if err != nil {
				c.busy.Unlock()
				return nil, err
			}
			return c, nil
		}
		c.busy.Unlock() // it has ended while this call waited; the claim begins again
	}
}

// reserve returns the claim of that UID, a new one if there is none.
func (k *Keeper) reserve(uid string, wanted *wish, how map[string]string) (*claim, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, other := range k.claims {
		theirs := other.copy()
		has, err := parse(theirs.How)
		if theirs.UID == uid || err != nil {
			continue
		}
		for _, gpu := range wanted.gpus {
			if slices.Contains(has.gpus, gpu) {
				return nil, fmt.Errorf("GPU %s: claim %s has it still", gpu, theirs.UID)
			}
		}
	}
	c := k.claims[uid]
	if c == nil {
		c = &claim{Claim: wire.Claim{UID: uid}}
		k.claims[uid] = c
	}
	if len(c.copy().How) == 0 {
		c.set(func() { c.How = how }) // which keeps others from the GPUs
	}
	return c, nil
}

// errEnded means that a claim has ended while a call waited for it.
var errEnded = errors.New("the claim has ended")

// current reports why nothing is to be done for a claim whose busy lock the caller has, nil if it may be.
func (k *Keeper) current(c *claim) error {
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

// End undoes what was done for a claim, and returns once nothing is left of it.
func (k *Keeper) End(ctx context.Context, uid string) error {
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
	if err := k.undo(ctx, c, false); err != nil {
		k.config.Log.Printf("claim %s: not ended: %v", uid, err)
		return err
	}
	k.mu.Lock()
	delete(k.claims, uid)
	k.mu.Unlock()
	k.config.Log.Printf("claim %s: ended", uid)
	return nil
}

// Stop ends all daemons before this process ends, and refuses all orders from then on. Their directories stay: containers have them
// mounted, and find the daemon again that the agent orders of the next process.
func (k *Keeper) Stop(ctx context.Context) {
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

// save writes down what is done for a claim.
func (k *Keeper) save(c *claim) error {
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

// undo ends the daemon of a claim, and gives its GPUs back as they are for all. The directory
// stays if containers are to go on with it.
func (k *Keeper) undo(ctx context.Context, c *claim, keep bool) error {
	if err := k.quit(ctx, c); err != nil {
		return err
	}
	now := c.copy()
	wanted, err := parse(now.How)
	if err == nil {
		if err := k.reset(ctx, c, wanted); err != nil {
			return err
		}
	}
	c.set(func() { c.Begun = false })
	c.touched = keep
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
