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

	// ours says that it is in the first process's namespace of process IDs, and foreign that
	// it is in another: it is in a container, such as a node that is one. Neither is known of
	// processes that this one may not look into.
	ours, foreign bool
}

// processesOf returns the processes below a proc directory of which the command line can be
// read.
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

// named returns the processes of a program that are in no container. Some distributions have all in one program, whose
// first argument says which it is, such as "hyperkube kubelet".
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

// flags returns the process's flags by name, those without a value as "true".
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

// environment returns the variables that the process was started with, none if they may not be read.
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

// started returns when the process started: its stat has ticks since the machine started, of
// which there are 100 a second to user space on all architectures (proc_pid_stat(5)).
func (p process) started() (time.Time, error) {
	stat, err := os.ReadFile(filepath.Join(p.dir, "stat"))
	if err != nil {
		return time.Time{}, err
	}
	_, rest, found := strings.Cut(string(stat), ") ") // behind the name, which may have spaces
	fields := strings.Fields(rest)
	if !found || len(fields) < 20 {
		return time.Time{}, fmt.Errorf("%s/stat: not as proc_pid_stat(5) says", p.dir)
	}
	ticks, err := strconv.ParseInt(fields[19], 10, 64) // the 22nd of all
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
