// Command stuck starts a process that has a file open and hangs in the kernel, like a process whose
// device driver does not answer. No signal ends the process, not even SIGKILL. The command prints
// the PID of the process. It releases the process on SIGTERM, or when the command itself ends.
//
//	stuck /dev/full
//
// The kernel waits for a file system in user space (FUSE) that does not answer. A request that the
// file system has read cannot be cancelled, except by the end of the file system
// (request_wait_answer in fs/fuse/dev.c, Linux 4.2 to 6.18).
package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"runtime"

	"golang.org/x/sys/unix"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("stuck: ")
	var err error
	switch {
	case len(os.Args) == 2:
		err = serve(os.Args[1])
	case len(os.Args) == 4 && os.Args[1] == "hang":
		err = hang(os.Args[2], os.Args[3])
	default:
		err = errors.New("usage: stuck FILE")
	}
	if err != nil {
		log.Fatal(err)
	}
}

// hang opens a file, and reads the status of a directory in a file system that does not answer.
func hang(file, dir string) error {
	opened, err := os.Open(file)
	if err != nil {
		return err
	}
	defer opened.Close()
	_, err = os.Stat(dir)
	return err
}

// serve mounts the file system in a mount namespace of its own, and starts the process.
func serve(file string) error {
	runtime.LockOSThread() // The mount namespace belongs to this thread and its children.
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("own mounts: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("own mounts: %w", err)
	}
	fuse, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("/dev/fuse: %w", err)
	}
	dir, err := os.MkdirTemp("", "stuck-")
	if err != nil {
		return err
	}
	defer os.Remove(dir) // The directory below the mount. The mount is invisible outside this namespace.
	if err := unix.Mount("stuck", dir, "fuse", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fuse)); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	child := exec.Command("/proc/self/exe", "hang", file, dir)
	child.Stderr = os.Stderr
	if err := child.Start(); err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- answer(fuse, child.Process.Pid) }()
	told := make(chan os.Signal, 1)
	signal.Notify(told, unix.SIGTERM, unix.SIGINT)
	select {
	case err = <-served:
	case <-told:
	}
	if err := unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH); err != nil { // This ends all requests.
		return fmt.Errorf("unmount: %w", err)
	}
	_ = child.Wait() // The process may have been killed.
	return err
}

// Numbers and sizes of include/uapi/linux/fuse.h, protocol 7.31.
const (
	opInit        = 26
	opInterrupt   = 36
	inHeader      = 40
	outHeader     = 16
	initAnswer    = 64
	minor         = 31
	smallestWrite = 4096
)

// answer initializes the FUSE protocol and answers no other request.
func answer(fuse, process int) error {
	request := make([]byte, 1<<17)
	for {
		n, err := unix.Read(fuse, request)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENOENT): // The request was cancelled before it was read.
			continue
		case err != nil:
			return fmt.Errorf("read a request: %w", err)
		case n < inHeader:
			return fmt.Errorf("a request of %d bytes", n)
		}
		switch binary.NativeEndian.Uint32(request[4:]) {
		case opInit:
			out := make([]byte, outHeader+initAnswer)
			binary.NativeEndian.PutUint32(out, uint32(len(out)))
			copy(out[8:16], request[8:16]) // the request's number
			binary.NativeEndian.PutUint32(out[outHeader:], 7)
			binary.NativeEndian.PutUint32(out[outHeader+4:], minor)
			binary.NativeEndian.PutUint32(out[outHeader+20:], smallestWrite)
			if _, err := unix.Write(fuse, out); err != nil {
				return fmt.Errorf("answer INIT: %w", err)
			}
		case opInterrupt:
		default:
			fmt.Println(process)
		}
	}
}
