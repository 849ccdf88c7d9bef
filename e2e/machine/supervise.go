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

// Descriptors that the supervisor and the machine's first process are given.
const (
	listenerFD = 3 // what Config.Publish is reached by
	reportFD   = 4 // where the first process reports
)

const namespaces = syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET |
	syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWCGROUP

// Supervise is the life of a supervisor: it reads an order from in, makes the machine, reports on out, waits for in
// to end or the machine to die, and removes everything. For cmd/machine only; main must call it on its first thread.
func Supervise(in io.Reader, out io.Writer) error {
	// The first process dies with the thread that started it.
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

// begin returns when the machine is up. After an error, end removes what it has made.
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

// paths are the directories to remove in the end. Of an own directory that is the first element below Dir.
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

// startInit starts the first process as a member of the new cgroups, whose namespace then begins there, steps out of
// them itself, since in cgroup v2 only leaves may have members, and hands the order on.
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

// end kills the first process, with it everything in the machine, and removes what was made. Anything that could not
// be removed stays on record.
func (s *supervisor) end() error {
	if s.initGone != nil {
		_ = s.init.Process.Kill()
		<-s.initGone // a PID namespace's first process is waited for after all others are gone
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
