// Package machine makes a machine inside this one: a tree of processes with mount, PID, network, UTS, IPC and cgroup
// namespaces of its own, which sees this machine's devices and programs and changes nothing of it. It knows nothing
// of what runs there, Kubernetes included.
//
// Three processes make one. The caller of Start holds a pipe. A supervisor, in a session of its own, makes the
// cgroups, starts the machine's first process and waits for the pipe to close, be it by Stop or because the caller
// died. The machine's first process, its PID 1, lays out mounts and network and then only reaps and forwards
// connections; with it the kernel ends everything in the machine, and with the last process go mounts and
// interfaces. The supervisor removes what the kernel does not: cgroups and directories. Should the supervisor be
// killed too, the next Start does it.
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

// Where a machine finds what is its own.
const (
	ownDir = "/run/machine"
	// StateDir is Config.Dir as the machine sees it.
	StateDir = ownDir + "/state"
	// ProgramDir is the directory of Config.Program as the machine sees it.
	ProgramDir = ownDir + "/bin"
)

// Config describes a machine. Program and Dir must be set.
//
// The host's files are all there: read-only on the root file system, except for the directory of temporary files,
// and as they are on others. The machine's own are /run, empty at first; /etc, the host's with changes of its own;
// /proc, /sys, /dev/shm and /dev/pts; and the directories named in Own. /dev is the host's.
type Config struct {
	// Program is chandler.dev/e2e/cmd/machine, built.
	Program string `json:"program"`
	// Dir holds the machine's own directories and its log.
	Dir string `json:"dir"`
	// RemoveDir says to remove Dir with the machine; else only the own directories are removed from it, with those
	// above them up to Dir.
	RemoveDir bool `json:"removeDir"`
	// Hostname is "machine" unless given.
	Hostname string `json:"hostname"`
	// Own are directories that the machine has to itself: what it has at /var/lib lies in Dir/var/lib.
	Own []string `json:"own"`
	// Files are what the machine reads in place of existing files, by path: of /proc/sys, for example.
	Files map[string]string `json:"files"`
	// Addresses of the machine's loopback interface, the only one it has at first, besides 127.0.0.1.
	Addresses []netip.Addr `json:"addresses"`
	// Forward are addresses in the machine whose connections lead to other addresses in it.
	Forward map[string]string `json:"forward"`
	// Publish is an address in the machine that can be reached from the host, at the address that Published returns.
	Publish string `json:"publish"`
}

// A Machine runs until Stop is called or its caller's process ends.
type Machine struct {
	id        string
	cfg       Config
	published string
	initPID   int

	lifeline   io.Closer // the supervisor reads its other end
	supervisor *exec.Cmd
	done       chan struct{}
	waitErr    error // of supervisor, once done is closed
}

// Start first removes what killed machines have left, then starts one. The context bounds the start, not the machine.
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

// start runs the supervisor and waits for its word that the machine is up.
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

	cmd := exec.Command(m.cfg.Program, "supervise") // not bound to ctx: it ends when its pipe does
	cmd.Stderr = log
	cmd.ExtraFiles = []*os.File{listener}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // a Ctrl-C is not for it; it has the caller's end to wait for
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

// publish opens the listener on the host. A listener is passed on even if nothing is published, to keep the
// supervisor's descriptors the same; it is then the null device.
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

// An order is what the supervisor reads, and hands on to the machine's first process.
type order struct {
	ID     string `json:"id"`
	Config Config `json:"config"`
}

// A report is what the supervisor answers, once.
type report struct {
	PID   int    `json:"pid"` // of the machine's first process, on the host
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

// ID is the machine's name among those of this host; its cgroups are called chandler-e2e-ID.
func (m *Machine) ID() string { return m.id }

// PID is that of the machine's first process, as the host counts.
func (m *Machine) PID() int { return m.initPID }

// Published is the address on the host that leads to Config.Publish.
func (m *Machine) Published() string { return m.published }

// Done is closed when the machine and everything it was made of is gone.
func (m *Machine) Done() <-chan struct{} { return m.done }

// Command returns a command that runs in the machine. Name and arguments are as the machine sees its files; standard
// input and output are the caller's to set, as ever. Signals sent to the command's process reach the program, and
// when the command is killed so is the program.
func (m *Machine) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	enter := []string{"enter", strconv.Itoa(m.initPID), name}
	return exec.CommandContext(ctx, m.cfg.Program, append(enter, args...)...)
}

// Path returns a path of the host that leads to path in the machine, mounts and all, while the machine runs. Symbolic
// links on the way are resolved as the machine would; the last element need not exist.
func (m *Machine) Path(path string) string {
	root := filepath.Join("/proc", strconv.Itoa(m.initPID), "root")
	inside, err := securejoin.SecureJoin(root, path)
	if err != nil { // links that never end, or a path that cannot be read: opening it will tell
		return filepath.Join(root, path)
	}
	return inside
}

// Stop ends all that runs in the machine and returns when nothing of it is left. A second call returns what the first
// one did.
func (m *Machine) Stop() error {
	_ = m.lifeline.Close()
	<-m.done
	if m.waitErr != nil {
		return fmt.Errorf("supervisor of machine %s: %w%s", m.id, m.waitErr, m.lastWords())
	}
	return nil
}

// lastWords returns what the supervisor logged, if it is still to be read.
func (m *Machine) lastWords() string {
	log, err := os.ReadFile(filepath.Join(m.cfg.Dir, "log", "machine.log"))
	if err != nil || len(log) == 0 {
		return ""
	}
	return "\n" + strings.TrimSpace(string(log))
}
