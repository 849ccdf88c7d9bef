package gather

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"k8s.io/apimachinery/pkg/util/version"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"chandler.dev/cdi"
	"chandler.dev/internal/doctor"
)

func containerRuntime(ctx context.Context, o Options, processes []process, f *doctor.Facts) {
	r := &f.Runtime
	if node := f.Cluster.Node; node.Unknown == "" && node.Value != nil {
		r.Name, r.Version, _ = strings.Cut(node.Value.Status.NodeInfo.ContainerRuntimeVersion, "://")
	}
	r.Config = withPatience(ctx, "the container runtime's configuration", func() (doctor.RuntimeConfig, error) { return runtimeConfig(o, processes, r) })
	r.Writable = withPatience(ctx, "the directory of CDI specs", func() (string, error) { return unwritableReason(o.CDIDir), nil })
	r.Specs = withPatience(ctx, "the directory of CDI specs", func() ([]doctor.Spec, error) { return claimSpecs(o.CDIDir) })
	dirs := []string{"/etc/cdi", "/var/run/cdi"}
	if r.Config.Unknown == "" {
		dirs = r.Config.Value.SpecDirs
	}
	r.Errors = withPatience(ctx, "CDI specs", func() (map[string][]string, error) { return specErrors(o, dirs) }).Value
}

// CDIEnabled reports whether the container runtime of a node reads CDI specs. It uses the name and
// version in the node's status, such as "containerd://1.7.2", and the configuration below root, the
// host's root directory. The host's processes in proc show where the configuration is. An error means
// that the answer is not known.
func CDIEnabled(root, proc, status string) (bool, error) {
	var r doctor.RuntimeFacts
	r.Name, r.Version, _ = strings.Cut(status, "://")
	v, err := version.ParseGeneric(r.Version)
	if err != nil {
		return false, fmt.Errorf("version of the runtime: %w", err)
	}
	switch {
	case doctor.IsBeforeCDI(r.Name, v):
		return false, nil
	case r.Name == "cri-o", r.Name == "containerd" && v.AtLeast(version.MajorMinor(2, 4)):
		return true, nil // CDI cannot be disabled; see containerdConfig and crioConfig
	}
	config, err := runtimeConfig(Options{Root: root}, processesOf(proc), &r)
	if err == nil && len(config.Files) == 0 {
		err = errors.New("the runtime's configuration cannot be read here")
	}
	return config.CDI && err == nil, err
}

// runtimeConfig reads the configuration of the container runtime. If the node object does not
// name the runtime, runtimeConfig determines it from the running processes and sets r.Name.
func runtimeConfig(o Options, processes []process, r *doctor.RuntimeFacts) (doctor.RuntimeConfig, error) {
	if o.Root == "" {
		return doctor.RuntimeConfig{}, errors.New("the runtime's configuration is not in the agent's pod; run doctor on the node")
	}
	containerd, crio := named(processes, "containerd"), named(processes, "crio")
	switch {
	case r.Name == "cri-o" || r.Name == "" && len(containerd) == 0 && len(crio) > 0:
		r.Name = "cri-o"
		return crioConfig(o, crio)
	case r.Name == "containerd" || r.Name == "" && len(containerd) > 0:
		r.Name = "containerd"
		return containerdConfig(o, containerd, r.Version)
	case r.Name != "":
		return doctor.RuntimeConfig{}, fmt.Errorf("the configuration of %s is unknown here", r.Name)
	}
	return doctor.RuntimeConfig{}, errors.New("no container runtime is visible")
}

// containerdFile is the relevant part of a containerd configuration file.
type containerdFile struct {
	Version int                       `toml:"version"`
	Imports []string                  `toml:"imports"`
	Plugins map[string]map[string]any `toml:"plugins"`
}

// The sections of the CRI plugin: the first up to containerd 1.7, the second from 2.0 on.
// containerd 2.0 and later read both.
var criSections = []string{"io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"}

// containerdConfig reads a configuration as containerd does (cmd/containerd/server/config/
// config.go, LoadConfig, in 1.7 and 2.4): first the file, then its imports. Files read later
// take precedence. Up to 1.7, a plugin's section replaces an earlier section; from 2.0 on, the
// sections are merged.
func containerdConfig(o Options, daemons []process, said string) (c doctor.RuntimeConfig, err error) {
	name := "/etc/containerd/config.toml"
	if len(daemons) == 1 {
		flags := daemons[0].flags()
		for _, flag := range []string{"config", "c"} {
			if flags[flag] != "" {
				name = flags[flag]
			}
		}
		c.Started, _ = daemons[0].startTime()
	}
	v, unknown := version.ParseGeneric(said)
	merged := make(map[string]any)
	pending, loaded, explicit := []string{name}, make(map[string]bool), 0
	for len(pending) > 0 {
		name, pending = pending[0], pending[1:]
		if loaded[name] {
			continue
		}
		loaded[name] = true
		var file containerdFile
		if err := read(&c, o, name, &file); errors.Is(err, fs.ErrNotExist) && len(loaded) == 1 {
			break // containerd uses its defaults
		} else if err != nil {
			return c, err
		}
		explicit = max(explicit, file.Version)
		for _, section := range criSections {
			if settings, there := file.Plugins[section]; there {
				if unknown == nil && v.LessThan(version.MajorMinor(2, 0)) {
					clear(merged)
				}
				mergeSettings(merged, settings)
			}
		}
		for _, pattern := range file.Imports {
			if !filepath.IsAbs(pattern) {
				pattern = filepath.Join(filepath.Dir(name), pattern)
			}
			matches, _ := filepath.Glob(filepath.Join(o.Root, pattern))
			for _, match := range matches {
				pending = append(pending, "/"+strings.TrimPrefix(strings.TrimPrefix(match, strings.TrimRight(o.Root, "/")), "/"))
			}
		}
	}
	on, set := merged["enable_cdi"].(bool)
	switch {
	case unknown == nil && v.AtLeast(version.MajorMinor(2, 4)):
		c.CDI = true // CDI cannot be disabled any more (RELEASES.md)
	case set:
		c.CDI = on
	case unknown == nil:
		c.CDI = v.AtLeast(version.MajorMinor(2, 0))
	case explicit >= 3:
		c.CDI = true // only containerd 2.0 and later support version 3
	default:
		return c, fmt.Errorf("%s does not say, and which version of containerd runs is not known", "/etc/containerd/config.toml")
	}
	c.SpecDirs = stringsOf(merged["cdi_spec_dirs"])
	if c.SpecDirs == nil {
		c.SpecDirs = []string{"/etc/cdi", "/var/run/cdi"} // internal/cri/config/config_unix.go
	}
	return c, nil
}

// mergeSettings copies settings into to, replacing earlier values. Lists are extended by the values
// that they lack.
func mergeSettings(to, from map[string]any) {
	for key, value := range from {
		added, isList := value.([]any)
		before, had := to[key].([]any)
		if !isList || !had {
			to[key] = value
			continue
		}
		for _, one := range added {
			if !slices.Contains(before, one) {
				before = append(before, one)
			}
		}
		to[key] = before
	}
}

func stringsOf(value any) (found []string) {
	list, _ := value.([]any)
	for _, one := range list {
		if text, ok := one.(string); ok {
			found = append(found, text)
		}
	}
	return found
}

// read decodes a configuration file, and adds its name and modification time to c.
func read(c *doctor.RuntimeConfig, o Options, name string, into any) error {
	file := filepath.Join(o.Root, name)
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := toml.Unmarshal(data, into); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	c.Files = append(c.Files, name)
	if info, err := os.Stat(file); err == nil && info.ModTime().After(c.Changed) {
		c.Changed = info.ModTime()
	}
	return nil
}

// crioConfig reads the configuration of CRI-O: the main file, then the files of the directory
// crio.conf.d in the order of their names (crio.conf.d(5)). In CRI-O, CDI is always enabled.
func crioConfig(o Options, daemons []process) (c doctor.RuntimeConfig, err error) {
	c.CDI, c.SpecDirs = true, []string{"/etc/cdi", "/var/run/cdi"}
	if len(daemons) == 1 {
		c.Started, _ = daemons[0].startTime()
	}
	files := []string{"/etc/crio/crio.conf"}
	matches, _ := filepath.Glob(filepath.Join(o.Root, "etc/crio/crio.conf.d/*"))
	for _, match := range matches {
		files = append(files, "/etc/crio/crio.conf.d/"+filepath.Base(match))
	}
	for _, name := range files {
		var file struct {
			CRIO struct {
				Runtime struct {
					Dirs []string `toml:"cdi_spec_dirs"`
				} `toml:"runtime"`
			} `toml:"crio"`
		}
		if err := read(&c, o, name, &file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return c, err
		}
		if dirs := file.CRIO.Runtime.Dirs; dirs != nil {
			c.SpecDirs = dirs
		}
	}
	return c, nil
}

// claimSpecs returns the CDI specs of claims in a directory.
func claimSpecs(dir string) (specs []doctor.Spec, err error) {
	uids, err := cdi.Dir{Path: dir}.Claims()
	for _, uid := range uids {
		specs = append(specs, doctor.Spec{File: filepath.Join(dir, fmt.Sprintf("%s-%s_%s.json", cdi.Vendor, cdi.Class, uid)), UID: string(uid)})
	}
	return specs, err
}

// specErrors reads all CDI specs as container runtimes do, and returns the errors by file.
func specErrors(o Options, dirs []string) (map[string][]string, error) {
	var rooted []string
	for _, dir := range dirs {
		rooted = append(rooted, filepath.Join(o.Root, dir))
	}
	if !slices.ContainsFunc(rooted, func(dir string) bool { return dir == o.CDIDir }) {
		rooted = append(rooted, o.CDIDir)
	}
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(rooted...), cdilib.WithAutoRefresh(false))
	if err != nil {
		return nil, err
	}
	found := make(map[string][]string)
	all := cache.GetErrors()
	for _, file := range slices.Sorted(maps.Keys(all)) {
		if filepath.Ext(file) == "" {
			continue // a missing directory
		}
		for _, err := range all[file] {
			found[file] = append(found[file], err.Error())
		}
	}
	return found, nil
}
