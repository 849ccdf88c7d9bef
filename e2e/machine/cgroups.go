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

// leaf is the cgroup of the machine's first process, and of those that enter, in a cgroup v2 hierarchy: a cgroup that
// controls others may have no members.
const leaf = "init"

// A hierarchy is one tree of cgroups, mounted somewhere. Cgroup v1 has one for each controller or so, v2 has one;
// both may be there at once.
type hierarchy struct {
	mount       string // where it is mounted
	root        string // the cgroup seen at the mount point
	member      string // the cgroup of this process
	controllers string // of v1, as in /proc/self/cgroup; "" is v2
}

func (h hierarchy) v2() bool { return h.controllers == "" }

// home is the directory of the cgroup of this process.
func (h hierarchy) home() string {
	return filepath.Join(h.mount, strings.TrimPrefix(h.member, strings.TrimSuffix(h.root, "/")))
}

// mountOptions are those that mount a v1 hierarchy again.
func (h hierarchy) mountOptions() string {
	if strings.HasPrefix(h.controllers, "name=") {
		return "none," + h.controllers
	}
	return h.controllers
}

// hierarchies returns those that are mounted, read from the proc file system of host.
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

// findMount fills in where the hierarchy is mounted, and tells whether it is.
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

// A subtree is the machine's part of each hierarchy: a cgroup directly below its root.
type subtree struct {
	name        string
	hierarchies []hierarchy
}

// planSubtree makes nothing yet.
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

// create makes the cgroups so that processes can live in them. In a v2 hierarchy it switches on the controllers that
// a node needs for the root's children; they stay on, since others may have come to count on them.
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

// enableControllers lets the children of a v2 cgroup have all controllers that containers use and the cgroup has.
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

// inheritCpuset fills in what is empty in a new v1 cgroup, which until then takes no process.
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

// enter makes this process a member. The function it returns makes it a member of its former cgroups again; it is to
// be called after an error too.
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

// join makes this process a member of the cgroup with directory dir.
func join(dir string) error { return write(filepath.Join(dir, "cgroup.procs"), "0") }

// joinCgroupsOf makes this process a member of the same cgroups as another one.
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

// mountCgroups lays out /sys/fs/cgroup in a machine as it is on the host, whose hierarchies and links are given. The
// machine's cgroups are then the roots.
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
		return nil // seen nowhere but in unusual places
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

// removeCgroup removes a cgroup with those below it. The kernel lets go of the members of a dead machine a little
// after they are waited for.
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

// write writes to a file of the kernel, which is there already.
func write(path, value string) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(value)
	return errors.Join(err, file.Close())
}
