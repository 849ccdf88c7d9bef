package driver

import (
	"bytes"
	"context"
	"crypto/sha256"
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

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	metadatav1alpha1 "k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/ledger"
)

// Where the library writes what containers can read of their devices
// (k8s.io/dynamic-resource-allocation/kubeletplugin, metadata.go): a file
// <namespace>_<name>/<request>… of each request of a claim in a directory of
// the driver's, and a CDI spec <driver>_metadata_<claim uid>_<request>.json
// that has it mounted.
const (
	metadataDir        = "dra-device-metadata"
	metadataSpecPrefix = discovery.Domain + "_metadata_"
	metadataCopies     = metadataDir + "-specs" // of ours, beside the library's
)

// metadata keeps the files that containers read of their devices: attributes,
// and the names of interfaces that they got. The library writes them after a
// claim is prepared; a claim whose files cannot be written is prepared without.
// They are an output of the ledger: what was written is written again if it is
// missing. A copy of each spec is beside the files, since the specs' directory
// may be lost while containers have them.
type metadata struct {
	specs  string // directory of CDI specs
	dir    string // directory of the claims' directories
	copies string // directory of copies of the specs
	files  disk.Files

	// names keeps a claim's files from being written while those of an earlier
	// claim of its name are removed. Keys are names in dir.
	names ledger.Locks

	mu    sync.Mutex
	texts map[string]map[string][]byte // what was written, by owner, which is a name in dir or a claim's UID, and path
}

var _ interface {
	ledger.Output
	ledger.Tidier
} = (*metadata)(nil)

// options has the library write the files.
func (m *metadata) options() []kubeletplugin.Option {
	return []kubeletplugin.Option{
		// The newest version comes first; the older is for readers that know no other.
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion, metadatav1alpha1.SchemeGroupVersion}),
		kubeletplugin.CDIDirectory(m.specs),
		kubeletplugin.MetadataFileOps(kubeletplugin.MetadataFileOperations{
			WriteFile: m.write,
			MkdirAll:  func(string, fs.FileMode) error { return nil }, // write makes directories
			// When the library wants to remove files they are gone already. Its
			// way goes by the claim's name, which another claim may have by
			// now, and lists the specs of all claims.
			RemoveAll: func(string) error { return nil },
			Glob:      func(string) ([]string, error) { return nil, nil },
		}),
	}
}

func (m *metadata) write(name string, data []byte, mode fs.FileMode) error {
	claim, below := m.claimOf(name)
	if !below { // a spec, whose name is by the claim's UID
		data = m.mountShort(data)
		m.keepSpec(filepath.Base(name), data)
		_, err := m.files.Write(filepath.Join(m.copies, filepath.Base(name)), data, mode)
		if err == nil {
			_, err = m.files.Write(name, data, mode)
		}
		return err
	}
	name = strings.Replace(name, claim, short(claim), 1)
	claim = short(claim)
	return m.alone(context.Background(), claim, func() error {
		_, err := m.files.Write(name, data, mode)
		if err == nil {
			m.keep(claim, name, data)
		}
		return err
	})
}

// keep remembers what a file is to be.
func (m *metadata) keep(owner, name string, data []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.texts == nil {
		m.texts = make(map[string]map[string][]byte)
	}
	if m.texts[owner] == nil {
		m.texts[owner] = make(map[string][]byte)
	}
	m.texts[owner][name] = data
}

// keepSpec remembers what a spec and its copy are to be.
func (m *metadata) keepSpec(name string, data []byte) {
	m.keep(uidOf(name), filepath.Join(m.copies, name), data)
	m.keep(uidOf(name), filepath.Join(m.specs, name), data)
}

// kept returns what the files of an owner are to be.
func (m *metadata) kept(owner string) map[string][]byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.texts[owner])
}

func (m *metadata) forget(owner string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.texts, owner)
}

// uidOf returns of which claim a spec is, by its name; "" if it is of none.
func uidOf(spec string) string {
	rest, ours := strings.CutPrefix(spec, metadataSpecPrefix)
	if !ours {
		return ""
	}
	uid, _, _ := strings.Cut(rest, "_")
	return uid
}

// Write implements [ledger.Output]. It writes files again that the library has
// written once and that are missing.
func (m *metadata) Write(e ledger.Entry) error {
	c, ok := e.(*ledger.Claim)
	if !ok {
		return nil
	}
	errs := []error{m.alone(context.Background(), claimDir(c), func() error { return m.restore(claimDir(c)) }), m.restore(c.Key())}
	return joined("write metadata of devices again", errs)
}

// restore writes the files of an owner that are missing.
func (m *metadata) restore(owner string) error {
	var errs []error
	for name, data := range m.kept(owner) {
		if _, err := m.files.Lstat(name); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		_, err := m.files.Write(name, data, 0o644)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// claimOf returns the name of the claim's directory that a file is below.
func (m *metadata) claimOf(file string) (name string, below bool) {
	path, err := filepath.Rel(m.dir, file)
	name, _, below = strings.Cut(path, "/")
	return name, err == nil && below && name != ".."
}

// alone calls do while nobody else works on a claim's directory.
func (m *metadata) alone(ctx context.Context, claim string, do func() error) error {
	unlock, err := m.names.Lock(ctx, claim)
	if err != nil {
		return err
	}
	defer unlock()
	return do()
}

// removeDir removes a claim's directory.
func (m *metadata) removeDir(claim string) error {
	return m.alone(context.Background(), claim, func() error {
		m.forget(claim)
		return m.files.RemoveAll(filepath.Join(m.dir, claim))
	})
}

// Remove implements [ledger.Output]. The directory stays while another claim has
// the same name. Of a claim that is not understood only the UID is known: its
// specs say where its other files are.
func (m *metadata) Remove(e ledger.Entry, others []ledger.Entry) error {
	uid := e.Owner().UID
	if uid == "" {
		return nil
	}
	var dirs, names []string
	var errs []error
	switch c := e.(type) {
	case *ledger.Claim:
		dirs = append(dirs, claimDir(c))
		for _, result := range c.Results {
			names = append(names, metadataSpecPrefix+string(uid)+"_"+resourceclaim.BaseRequestRef(result.Request)+".json")
		}
	case *ledger.Sealed:
		all, err := m.entries(m.specs)
		errs = append(errs, err)
		for _, name := range all {
			if uidOf(name) == string(uid) {
				names, dirs = append(names, name), append(dirs, m.dirsOf(filepath.Join(m.specs, name))...)
			}
		}
	}
	for _, dir := range dirs {
		if !haveDir(others, dir) {
			errs = append(errs, m.removeDir(dir))
		}
	}
	if _, sealed := e.(*ledger.Sealed); sealed {
		errs = append(errs, m.removeNameless(others))
	}
	if !haveUID(others, uid) {
		m.forget(string(uid))
		for _, name := range names {
			errs = append(errs, m.files.Remove(filepath.Join(m.specs, name)), m.files.Remove(filepath.Join(m.copies, name)))
		}
	}
	return joined("remove metadata of devices", errs)
}

// haveDir reports whether one of the entries is of a claim with a directory of
// the name.
func haveDir(entries []ledger.Entry, dir string) bool {
	return slices.ContainsFunc(entries, func(e ledger.Entry) bool { c, ok := e.(*ledger.Claim); return ok && claimDir(c) == dir })
}

// removeNameless removes the directories that were kept at the start for claims
// whose names are not known, once the last of these has ended.
func (m *metadata) removeNameless(others []ledger.Entry) error {
	if slices.ContainsFunc(others, func(e ledger.Entry) bool { _, sealed := e.(*ledger.Sealed); return sealed }) {
		return nil
	}
	dirs, err := m.entries(m.dir)
	errs := []error{err}
	for _, dir := range dirs {
		errs = append(errs, m.alone(context.Background(), dir, func() error {
			// What was written since, or belongs to a claim in the ledger, is remembered.
			if haveDir(others, dir) || len(m.kept(dir)) > 0 {
				return nil
			}
			return m.files.RemoveAll(filepath.Join(m.dir, dir))
		}))
	}
	return errors.Join(errs...)
}

// dirsOf returns the names of the claims' directories of which a spec has files
// mounted.
func (m *metadata) dirsOf(file string) (names []string) {
	data, err := m.files.Read(file)
	if err != nil {
		return nil
	}
	var spec specs.Spec
	if json.Unmarshal(data, &spec) != nil {
		return nil
	}
	for _, device := range spec.Devices {
		for _, mount := range device.ContainerEdits.Mounts {
			if name, below := m.claimOf(mount.HostPath); below {
				names = append(names, name)
			}
		}
	}
	return names
}

// Sweep implements [ledger.Output]. It remembers the files of claims that are in
// the ledger, and restores specs from their copies. Claims that are not understood
// keep what they have: all directories stay, since the names of such claims are
// not known.
func (m *metadata) Sweep(all []ledger.Entry) error {
	uids, names, sealed := make(map[string]bool), make(map[string]bool), false
	for _, e := range all {
		switch e := e.(type) {
		case *ledger.Claim:
			uids[e.Key()], names[claimDir(e)] = true, true
		case *ledger.Sealed:
			uids[string(e.UID)], sealed = true, true
		}
	}
	errs := []error{m.sweepSpecs(m.copies, uids), m.sweepSpecs(m.specs, uids)}
	dirs, err := m.entries(m.dir)
	errs = append(errs, err)
	for _, name := range dirs {
		switch {
		case names[name]:
			errs = append(errs, m.remember(name, filepath.Join(m.dir, name)))
		case !sealed:
			errs = append(errs, m.files.RemoveAll(filepath.Join(m.dir, name)))
		}
	}
	return joined("sweep metadata of devices", errs)
}

// Tidy implements [ledger.Tidier].
func (m *metadata) Tidy(age time.Duration) error {
	return joined("sweep metadata of devices", []error{m.files.Sweep(m.specs, age, metadataSpecPrefix), m.files.Sweep(m.copies, age, metadataSpecPrefix)})
}

// sweepSpecs removes the specs in a directory that are of no claim, and remembers
// the others.
func (m *metadata) sweepSpecs(dir string, uids map[string]bool) error {
	found, err := m.entries(dir)
	errs := []error{err}
	for _, name := range found {
		uid := uidOf(name)
		switch {
		case uid == "":
		case !uids[uid]:
			errs = append(errs, m.files.Remove(filepath.Join(dir, name)))
		default:
			data, err := m.files.Read(filepath.Join(dir, name))
			errs = append(errs, err)
			if err == nil {
				m.keepSpec(name, data)
			}
		}
	}
	return errors.Join(errs...)
}

// remember remembers the files in a directory.
func (m *metadata) remember(owner, dir string) error {
	found, err := m.files.List(dir)
	errs := []error{err}
	for _, entry := range found {
		name := filepath.Join(dir, entry.Name())
		if entry.IsDir() {
			errs = append(errs, m.remember(owner, name))
			continue
		}
		data, err := m.files.Read(name)
		errs = append(errs, err)
		if err == nil {
			m.keep(owner, name, data)
		}
	}
	return errors.Join(errs...)
}

// entries returns the names in a directory, none if there is no such directory.
func (m *metadata) entries(dir string) ([]string, error) {
	all, err := m.files.List(dir)
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(all))
	for _, entry := range all {
		names = append(names, entry.Name())
	}
	return names, nil
}

// claimDir is the name of a claim's directory.
func claimDir(r *ledger.Claim) string { return short(r.Namespace + "_" + r.Name) }

// maxName is how long the name of a file can be on Linux.
const maxName = 255

// short is how a claim's directory is called that the library calls by a name
// that may be longer than any file's. No other claim has the short name, since
// names of claims have no underscore.
func short(claim string) string {
	if len(claim) <= maxName {
		return claim
	}
	end := fmt.Sprintf("_%x", sha256.Sum256([]byte(claim)))
	return claim[:maxName-len(end)] + end
}

// mountShort returns a spec that mounts files of the directory which short names.
func (m *metadata) mountShort(spec []byte) []byte {
	_, after, _ := bytes.Cut(spec, []byte(m.dir+"/"))
	claim, _, _ := strings.Cut(string(after), "/")
	return bytes.Replace(spec, []byte(claim), []byte(short(claim)), 1)
}

// metadataOf returns what containers can read of a device: all that is
// published of it, and how they call the interface that was moved to them.
func metadataOf(r *ledger.Result, device *rules.Offered) *kubeletplugin.DeviceMetadata {
	out := &kubeletplugin.DeviceMetadata{Attributes: make(map[string]resourceapi.DeviceAttribute, len(device.Attributes))}
	for name, value := range device.Attributes {
		out.Attributes[string(name)] = value
	}
	if name := interfaceOf(r); name != "" {
		out.NetworkData = &resourceapi.NetworkDeviceData{InterfaceName: name}
	}
	return out
}

// interfaceOf returns what the interface is called that is moved to the
// container, "" if none is.
func interfaceOf(r *ledger.Result) string {
	if len(r.Edits.NetDevices) != 1 {
		return ""
	}
	return r.Edits.NetDevices[0].Name
}
