// Package machine runs a machine inside the host: a tree of processes in mount, PID, network,
// UTS, IPC and cgroup namespaces of its own. The machine uses the host's devices and programs,
// and does not change the host. The package is independent of the workload, including
// Kubernetes.
//
// Three processes form a machine. The caller of Start holds a pipe. A supervisor, in a session
// of its own, creates the cgroups, starts the machine's first process and waits until the pipe
// is closed, either by Stop or by the death of the caller. The machine's first process, its
// PID 1, sets up mounts and network, and then only reaps processes and forwards connections.
// When the first process ends, the kernel kills all processes in the machine, and removes
// mounts and interfaces after the last process. The supervisor removes the rest: cgroups and
// directories. If the supervisor is killed as well, the next Start removes them.
package machine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	securejoin "github.com/cyphar/filepath-securejoin"
)

// Paths of the machine's own directories.
const (
	ownDir = "/run/machine"
	// StateDir is the path of Config.Dir inside the machine.
	StateDir = ownDir + "/state"
	// ProgramDir is the path of Config.Program's directory inside the machine.
	ProgramDir = ownDir + "/bin"
)

// Config describes a machine. Program and Dir must be set.
//
// The machine sees all files of the host. The root file system is read-only, except for the
// directory of temporary files; other file systems are unchanged. The following directories
// belong to the machine: /run, initially empty; /etc, an overlay over the host's /etc; /proc,
// /sys, /dev/shm and /dev/pts; and the directories in Own. /dev is the host's.
type Config struct {
	// Program is the path of the built program chandler.dev/e2e/cmd/machine.
	Program string `json:"program"`
	// Dir holds the machine's own directories and its log.
	Dir string `json:"dir"`
	// If RemoveDir is set, Dir is removed with the machine. Otherwise only the top-level
	// directories of Own below Dir are removed.
	RemoveDir bool `json:"removeDir"`
	// Hostname is "machine" by default.
	Hostname string `json:"hostname"`
	// Own lists directories private to the machine: its /var/lib, for example, is Dir/var/lib.
	Own []string `json:"own"`
	// Files maps paths of existing files, such as files in /proc/sys, to replacement contents.
	Files map[string]string `json:"files"`
	// Addresses are added to the loopback interface, which initially is the only interface.
	Addresses []netip.Addr `json:"addresses"`
	// Forward maps addresses in the machine to other addresses in the machine. Connections are
	// forwarded.
	Forward map[string]string `json:"forward"`
	// Publish is an address in the machine that is reachable from the host through Published.
	Publish string `json:"publish"`
}

// A Machine runs until Stop is called or the process of Start's caller ends.
type Machine struct {
	id        string
	cfg       Config
	published string
	initPID   int

	lifeline   io.Closer // read by the supervisor
	supervisor *exec.Cmd
	done       chan struct{}
	waitErr    error // error of supervisor, valid after done is closed
}

// Start starts a machine, after removing the remains of killed machines. The context limits
// the start, not the machine's lifetime.
func Start(ctx context.Context, cfg Config) (*Machine, error) {
	if err := sweep(registryDir); err != nil {
		return nil, fmt.Errorf("sweep left machines: %w", err)
	}
	m := &Machine{id: newID(), cfg: cfg, done: make(chan struct{})}
	if m.cfg.Hostname == "" {
		m.cfg.Hostname = "machine"
	}
	for _, dir := range append([]string{"log"}, cfg.Own...) {
		if err := os.MkdirAll(filepath.Join(cfg.Dir, dir), 0o755); err != nil {
			return nil, fmt.Errorf("directories of machine %s: %w", m.id, err)
		}
	}
	if err := m.start(ctx); err != nil {
		return nil, fmt.Errorf("machine %s: %w", m.id, err)
	}
	return m, nil
}

func newID() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// start starts the supervisor and waits for its report.
func (m *Machine) start(ctx context.Context) error {
	log, err := os.Create(filepath.Join(m.cfg.Dir, "log", "machine.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	listener, err := m.publish()
	if err != nil {
		return fmt.Errorf("publish %s: %w", m.cfg.Publish, err)
	}
	defer listener.Close()

	cmd := exec.Command(m.cfg.Program, "supervise") // not bound to ctx: the supervisor ends with its pipe
	cmd.Stderr = log
	cmd.ExtraFiles = []*os.File{listener}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // a new session, so a Ctrl-C in the terminal does not end the supervisor
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start supervisor: %w", err)
	}
	m.supervisor, m.lifeline = cmd, stdin
	answered := make(chan error, 1)
	go func() {
		answered <- m.converse(stdin, stdout)
		m.waitErr = cmd.Wait()
		close(m.done)
	}()
	select {
	case err = <-answered:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		return errors.Join(err, m.Stop())
	}
	return nil
}

// publish opens the listener on the host. Without Config.Publish, publish opens the null
// device instead, so the supervisor's file descriptors keep their numbers.
func (m *Machine) publish() (*os.File, error) {
	if m.cfg.Publish == "" {
		return os.Open(os.DevNull)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer listener.Close() // File returns a copy
	m.published = listener.Addr().String()
	return listener.(*net.TCPListener).File()
}

// An order is sent to the supervisor, which forwards it to the machine's first process.
type order struct {
	ID     string `json:"id"`
	Config Config `json:"config"`
}

// A report is the supervisor's only response.
type report struct {
	PID   int    `json:"pid"` // of the machine's first process, as seen by the host
	Error string `json:"error,omitempty"`
}

func (m *Machine) converse(stdin io.Writer, stdout io.Reader) error {
	if err := json.NewEncoder(stdin).Encode(order{ID: m.id, Config: m.cfg}); err != nil {
		return fmt.Errorf("order to supervisor: %w", err)
	}
	var r report
	if err := json.NewDecoder(stdout).Decode(&r); err != nil {
		return fmt.Errorf("report of supervisor (see %s): %w", filepath.Join(m.cfg.Dir, "log", "machine.log"), err)
	}
	if r.Error != "" {
		return errors.New(r.Error)
	}
	m.initPID = r.PID
	return nil
}

// ID returns the machine's unique name on the host. The machine's cgroups are named
// chandler-e2e-ID.
func (m *Machine) ID() string { return m.id }

// PID returns the process ID of the machine's first process, as seen by the host.
func (m *Machine) PID() int { return m.initPID }

// Published returns the address on the host that leads to Config.Publish.
func (m *Machine) Published() string { return m.published }

// Done returns a channel that is closed after the machine and all its resources have been
// removed.
func (m *Machine) Done() <-chan struct{} { return m.done }

// Command returns a command that runs in the machine. Name and arguments refer to the
// machine's files. The caller sets standard input and output. Signals to the command's process
// reach the program, and the program is killed with the command. The end of ctx kills the program
// by the signal Kill.
func (m *Machine) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	enter := []string{"enter", strconv.Itoa(m.initPID), name}
	cmd := exec.CommandContext(ctx, m.cfg.Program, append(enter, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(Kill) }
	return cmd
}

// Path returns the path on the host that leads to a path in the running machine, including
// mounts. Symbolic links are resolved within the machine. The last element need not exist.
func (m *Machine) Path(path string) string {
	root := filepath.Join("/proc", strconv.Itoa(m.initPID), "root")
	inside, err := securejoin.SecureJoin(root, path)
	if err != nil { // a loop of links, or an unreadable path; opening the path returns the error
		return filepath.Join(root, path)
	}
	return inside
}

// Stop ends all processes in the machine and returns after everything has been removed.
// Further calls return the same result.
func (m *Machine) Stop() error {
	_ = m.lifeline.Close()
	<-m.done
	if m.waitErr != nil {
		return fmt.Errorf("supervisor of machine %s: %w%s", m.id, m.waitErr, m.lastWords())
	}
	return nil
}

// lastWords returns the supervisor's log, or "" if the log is empty or unreadable.
func (m *Machine) lastWords() string {
	log, err := os.ReadFile(filepath.Join(m.cfg.Dir, "log", "machine.log"))
	if err != nil || len(log) == 0 {
		return ""
	}
	return "\n" + strings.TrimSpace(string(log))
}
