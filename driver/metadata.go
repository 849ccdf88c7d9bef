package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	metadatav1alpha1 "k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// Where the library writes what containers can read of their devices
// (k8s.io/dynamic-resource-allocation/kubeletplugin, metadata.go): a file
// <namespace>_<name>/<request>… of each request of a claim in a directory of
// the driver's, and a CDI spec <driver>_metadata_<claim uid>_<request>.json
// that has it mounted.
const (
	metadataDir        = "dra-device-metadata"
	metadataSpecPrefix = discovery.Domain + "_metadata_"
)

// metadata keeps the files that containers read of their devices: attributes,
// and the names of interfaces that they got. The library writes them after a
// claim is prepared; a claim whose files cannot be written is prepared without.
// They are removed with the claim's record, which tells what there is, and what
// has no record is swept at the start.
type metadata struct {
	specs string // directory of CDI specs
	dir   string // directory of the claims' directories
	files disk.Files

	// names keeps a claim's files from being written while those of an earlier
	// claim of its name are removed. Keys are names in dir.
	names locks[string]
}

// options has the library write the files.
func (m *metadata) options() []kubeletplugin.Option {
	return []kubeletplugin.Option{
		// The newest version comes first; the older is for readers that know no other.
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion, metadatav1alpha1.SchemeGroupVersion}),
		kubeletplugin.CDIDirectory(m.specs),
		kubeletplugin.MetadataFileOps(kubeletplugin.MetadataFileOperations{
			WriteFile: m.write,
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
		_, err := m.files.Write(name, data, mode)
		return err
	}
	return m.alone(context.Background(), claim, func() error {
		_, err := m.files.Write(name, data, mode)
		return err
	})
}

// claimOf returns the name of the claim's directory that a file is below.
func (m *metadata) claimOf(file string) (name string, below bool) {
	path, err := filepath.Rel(m.dir, file)
	name, _, below = strings.Cut(path, "/")
	return name, err == nil && below && name != ".."
}

// alone calls do while nobody else works on a claim's directory.
func (m *metadata) alone(ctx context.Context, claim string, do func() error) error {
	unlock, err := m.names.lock(ctx, claim)
	if err != nil {
		return err
	}
	defer unlock()
	return do()
}

// removeDir removes a claim's directory unless it is in use.
func (m *metadata) removeDir(ctx context.Context, claim string, inUse func() bool) error {
	return m.alone(ctx, claim, func() error {
		if inUse() {
			return nil
		}
		return m.files.RemoveAll(filepath.Join(m.dir, claim))
	})
}

// remove removes the files of a claim; r may be nil. What is missing is no
// error. The directory stays while another claim has the same name.
func (m *metadata) remove(ctx context.Context, r *record, sameName func(*record) bool) error {
	if r == nil {
		return nil
	}
	var errs []error
	for _, result := range r.Results {
		errs = append(errs, m.files.Remove(filepath.Join(m.specs, metadataSpecPrefix+string(r.UID)+"_"+resourceclaim.BaseRequestRef(result.Request)+".json")))
	}
	if r.Name != "" {
		errs = append(errs, m.removeDir(ctx, claimDir(r), func() bool { return sameName(r) }))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove metadata of devices: %w", err)
	}
	return nil
}

// removeUnnamed removes the files of a claim of which only the UID is known:
// its specs say where the others are. A directory stays while another claim has
// the name that it is called by.
func (m *metadata) removeUnnamed(ctx context.Context, uid types.UID, inUse func(dir string) bool) error {
	specs, err := m.entries(m.specs)
	errs := []error{err}
	for _, name := range specs {
		if !strings.HasPrefix(name, metadataSpecPrefix+string(uid)+"_") {
			continue
		}
		spec := filepath.Join(m.specs, name)
		for _, dir := range m.dirsOf(spec) {
			errs = append(errs, m.removeDir(ctx, dir, func() bool { return inUse(dir) }))
		}
		errs = append(errs, m.files.Remove(spec))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove metadata of devices: %w", err)
	}
	return nil
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

// sweep removes what is there of claims that have no record in keep, and what
// interrupted writers left. Claims whose record cannot be read keep what they
// have: all directories stay, since the names of such claims are not known.
func (m *metadata) sweep(keep []*record, unreadable func(types.UID) bool) error {
	uids, names := make(map[types.UID]bool), make(map[string]bool)
	for _, r := range keep {
		uids[r.UID], names[claimDir(r)] = true, true
	}
	errs := []error{m.files.Sweep(m.specs, metadataSpecPrefix)}
	specs, err := m.entries(m.specs)
	errs = append(errs, err)
	anyUnreadable := false
	for _, name := range specs {
		rest, found := strings.CutPrefix(name, metadataSpecPrefix)
		if !found {
			continue
		}
		uid, _, _ := strings.Cut(rest, "_")
		switch {
		case unreadable(types.UID(uid)):
			anyUnreadable = true
		case !uids[types.UID(uid)]:
			errs = append(errs, m.files.Remove(filepath.Join(m.specs, name)))
		}
	}
	dirs, err := m.entries(m.dir)
	errs = append(errs, err)
	for _, name := range dirs {
		if !names[name] && !anyUnreadable {
			errs = append(errs, m.files.RemoveAll(filepath.Join(m.dir, name)))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("sweep metadata of devices: %w", err)
	}
	return nil
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
func claimDir(r *record) string { return r.Namespace + "_" + r.Name }

// metadataOf returns what containers can read of a device: all that is
// published of it, and how they call the interface that was moved to them.
func metadataOf(r *result, device *discovery.Device) *kubeletplugin.DeviceMetadata {
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
func interfaceOf(r *result) string {
	if len(r.Edits.NetDevices) != 1 {
		return ""
	}
	return r.Edits.NetDevices[0].Name
}

// hasName reports whether a claim has the name by which a directory is called.
func (s *store) hasName(dir string) bool {
	namespace, name, _ := strings.Cut(dir, "_")
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.names[types.NamespacedName{Namespace: namespace, Name: name}] > 0
}

// sameName reports whether another claim has the name of the record's: one that
// was made when the other was deleted.
func (s *store) sameName(r *record) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.names[r.named()] > 1
}
