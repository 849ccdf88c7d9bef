package machine

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Enter runs a program in the machine whose first process is pid, passes signals on to it, and returns its exit
// status: 128 and the signal where a signal ended it, as shells do. For cmd/machine only.
func Enter(pid string, command []string) (int, error) {
	// Namespaces are a thread's, and so are the children it starts.
	runtime.LockOSThread()
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2)

	if err := joinCgroupsOf(pid); err != nil {
		return 0, fmt.Errorf("join cgroups: %w", err)
	}
	if err := joinNamespacesOf(pid); err != nil {
		return 0, fmt.Errorf("join namespaces: %w", err)
	}
	cmd := exec.Command("/proc/self/exe", append([]string{"exec"}, command...)...) // in the machine too, where it is a link to this program
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s)
		}
	}()
	err := cmd.Wait()
	signal.Stop(signals)
	close(signals)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return 0, err
	}
	status := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if status.Signaled() {
		return 128 + int(status.Signal()), nil
	}
	return status.ExitStatus(), nil
}

// joinNamespacesOf moves this thread, and the children it will start, into the namespaces of a process.
func joinNamespacesOf(pid string) error {
	number, err := strconv.Atoi(pid)
	if err != nil {
		return err
	}
	fd, err := unix.PidfdOpen(number, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // else a mount namespace cannot be joined
		return err
	}
	return unix.Setns(fd, namespaces)
}

// Exec becomes the program that command names, which dies with its parent. It runs in the machine, as the child of a
// process outside. For cmd/machine only.
//
// The parent cannot ask for that when it starts the child, as Go checks there that the parent's ID is still the one
// it was, and that ID is not visible from here.
func Exec(command []string) error {
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("die with parent: %w", err)
	}
	path, err := exec.LookPath(command[0])
	if err != nil {
		return err
	}
	return syscall.Exec(path, command, os.Environ())
}
