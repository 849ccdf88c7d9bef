package driver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
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

// badFiles returns the records of a claim that were set aside.
func (s *store) badFiles(uid types.UID) ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
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

// remains returns what is known of a claim's records that cannot be read, nil
// if there is none. What the snapshot says of a device goes before what such a
// record says.
func (d *Driver) remains(uid types.UID) *record {
	d.store.mu.Lock()
	known := slices.Clone(d.store.bad[uid])
	d.store.mu.Unlock()
	if known == nil {
		return nil
	}
	for i := range known {
		if device, found := d.view.Load().allocated(known[i].Source); found {
			known[i].Silicon, known[i].Files = device.Silicon(), filesOf(&device)
		}
	}
	return &record{UID: uid, Results: known}
}
