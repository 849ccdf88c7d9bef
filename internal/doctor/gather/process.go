package gather

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// process is a process of the host.
type process struct {
	pid  int
	dir  string // its directory in proc
	args []string

	// ours is set for a process in the PID namespace of the first process. foreign is set for a
	// process in another PID namespace: in a container, or in a node that is a container. Neither
	// is set if permission to inspect the process is missing.
	ours, foreign bool
}

// processesOf returns the processes in a proc directory whose command lines are readable.
func processesOf(proc string) (found []process) {
	entries, _ := os.ReadDir(proc)
	first, _ := os.Readlink(filepath.Join(proc, "1/ns/pid"))
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		dir := filepath.Join(proc, entry.Name())
		data, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil || len(data) == 0 {
			continue
		}
		p := process{pid: pid, dir: dir, args: strings.Split(string(bytes.TrimRight(data, "\x00")), "\x00")}
		if namespace, err := os.Readlink(filepath.Join(dir, "ns/pid")); err == nil && first != "" {
			p.ours, p.foreign = namespace == first, namespace != first
		}
		found = append(found, p)
	}
	return found
}

// named returns the processes of a program, without processes in containers. Some
// distributions combine several programs in one binary, and the first argument selects the
// program, as in "hyperkube kubelet".
func named(processes []process, program string) (found []process) {
	for _, p := range processes {
		if p.foreign {
			continue
		}
		if filepath.Base(p.args[0]) == program || len(p.args) > 2 && p.args[1] == program {
			found = append(found, p)
		}
	}
	return found
}

// flags returns the process's flags by name. A flag without a value has the value "true".
func (p process) flags() map[string]string {
	flags := make(map[string]string)
	for i, arg := range p.args {
		name, found := strings.CutPrefix(arg, "--")
		if !found {
			if name, found = strings.CutPrefix(arg, "-"); !found {
				continue
			}
		}
		name, value, has := strings.Cut(name, "=")
		switch {
		case has:
		case i+1 < len(p.args) && !strings.HasPrefix(p.args[i+1], "-"):
			value = p.args[i+1]
		default:
			value = "true"
		}
		flags[name] = value
	}
	return flags
}

// environment returns the process's initial environment variables, or none if they are
// unreadable.
func (p process) environment() map[string]string {
	data, _ := os.ReadFile(filepath.Join(p.dir, "environ"))
	variables := make(map[string]string)
	for variable := range strings.SplitSeq(string(data), "\x00") {
		if name, value, found := strings.Cut(variable, "="); found {
			variables[name] = value
		}
	}
	return variables
}

// startTime returns when the process started. The start time in its stat file is in clock ticks
// since boot; user space sees 100 ticks per second on all architectures (proc_pid_stat(5)).
func (p process) startTime() (time.Time, error) {
	stat, err := os.ReadFile(filepath.Join(p.dir, "stat"))
	if err != nil {
		return time.Time{}, err
	}
	_, rest, found := strings.Cut(string(stat), ") ") // skip the name, which may contain spaces
	fields := strings.Fields(rest)
	if !found || len(fields) < 20 {
		return time.Time{}, fmt.Errorf("%s/stat: not as proc_pid_stat(5) says", p.dir)
	}
	ticks, err := strconv.ParseInt(fields[19], 10, 64) // field 22 of the file
	if err != nil {
		return time.Time{}, err
	}
	all, err := os.ReadFile(filepath.Join(filepath.Dir(p.dir), "stat"))
	if err != nil {
		return time.Time{}, err
	}
	for line := range strings.Lines(string(all)) {
		if boot, found := strings.CutPrefix(line, "btime "); found {
			seconds, err := strconv.ParseInt(strings.TrimSpace(boot), 10, 64)
			return time.Unix(seconds+ticks/100, 0), err
		}
	}
	return time.Time{}, fmt.Errorf("%s: no btime", filepath.Dir(p.dir))
}
