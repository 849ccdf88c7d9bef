// Package inside is the part of the test harness that runs in a guest: the first process and the
// server for the host's requests. It is independent of Chandler.
package inside

import (
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Port is the name of the virtio-serial port for the host's requests.
const Port = "chandler.guest"

// ModulesFile is a file of the initramfs with the modules to load at every boot: one name per line.
const ModulesFile = "/etc/guest-modules"

// Path is the search path of commands in a guest. Debian programs come before busybox.
const Path = "/usr/bin:/bin"

// transport are the modules that the port needs.
var transport = []string{"virtio_pci", "virtio_console"}

// A mount is a file system of every guest.
type mount struct {
	kind, at string
	flags    uintptr
}

var mounts = []mount{
	{"proc", "/proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
	{"sysfs", "/sys", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
	{"devtmpfs", "/dev", unix.MS_NOSUID},
	{"tmpfs", "/dev/shm", unix.MS_NOSUID | unix.MS_NODEV},
	{"devpts", "/dev/pts", unix.MS_NOSUID | unix.MS_NOEXEC},
	{"tmpfs", "/run", unix.MS_NOSUID | unix.MS_NODEV},
	{"tmpfs", "/tmp", unix.MS_NOSUID | unix.MS_NODEV},
	{"cgroup2", "/sys/fs/cgroup", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC},
	{"debugfs", "/sys/kernel/debug", 0},
}

// Init runs the first process: it sets up the system, starts the server in a process of its own,
// and reaps orphans. It returns only if the server ends.
func Init() error {
	for _, m := range mounts {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			log.Print(err)
			continue
		}
		if err := unix.Mount(m.kind, m.at, m.kind, m.flags, ""); err != nil {
			log.Printf("mount %s: %v", m.at, err)
		}
	}
	for name, target := range map[string]string{"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"} {
		_ = os.Symlink(target, "/dev/"+name)
	}
	if err := unix.Sethostname([]byte("guest")); err != nil {
		return err
	}
	if err := os.Setenv("PATH", Path); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/kernel/modprobe", []byte("/usr/bin/modprobe"), 0); err != nil {
		log.Print(err)
	}
	_ = exec.Command("/bin/ip", "link", "set", "lo", "up").Run()

	server := exec.Command("/init", "serve")
	server.Stdout, server.Stderr = os.Stdout, os.Stderr
	if err := server.Start(); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err == nil && pid == server.Process.Pid {
			return fmt.Errorf("the server ended with %v", status)
		}
	}
}

// Serve loads the modules and then answers the host until the machine ends.
func Serve() error {
	for _, module := range transport {
		if err := load(module); err != nil {
			return err
		}
	}
	listed, err := os.ReadFile(ModulesFile)
	if err != nil {
		return err
	}
	var problems []string
	for _, module := range strings.Fields(string(listed)) {
		if err := load(module); err != nil {
			problems = append(problems, err.Error())
		}
	}
	port, err := openPort()
	if err != nil {
		return err
	}
	return newServer(problems).serve(port)
}

func load(module string) error {
	out, err := exec.Command("modprobe", module).CombinedOutput()
	if err != nil {
		return fmt.Errorf("modprobe %s: %w: %s", module, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// openPort opens the port as soon as the kernel has found it.
func openPort() (*port, error) {
	for {
		names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, file := range names {
			name, err := os.ReadFile(file)
			if err != nil || strings.TrimSpace(string(name)) != Port {
				continue
			}
			fd, err := unix.Open("/dev/"+filepath.Base(filepath.Dir(file)), unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				return nil, fmt.Errorf("open the port: %w", err)
			}
			return &port{fd}, nil
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A port is the open port. Reads and writes block.
type port struct{ fd int }

// A session is one connection of the host.
type session struct {
	port  *port
	begun bool
}

// Read waits until the host is connected. The kernel reports a disconnected host as the end of the
// file.
func (s *session) Read(b []byte) (int, error) {
	for {
		n, err := unix.Read(s.port.fd, b)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 0, err
		case n > 0:
			s.begun = true
			return n, nil
		case s.begun:
			return 0, io.EOF
		default:
			time.Sleep(10 * time.Millisecond)
		}
	}
}

func (s *session) Write(b []byte) (int, error) {
	written := 0
	for written < len(b) {
		n, err := unix.Write(s.port.fd, b[written:])
		if err != nil && err != unix.EINTR {
			return written, err
		}
		written += max(n, 0)
	}
	return written, nil
}

// Close leaves the port open for the next session.
func (s *session) Close() error { return nil }
