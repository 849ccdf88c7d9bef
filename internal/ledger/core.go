package ledger

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// core is the part of a ledger that its claims, grants and leases share.
type core struct {
	config       Config
	files        allocation.Files
	outputs      outputs
	openedSignal chan struct{} // closed by Open
	changed      chan struct{} // holds a value when Run must reconcile; every change may send, Run receives
	filing       turn          // serializes writes and removals of files of the host

	mu           sync.Mutex // guards the fields below, and is never held during I/O
	accounts     accounts
	replaced     map[string][]allocation.Entry // by key, entries whose outputs the present entry replaces
	listing      listingState
	endTimes     map[string]time.Time // when claims have ended, by key
	grantsUnread bool                 // the file of grants may hold grants that the accounts lack
	recordsLost  bool                 // records of claims were lost in this boot
}

func (c *core) accountOf(key string) *exclusion.Account {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.accounts.byKey[key]
}

func (c *core) isOpen() bool {
	select {
	case <-c.openedSignal:
		return true
	default:
		return false
	}
}

// otherEntries returns the entries whose outputs must stay, except the entries with the given keys.
func (c *core) otherEntries(without []string) []allocation.Entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	entries := make([]allocation.Entry, 0, len(c.accounts.byKey))
	for key, a := range c.accounts.byKey {
		if a.State != allocation.Ended && !slices.Contains(without, key) && (a.State != allocation.Ending || a.Entry.API() == discovery.ModeDevicePlugin) {
			entries = append(entries, a.Entry)
		}
	}
	return entries
}

// lockFiles excludes other writers of files of the host, if one of the entries has such files. When
// two entries that share a file end at once, the second one sees that the first is gone. A file is
// not written while another call regards it as unused.
func (c *core) lockFiles(entries ...allocation.Entry) (done func()) {
	if !slices.ContainsFunc(entries, func(e allocation.Entry) bool { return len(e.Files()) > 0 }) {
		return func() {}
	}
	return c.filing.takeTurn()
}

// mayHave returns [*exclusion.Blocked] for new claims while the devices of containers are not known
// yet.
func (c *core) mayHave(q exclusion.Query) *exclusion.Blocked {
	why := c.unknownOwnerReason()
	if why == "" || q.API != discovery.ModeDRA {
		return nil
	}
	for i := range q.Wanted {
		if h := exclusion.Complete(q.Wanted[i], q.Stock); !h.Open {
			return &exclusion.Blocked{Device: h.Device, OwnerText: why}
		}
	}
	return nil
}

// unknownOwnerReason returns the reason why a container may have a device without a recorded owner,
// or "" if all allocations are known.
func (c *core) unknownOwnerReason() string {
	switch {
	case c.grantsUnread:
		return fmt.Sprintf("a container perhaps: %s, which lists the devices of containers, cannot be read", c.files.Path(allocation.GrantsFile))
	case c.config.Listings && !c.listing.whole:
		return unlistedFor
	}
	return ""
}

// mayOpen returns [*exclusion.Blocked] if a process has one of the devices open and the device can
// be opened by only one process at a time. The caller has reserved the devices.
func (c *core) mayOpen(holds []allocation.Hold, own []types.UID, s exclusion.Stock) error {
	if c.config.OpenBy == nil {
		return nil
	}
	asked := make(map[string]bool)
	for _, h := range holds {
		d, found := s.Device(h.Device)
		if !found || asked[h.Device] || h.Open || h.Amount != nil {
			continue // the containers of other consumers may have a shared device open
		}
		asked[h.Device] = true
		if who := c.config.OpenBy(&d.Device, own); who != "" {
			return &exclusion.Blocked{Device: h.Device, OwnedDevice: h.Device, Kind: exclusion.Reclaiming, OwnerText: who}
		}
	}
	return nil
}

// writeOutputs implements [Ledger.Write].
func (c *core) writeOutputs(key string) error {
	c.mu.Lock()
	a, replaced := c.accounts.byKey[key], c.replaced[key]
	c.mu.Unlock()
	if a == nil || a.State != allocation.Allocated {
		return nil
	}
	defer c.lockFiles(append(slices.Clone(replaced), a.Entry)...)()
	for _, o := range c.outputs {
		if err := o.Write(a.Entry); err != nil {
			return err
		}
	}
	for _, e := range replaced {
		if err := c.outputs.removeEntry(e, c.otherEntries(nil)); err != nil {
			return err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.replaced, key)
	return nil
}
