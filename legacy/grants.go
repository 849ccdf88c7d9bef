package legacy

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/hostfile"
	"chandler.dev/legacy/list"
)

// grantsFile is the name of the file that holdings are saved in.
const grantsFile = "grants.json"

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

	// Files are the files of the host that go with what the ID stood for. They
	// are written down whole: after a reboot the kubelet starts the pod again
	// without another Allocate, and they must be there again.
	Files []discovery.HostFile `json:"files,omitempty"`

	missing time.Time // when PodResources first left it out again
}

func newHolding(resource, id string, u *list.Unit, since time.Time) *holding {
	h := &holding{Resource: resource, ID: id, Since: since}
	if u != nil {
		h.Devices, h.Silicon, h.Exclusive = u.DeviceNames(), u.Silicon(), len(u.IDs) == 1
		for _, d := range u.Devices {
			h.Files = append(h.Files, d.FilesAs(resource)...)
		}
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
	disk disk.Files

	files  hostfile.Writer
	filing sync.Mutex      // one at a time writes files of the host or removes them
	filed  map[string]bool // what is written of them, or may be

	granting sync.Mutex // one grant at a time, so that one that fails can be undone
	saving   sync.Mutex // one write at a time, so that the last one is the newest

	mu      sync.Mutex
	changes int // counts what changed below
	held    map[key]*holding
	asked   time.Time        // when PodResources was last asked, zero if it did not answer in full
	heard   bool             // whether it has answered at all
	listed  map[key]sighting // what it says that containers have, of whatever resource
	known   list.Catalogue   // what an ID may stand for
}

// sighting is an ID that PodResources lists, or listed until a moment ago. It
// is kept for as long as a holding would be.
type sighting struct {
	container string
	missing   time.Time // when PodResources first left it out again
}

// load reads what was held when the holdings were last saved. A file that
// cannot be understood is set aside and reported; PodResources still tells.
func (h *holdings) load() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held, h.filed = make(map[key]*holding), make(map[string]bool)
	data, err := h.disk.Read(h.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read grants: %w", err)
	}
	var saved []*holding
	if err := json.Unmarshal(data, &saved); err != nil {
		aside := h.file + ".unreadable"
		return errors.Join(fmt.Errorf("read grants: %s, set aside as %s: %w", h.file, aside, err), h.disk.Rename(h.file, aside))
	}
	for _, one := range saved {
		if one != nil {
			h.held[key{one.Resource, one.ID}] = one
		}
	}
	return nil
}

// restoreFiles writes the files of the host that go with what is held, where
// they are not as they should be.
func (h *holdings) restoreFiles() error {
	var errs []error
	for _, one := range h.sorted() {
		_, err := h.writeFiles(one.Files)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// writeFiles writes files of the host of what is held. It returns those that
// nobody reads, and which are not written.
func (h *holdings) writeFiles(files []discovery.HostFile) (unwritten []string, err error) {
	h.filing.Lock()
	defer h.filing.Unlock()
	for _, f := range files {
		h.filed[f.Path] = true
	}
	return h.files.Write(files)
}

// removeFiles removes the files of the host that go with nothing that is held
// any more. It is called before what goes is off the disk too, so that none is
// forgotten. One that cannot be removed is tried again the next time.
func (h *holdings) removeFiles() error {
	h.filing.Lock()
	defer h.filing.Unlock()
	held := make(map[string]bool)
	for _, one := range h.sorted() {
		for _, f := range one.Files {
			held[f.Path] = true
		}
	}
	var errs []error
	for path := range h.filed {
		if held[path] {
			continue
		}
		if err := h.files.Remove([]string{path}); err != nil {
			errs = append(errs, err)
			continue
		}
		delete(h.filed, path)
	}
	return errors.Join(errs...)
}

// sweep removes what writers that crashed have left.
func (h *holdings) sweep() error {
	return h.disk.Sweep(filepath.Dir(h.file), filepath.Base(h.file)+".")
}

// grant takes IDs and saves them, and then writes their files of the host, of
// which it returns those that nobody reads. It shows them to the other API before it
// calls check, which asks what that one holds: of two that take the same
// silicon at the same moment, at least one sees the other.
func (h *holdings) grant(given []*holding, check func() error) (unwritten []string, err error) {
	h.granting.Lock()
	defer h.granting.Unlock()
	undo := h.take(given)
	if err := check(); err != nil {
		undo()
		return nil, err
	}
	if err := h.save(); err != nil {
		undo()
		return nil, err
	}
	for _, one := range given {
		more, err := h.writeFiles(one.Files)
		if err != nil {
			undo()
			return nil, errors.Join(err, h.removeFiles(), h.save())
		}
		unwritten = append(unwritten, more...)
	}
	return unwritten, nil
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
	h.changes++
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.changes++
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
	if _, err := h.disk.Write(h.file, append(data, '\n'), 0o600); err != nil {
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
	slices.SortFunc(all, byKey)
	return all
}

func byKey(a, b *holding) int {
	return cmp.Or(strings.Compare(a.Resource, b.Resource), list.Natural(a.ID, b.ID))
}

// know says what IDs may stand for.
func (h *holdings) know(devices []discovery.Device) {
	known := list.CatalogueOf(devices)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.known = known
	h.changes++
}

// recognise returns the holding with its devices. If they were not written down
// they are those of the ID. A holding without any keeps none.
func recognise(known list.Catalogue, one *holding) *holding {
	if len(one.Devices) > 0 {
		return one
	}
	u, share := known.Find(one.ID)
	if u == nil {
		return one
	}
	recognised := newHolding(one.Resource, one.ID, u, one.Since)
	recognised.Container = one.Container
	recognised.Exclusive = recognised.Exclusive && !share
	return recognised
}

// had returns what all returns, for lists, and a number that is another when the
// answer may be.
func (h *holdings) had() (had []*list.Had, changes int) {
	h.mu.Lock()
	changes = h.changes
	ours := make(map[key]bool, len(h.held))
	for k := range h.held {
		ours[k] = true
	}
	h.mu.Unlock()
	all, _ := h.all()
	for _, one := range all {
		had = append(had, &list.Had{
			Resource: one.Resource, ID: one.ID, Owner: one.who(), Ours: ours[key{one.Resource, one.ID}],
			Devices: one.Devices, Silicon: one.Silicon, Exclusive: one.Exclusive,
		})
	}
	return had, changes
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

// unheard is who holds what nobody is known to hold before PodResources has
// answered for the first time.
const unheard = "unknown: the kubelet has not said yet what containers hold"

// holder names a container that holds a piece of silicon; one that
// PodResources names, if there is one.
func (h *holdings) holder(silicon string) (string, bool) {
	var found *holding
	all, heard := h.all()
	for _, one := range all {
		if slices.Contains(one.Silicon, silicon) && (found == nil || one.Container > found.Container) {
			found = one
		}
	}
	switch {
	case found != nil:
		return found.who(), true
	case !heard:
		return unheard, true
	default:
		return "", false
	}
}

// all returns what containers have of all resources, also of those that are
// not ours, with the devices that it is known to be, by resource and ID; and
// whether PodResources has answered yet.
func (h *holdings) all() (all []*holding, heard bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, one := range h.held {
		all = append(all, recognise(h.known, one))
	}
	for k, s := range h.listed {
		if h.held[k] == nil {
			all = append(all, recognise(h.known, &holding{Resource: k.resource, ID: k.id, Container: s.container}))
		}
	}
	slices.SortFunc(all, byKey)
	return all, h.heard
}

// listing is what PodResources said.
type listing struct {
	containers map[key]string // which container has what

	// whole says that the kubelet knew all of its pods. One that has just
	// started lists those that it knows, which are at first none, then the
	// static ones and, once the API server has answered it, the others
	// (pkg/kubelet/apis/podresources/server_v1.go, List, takes the active
	// pods of the pod manager). What such an answer names is held; that it
	// leaves something out says nothing.
	whole bool
}

// observe enters what PodResources said when it was asked at a time, nil if
// it did not answer. One that it named before is dropped when whole answers
// have left it out for the time that is the patience. A grant that it never
// named stays: it leaves init containers out
// (pkg/kubelet/apis/podresources/server_v1.go, List). The answer is whether
// there is anything to save.
func (h *holdings) observe(at time.Time, said *listing, patience time.Duration) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.asked = time.Time{}
	if said == nil {
		return false
	}
	if !h.heard {
		h.heard = true
		h.changes++
	}
	h.list(at, said, patience)
	changed := h.confirm(at, said.containers)
	if !said.whole {
		return changed
	}
	h.asked = at
	return h.dismiss(at, said.containers, patience) || changed
}

// list remembers what was said, and for a while what no longer is.
func (h *holdings) list(at time.Time, said *listing, patience time.Duration) {
	listed := make(map[key]sighting)
	for k, container := range said.containers {
		listed[k] = sighting{container: container}
	}
	for k, before := range h.listed {
		if _, named := listed[k]; named {
			continue
		}
		if said.whole && before.missing.IsZero() {
			before.missing = at
		}
		if !said.whole || at.Sub(before.missing) < patience {
			listed[k] = before
		}
	}
	if !maps.Equal(h.listed, listed) {
		h.changes++
	}
	h.listed = listed
}

// confirm enters which container has what is held, and reports whether any of
// it is new.
func (h *holdings) confirm(at time.Time, listed map[key]string) (changed bool) {
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
		h.changes++
	}
	return changed
}

// dismiss drops what was confirmed and has been left out for long enough, and
// reports whether there was any.
func (h *holdings) dismiss(at time.Time, listed map[key]string, patience time.Duration) (changed bool) {
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
			h.changes++
			changed = true
		}
	}
	return changed
}

// adopt enters what PodResources lists and is not held yet, where ours says
// that it is of a resource of ours, and the devices of what is held without
// any, once ours knows them. It reports whether there was anything to enter.
func (h *holdings) adopt(ours func(key) (*list.Unit, bool)) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	adopted := false
	for k, one := range h.held {
		if len(one.Devices) > 0 {
			continue
		}
		if u, _ := ours(k); u != nil {
			completed := newHolding(k.resource, k.id, u, one.Since)
			completed.Container, completed.missing = one.Container, one.missing
			h.held[k] = completed
			h.changes++
			adopted = true
		}
	}
	for k, s := range h.listed {
		if h.held[k] != nil {
			continue
		}
		if u, own := ours(k); own {
			one := newHolding(k.resource, k.id, u, h.asked)
			one.Container = s.container
			h.held[k] = one
			h.changes++
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
	h.changes++
	for _, one := range grants {
		if k := (key{one.Resource, one.ID}); h.held[k] == one {
			delete(h.held, k)
		}
	}
}

// askedAt returns when PodResources was last asked, zero if it did not answer
// in full.
func (h *holdings) askedAt() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asked
}

// changed returns a number that is another when what is held may be.
func (h *holdings) changed() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.changes
}
