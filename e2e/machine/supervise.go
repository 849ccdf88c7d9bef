package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
)

// File descriptors passed to the supervisor and to the machine's first process.
const (
	listenerFD = 3 // the listener for Config.Publish
	reportFD   = 4 // for the report of the first process
)

const namespaces = syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET |
	syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWCGROUP

// Supervise is the main function of a supervisor. It reads an order from in, creates the
// machine, reports on out, waits until in is closed or the machine ends, and removes
// everything. For cmd/machine only; main must call Supervise on its first thread.
func Supervise(in io.Reader, out io.Writer) error {
	// The first process is killed when the thread of its start ends.
	runtime.LockOSThread()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)

	var o order
	if err := json.NewDecoder(in).Decode(&o); err != nil {
		return fmt.Errorf("read order: %w", err)
	}
	s := &supervisor{order: o}
	if err := s.begin(); err != nil {
		_ = json.NewEncoder(out).Encode(report{Error: err.Error()})
		return s.end()
	}
	if err := json.NewEncoder(out).Encode(report{PID: s.init.Process.Pid}); err != nil {
		return errors.Join(err, s.end())
	}

	callerGone := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, in)
		close(callerGone)
	}()
	select {
	case <-callerGone:
	case <-stop:
	case <-s.initGone:
	}
	return s.end()
}

type supervisor struct {
	order    order
	record   *record
	cgroups  *subtree
	init     *exec.Cmd
	initGone chan struct{}
}

// begin returns when the machine is running. After an error, the caller must call end.
func (s *supervisor) begin() error {
	cgroups, err := planSubtree(os.DirFS("/"), "chandler-e2e-"+s.order.ID)
	if err != nil {
		return fmt.Errorf("cgroups: %w", err)
	}
	s.cgroups = cgroups
	s.record, err = register(registryDir, s.order.ID, leftovers{Cgroups: cgroups.dirs(), Paths: s.paths()})
	if err != nil {
		return fmt.Errorf("register: %w", err)
	}
	if err := cgroups.create(); err != nil {
		return fmt.Errorf("create cgroups: %w", err)
	}
	if err := s.startInit(); err != nil {
		return fmt.Errorf("first process: %w", err)
	}
	return nil
}

// paths returns the directories to remove at the end: Dir, or the top-level directories of Own
// below Dir.
func (s *supervisor) paths() []string {
	dir := s.order.Config.Dir
	if s.order.Config.RemoveDir {
		return []string{dir}
	}
	var paths []string
	for _, own := range s.order.Config.Own {
		first, _, _ := strings.Cut(strings.TrimPrefix(own, "/"), "/")
		if path := filepath.Join(dir, first); !slices.Contains(paths, path) {
			paths = append(paths, path)
		}
	}
	return paths
}

// startInit enters the new cgroups, starts the first process there, so that its cgroup
// namespace has them as roots, and leaves the cgroups again, because only leaves may contain
// processes in cgroup v2. Then it forwards the order.
func (s *supervisor) startInit() error {
	reports, reportTo, err := os.Pipe()
	if err != nil {
		return err
	}
	defer reports.Close()
	defer reportTo.Close()
	s.init = exec.Command(s.order.Config.Program, "init")
	s.init.Env = []string{"TMPDIR=" + os.TempDir()}
	s.init.Stderr = os.Stderr
	s.init.ExtraFiles = []*os.File{os.NewFile(listenerFD, "listener"), reportTo}
	s.init.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces, Pdeathsig: syscall.SIGKILL}
	orders, err := s.init.StdinPipe()
	if err != nil {
		return err
	}
	defer orders.Close()

	leave, err := s.cgroups.enter()
	if err == nil {
		err = s.init.Start()
	}
	if err := errors.Join(err, leave()); err != nil {
		return err
	}
	_ = reportTo.Close()
	s.initGone = make(chan struct{})
	go func() {
		_ = s.init.Wait()
		close(s.initGone)
	}()

	if err := json.NewEncoder(orders).Encode(s.order); err != nil {
		return fmt.Errorf("hand on the order: %w", err)
	}
	var r report
	if err := json.NewDecoder(reports).Decode(&r); err != nil {
		return fmt.Errorf("read its report: %w", err)
	}
	if r.Error != "" {
		return errors.New(r.Error)
	}
	return nil
}

// end kills the first process, and thereby all processes in the machine, and removes the
// machine's resources. The record remains if the removal fails.
func (s *supervisor) end() error {
	if s.initGone != nil {
		_ = s.init.Process.Kill()
		<-s.initGone // the kernel reports the end of a PID namespace's first process after that of all others
	}
	if s.record == nil {
		return nil
	}
	if err := s.record.leftovers.remove(); err != nil {
		return err
	}
	s.record.close()
	return nil
}
