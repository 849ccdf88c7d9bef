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

// userFiles is the set of driver files, hooks and variables for containers, from either source.
type userFiles struct {
	mounts []*specs.Mount
	links  []link // links to create in the container
	hooks  []call
	env    []string
}

// link is a symbolic link in a container. The target may be relative to the link's directory.
type link struct{ target, path string }

// call is an invocation of one of the hooks in package hook.
type call struct {
	name  string
	flags []string // such as "--folder=/usr/lib64"
}

// filesBelow returns the edits that give containers the files of the driver below its root. The
// edits follow the answer of the NVIDIA CDI code if there is an answer for the loaded driver, and
// otherwise the files that the agent finds itself. odd reports the unusable parts of the NVIDIA
// answer, which do no harm to the GPUs.
func (d *driver) filesBelow(root string) (edits specs.ContainerEdits, odd, err error) {
	if d.installer {
		return specs.ContainerEdits{Mounts: installerMounts(root)}, nil, nil
	}
	if d.version == "" {
		return specs.ContainerEdits{}, nil, errors.New("driver root: the driver's version is not known, and so not its libraries")
	}
	files, odd := d.listedFiles(root)
	if files == nil {
		files, err = d.foundFiles(root)
	}
	if err != nil {
		return specs.ContainerEdits{}, odd, err
	}
	return d.edits(files), odd, nil
}

// edits converts files to CDI edits.
//
// A link that leads to a mounted file becomes a mount of that file at the link's path. Programs
// find the file by the same name, and a loader treats both names as one library because both are
// one file. So libcuda.so.1 also exists where hooks do not run: where the runtime forbids hooks,
// and in the device plugin API without CDI. Hooks create the other links.
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
		if to := at[resolveLinks(leads, l.path)]; to != nil {
			add(&specs.Mount{HostPath: to.HostPath, ContainerPath: l.path, Options: to.Options})
		} else if i < len(files.links) {
			rest = append(rest, "--link="+l.target+"::"+l.path)
		}
	}
	slices.SortStableFunc(edits.Mounts, func(a, b *specs.Mount) int { return strings.Compare(a.ContainerPath, b.ContainerPath) })
	if len(rest) > 0 {
		// The links must exist before the hook that builds the loader's cache.
		files.hooks = slices.Insert(files.hooks, 0, call{"create-symlinks", rest})
	}
	if d.host.Hooks != "" {
		for _, h := range files.hooks {
			args := append([]string{path.Base(d.host.Hooks), "hook", h.name}, h.flags...)
			edits.Hooks = append(edits.Hooks, &specs.Hook{HookName: "createContainer", Path: d.host.Hooks, Args: args})
		}
	}
	return edits
}

// resolveLinks resolves links from a path: libcuda.so -> libcuda.so.1 -> libcuda.so.535.104.05.
func resolveLinks(leads map[string]string, name string) string {
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

// linksTo returns the links that lie beside mounted libraries on the host, converted to the
// corresponding paths in the container. Programs open libraries by such links.
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

// hookFlags lists the hooks that the NVIDIA CDI code may request, each with the flags that are
// passed on.
var hookFlags = map[string][]string{
	"create-symlinks":                  {"link"},
	"enable-cuda-compat":               {"host-driver-version", "host-cuda-version", "cuda-compat-container-root"},
	"update-ldcache":                   {"folder"},
	"disable-device-node-modification": nil,
	"update-application-profile":       nil,
}

// listedFiles returns the files that the NVIDIA CDI code lists for the root. The result is nil if
// there is no answer, or if the answer is for another driver version: a new driver was loaded
// since, or the root belongs to a version other than the loaded one.
func (d *driver) listedFiles(root string) (*userFiles, error) {
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
		if !userspace.IsBelow(m.HostPath, root) {
			return nil, fmt.Errorf("user space: %s is not below the driver root %s", m.HostPath, root)
		}
		// Skip missing files. A socket disappears with its daemon, and a container with a mount of
		// a missing path does not start.
		if d.host.FileExists(m.HostPath) {
			files.mounts = append(files.mounts, m)
		}
	}
	// The NVIDIA code follows links to programs as if the agent's root were the host's root. So the
	// answer lacks programs behind links to /etc/alternatives, as Debian installs them.
	for _, m := range d.programs(root) {
		there := slices.ContainsFunc(files.mounts, func(other *specs.Mount) bool { return other.ContainerPath == m.ContainerPath })
		if !there {
			files.mounts = append(files.mounts, m)
		}
	}
	for _, variable := range answer.Edits.Env {
		if !strings.HasPrefix(variable, "NVIDIA_VISIBLE_DEVICES=") { // visible sets this variable
			files.env = append(files.env, variable)
		}
	}
	var odd []error
	for _, h := range answer.Edits.Hooks {
		odd = append(odd, files.addHook(h.Args[1], h.Args[2:]))
	}
	return files, errors.Join(odd...)
}

// addHook adds a hook that the NVIDIA CDI code requests. An unknown hook is an error and is left
// out. A container without the hook still has all files.
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

// libraryDirs lists the directories below a driver root that distributions, and the installers of
// NVIDIA and Google, use for the driver's libraries.
var libraryDirs = []string{
	"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu",
	"lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu",
}

// programs are the driver's programs. Their version must match the driver's.
var programs = []string{"nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-debugdump", "nvidia-persistenced", "nvidia-smi"}

// foundFiles returns the driver's libraries and programs below its root, each for its path in the
// root, and the hooks that the NVIDIA CDI code requests if there is nothing else
// (nvidia-container-toolkit v1.20, pkg/nvcdi). Without the hooks, images find the libraries only if
// they search the directory that the host uses.
func (d *driver) foundFiles(root string) (*userFiles, error) {
	for _, dir := range libraryDirs {
		if !d.host.FileExists(path.Join(root, dir, "libcuda.so."+d.version)) {
			continue
		}
		return &userFiles{
			mounts: append(d.libraries(root, dir), d.programs(root)...),
			hooks: []call{
				{"enable-cuda-compat", []string{"--host-driver-version=" + d.version}}, // before the hook that builds the loader's cache
				{"update-ldcache", []string{"--folder=/" + dir}},
				{"disable-device-node-modification", nil},
				{"update-application-profile", nil},
			},
		}, nil
	}
	return nil, fmt.Errorf("driver root: no libcuda.so.%s in the library directories below %s", d.version, root)
}

// libraries returns mounts of the libraries in a directory that have the driver's version.
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
			if file := path.Join(root, dir, program); d.host.FileExists(file) {
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
