package driver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	metadatav1alpha1 "k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/ledger"
)

// Where files with metadata are, below the driver's directory, and how the specs
// are called that have them mounted.
const (
	metadataDir        = "metadata"
	metadataBefore     = "dra-device-metadata"
	metadataSpecPrefix = discovery.Domain + "_metadata_" // and <claim uid>_<request>.json
)

// metadata keeps the files that containers read of their devices: attributes,
// and the names of interfaces that they got. The library writes them after a
// claim is prepared (k8s.io/dynamic-resource-allocation/kubeletplugin,
// metadata.go); a claim whose files cannot be written is prepared without. They
// are an output of the ledger: what was written is written again if it is missing.
//
// The library wants a directory <namespace>_<name> for each claim. A later claim
// may have the same name, and the name of a directory cannot be as long. So a
// claim's files are in <dir>/<uid> instead. Beside them are copies of the claim's
// specs, since the specs' directory may be lost while containers have them.
type metadata struct {
	specs  string // directory of CDI specs
	dir    string // directory of the claims' directories
	before string // where agents before kept the files, by the claims' names
	files  disk.Files
	ledger *ledger.Ledger

	mu    sync.Mutex
	texts map[string]map[string][]byte // what was written, by the claim's UID and path; nil for what could not be read
}

var _ interface {
	ledger.Output
	ledger.Tidier
	ledger.Keeper
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
			// way lists the specs of all claims.
			RemoveAll: func(string) error { return nil },
			Glob:      func(string) ([]string, error) { return nil, nil },
		}),
	}
}

// write writes a file for the library: <request>/metadata.json, or the spec that
// has that mounted.
func (m *metadata) write(name string, data []byte, mode fs.FileMode) error {
	base := filepath.Base(name)
	uid := uidOf(base)
	var err error
	if uid != "" {
		data, err = m.mounted(uid, data)
	} else {
		uid, err = claimIn(data)
		name = m.file(uid, filepath.Base(filepath.Dir(name)))
	}
	if err != nil {
		return err
	}
	// The library writes when all claims of a call are prepared. The kubelet may have
	// given up on that call, and have unprepared this one.
	unlock, err := m.ledger.Lock(context.Background(), uid)
	if err != nil {
		return err
	}
	defer unlock()
	if _, state := m.ledger.Claim(types.UID(uid)); state != ledger.Given {
		return fmt.Errorf("claim with UID %s is not prepared any more", uid)
	}
	for _, path := range m.keep(uid, name, data) {
		if _, err := m.files.Write(path, data, mode); err != nil {
			return err
		}
	}
	return nil
}

// file is where a container reads of the devices of a request.
func (m *metadata) file(uid, request string) string {
	return filepath.Join(m.dir, uid, request+".json")
}

// claimIn returns of which claim metadata are.
func claimIn(data []byte) (uid string, err error) {
	var object struct{ Metadata struct{ UID string } }
	if err = json.NewDecoder(bytes.NewReader(data)).Decode(&object); err == nil && object.Metadata.UID == "" {
		err = errors.New("no UID")
	}
	if err != nil {
		err = fmt.Errorf("metadata of devices: %w", err)
	}
	return object.Metadata.UID, err
}

// mounted returns a spec that has files of the claim's own directory mounted.
func (m *metadata) mounted(uid string, data []byte) ([]byte, error) {
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return nil, fmt.Errorf("CDI spec of metadata: %w", err)
	}
	for _, device := range spec.Devices {
		for _, mount := range device.ContainerEdits.Mounts {
			mount.HostPath = m.file(uid, filepath.Base(filepath.Dir(mount.HostPath)))
		}
	}
	return json.MarshalIndent(spec, "", "  ")
}

// keep remembers what a file is to be, or, if the data is nil, that there is one. It
// returns where the file belongs: a spec also beside the claim's other files.
func (m *metadata) keep(uid, name string, data []byte) (paths []string) {
	paths = []string{name}
	if base := filepath.Base(name); uidOf(base) != "" {
		paths = []string{filepath.Join(m.dir, uid, base), filepath.Join(m.specs, base)}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.texts == nil {
		m.texts = make(map[string]map[string][]byte)
	}
	if m.texts[uid] == nil {
		m.texts[uid] = make(map[string][]byte)
	}
	for _, path := range paths {
		if m.texts[uid][path] == nil || data != nil {
			m.texts[uid][path] = data
		}
	}
	return paths
}

// kept returns what the files of a claim are to be.
func (m *metadata) kept(uid string) map[string][]byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.texts[uid])
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
	var errs []error
	for name, data := range m.kept(string(e.Owner().UID)) {
		if _, err := m.files.Lstat(name); data != nil && errors.Is(err, fs.ErrNotExist) {
			_, err := m.files.Write(name, data, 0o644)
			errs = append(errs, err)
		}
	}
	return joined("write metadata of devices again", errs)
}

// Remove implements [ledger.Output].
func (m *metadata) Remove(e ledger.Entry, others []ledger.Entry) error {
	uid := string(e.Owner().UID)
	if uid == "" || haveUID(others, e.Owner().UID) {
		return nil
	}
	var errs []error
	for name := range m.kept(uid) {
		if filepath.Dir(name) == m.specs {
			errs = append(errs, m.files.Remove(name))
		}
	}
	return joined("remove metadata of devices", errs)
}

// Forget implements [ledger.Keeper].
func (m *metadata) Forget(uid types.UID) error {
	if err := m.files.RemoveAll(filepath.Join(m.dir, string(uid))); err != nil {
		return fmt.Errorf("remove metadata of devices: %w", err)
	}
	m.mu.Lock()
	delete(m.texts, string(uid))
	m.mu.Unlock()
	return m.sweepBefore()
}

// Sweep implements [ledger.Output]. It remembers what is of claims that are known.
func (m *metadata) Sweep(look func(types.UID, func() error) (bool, error)) error {
	claims, err := m.files.List(m.dir)
	errs := []error{err}
	for _, claim := range claims {
		dir := filepath.Join(m.dir, claim.Name())
		known, err := look(types.UID(claim.Name()), func() error { return m.files.RemoveAll(dir) })
		if errs = append(errs, err); !known {
			continue
		}
		files, err := m.files.List(dir)
		errs = append(errs, err)
		for _, file := range files {
			errs = append(errs, m.remember(claim.Name(), filepath.Join(dir, file.Name())))
		}
	}
	found, err := m.files.List(m.specs)
	errs = append(errs, err)
	for _, spec := range found {
		name, uid := filepath.Join(m.specs, spec.Name()), uidOf(spec.Name())
		if uid == "" {
			continue
		}
		known, err := look(types.UID(uid), func() error { return m.files.Remove(name) })
		if errs = append(errs, err); known {
			errs = append(errs, m.remember(uid, name))
		}
	}
	return joined("sweep metadata of devices", append(errs, m.sweepBefore()))
}

// remember reads what a file is to be.
func (m *metadata) remember(uid, name string) error {
	data, err := m.files.Read(name)
	m.keep(uid, name, data)
	return err
}

// sweepBefore removes what agents before wrote and no spec has mounted any more.
func (m *metadata) sweepBefore() error {
	dirs, err := m.files.List(m.before)
	errs := []error{err}
	for _, entry := range dirs {
		if dir := filepath.Join(m.before, entry.Name()); !m.mentioned(dir + "/") {
			errs = append(errs, m.files.RemoveAll(dir))
		}
	}
	return joined("sweep metadata of an earlier agent", errs)
}

// mentioned reports whether a path is, or may be, in a file of a claim.
func (m *metadata) mentioned(path string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, texts := range m.texts {
		for _, text := range texts {
			if text == nil || bytes.Contains(text, []byte(path)) {
				return true
			}
		}
	}
	return false
}

// Tidy implements [ledger.Tidier].
func (m *metadata) Tidy(age time.Duration) error {
	return joined("sweep metadata of devices", []error{m.files.Sweep(m.specs, age, metadataSpecPrefix)})
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
