package legacy

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"chandler.dev/cdi/atomicfile"
)

// holding is an ID that a container has, or is about to have. It begins as a
// grant, which Allocate writes to disk before it answers, and is confirmed
// once PodResources names the container. It is never modified.
type holding struct {
	Resource  string    `json:"resource"`
	ID        string    `json:"id"`
	Devices   []string  `json:"devices,omitempty"`   // what the ID stood for
	Silicon   []string  `json:"silicon,omitempty"`   // what of it only one API may hold
	Exclusive bool      `json:"exclusive,omitempty"` // the devices had no other ID in the resource
	Since     time.Time `json:"since"`
	Container string    `json:"container,omitempty"` // "namespace/pod container", "" until PodResources says

	missing time.Time // when PodResources first left it out again
}

func newHolding(resource, id string, u *unit, since time.Time) *holding {
	h := &holding{Resource: resource, ID: id, Since: since}
	if u != nil {
		h.Devices, h.Silicon, h.Exclusive = u.deviceNames(), u.silicon(), len(u.ids) == 1
	}
	return h
}

// who names the holder in words.
func (h *holding) who() string {
	if h.Container == "" {
		return "a container that the kubelet is starting"
	}
	return h.Container
}

// key is an ID of a resource.
type key struct{ resource, id string }

// holdings are all IDs that containers have, in memory and on disk. They
// outlive a restart, since a kubelet that cannot be asked then still has pods,
// and a reboot, since the kubelet starts those pods again without another
// Allocate.
type holdings struct {
	file string

	granting sync.Mutex // one grant at a time, so that one that fails can be undone
	saving   sync.Mutex // one write at a time, so that the last one is the newest

	mu     sync.Mutex
	held   map[key]*holding
	asked  time.Time      // when PodResources was last asked, zero if it did not answer
	listed map[key]string // what it answered last: which container has what
}

// load reads what was held when the holdings were last saved. A file that
// cannot be understood is set aside and reported; PodResources still tells.
func (h *holdings) load() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held = make(map[key]*holding)
	data, err := os.ReadFile(h.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read grants: %w", err)
	}
	var saved []*holding
	if err := json.Unmarshal(data, &saved); err != nil {
		aside := h.file + ".unreadable"
		return errors.Join(fmt.Errorf("read grants: %s, set aside as %s: %w", h.file, aside, err), os.Rename(h.file, aside))
	}
	for _, one := range saved {
		if one != nil {
			h.held[key{one.Resource, one.ID}] = one
		}
	}
	return nil
}

// grant takes IDs and saves them. It shows them to the other API before it
// calls check, which asks what that one holds: of two that take the same
// silicon at the same moment, at least one sees the other.
func (h *holdings) grant(given []*holding, check func() error) error {
	h.granting.Lock()
	defer h.granting.Unlock()
	undo := h.take(given)
	if err := check(); err != nil {
		undo()
		return err
	}
	if err := h.save(); err != nil {
		undo()
		return err
	}
	return nil
}

// take enters IDs in memory and returns how to take that back.
func (h *holdings) take(given []*holding) (undo func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before := make([]*holding, len(given))
	for i, one := range given {
		k := key{one.Resource, one.ID}
		before[i], h.held[k] = h.held[k], one
	}
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		for i, one := range slices.Backward(given) {
			k := key{one.Resource, one.ID}
			if before[i] == nil {
				delete(h.held, k)
			} else {
				h.held[k] = before[i]
			}
		}
	}
}

// save writes the holdings to disk, all or nothing.
func (h *holdings) save() error {
	h.saving.Lock()
	defer h.saving.Unlock()
	data, err := json.MarshalIndent(h.sorted(), "", "  ")
	if err != nil {
		return fmt.Errorf("write grants: %w", err)
	}
	if err := (atomicfile.Files{}).Write(h.file, append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("write grants: %w", err)
	}
	return nil
}

// sorted returns the holdings by resource and ID.
func (h *holdings) sorted() []*holding {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := make([]*holding, 0, len(h.held))
	for _, one := range h.held {
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b *holding) int {
		if a.Resource != b.Resource {
			return strings.Compare(a.Resource, b.Resource)
		}
		return natural(a.ID, b.ID)
	})
	return all
}

// of returns what is held of a resource, by ID.
func (h *holdings) of(resource string) map[string]*holding {
	h.mu.Lock()
	defer h.mu.Unlock()
	own := make(map[string]*holding)
	for k, one := range h.held {
		if k.resource == resource {
			own[k.id] = one
		}
	}
	return own
}

// holder names a container that holds a piece of silicon; one that
// PodResources names, if there is one.
func (h *holdings) holder(silicon string) (string, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var found *holding
	for _, one := range h.held {
		if slices.Contains(one.Silicon, silicon) && (found == nil || one.Container > found.Container) {
			found = one
		}
	}
	if found == nil {
		return "", false
	}
	return found.who(), true
}

// observe enters what PodResources said when it was asked at a time, nil if
// it did not answer. One that it named before is dropped when it has left it
// out for as long as a kubelet that has just started may not know its pods. A
// grant that it never named stays: it leaves init containers out
// (pkg/kubelet/apis/podresources/server_v1.go, List). The answer is whether
// there is anything to save.
func (h *holdings) observe(at time.Time, listed map[key]string, patience time.Duration) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if listed == nil {
		h.asked = time.Time{}
		return false
	}
	h.asked, h.listed = at, listed
	changed := false
	for k, container := range listed {
		one := h.held[k]
		// An answer that was asked for before the grant tells of the container
		// that had the ID before.
		if one == nil || one.Since.After(at) || one.Container == container && one.missing.IsZero() {
			continue
		}
		confirmed := *one
		changed = changed || one.Container != container
		confirmed.Container, confirmed.missing = container, time.Time{}
		h.held[k] = &confirmed
	}
	for k, one := range h.held {
		if _, named := listed[k]; named || one.Container == "" {
			continue
		}
		switch {
		case one.missing.IsZero():
			left := *one
			left.missing = at
			h.held[k] = &left
		case at.Sub(one.missing) >= patience:
			delete(h.held, k)
			changed = true
		}
	}
	return changed
}

// adopt enters what PodResources named last and is not held yet, where ours
// says that it is of a resource of ours, and reports whether there was any.
func (h *holdings) adopt(ours func(key) (*unit, bool)) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	adopted := false
	for k, container := range h.listed {
		if h.held[k] != nil {
			continue
		}
		if u, own := ours(k); own {
			one := newHolding(k.resource, k.id, u, h.asked)
			one.Container = container
			h.held[k] = one
			adopted = true
		}
	}
	return adopted
}

// unconfirmed returns the grants from before a time that PodResources never
// named, by resource.
func (h *holdings) unconfirmed(before time.Time) map[string][]*holding {
	h.mu.Lock()
	defer h.mu.Unlock()
	found := make(map[string][]*holding)
	for _, one := range h.held {
		if one.Container == "" && one.Since.Before(before) {
			found[one.Resource] = append(found[one.Resource], one)
		}
	}
	return found
}

// drop forgets grants, less those that were made anew or confirmed meanwhile.
func (h *holdings) drop(grants []*holding) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, one := range grants {
		if k := (key{one.Resource, one.ID}); h.held[k] == one {
			delete(h.held, k)
		}
	}
}

// askedAt returns when PodResources was last asked, zero if it did not answer.
func (h *holdings) askedAt() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asked
}

// resources returns the resources of which something is held.
func (h *holdings) resources() map[string]bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	names := make(map[string]bool)
	for k := range h.held {
		names[k.resource] = true
	}
	return names
}
