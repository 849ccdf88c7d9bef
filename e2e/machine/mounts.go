package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// layOutFiles changes the mounts inherited from the host into those of a machine. The order is
// important: directories of the host are opened before other mounts hide them, and changes
// precede the read-only remount of the root file system.
func layOutFiles(cfg Config) error {
	if err := mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	found, err := hierarchies(os.DirFS("/"))
	if err != nil {
		return err
	}
	links, err := cgroupLinks()
	if err != nil {
		return err
	}
	trees, err := takeTrees(cfg)
	if err != nil {
		return err
	}
	err = inOrder(
		layOutRun,
		layOutEtc,
		func() error { return placeTrees(trees) },
		func() error { return mountKernel(found, links) },
		func() error { return standIn(cfg.Files) },
		readOnlyRoot,
		// Mount propagation between the machine and its containers works as on any host with a
		// shared root.
		func() error { return mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "") },
	)
	return err
}

func inOrder(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// A tree is an open directory of the host, which other mounts may hide.
type tree struct {
	fd     int
	target string
}

// takeTrees opens the directories to mount in the machine, in mounting order.
func takeTrees(cfg Config) ([]tree, error) {
	sources := [][2]string{ // source, target
		{cfg.Dir, StateDir},
		{filepath.Dir(cfg.Program), ProgramDir},
		{os.TempDir(), os.TempDir()}, // on itself, to remain writable
	}
	for _, own := range cfg.Own {
		sources = append(sources, [2]string{filepath.Join(cfg.Dir, own), own})
	}
	var trees []tree
	for _, s := range sources {
		fd, err := unix.OpenTree(unix.AT_FDCWD, s[0], unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return nil, fmt.Errorf("take %s: %w", s[0], err)
		}
		trees = append(trees, tree{fd: fd, target: s[1]})
	}
	return trees, nil
}

// placeTrees mounts the opened directories. Missing mount points are created below /run and
// /etc, where the host remains unchanged.
func placeTrees(trees []tree) error {
	for _, t := range trees {
		if err := os.MkdirAll(t.target, 0o755); err != nil {
			return err
		}
		if err := unix.MoveMount(t.fd, "", unix.AT_FDCWD, t.target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("place %s: %w", t.target, err)
		}
		if err := unix.Close(t.fd); err != nil {
			return err
		}
	}
	return nil
}

// layOutRun mounts an empty /run. /var/run usually is a link to /run.
func layOutRun() error {
	if err := mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
		return err
	}
	return os.Mkdir(ownDir, 0o755)
}

// layOutEtc mounts an overlay on /etc, so the machine can change its files. There are no name
// servers, because the machine has no route to them.
func layOutEtc() error {
	upper, work := ownDir+"/etc/upper", ownDir+"/etc/work"
	for _, dir := range []string{upper, work} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := mount("overlay", "/etc", "overlay", 0, "lowerdir=/etc,upperdir="+upper+",workdir="+work); err != nil {
		return err
	}
	const resolv = "/etc/resolv.conf" // may be a link into /run on the host
	if err := os.Remove(resolv); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(resolv, nil, 0o644)
}

// mountKernel mounts the file systems that the kernel provides for each namespace.
func mountKernel(found []hierarchy, links map[string]string) error {
	const flags = unix.MS_NOSUID | unix.MS_NOEXEC
	return inOrder(
		func() error { return mount("proc", "/proc", "proc", flags|unix.MS_NODEV, "") },
		func() error { return mount("sysfs", "/sys", "sysfs", flags|unix.MS_NODEV, "") },
		func() error { return mountCgroups(found, links) },
		func() error {
			return mount("devpts", "/dev/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=620,gid=5")
		},
		func() error { return mount("tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777") },
	)
}

// standIn mounts replacement files over existing files.
func standIn(files map[string]string) error {
	dir := ownDir + "/files"
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for path, content := range files {
		file, err := os.CreateTemp(dir, "")
		if err != nil {
			return err
		}
		if _, err := file.WriteString(content); err != nil {
			return err
		}
		if err := file.Close(); err != nil {
			return err
		}
		if err := mount(file.Name(), path, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	return nil
}

// readOnlyRoot makes the root file system read-only. File systems mounted below keep their
// flags.
func readOnlyRoot() error {
	attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	if err := unix.MountSetattr(unix.AT_FDCWD, "/", 0, attr); err != nil {
		return fmt.Errorf("make / read-only: %w", err)
	}
	return nil
}

func mount(source, target, kind string, flags uintptr, options string) error {
	if err := unix.Mount(source, target, kind, flags, options); err != nil {
		what := kind
		if what == "" {
			what = "flags " + strconv.FormatUint(uint64(flags), 16)
		}
		return fmt.Errorf("mount %s on %s: %w", what, target, err)
	}
	return nil
}
