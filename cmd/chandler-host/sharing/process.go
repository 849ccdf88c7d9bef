package sharing

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"chandler.dev/internal/hostservice/wire"
)

// processMark begins the environment variable of a claim's processes. Its value is the claim's
// directory, which is unique on the machine. The daemon has the variable, and its servers inherit
// it.
const processMark = "CHANDLER_SHARING_CLAIM="

// startTime returns the start time of a process, "" if there is no such process or only a zombie.
func startTime(pid int) string {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return ""
	}
	// The name of the program, in parentheses, may contain any character: man 5 proc_pid_stat.
	_, rest, _ := strings.Cut(string(stat[max(0, bytes.LastIndexByte(stat, ')')):]), " ")
	fields := strings.Fields(rest)
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return ""
	}
	return fields[19]
}

func isAlive(p wire.Process) bool { return p.PID > 0 && p.Start != "" && startTime(p.PID) == p.Start }

// ofClaim returns the processes of the claim with the given directory. A container's process cannot
// pretend to be one: it has another cgroup than this program.
func ofClaim(dir string) (found []wire.Process) {
	own, _ := os.ReadFile("/proc/self/cgroup")
	names, _ := filepath.Glob("/proc/[0-9]*")
	for _, name := range names {
		environ, err := os.ReadFile(filepath.Join(name, "environ"))
		if err != nil || !isMarked(environ, dir) {
			continue
		}
		group, err := os.ReadFile(filepath.Join(name, "cgroup"))
		pid, _ := strconv.Atoi(filepath.Base(name))
		if start := startTime(pid); err == nil && bytes.Equal(own, group) && start != "" {
			found = append(found, wire.Process{PID: pid, Start: start})
		}
	}
	return found
}

func isMarked(environ []byte, dir string) bool {
	for variable := range bytes.SplitSeq(environ, []byte{0}) {
		if string(variable) == processMark+dir {
			return true
		}
	}
	return false
}

// signal sends a signal to all processes of a claim, and reports whether there are any.
func signal(dir string, s syscall.Signal) bool {
	all := ofClaim(dir)
	for _, p := range all {
		if isAlive(p) {
			_ = syscall.Kill(p.PID, s) // the process may have ended meanwhile
		}
	}
	return len(all) > 0
}
