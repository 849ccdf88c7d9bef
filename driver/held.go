package driver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
)

// Held returns which claims have which devices, by the devices' names, as the
// records in a directory of the host say. It is for those who are not the agent,
// and only reads. Records of another boot than that of the boot ID hold nothing, if
// there is one.
// What a damaged record names counts, and one that names nothing is an error.
func Held(host fs.FS, dir, boot string) (map[string]string, error) {
	entries, err := fs.ReadDir(host, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read claim records: %w", err)
	}
	held := make(map[string]string)
	var errs []error
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, ".") {
			continue // of a writer that crashed
		}
		data, err := fs.ReadFile(host, path.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // unprepared meanwhile
		}
		if err == nil {
			err = addHeld(held, data, boot)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("read claim record %s: %w", name, err))
		}
	}
	return held, errors.Join(errs...)
}

// Use is a device that claims have, and how it is for them.
type Use struct {
	Device string // its name in the snapshot
	Health discovery.Health
	Claims []types.NamespacedName
}

// InUse returns which devices containers may have by claims, and how they are as
// a snapshot has them. There is more than one of a device that is gone for some of
// its claims, since another has taken its place, and there for others. What a claim
// has for administration only is nobody's concern. It is empty until the records
// are read.
func (d *Driver) InUse(s *discovery.Snapshot) []Use {
	var uses []Use
	now := time.Now()
	for _, r := range d.recorded() {
		if r.Configuring {
			continue
		}
		for i := range r.Results {
			has := &r.Results[i]
			if has.Admin {
				continue
			}
			use := Use{Device: has.Source, Health: d.healthOf(s, r, has, now)}
			i := slices.IndexFunc(uses, func(u Use) bool { return u.Device == use.Device && u.Health == use.Health })
			if i < 0 {
				i, uses = len(uses), append(uses, use)
			}
			if !slices.Contains(uses[i].Claims, r.named()) {
				uses[i].Claims = append(uses[i].Claims, r.named())
			}
		}
	}
	return uses
}

// addHeld adds what a record names, whatever its version and checksum.
func addHeld(held map[string]string, data []byte, boot string) error {
	_, body, _ := bytes.Cut(data, []byte("\n"))
	var r record
	if err := json.Unmarshal(body, &r); err != nil {
		return err
	}
	if boot != "" && r.Boot != boot {
		return nil
	}
	for _, result := range r.Results {
		if result.Admin {
			continue
		}
		for _, name := range []string{result.Device, result.Source} {
			if name != "" {
				held[name] = r.who()
			}
		}
	}
	return nil
}
