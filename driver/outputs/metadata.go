package outputs

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
	"chandler.dev/internal/ledger/allocation"
)

// MetadataSpecPrefix is the prefix of the CDI specs that mount metadata files. It is followed by
// <claim uid>_<request>.json.
const MetadataSpecPrefix = discovery.Domain + "_metadata_"

// Metadata manages the files from which containers read about their devices: attributes, and the
// names of their network interfaces. The library writes the files after a claim is prepared
// (k8s.io/dynamic-resource-allocation/kubeletplugin, metadata.go). If that fails, the claim is
// prepared without metadata. The files are an output of the ledger, which writes missing files
// again.
//
// The library uses a directory <namespace>_<name> for each claim. A later claim may have the same
// name, and such a name may be too long for a directory. Therefore the files of a claim are in
// <dir>/<uid> instead, together with copies of the claim's CDI specs, since the specs' directory
// may be lost while containers use them.
type Metadata struct {
	SpecDir    string // directory of CDI specs
	Dir        string // directory of the claims' directories
	EarlierDir string // where earlier agents kept the files, by the claims' names
	Files      disk.Files
	Ledger     *ledger.Ledger

	mu       sync.Mutex
	contents map[string]map[string][]byte // contents of the written files, by claim UID and path; nil for unreadable files
}

var _ interface {
	ledger.Output
	ledger.TemporaryRemover
	ledger.ClaimForgetter
} = (*Metadata)(nil)

// HelperOptions returns the library's options for metadata files.
func (m *Metadata) HelperOptions() []kubeletplugin.Option {
	return []kubeletplugin.Option{
		// The newest version comes first. The older version is for readers that support no other.
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion, metadatav1alpha1.SchemeGroupVersion}),
		kubeletplugin.CDIDirectory(m.SpecDir),
		kubeletplugin.MetadataFileOps(kubeletplugin.MetadataFileOperations{
			WriteFile: m.write,
			MkdirAll:  func(string, fs.FileMode) error { return nil }, // write creates directories
			// The driver has already removed the files when the library would remove them. The
			// library would also list the specs of all claims.
			RemoveAll: func(string) error { return nil },
			Glob:      func(string) ([]string, error) { return nil, nil },
		}),
	}
}

// write writes a file for the library: either <request>/metadata.json, or the CDI spec that mounts
// it.
func (m *Metadata) write(name string, data []byte, mode fs.FileMode) error {
	base := filepath.Base(name)
	uid := uidOf(base)
	var err error
	if uid != "" {
		data, err = m.mountedSpec(uid, data)
	} else {
		uid, err = claimIn(data)
		name = m.File(uid, filepath.Base(filepath.Dir(name)))
	}
	if err != nil {
		return err
	}
	// The library writes when all claims of a call are prepared. By then the kubelet may have given
	// up on the call and unprepared this claim.
	unlock, err := m.Ledger.Lock(context.Background(), uid)
	if err != nil {
		return err
	}
	defer unlock()
	if _, state := m.Ledger.Claim(types.UID(uid)); state != allocation.Allocated {
		return fmt.Errorf("claim with UID %s is not prepared any more", uid)
	}
	for _, path := range m.storeFile(uid, name, data) {
		if _, err := m.Files.Write(path, data, mode); err != nil {
			return err
		}
	}
	return nil
}

// File returns the path of the metadata of a request.
func (m *Metadata) File(uid, request string) string {
	return filepath.Join(m.Dir, uid, request+".json")
}

// claimIn returns the UID of the claim that metadata describe.
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

// mountedSpec returns the spec with mounts from the claim's own directory.
func (m *Metadata) mountedSpec(uid string, data []byte) ([]byte, error) {
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return nil, fmt.Errorf("CDI spec of metadata: %w", err)
	}
	for _, device := range spec.Devices {
		for _, mount := range device.ContainerEdits.Mounts {
			mount.HostPath = m.File(uid, filepath.Base(filepath.Dir(mount.HostPath)))
		}
	}
	return json.MarshalIndent(spec, "", "  ")
}

// storeFile stores the content of a file, or, if data is nil, its existence. It returns the paths
// of the file. A spec has a second path among the claim's other files.
func (m *Metadata) storeFile(uid, name string, data []byte) (paths []string) {
	paths = []string{name}
	if base := filepath.Base(name); uidOf(base) != "" {
		paths = []string{filepath.Join(m.Dir, uid, base), filepath.Join(m.SpecDir, base)}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.contents == nil {
		m.contents = make(map[string]map[string][]byte)
	}
	if m.contents[uid] == nil {
		m.contents[uid] = make(map[string][]byte)
	}
	for _, path := range paths {
		if m.contents[uid][path] == nil || data != nil {
			m.contents[uid][path] = data
		}
	}
	return paths
}

// claimFiles returns the contents of a claim's files.
func (m *Metadata) claimFiles(uid string) map[string][]byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.contents[uid])
}

// uidOf returns the UID of the claim in the file name of a metadata spec, or "" for other files.
func uidOf(spec string) string {
	rest, ours := strings.CutPrefix(spec, MetadataSpecPrefix)
	if !ours {
		return ""
	}
	uid, _, _ := strings.Cut(rest, "_")
	return uid
}

// Write implements [ledger.Output]. It rewrites missing files that the library had written.
func (m *Metadata) Write(e allocation.Entry) error {
	var errs []error
	for name, data := range m.claimFiles(string(e.Owner().UID)) {
		if _, err := m.Files.Lstat(name); data != nil && errors.Is(err, fs.ErrNotExist) {
			_, err := m.Files.Write(name, data, 0o644)
			errs = append(errs, err)
		}
	}
	return joinErrors("write metadata of devices again", errs)
}

// Remove implements [ledger.Output].
func (m *Metadata) Remove(e allocation.Entry, others []allocation.Entry) error {
	uid := string(e.Owner().UID)
	if uid == "" || haveUID(others, e.Owner().UID) {
		return nil
	}
	var errs []error
	for name := range m.claimFiles(uid) {
		if filepath.Dir(name) == m.SpecDir {
			errs = append(errs, m.Files.Remove(name))
		}
	}
	return joinErrors("remove metadata of devices", errs)
}

// ForgetClaim implements [ledger.ClaimForgetter].
func (m *Metadata) ForgetClaim(uid types.UID) error {
	if err := m.Files.RemoveAll(filepath.Join(m.Dir, string(uid))); err != nil {
		return fmt.Errorf("remove metadata of devices: %w", err)
	}
	m.mu.Lock()
	delete(m.contents, string(uid))
	m.mu.Unlock()
	_ = m.sweepBefore() // RemoveOrphans tries again and returns the error; the claim has no files any more
	return nil
}

// RemoveOrphans implements [ledger.Output]. It also reads the files of known claims.
func (m *Metadata) RemoveOrphans(look func(types.UID, func() error) (bool, error)) error {
	claims, err := m.Files.ListDir(m.Dir)
	errs := []error{err}
	for _, claim := range claims {
		dir := filepath.Join(m.Dir, claim.Name())
		known, err := look(types.UID(claim.Name()), func() error { return m.Files.RemoveAll(dir) })
		if errs = append(errs, err); !known {
			continue
		}
		files, err := m.Files.ListDir(dir)
		errs = append(errs, err)
		for _, file := range files {
			errs = append(errs, m.readContent(claim.Name(), filepath.Join(dir, file.Name())))
		}
	}
	found, err := m.Files.ListDir(m.SpecDir)
	errs = append(errs, err)
	for _, spec := range found {
		name, uid := filepath.Join(m.SpecDir, spec.Name()), uidOf(spec.Name())
		if uid == "" {
			continue
		}
		known, err := look(types.UID(uid), func() error { return m.Files.Remove(name) })
		if errs = append(errs, err); known {
			errs = append(errs, m.readContent(uid, name))
		}
	}
	return joinErrors("sweep metadata of devices", append(errs, m.sweepBefore()))
}

// readContent reads the content of a file.
func (m *Metadata) readContent(uid, name string) error {
	data, err := m.Files.Read(name)
	m.storeFile(uid, name, data)
	return err
}

// sweepBefore removes files of earlier agents that no spec mounts.
func (m *Metadata) sweepBefore() error {
	dirs, err := m.Files.ListDir(m.EarlierDir)
	errs := []error{err}
	for _, entry := range dirs {
		if dir := filepath.Join(m.EarlierDir, entry.Name()); !m.isMentioned(dir + "/") {
			errs = append(errs, m.Files.RemoveAll(dir))
		}
	}
	return joinErrors("sweep metadata of an earlier agent", errs)
}

// isMentioned reports whether a file of a claim contains a path, or cannot be read and may contain
// it.
func (m *Metadata) isMentioned(path string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, texts := range m.contents {
		for _, text := range texts {
			if text == nil || bytes.Contains(text, []byte(path)) {
				return true
			}
		}
	}
	return false
}

// RemoveTemporary implements [ledger.TemporaryRemover].
func (m *Metadata) RemoveTemporary(age time.Duration) error {
	return joinErrors("sweep metadata of devices", []error{m.Files.SweepTemporary(m.SpecDir, age, MetadataSpecPrefix)})
}

// DeviceMetadata returns the metadata of a device for containers: all published attributes, and the
// container's name for the network interface moved to it.
func DeviceMetadata(r *allocation.Result, device *rules.Offered) *kubeletplugin.DeviceMetadata {
	out := &kubeletplugin.DeviceMetadata{Attributes: make(map[string]resourceapi.DeviceAttribute, len(device.Attributes))}
	for name, value := range device.Attributes {
		out.Attributes[string(name)] = value.ForSlice()
	}
	if name := r.InterfaceName(); name != "" {
		out.NetworkData = &resourceapi.NetworkDeviceData{InterfaceName: name}
	}
	return out
}
