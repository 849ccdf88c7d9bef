package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery/families/nvidia/userspace"
)

// userFiles are what containers need of a driver's files, whoever said so.
type userFiles struct {
	mounts []*specs.Mount
	links  []link // of the container
	hooks  []call
	env    []string
}

// link is a symbolic link of a container. The target may be relative to it.
type link struct{ target, path string }

// call is a hook that is to be called, of those in package hook.
type call struct {
	name  string
	flags []string // "--folder=/usr/lib64"
}

// filesBelow returns how containers have the files of the driver below its root: as NVIDIA's own
// code says, where it was asked and speaks of the driver that is loaded, and else what is found
// here. Odd is what of NVIDIA's answer is of no use, which does the GPUs no harm.
func (d *driver) filesBelow(root string) (edits specs.ContainerEdits, odd, err error) {
	if d.installer {
		return specs.ContainerEdits{Mounts: installerMounts(root)}, nil, nil
	}
	if d.version == "" {
		return specs.ContainerEdits{}, nil, errors.New("driver root: the driver's version is not known, and so not its libraries")
	}
	files, odd := d.toldFiles(root)
	if files == nil {
		files, err = d.foundFiles(root)
	}
	if err != nil {
		return specs.ContainerEdits{}, odd, err
	}
	return d.edits(files), odd, nil
}

// edits says files in the words of CDI.
//
// A link that leads to a file which is mounted becomes a mount of that file at the link's path.
// Programs find it by its name all the same, and a loader takes both names for one library, since
// they are one file. So libcuda.so.1 is there without hooks too: where the runtime forbids them,
// and in the device-plugin API without CDI. Hooks make the other links.
func (d *driver) edits(files *userFiles) specs.ContainerEdits {
	edits := specs.ContainerEdits{Env: files.env}
	at := make(map[string]*specs.Mount)
	add := func(m *specs.Mount) {
		if at[m.ContainerPath] == nil {
			at[m.ContainerPath] = m
			edits.Mounts = append(edits.Mounts, m)
		}
	}
	for _, m := range files.mounts {
		add(m)
	}
	links := slices.Concat(files.links, d.linksTo(files.mounts))
	leads := make(map[string]string)
	for _, l := range links {
		leads[l.path] = l.target
	}
	var rest []string
	for i, l := range links {
		if to := at[follow(leads, l.path)]; to != nil {
			add(&specs.Mount{HostPath: to.HostPath, ContainerPath: l.path, Options: to.Options})
		} else if i < len(files.links) {
			rest = append(rest, "--link="+l.target+"::"+l.path)
		}
	}
	slices.SortStableFunc(edits.Mounts, func(a, b *specs.Mount) int { return strings.Compare(a.ContainerPath, b.ContainerPath) })
	if len(rest) > 0 {
		files.hooks = slices.Insert(files.hooks, 0, call{"create-symlinks", rest}) // before the loader's cache is made
	}
	if d.host.Hooks != "" {
		for _, h := range files.hooks {
			args := append([]string{path.Base(d.host.Hooks), "hook", h.name}, h.flags...)
			edits.Hooks = append(edits.Hooks, &specs.Hook{HookName: "createContainer", Path: d.host.Hooks, Args: args})
		}
	}
	return edits
}

// follow returns where links lead from a path: libcuda.so -> libcuda.so.1 -> libcuda.so.535.104.05.
func follow(leads map[string]string, name string) string {
	for range 4 {
		target, ok := leads[name]
		if !ok {
			break
		}
		if !path.IsAbs(target) {
			target = path.Join(path.Dir(name), target)
		}
		name = target
	}
	return name
}

// linksTo returns the links that lie beside mounted libraries on the host, as they are to be
// beside them in the container. Programs ask for libraries by such links.
func (d *driver) linksTo(mounts []*specs.Mount) (links []link) {
	seen := make(map[string]bool)
	for _, m := range mounts {
		dir := path.Dir(m.HostPath)
		if seen[dir] || !isLibrary(path.Base(m.HostPath)) {
			continue
		}
		seen[dir] = true
		entries, err := fs.ReadDir(d.host.FS, strings.TrimPrefix(dir, "/"))
		if err != nil {
			continue
		}
		for _, entry := range entries {
			name := entry.Name()
			if entry.Type() != fs.ModeSymlink || !isLibrary(name) {
				continue
			}
			target, err := fs.ReadLink(d.host.FS, strings.TrimPrefix(path.Join(dir, name), "/"))
			if err == nil && !strings.Contains(target, "/") {
				links = append(links, link{target, path.Join(path.Dir(m.ContainerPath), name)})
			}
		}
	}
	return links
}

func isLibrary(name string) bool {
	return strings.HasPrefix(name, "lib") && strings.Contains(name, ".so")
}

// hookFlags are the hooks that NVIDIA's code may ask for, with those of their flags that are
// passed on.
var hookFlags = map[string][]string{
	"create-symlinks":                  {"link"},
	"enable-cuda-compat":               {"host-driver-version", "host-cuda-version", "cuda-compat-container-root"},
	"update-ldcache":                   {"folder"},
	"disable-device-node-modification": nil,
	"update-application-profile":       nil,
}

// toldFiles returns what NVIDIA's own code says of the root, nil where nobody asked it, or it
// speaks of another driver: one was loaded since, or the root has not the one that is loaded.
func (d *driver) toldFiles(root string) (*userFiles, error) {
	text, err := d.host.ReadText(userspace.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	answer, err := userspace.Parse(text)
	if err != nil || answer.Driver != d.version {
		return nil, err
	}
	files := &userFiles{}
	for _, m := range answer.Edits.Mounts {
		if !userspace.Below(m.HostPath, root) {
			return nil, fmt.Errorf("user space: %s is not below the driver root %s", m.HostPath, root)
		}
		// A socket goes with its daemon, and a container with a mount of nothing does not start.
		if d.host.Exists(m.HostPath) {
			files.mounts = append(files.mounts, m)
		}
	}
	// Its code follows links to programs as if the agent's root were the host's, and so misses those
	// that lead to /etc/alternatives, as Debian has them.
	for _, m := range d.programs(root) {
		there := slices.ContainsFunc(files.mounts, func(other *specs.Mount) bool { return other.ContainerPath == m.ContainerPath })
		if !there {
			files.mounts = append(files.mounts, m)
		}
	}
	for _, variable := range answer.Edits.Env {
		if !strings.HasPrefix(variable, "NVIDIA_VISIBLE_DEVICES=") { // [visible] says it
			files.env = append(files.env, variable)
		}
	}
	var odd []error
	for _, h := range answer.Edits.Hooks {
		odd = append(odd, files.addHook(h.Args[1], h.Args[2:]))
	}
	return files, errors.Join(odd...)
}

// addHook adds a hook as NVIDIA's code asks for it. A hook that is not known is left out: a container
// without it has all files.
func (f *userFiles) addHook(name string, args []string) error {
	passed, ok := hookFlags[name]
	if !ok {
		return fmt.Errorf("user space: hook %.60q is not known", name)
	}
	h := call{name: name}
	for i := 0; i < len(args); i++ {
		flag, value, ok := strings.Cut(args[i], "=")
		if !ok && i+1 < len(args) {
			i++
			value = args[i]
		}
		flag = strings.TrimPrefix(flag, "--")
		if !slices.Contains(passed, flag) {
			return fmt.Errorf("user space: hook %s: flag %.60q is not known", name, flag)
		}
		if target, at, ok := strings.Cut(value, "::"); name == "create-symlinks" {
			if !ok || target == "" || userspace.CheckPath(at) != nil {
				return fmt.Errorf("user space: hook %s: no link: %.60q", name, value)
			}
			f.links = append(f.links, link{target, at})
			continue
		}
		h.flags = append(h.flags, "--"+flag+"="+value)
	}
	if name != "create-symlinks" {
		f.hooks = append(f.hooks, h)
	}
	return nil
}

// libraryDirs are where distributions, and NVIDIA's and Google's installers,
// put the driver's libraries below its root.
var libraryDirs = []string{
	"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu",
	"lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu",
}

// programs come with the driver and must be of its version.
var programs = []string{"nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-debugdump", "nvidia-persistenced", "nvidia-smi"}

// foundFiles returns the driver's libraries and programs below its root, each for the path that it
// has there, and what NVIDIA's code asks for where there are only these (nvidia-container-toolkit
// v1.20, pkg/nvcdi). Without the hooks, images find the libraries only if they look in the
// directory in which the host has them.
func (d *driver) foundFiles(root string) (*userFiles, error) {
	for _, dir := range libraryDirs {
		if !d.host.Exists(path.Join(root, dir, "libcuda.so."+d.version)) {
			continue
		}
		return &userFiles{
			mounts: append(d.libraries(root, dir), d.programs(root)...),
			hooks: []call{
				{"enable-cuda-compat", []string{"--host-driver-version=" + d.version}}, // the loader's cache is made after it
				{"update-ldcache", []string{"--folder=/" + dir}},
				{"disable-device-node-modification", nil},
				{"update-application-profile", nil},
			},
		}, nil
	}
	return nil, fmt.Errorf("driver root: no libcuda.so.%s in the library directories below %s", d.version, root)
}

// libraries returns mounts of the libraries of the driver's version in a directory.
func (d *driver) libraries(root, dir string) []*specs.Mount {
	entries, err := fs.ReadDir(d.host.FS, strings.TrimPrefix(path.Join(root, dir), "/"))
	if err != nil {
		return nil
	}
	var mounts []*specs.Mount
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, "lib") && strings.HasSuffix(name, ".so."+d.version) {
			mounts = append(mounts, mount(path.Join(root, dir, name), path.Join("/", dir, name)))
		}
	}
	return mounts
}

// programs returns mounts of the driver's programs.
func (d *driver) programs(root string) []*specs.Mount {
	var mounts []*specs.Mount
	for _, program := range programs {
		for _, dir := range []string{"usr/bin", "bin"} {
			if file := path.Join(root, dir, program); d.host.Exists(file) {
				mounts = append(mounts, mount(file, "/usr/bin/"+program))
				break
			}
		}
	}
	return mounts
}

func mount(hostPath, containerPath string) *specs.Mount {
	return &specs.Mount{
		HostPath:      hostPath,
		ContainerPath: containerPath,
		Options:       []string{"ro", "nosuid", "nodev", "rbind", "rprivate"},
	}
}
