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

// Kill is the signal that kills the program of a command of a machine. The command ends after the
// program, and so after the program's files and sockets are closed. After SIGKILL, the command ends
// first.
const Kill = syscall.Signal(40) // the first of the real-time signals that no libc uses

// Enter runs a program in the machine whose first process is pid, forwards signals to the
// program, and returns its exit status: 128 plus the signal number after a fatal signal, as in
// shells. For cmd/machine only.
func Enter(pid string, command []string) (int, error) {
	// Namespaces belong to a thread and to the children started by the thread.
	runtime.LockOSThread()
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, Kill)

	if err := joinCgroupsOf(pid); err != nil {
		return 0, fmt.Errorf("join cgroups: %w", err)
	}
	if err := joinNamespacesOf(pid); err != nil {
		return 0, fmt.Errorf("join namespaces: %w", err)
	}
	cmd := exec.Command("/proc/self/exe", append([]string{"exec"}, command...)...) // this program is available inside the machine, too
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	go func() {
		for s := range signals {
			if s == Kill {
				s = unix.SIGKILL
			}
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

// joinNamespacesOf moves this thread and its future children into the namespaces of a process.
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
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // required before joining a mount namespace
		return err
	}
	return unix.Setns(fd, namespaces)
}

// Exec replaces this process with the program named by command. The program is killed when its
// parent dies. Exec runs in the machine, as the child of a process outside. For cmd/machine
// only.
//
// The parent cannot set the death signal when it starts the child: Go then verifies that the
// child's parent ID is unchanged, and the parent's ID is not visible inside the machine.
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
