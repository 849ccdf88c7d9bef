package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/cdi"
)

// setAside moves an unreadable record out of the way of a new one.
func (s *store) setAside(uid types.UID) error {
	files, err := s.badFiles(uid)
	if err == nil {
		err = s.files.Rename(s.file(uid), fmt.Sprintf("%s%d", filepath.Join(s.dir, string(uid)+badExtension), len(files)))
	}
	if err != nil {
		return fmt.Errorf("set aside the record of claim %s: %w", uid, err)
	}
	return nil
}

// readAgain makes a record that was set aside the claim's again, if this agent can
// read it, as a newer one can that an older one did not understand, and there is
// no other of the claim. It reports whether it did.
func (s *store) readAgain(uid types.UID, name string, data []byte) bool {
	r, err := decodeRecord(data)
	if err != nil || r.UID != uid {
		return false
	}
	if _, err := s.files.Lstat(s.file(uid)); !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	if others, err := s.badFiles(uid); err != nil || len(others) != 1 {
		return false
	}
	if s.files.Rename(filepath.Join(s.dir, name), s.file(uid)) != nil {
		return false
	}
	s.enter(r)
	return true
}

// badFiles returns the records of a claim that were set aside.
func (s *store) badFiles(uid types.UID) ([]string, error) {
	entries, err := s.files.List(s.dir)
	if err != nil {
		return nil, err
	}
	var files []string
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), string(uid)+badExtension) {
			files = append(files, filepath.Join(s.dir, entry.Name()))
		}
	}
	return files, nil
}

// hold keeps what an unreadable record named: what its spec is for, and what
// can be read of the record itself.
func (s *store) hold(uid types.UID, data []byte, specs cdi.Dir) {
	remains := salvage(data, s.boot)
	names, _ := specs.ClaimDevices(uid)
	for _, name := range names {
		remains = append(remains, result{Device: name, Source: name})
	}
	s.bad[uid] = append(s.bad[uid], remains...)
}

// salvage returns what a damaged record still says of the devices: the names,
// the silicon and the files of the host that go with them. It is only good
// enough to keep others from the devices, and to remove the files.
func salvage(data []byte, boot string) (remains []result) {
	_, body, _ := bytes.Cut(data, []byte("\n"))
	var r struct {
		Boot    string
		Results []struct {
			Device, Source, Silicon string
			Files                   []hostFile
		}
	}
	// What has another type than it should is left out, and the rest is read.
	_ = json.Unmarshal(body, &r)
	if r.Boot != boot {
		return nil
	}
	for _, found := range r.Results {
		for _, name := range []string{found.Device, found.Source} {
			remains = append(remains, result{Device: name, Source: name, Silicon: found.Silicon, Files: found.Files})
		}
	}
	return remains
}

// badHolds reports whether devices of an unreadable record, of which no more
// than the names is sure, are or compete with what is wanted.
func badHolds(remains []result, wanted *result, lookup lookup) bool {
	return slices.ContainsFunc(remains, func(r result) bool {
		if r.Source == wanted.Source || r.Source == wanted.Device {
			return true
		}
		device, found := lookup(r.Source)
		return found && !device.Shareable && device.Silicon() == wanted.Silicon &&
			(wanted.Whole || device.PartOf == nil || len(device.Takes) > 0)
	})
}

// unreadable reports whether a record of the claim was set aside.
func (s *store) unreadable(uid types.UID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, bad := s.bad[uid]
	return bad
}

// removeRemains removes the files, but for the spec, of a claim with records
// that cannot be read, as far as it is known which they are. What the snapshot
// says of a device goes before what such a record says. What the claim has by
// another record, which may be nil, is kept.
func (d *Driver) removeRemains(ctx context.Context, uid types.UID, keep *record) error {
	if err := d.metadata.removeUnnamed(ctx, uid, d.store.hasName); err != nil {
		return err
	}
	remains := &record{UID: uid, Results: d.store.remains(uid)}
	for i := range remains.Results {
		r := &remains.Results[i]
		if device, found := d.view.Load().allocated(r.Source); found {
			r.Silicon, r.Files = device.Silicon(), filesOf(&device)
		}
	}
	return d.removeFiles(remains, keep, func() error { return nil })
}

// remains returns what the claim's unreadable records are known to hold.
func (s *store) remains(uid types.UID) []result {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.bad[uid])
}
