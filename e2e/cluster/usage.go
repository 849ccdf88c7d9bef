package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Usage is what a program on a node uses of the machine.
type Usage struct {
	CPU       time.Duration // processor time since the start of the program, in steps of 10 ms
	Memory    int64         // resident memory in bytes
	Anonymous int64         // the part of Memory that no file backs
}

// Usage returns the usage of a running component, such as "etcd".
func (n *Node) Usage(component string) (Usage, error) {
	n.mu.Lock()
	p := n.components[component]
	n.mu.Unlock()
	if p == nil {
		return Usage{}, fmt.Errorf("%s does not run", component)
	}
	u, err := UsageOf(p.cmd)
	if err != nil {
		return Usage{}, fmt.Errorf("usage of %s: %w", component, err)
	}
	return u, nil
}

// UsageOf returns the usage of the program of a running command of [Node.Command].
func UsageOf(cmd *exec.Cmd) (u Usage, err error) {
	pid, err := childOf(cmd.Process.Pid)
	if err != nil {
		return u, err
	}
	status, err := os.ReadFile(filepath.Join("/proc", pid, "status"))
	if err != nil {
		return u, err
	}
	for field, to := range map[string]*int64{"VmRSS": &u.Memory, "RssAnon": &u.Anonymous} {
		if *to, err = kilobytes(string(status), field); err != nil {
			return u, fmt.Errorf("process %s: %w", pid, err)
		}
	}
	stat, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	if err == nil {
		u.CPU, err = processorTime(string(stat))
	}
	if err != nil {
		return u, fmt.Errorf("process %s: %w", pid, err)
	}
	return u, nil
}

// kilobytes returns a field that the status of a process states in kB. The result is in bytes.
func kilobytes(status, field string) (int64, error) {
	_, rest, _ := strings.Cut(status, field+":")
	value, _, found := strings.Cut(rest, " kB")
	if !found {
		return 0, fmt.Errorf("its status states no %s", field)
	}
	n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
	return n << 10, err
}

// processorTime returns the processor time in the stat of a process.
func processorTime(stat string) (time.Duration, error) {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:]) // The text after the command name begins with the third field.
	if len(fields) < 13 {
		return 0, fmt.Errorf("stat has %d fields", 2+len(fields))
	}
	var ticks int64
	for _, field := range fields[11:13] { // utime and stime, proc_pid_stat(5); in user space, Linux has 100 ticks per second
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("stat: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil
}

// childOf returns the PID of the only child of a process. A command on the node is the child of the
// process that entered the node for the command.
func childOf(pid int) (string, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return "", err
	}
	var children []string
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		children = append(children, strings.Fields(string(data))...)
	}
	if len(children) != 1 {
		return "", fmt.Errorf("process %d has %d children", pid, len(children))
	}
	return children[0], nil
}
