// Command guestuse runs in guests. It opens a PCI function by vfio as a virtual machine does, or
// stops another command between two of its output lines. Command guestuse is independent of
// Chandler.
package main

import (
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	log.SetFlags(0)
	var err error
	switch {
	case len(os.Args) == 3 && os.Args[1] == "vfio":
		err = vfio(os.Args[2])
	case len(os.Args) > 3 && (os.Args[1] == "kill" || os.Args[1] == "hold"):
		var lines int
		if lines, err = strconv.Atoi(os.Args[2]); err == nil {
			err = after(lines, os.Args[1] == "kill", os.Args[3:])
		}
	default:
		err = errors.New("usage: guestuse vfio ADDRESS | guestuse kill|hold LINES COMMAND...")
	}
	if err != nil {
		log.Fatal(err)
	}
}

// Requests of vfio (include/uapi/linux/vfio.h).
const (
	setIOMMU     = 0x3b66
	setContainer = 0x3b68
	getDevice    = 0x3b6a
	type1        = 1
)

// vfio opens a function, closes all descriptors except the function's own, and keeps the function
// open until the process is killed.
func vfio(address string) error {
	link, err := os.Readlink(filepath.Join("/sys/bus/pci/devices", address, "iommu_group"))
	if err != nil {
		return err
	}
	container, err := unix.Open("/dev/vfio/vfio", unix.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("open the container: %w", err)
	}
	group, err := unix.Open("/dev/vfio/"+filepath.Base(link), unix.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("open the group: %w", err)
	}
	number := int32(container)
	if _, err := ioctl(group, setContainer, uintptr(unsafe.Pointer(&number))); err != nil {
		return fmt.Errorf("set the container: %w", err)
	}
	if _, err := ioctl(container, setIOMMU, type1); err != nil {
		return fmt.Errorf("set the IOMMU: %w", err)
	}
	name := append([]byte(address), 0)
	if _, err := ioctl(group, getDevice, uintptr(unsafe.Pointer(&name[0]))); err != nil {
		return fmt.Errorf("get the function: %w", err)
	}
	if err := errors.Join(unix.Close(group), unix.Close(container)); err != nil {
		return err
	}
	fmt.Println("ready")
	time.Sleep(time.Hour)
	return nil
}

func ioctl(fd int, request, argument uintptr) (uintptr, error) {
	result, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, argument)
	if errno != 0 {
		return 0, errno
	}
	return result, nil
}

// after runs a command until the command is about to write the line after the given number of
// lines. At that moment, all the command's work before that line is done. Then after kills the
// command, or prints "held" and lets the command continue at SIGUSR1. The exit code is the
// command's own, or 137 if the command was killed.
//
// The command's output is a pipe that holds one write at a time. The pipe is full from the
// beginning.
func after(lines int, kill bool, args []string) error {
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_DIRECT|unix.O_CLOEXEC); err != nil {
		return err
	}
	if _, err := unix.FcntlInt(uintptr(pipe[0]), unix.F_SETPIPE_SZ, os.Getpagesize()); err != nil {
		return err
	}
	if _, err := unix.Write(pipe[1], []byte("\n")); err != nil {
		return err
	}
	release := make(chan os.Signal, 1)
	signal.Notify(release, syscall.SIGUSR1)
	cmd := exec.Command(args[0], args[1:]...)
	output := os.NewFile(uintptr(pipe[1]), "pipe")
	cmd.Stdout, cmd.Stderr = output, os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait(); output.Close() }()
	for n := 0; n < lines; n++ {
		if !waitForWrite(cmd.Process.Pid, ended) {
			break
		}
		next(pipe[0], n > 0)
	}
	if waitForWrite(cmd.Process.Pid, ended) {
		if kill {
			_ = cmd.Process.Kill()
		} else {
			fmt.Println("held")
			<-release
		}
	}
	for n := lines; next(pipe[0], n > 0); n++ { // Print the remaining lines.
	}
	err := <-ended
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() >= 0:
		os.Exit(exit.ExitCode())
	case errors.As(err, &exit):
		os.Exit(137)
	}
	return err
}

// next reads one line from the pipe and reports whether there was any. If print is set, next prints
// the line.
func next(pipe int, print bool) bool {
	line := make([]byte, os.Getpagesize())
	n, err := unix.Read(pipe, line)
	if err != nil || n == 0 {
		return false
	}
	if print {
		_, _ = os.Stdout.Write(line[:n])
	}
	return true
}

// waitForWrite waits until a process blocks in write(2) to its standard output. It returns false if
// the process ends first.
func waitForWrite(pid int, ended chan error) bool {
	for {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid))
		for _, thread := range threads {
			if text, err := os.ReadFile(thread); err == nil && strings.HasPrefix(string(text), fmt.Sprintf("%d 0x1 ", unix.SYS_WRITE)) {
				return true
			}
		}
		select {
		case err := <-ended:
			ended <- err
			return false
		case <-time.After(5 * time.Millisecond):
		}
	}
}
