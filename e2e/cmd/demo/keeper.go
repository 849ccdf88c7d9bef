package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A keeper is the background process that owns a cluster left running. The keeper locks a file with
// its PID for as long as the keeper runs, so another process with a reused PID is not mistaken for
// a keeper.

// readyFD is the keeper's file descriptor for one line that reports a ready cluster.
const readyFD = 3

// keeperFile returns the name of the file with the keeper's PID, and creates the directory of the
// file.
func keeperFile() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("cache directory: %w", err)
	}
	dir := filepath.Join(cache, "chandler-e2e")
	return filepath.Join(dir, "cluster.pid"), os.MkdirAll(dir, 0o755)
}

// startKeeper starts this program as a keeper. It returns when the cluster is ready or the keeper
// has ended.
func startKeeper(ctx context.Context, project string) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	ready, tell, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	keeper := exec.Command(program, "-project", project, "-keeper")
	keeper.Stdout, keeper.Stderr = os.Stdout, os.Stderr
	keeper.ExtraFiles = []*os.File{tell}
	keeper.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // The keeper survives the end of the terminal.
	if err := keeper.Start(); err != nil {
		return errors.Join(err, tell.Close())
	}
	tell.Close()
	defer context.AfterFunc(ctx, func() { _ = keeper.Process.Signal(syscall.SIGTERM) })()
	if said, _ := io.ReadAll(ready); len(said) > 0 {
		return nil
	}
	if err := keeper.Wait(); err != nil {
		return fmt.Errorf("the cluster did not start: %w", err)
	}
	return ctx.Err()
}

// becomeKeeper locks the keeper's file for this process and writes the PID to it. It returns an
// error if a keeper already runs.
func becomeKeeper() (release func(), err error) {
	unix.CloseOnExec(readyFD) // Child processes of the keeper must not inherit the pipe.
	name, err := keeperFile()
	if err != nil {
		return nil, err
	}
	file, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		file.Close()
		return nil, errors.New("a cluster was left running already; end it with: make cluster-stop")
	}
	if err := errors.Join(file.Truncate(0), write(file, strconv.Itoa(os.Getpid()))); err != nil {
		file.Close()
		return nil, err
	}
	return func() {
		os.Remove(name)
		file.Close()
	}, nil
}

func write(file *os.File, text string) error {
	_, err := file.WriteString(text)
	return err
}

// tellReady detaches the keeper from the terminal and reports to startKeeper that the cluster is
// ready.
func tellReady() error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	for _, fd := range []int{0, 1, 2} {
		if err := unix.Dup2(int(null.Fd()), fd); err != nil {
			return err
		}
	}
	tell := os.NewFile(readyFD, "ready")
	return errors.Join(write(tell, "ready\n"), tell.Close())
}

// stopKeeper ends the keeper, which stops the cluster. It returns when both are gone.
func stopKeeper(ctx context.Context) error {
	name, err := keeperFile()
	if err != nil {
		return err
	}
	file, err := os.Open(name)
	if errors.Is(err, os.ErrNotExist) {
		return errors.New("no cluster was left running")
	}
	if err != nil {
		return err
	}
	defer file.Close()
	text, err := io.ReadAll(file)
	if err != nil {
		return err
	}
	for first := true; ; first = false {
		if unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB) == nil {
			return nil // No process holds the lock: the keeper is gone.
		}
		if first {
			pid, err := strconv.Atoi(string(bytes.TrimSpace(text)))
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
				return fmt.Errorf("end process %d: %w", pid, err)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}
