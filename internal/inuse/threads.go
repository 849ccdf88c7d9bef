package inuse

import (
	"io/fs"
	"path"
	"strconv"

	"golang.org/x/sys/unix"
)

// kcmpFiles makes kcmp(2) compare the file tables of two threads (KCMP_FILES in
// include/uapi/linux/kcmp.h).
const kcmpFiles = 2

// sharesFiles returns a function to report whether two threads of the host share one file table.
// The function compares threads by kcmp(2), which uses thread numbers of the caller's PID
// namespace. The function reports false, and each table is read, if the host's /proc belongs to
// another namespace or to a recorded host, and if the kernel refuses the comparison: without
// CONFIG_KCMP (ENOSYS), without CAP_SYS_PTRACE (EPERM), and for a thread after its end (ESRCH).
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

// isOwnProc reports whether the host's /proc uses this process's numbers of processes: this process
// has its own number there, and /proc is of the namespace of all processes or of the namespace of
// its first process.
func isOwnProc(host fs.FS) bool {
	own, err := fs.ReadLink(host, "proc/self")
	if err != nil {
		return false
	}
	if shown, err := strconv.Atoi(own); err != nil || shown != unix.Getpid() {
		return false
	}
	namespace, err := fs.ReadLink(host, path.Join("proc", own, "ns/pid"))
	if err != nil || namespace == initialPIDs {
		return err == nil
	}
	first, err := fs.ReadLink(host, "proc/1/ns/pid")
	return err == nil && first == namespace
}
