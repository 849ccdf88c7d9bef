package inuse

import (
	"io/fs"
	"path"
	"strconv"

	"golang.org/x/sys/unix"
)

// kcmpFiles has kcmp(2) compare the tables of files of two threads (KCMP_FILES in include/uapi/linux/kcmp.h).
const kcmpFiles = 2

// sharesFiles returns what reports whether two threads of the host have one table of files. It compares them by kcmp(2),
// which knows threads by their numbers in the PID namespace of the caller. So it reports false, and each table is
// read, if /proc of the host is not of that namespace, as that of a recorded host, and where the kernel refuses:
// without CONFIG_KCMP (ENOSYS), without CAP_SYS_PTRACE (EPERM), and for a thread that has ended (ESRCH).
func sharesFiles(host fs.FS) func(thread, other string) bool {
	if !isOwnProc(host) {
		return func(string, string) bool { return false }
	}
	return func(thread, other string) bool {
		first, err := strconv.Atoi(thread)
		if err != nil {
			return false
		}
		second, err := strconv.Atoi(other)
		if err != nil {
			return false
		}
		differ, _, failed := unix.Syscall6(unix.SYS_KCMP, uintptr(first), uintptr(second), kcmpFiles, 0, 0, 0)
		return failed == 0 && differ == 0
	}
}

// isOwnProc reports whether /proc of the host has processes by the numbers that this process knows them by: it shows this
// process under its own number, and in the namespace of all processes or in that of its first process.
func isOwnProc(host fs.FS) bool {
	own := strconv.Itoa(unix.Getpid())
	if shown, err := fs.ReadLink(host, "proc/self"); err != nil || shown != own {
		return false
	}
	namespace, err := fs.ReadLink(host, path.Join("proc", own, "ns/pid"))
	if err != nil || namespace == initialPIDs {
		return err == nil
	}
	first, err := fs.ReadLink(host, "proc/1/ns/pid")
	return err == nil && first == namespace
}
