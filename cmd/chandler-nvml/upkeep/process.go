package upkeep

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"chandler.dev/internal/upkeep/wire"
)

// mark begins the variable by which the processes of a claim are known, with the claim's
// directory, which no other supervisor of this machine has: the daemon has it, and its servers
// inherit it.
const mark = "CHANDLER_UPKEEP_OF="

// started returns when a process was started, "" if there is none of that number, or only what is
// left of one until its parent has asked for its end.
func started(pid int) string {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return ""
	}
	// The name of the program, in parentheses, may have anything in it: man 5 proc_pid_stat.
	_, rest, _ := strings.Cut(string(stat[max(0, bytes.LastIndexByte(stat, ')')):]), " ")
	fields := strings.Fields(rest)
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return ""
	}
	return fields[19]
}

func alive(p wire.Process) bool { return p.PID > 0 && p.Start != "" && started(p.PID) == p.Start }

// ofClaim returns the processes of the claim that has a directory. A container's process cannot pass for one: it is in
// another control group than this program.
func ofClaim(dir string) (found []wire.Process) {
	own, _ := os.ReadFile("/proc/self/cgroup")
	names, _ := filepath.Glob("/proc/[0-9]*")
	for _, name := range names {
		environ, err := os.ReadFile(filepath.Join(name, "environ"))
		if err != nil || !marked(environ, dir) {
			continue
		}
		group, err := os.ReadFile(filepath.Join(name, "cgroup"))
		pid, _ := strconv.Atoi(filepath.Base(name))
		if start := started(pid); err == nil && bytes.Equal(own, group) && start != "" {
			found = append(found, wire.Process{PID: pid, Start: start})
		}
	}
	return found
}

func marked(environ []byte, dir string) bool {
	for variable := range bytes.SplitSeq(environ, []byte{0}) {
		if string(variable) == mark+dir {
			return true
		}
	}
	return false
}

// signal sends all processes of a claim a signal, and reports whether there are any.
func signal(dir string, s syscall.Signal) bool {
	all := ofClaim(dir)
	for _, p := range all {
		if alive(p) {
			_ = syscall.Kill(p.PID, s) // it may have ended meanwhile
		}
	}
	return len(all) > 0
}
