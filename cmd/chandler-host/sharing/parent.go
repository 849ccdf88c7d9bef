package sharing

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// isChild is the environment variable of a child process of Run.
const isChild = "CHANDLER_SHARING_CHILD"

// The limit of crashes, and the pause before a restart.
const (
	maxCrashes   = 5
	crashesSince = time.Minute
	restartPause = time.Second
)

// Run serves in a child process with the same program, until the context ends. After a crash, Run
// restarts the child, so that daemons continue. A container ends with its first process, and the
// runtime then kills all others. For this reason, the first process does nothing else.
//
// Run waits for all children of the current process.
func Run(ctx context.Context, config Config) error {
	if os.Getenv(isChild) == "" {
		return supervise(ctx, config.log())
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // ends with the parent
		cancel()
	}()
	return Serve(ctx, config)
}

func supervise(ctx context.Context, log *log.Logger) error {
	// The processes of a crashed child become children of this one, even if this is not the
	// container's first process.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the parent of orphans: %w", err)
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	theirs, ours, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ours.Close()
	defer theirs.Close()
	var crashed []time.Time
	for {
		pid, err := syscall.ForkExec(program, os.Args, &syscall.ProcAttr{
			Env: append(os.Environ(), isChild+"=1"), Files: []uintptr{theirs.Fd(), os.Stdout.Fd(), os.Stderr.Fd()},
		})
		if err != nil {
			return fmt.Errorf("start %s: %w", program, err)
		}
		stop := context.AfterFunc(ctx, func() { _ = syscall.Kill(pid, syscall.SIGTERM) }) // the child may have ended
		status, err := reapChild(pid)
		stop()
		switch {
		case err != nil || status.Exited() && status.ExitStatus() == 0:
			return err
		case ctx.Err() != nil:
			return errors.New("crashed while it ended: " + describeStatus(status))
		}
		crashed = append(crashed, time.Now())
		if n := len(crashed) - maxCrashes; n >= 0 && time.Since(crashed[n]) < crashesSince {
			return fmt.Errorf("crashed %d times within %s: %s", maxCrashes, crashesSince, describeStatus(status))
		}
		log.Printf("crashed, and is started again; daemons go on: %s", describeStatus(status))
		select {
		case <-ctx.Done():
		case <-time.After(restartPause):
		}
	}
}

// reapChild waits for the end of a child, and meanwhile collects all other children of this
// process.
func reapChild(pid int) (status syscall.WaitStatus, err error) {
	for {
		ended, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return status, fmt.Errorf("wait for process %d: %w", pid, err)
		case ended == pid:
			return status, nil
		}
	}
}

func describeStatus(status syscall.WaitStatus) string {
	if status.Signaled() {
		return "signal: " + status.Signal().String()
	}
	return fmt.Sprintf("exit status %d", status.ExitStatus())
}
