package sharing

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// programDirs are the directories of programs in a root.
var programDirs = []string{"usr/bin", "bin", "usr/local/bin", "usr/local/nvidia/bin"}

// The claim's directories in the mount namespace of a daemon.
const (
	insidePipes = "/tmp/nvidia-mps"
	insideLogs  = "/tmp/nvidia-mps-log"
)

// environment returns the environment of the programs for a claim. uid is "" for programs without a
// claim.
func (k *Supervisor) environment(uid string) []string {
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	switch {
	case uid == "":
		return env
	case k.config.Private:
		return append(env, processMark+k.dir(uid), "CUDA_MPS_PIPE_DIRECTORY="+insidePipes, "CUDA_MPS_LOG_DIRECTORY="+insideLogs)
	}
	return append(env, processMark+k.dir(uid), "CUDA_MPS_PIPE_DIRECTORY="+filepath.Join(k.dir(uid), pipes), "CUDA_MPS_LOG_DIRECTORY="+filepath.Join(k.dir(uid), logs))
}

// mountShared mounts the memory that programs share with the daemon of a claim. The mount limits
// the memory, as in any container's /dev/shm.
func (k *Supervisor) mountShared(uid string) error {
	dir := filepath.Join(k.dir(uid), sharedMemory)
	var now unix.Statfs_t
	if !k.config.Private || unix.Statfs(dir, &now) == nil && now.Type == unix.TMPFS_MAGIC && isMount(dir) {
		return nil
	}
	if err := unix.Mount("shm", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=64m,mode=1777"); err != nil {
		return fmt.Errorf("mount shared memory: %w", err)
	}
	return nil
}

// isMount reports whether a directory is a mount point.
func isMount(dir string) bool {
	var here, above unix.Stat_t
	return unix.Stat(dir, &here) == nil && unix.Stat(filepath.Dir(dir), &above) == nil && here.Dev != above.Dev
}

// run starts a program of the root. With Private, the program sees the claim's directories in place
// of /tmp and /dev/shm.
func (k *Supervisor) run(uid string, cmd *exec.Cmd) error {
	found := false
	for _, dir := range programDirs {
		// A link in the root may lead anywhere, and is resolved only inside the root.
		file := filepath.Join(k.config.Root, dir, filepath.Base(cmd.Args[0]))
		if info, err := os.Lstat(file); err == nil && !info.IsDir() {
			cmd.Path, found = "/"+filepath.Join(dir, filepath.Base(cmd.Args[0])), true
			break
		}
	}
	if !found {
		return fmt.Errorf("there is no %s in %s: %w", filepath.Base(cmd.Args[0]), k.config.Root, exec.ErrNotFound)
	}
	cmd.Err = nil
	cmd.Dir = "/"
	if !k.config.Private {
		cmd.Path = filepath.Join(k.config.Root, cmd.Path)
		return cmd.Start()
	}
	if k.config.Root != "/" {
		cmd.SysProcAttr.Chroot = k.config.Root
	}
	failed := make(chan error)
	go func() {
		// From here on, the thread has its own mount namespace, which its child inherits. The
		// thread ends with the goroutine, because it is never unlocked.
		runtime.LockOSThread()
		err := k.isolateMounts(uid)
		if err == nil {
			err = cmd.Start()
		}
		failed <- err
	}()
	return <-failed
}

// isolateMounts moves the calling thread to its own mount namespace.
func (k *Supervisor) isolateMounts(uid string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("a view of its own of the file system: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("keep mounts from others: %w", err)
	}
	root := k.config.Root
	var binds [][2]string // source and target, in order
	if root != "/" {
		binds = append(binds, [2]string{"/dev", "/dev"}, [2]string{"/proc", "/proc"})
	}
	if uid != "" {
		if err := unix.Mount("tmp", filepath.Join(root, "tmp"), "tmpfs", 0, "size=1m"); err != nil {
			return fmt.Errorf("mount %s: %w", filepath.Join(root, "tmp"), err)
		}
		for inside, dir := range map[string]string{insidePipes: pipes, insideLogs: logs, "/dev/shm": sharedMemory} {
			if inside != "/dev/shm" {
				if err := os.Mkdir(filepath.Join(root, inside), 0o755); err != nil {
					return fmt.Errorf("make directory: %w", err)
				}
			}
			binds = append(binds, [2]string{filepath.Join(k.dir(uid), dir), inside})
		}
	}
	for _, bind := range binds {
		if err := unix.Mount(bind[0], filepath.Join(root, bind[1]), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("mount %s at %s: %w", bind[0], filepath.Join(root, bind[1]), err)
		}
	}
	return nil
}
