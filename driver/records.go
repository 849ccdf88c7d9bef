package driver

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// The files of a store: <claim uid>.record, and <claim uid>.bad<n> for one
// that could not be read.
const (
	recordExtension = ".record"
	badExtension    = ".bad"
)

// lookup finds a device of the present snapshot by its name.
type lookup func(name string) (discovery.Device, bool)

// store keeps the records of claims, one file for each, and knows from memory
// who holds what. Only the active instance has one, so no file has two
// writers. Callers keep calls for the same claim apart.
type store struct {
	dir   string
	boot  string
	files disk.Files

	// mu guards what follows and is never held during I/O.
	mu      sync.Mutex
	claims  map[types.UID]*record
	names   map[types.NamespacedName]int  // how many of the claims have a name
	silicon map[string]map[types.UID]bool // who may hold a piece of it; exact answers are in claims
	bad     map[types.UID][]result        // what unreadable records hold, as far as it is known
}

// openStore reads the records. What it could not read is in problems: it is
// set aside, and what its claim's CDI spec names stays held.
func openStore(dir, boot string, files disk.Files, specs cdi.Dir) (s *store, problems []error, err error) {
	s = &store{
		dir: dir, boot: boot, files: files,
		claims:  make(map[types.UID]*record),
		names:   make(map[types.NamespacedName]int),
		silicon: make(map[string]map[types.UID]bool),
		bad:     make(map[types.UID][]result),
	}
	if err := files.MakeDir(dir, 0o700); err != nil {
		return nil, nil, fmt.Errorf("open records: %w", err)
	}
	if err := files.Sweep(dir, ""); err != nil {
		problems = append(problems, fmt.Errorf("sweep records: %w", err))
	}
	entries, err := files.List(dir)
	if err != nil {
		return nil, nil, fmt.Errorf("open records: %w", err)
	}
	for _, entry := range entries {
		name := entry.Name()
		uid := types.UID(strings.TrimSuffix(name, filepath.Ext(name)))
		switch extension := filepath.Ext(name); {
		case strings.HasPrefix(name, "."):
		case extension == recordExtension:
			if err := s.load(uid, specs); err != nil {
				problems = append(problems, err)
			}
		case strings.HasPrefix(extension, badExtension):
			data, _ := s.files.Read(filepath.Join(dir, name))
			if !s.readAgain(uid, name, data) {
				s.hold(uid, data, specs)
			}
		}
	}
	return s, problems, nil
}

// load reads the record of a claim, or sets it aside.
func (s *store) load(uid types.UID, specs cdi.Dir) error {
	data, err := s.files.Read(s.file(uid))
	var r *record
	if err == nil {
		r, err = decodeRecord(data)
	}
	if err == nil && r.UID != uid {
		err = fmt.Errorf("is of claim %s", r.UID)
	}
	if err == nil {
		s.enter(r)
		return nil
	}
	s.hold(uid, data, specs)
	return errors.Join(fmt.Errorf("record %s: %w; it is set aside, and the devices that it names stay held until the claim is unprepared", s.file(uid), err),
		s.setAside(uid))
}

// get returns the record of a claim, nil if there is none.
func (s *store) get(uid types.UID) *record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.claims[uid]
}

// holds reports whether the claim has a record, readable or not.
func (s *store) holds(uid types.UID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, bad := s.bad[uid]
	return bad || s.claims[uid] != nil
}

// prepared returns the records of this boot, in order of their UIDs.
func (s *store) prepared() []*record {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*record
	for _, uid := range slices.Sorted(maps.Keys(s.claims)) {
		if s.claims[uid].Boot == s.boot {
			all = append(all, s.claims[uid])
		}
	}
	return all
}

// all returns the claims of which there is anything, of whatever boot. Those of
// which no record can be read have no name.
func (s *store) all() []Claim {
	s.mu.Lock()
	defer s.mu.Unlock()
	claims := make(map[types.UID]Claim, len(s.claims))
	for uid := range s.bad {
		claims[uid] = Claim{UID: uid}
	}
	for uid, r := range s.claims {
		claims[uid] = Claim{uid, r.Namespace, r.Name}
	}
	return slices.SortedFunc(maps.Values(claims), func(a, b Claim) int { return strings.Compare(string(a.UID), string(b.UID)) })
}

// reserve enters the record in memory unless another claim holds what it
// wants. It decides in one step, so of several claims for a device one wins,
// and nobody waits. What is reserved counts as held from here on: whoever asks
// Holder afterwards is told.
func (s *store) reserve(r *record, lookup lookup) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range r.Results {
		if err := s.free(r, i, lookup); err != nil {
			return err
		}
	}
	s.enter(r)
	return nil
}

// free returns an error that names who holds what a result of the record wants.
func (s *store) free(r *record, i int, lookup lookup) error {
	wanted := &r.Results[i]
	if wanted.Admin {
		return nil
	}
	balance := newBalance(wanted, lookup)
	for j := range r.Results {
		if j != i {
			balance.add(&r.Results[j]) // what the claim gets besides; with what others hold it is told
		}
	}
	for other := range s.holders(r.UID, wanted.Silicon) {
		for j := range other.Results {
			held := &other.Results[j]
			if held.excludes(wanted) {
				return fmt.Errorf("device %s is held by %s (device %s)", wanted.Device, other.whoBefore(r), held.Device)
			}
			if short := balance.add(held); short != "" {
				return fmt.Errorf("device %s is held by %s: with its device %s, %s", wanted.Device, other.whoBefore(r), held.Device, short)
			}
		}
	}
	for other, remains := range s.bad {
		if other != r.UID && !wanted.Shared && badHolds(remains, wanted, lookup) {
			return fmt.Errorf("device %s is held by claim with UID %s, whose record cannot be read", wanted.Device, other)
		}
	}
	return nil
}

// holders yields the records of other claims of this boot which hold anything
// of the silicon.
func (s *store) holders(uid types.UID, silicon string) func(yield func(*record) bool) {
	return func(yield func(*record) bool) {
		for _, other := range slices.Sorted(maps.Keys(s.silicon[silicon])) {
			if other != uid && s.claims[other].Boot == s.boot && !yield(s.claims[other]) {
				return
			}
		}
	}
}

// holder returns who holds anything of the silicon through DRA.
func (s *store) holder(silicon string, lookup lookup) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for other := range s.holders("", silicon) {
		for i := range other.Results {
			if held := &other.Results[i]; held.Silicon == silicon && !held.Admin {
				return other.who(), true
			}
		}
	}
	for uid, remains := range s.bad {
		if slices.ContainsFunc(remains, func(r result) bool {
			device, found := lookup(r.Source)
			return r.Silicon == silicon || r.Source == silicon || found && device.Silicon() == silicon
		}) {
			return fmt.Sprintf("claim with UID %s, whose record cannot be read", uid), true
		}
	}
	return "", false
}

// enter makes r the record of its claim in memory.
func (s *store) enter(r *record) {
	s.leave(r.UID)
	s.claims[r.UID] = r
	s.names[r.named()]++
	for _, result := range r.Results {
		if s.silicon[result.Silicon] == nil {
			s.silicon[result.Silicon] = make(map[types.UID]bool)
		}
		s.silicon[result.Silicon][r.UID] = true
	}
}

// leave forgets the record of a claim in memory.
func (s *store) leave(uid types.UID) {
	r := s.claims[uid]
	if r == nil {
		return
	}
	delete(s.claims, uid)
	if s.names[r.named()]--; s.names[r.named()] == 0 {
		delete(s.names, r.named())
	}
	for _, result := range r.Results {
		delete(s.silicon[result.Silicon], uid)
		if len(s.silicon[result.Silicon]) == 0 {
			delete(s.silicon, result.Silicon)
		}
	}
}

// write writes the record of a claim to disk: one that was read as it was, with
// all that this code does not know of it.
func (s *store) write(r *record) (err error) {
	data := r.raw
	if data == nil {
		data, err = r.encode()
	}
	if err == nil {
		_, err = s.files.Write(s.file(r.UID), data, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write record %s: %w", s.file(r.UID), err)
	}
	return nil
}

// restore puts back what was there before a reservation: the earlier record,
// or none. If the disk cannot be set right the reservation stays, since the
// record may be there after a restart.
func (s *store) restore(uid types.UID, earlier *record) error {
	if earlier == nil {
		if err := s.files.Remove(s.file(uid)); err != nil {
			return fmt.Errorf("remove record %s: %w", s.file(uid), err)
		}
	} else if err := s.write(earlier); err != nil {
		return err
	}
	s.release(uid, earlier)
	return nil
}

// release puts back in memory what was there before a reservation.
func (s *store) release(uid types.UID, earlier *record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leave(uid)
	if earlier != nil {
		s.enter(earlier)
	}
}

// remove removes all that is known of a claim. What is missing is no error.
func (s *store) remove(uid types.UID) error {
	if !s.holds(uid) {
		return nil
	}
	files := []string{s.file(uid)}
	if s.unreadable(uid) {
		bad, err := s.badFiles(uid)
		if err != nil {
			return fmt.Errorf("remove record of claim %s: %w", uid, err)
		}
		files = append(bad, files...)
	}
	for _, file := range files {
		if err := s.files.Remove(file); err != nil {
			return fmt.Errorf("remove record %s: %w", file, err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leave(uid)
	delete(s.bad, uid)
	return nil
}

func (s *store) file(uid types.UID) string {
	return filepath.Join(s.dir, string(uid)+recordExtension)
}
