package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// leaf is the cgroup of the machine's first process and of entering processes in a cgroup v2
// hierarchy. A v2 cgroup with controlled children may not contain processes.
const leaf = "init"

// A hierarchy is a mounted tree of cgroups. Cgroup v1 has about one hierarchy per controller,
// v2 has one. Both versions may be mounted at once.
type hierarchy struct {
	mount       string // the mount point
	root        string // the cgroup visible at the mount point
	member      string // the cgroup of this process
	controllers string // of v1, as in /proc/self/cgroup; "" for v2
}

func (h hierarchy) v2() bool { return h.controllers == "" }

// home returns the directory of this process's cgroup.
func (h hierarchy) home() string {
	return filepath.Join(h.mount, strings.TrimPrefix(h.member, strings.TrimSuffix(h.root, "/")))
}

// mountOptions returns the options for another mount of a v1 hierarchy.
func (h hierarchy) mountOptions() string {
	if strings.HasPrefix(h.controllers, "name=") {
		return "none," + h.controllers
	}
	return h.controllers
}

// hierarchies returns the mounted hierarchies according to the proc file system of host.
func hierarchies(host fs.FS) ([]hierarchy, error) {
	members, err := fs.ReadFile(host, "proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	mounts, err := fs.ReadFile(host, "proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var found []hierarchy
	for line := range strings.Lines(string(members)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			continue
		}
		h := hierarchy{controllers: fields[1], member: fields[2]}
		if h.findMount(string(mounts)) {
			found = append(found, h)
		}
	}
	return found, nil
}

// findMount sets root and mount, and reports whether the hierarchy is mounted.
func (h *hierarchy) findMount(mountinfo string) bool {
	for line := range strings.Lines(mountinfo) {
		// 36 35 98:0 /root /mount/point rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
		mount, super, _ := strings.Cut(strings.TrimSpace(line), " - ")
		mountFields, superFields := strings.Fields(mount), strings.Fields(super)
		if len(mountFields) < 5 || len(superFields) < 3 {
			continue
		}
		kind, options := superFields[0], strings.Split(superFields[2], ",")
		if h.v2() && kind == "cgroup2" || !h.v2() && kind == "cgroup" && containsAll(options, strings.Split(h.controllers, ",")) {
			h.root, h.mount = mountFields[3], mountFields[4]
			return true
		}
	}
	return false
}

func containsAll(all, wanted []string) bool {
	return !slices.ContainsFunc(wanted, func(s string) bool { return !slices.Contains(all, s) })
}

// A subtree is the machine's part of each hierarchy: a cgroup directly below the root.
type subtree struct {
	name        string
	hierarchies []hierarchy
}

// planSubtree returns a subtree without creating its cgroups.
func planSubtree(host fs.FS, name string) (*subtree, error) {
	found, err := hierarchies(host)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, errors.New("no cgroup hierarchy is mounted")
	}
	return &subtree{name: name, hierarchies: found}, nil
}

func (s *subtree) dir(h hierarchy) string { return filepath.Join(h.mount, s.name) }

func (s *subtree) dirs() []string {
	var dirs []string
	for _, h := range s.hierarchies {
		dirs = append(dirs, s.dir(h))
	}
	return dirs
}

// create creates the cgroups and prepares them for processes. In a v2 hierarchy, create
// enables the controllers that a node needs for the root's children. The controllers remain
// enabled, because other processes may depend on them.
func (s *subtree) create() error {
	for _, h := range s.hierarchies {
		if err := os.Mkdir(s.dir(h), 0o755); err != nil {
			return err
		}
		var err error
		if h.v2() {
			err = enableControllers(h.mount)
		} else if strings.Contains(h.controllers, "cpuset") {
			err = inheritCpuset(s.dir(h))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", s.dir(h), err)
		}
	}
	return nil
}

// enableControllers enables all available controllers used by containers for the children of a
// v2 cgroup.
func enableControllers(dir string) error {
	available, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for _, controller := range strings.Fields(string(available)) {
		if !slices.Contains([]string{"cpu", "cpuset", "hugetlb", "io", "memory", "pids"}, controller) {
			continue
		}
		if err := write(filepath.Join(dir, "cgroup.subtree_control"), "+"+controller); err != nil {
			return err
		}
	}
	return nil
}

// inheritCpuset fills the empty settings of a new v1 cgroup, which until then accepts no
// processes.
func inheritCpuset(dir string) error {
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(filepath.Dir(dir), file))
		if err != nil {
			return err
		}
		if err := write(filepath.Join(dir, file), strings.TrimSpace(string(value))); err != nil {
			return err
		}
	}
	return nil
}

// enter moves this process into the subtree. leave moves the process back into its former
// cgroups. Call leave after an error, too.
func (s *subtree) enter() (leave func() error, err error) {
	var entered []hierarchy
	leave = func() error {
		var errs []error
		for _, h := range entered {
			errs = append(errs, join(h.home()))
		}
		return errors.Join(errs...)
	}
	for _, h := range s.hierarchies {
		if err := join(s.dir(h)); err != nil {
			return leave, err
		}
		entered = append(entered, h)
	}
	return leave, nil
}

// join moves this process into the cgroup with directory dir.
func join(dir string) error { return write(filepath.Join(dir, "cgroup.procs"), "0") }

// joinCgroupsOf moves this process into the cgroups of another process.
func joinCgroupsOf(pid string) error {
	own, err := hierarchies(os.DirFS("/"))
	if err != nil {
		return err
	}
	members, err := os.ReadFile(filepath.Join("/proc", pid, "cgroup"))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(members)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for _, h := range own {
			if len(fields) != 3 || fields[1] != h.controllers {
				continue
			}
			h.member = fields[2]
			if err := join(h.home()); err != nil {
				return err
			}
		}
	}
	return nil
}

// mountCgroups mounts /sys/fs/cgroup in a machine with the hierarchies and links of the host.
// The machine's cgroups become the roots.
func mountCgroups(found []hierarchy, links map[string]string) error {
	if !slices.ContainsFunc(found, func(h hierarchy) bool { return h.mount == cgroupRoot }) {
		if err := mount("tmpfs", cgroupRoot, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=755"); err != nil {
			return err
		}
	}
	for _, h := range found {
		if err := mountHierarchy(h); err != nil {
			return err
		}
	}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(cgroupRoot, name)); err != nil {
			return err
		}
	}
	return nil
}

func mountHierarchy(h hierarchy) error {
	if !strings.HasPrefix(h.mount, cgroupRoot) {
		return nil // mounted in an unusual place and not needed
	}
	if err := os.MkdirAll(h.mount, 0o755); err != nil {
		return err
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if !h.v2() {
		return mount("cgroup", h.mount, "cgroup", flags, h.mountOptions())
	}
	if err := mount("cgroup2", h.mount, "cgroup2", flags, ""); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(h.mount, leaf), 0o755); err != nil {
		return err
	}
	if err := join(filepath.Join(h.mount, leaf)); err != nil {
		return err
	}
	return enableControllers(h.mount)
}

// cgroupLinks returns the symbolic links among the hierarchies, such as cpu for cpu,cpuacct.
func cgroupLinks() (map[string]string, error) {
	entries, err := os.ReadDir(cgroupRoot)
	if err != nil {
		return nil, err
	}
	links := map[string]string{}
	for _, entry := range entries {
		if entry.Type() != fs.ModeSymlink {
			continue
		}
		if links[entry.Name()], err = os.Readlink(filepath.Join(cgroupRoot, entry.Name())); err != nil {
			return nil, err
		}
	}
	return links, nil
}

// removeCgroup removes a cgroup and its descendants. The kernel releases the processes of a
// dead machine shortly after the wait for them has returned.
func removeCgroup(dir string) error {
	const patience, step = 5 * time.Second, 20 * time.Millisecond
	var err error
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(step) {
		if err = removeCgroupTree(dir); !errors.Is(err, syscall.EBUSY) {
			return err
		}
	}
	return err
}

func removeCgroupTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if !entry.IsDir() {
			continue
		}
		if err := removeCgroupTree(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	return os.Remove(dir)
}

// write writes to an existing file of the kernel.
func write(path, value string) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(value)
	return errors.Join(err, file.Close())
}
