package upkeep

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

// isChild is the variable by which a process knows that Run has started it.
const isChild = "CHANDLER_UPKEEP_CHILD"

// How often the child may crash, and how long until it is started again.
const (
	crashes      = 5
	crashesSince = time.Minute
	pause        = time.Second
)

// Run serves in a child process, which is this program again, until the context ends. It starts the child
// again when that crashes, so that daemons go on. A container ends with its first process, and the runtime then
// kills all others in it. That is why the first process does nothing else.
//
// It waits for all children of this process.
func Run(ctx context.Context, config Config) error {
	if os.Getenv(isChild) == "" {
		return stay(ctx, config.log())
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // which ends with the parent
		cancel()
	}()
	return Serve(ctx, config)
}

func stay(ctx context.Context, log *log.Logger) error {
	// The processes that a crashed child leaves become children of this one, whatever the container's first process is.
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
		stop := context.AfterFunc(ctx, func() { _ = syscall.Kill(pid, syscall.SIGTERM) }) // it may have ended
		status, err := reap(pid)
		stop()
		switch {
		case err != nil || status.Exited() && status.ExitStatus() == 0:
			return err
		case ctx.Err() != nil:
			return errors.New("crashed while it ended: " + describe(status))
		}
		crashed = append(crashed, time.Now())
		if n := len(crashed) - crashes; n >= 0 && time.Since(crashed[n]) < crashesSince {
			return fmt.Errorf("crashed %d times within %s: %s", crashes, crashesSince, describe(status))
		}
		log.Printf("crashed, and is started again; daemons go on: %s", describe(status))
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// reap waits for the end of a child, and meanwhile for that of whatever else has become a child of this process.
func reap(pid int) (status syscall.WaitStatus, err error) {
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

func describe(status syscall.WaitStatus) string {
	if status.Signaled() {
		return "signal: " + status.Signal().String()
	}
	return fmt.Sprintf("exit status %d", status.ExitStatus())
}
