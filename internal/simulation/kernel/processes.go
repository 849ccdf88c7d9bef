package kernel

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"
)

// processes holds the processes with their files in /proc.
type processes struct {
	files *tree
	byPID map[int]*process
	pids  int // the number of processes so far
}

// process is a process with open nodes.
type process struct {
	since time.Time
	nodes []string
}

// start starts a process, and opens the existing ones among the nodes.
func (p *processes) start(name, group string, nodes []string) (pid int) {
	p.pids++
	pid = 100 + p.pids
	dir := fmt.Sprintf("proc/%d", pid)
	p.files.text(dir+"/comm", name+"\n")
	p.files.text(dir+"/stat", fmt.Sprintf("%d (%s) S%s %d\n", pid, name, strings.Repeat(" 0", 18), pid)) // the start time is as unique as the PID
	p.files.text(dir+"/cgroup", "0::"+group+"\n")
	p.files.put(dir+"/fd/0", &node{mode: fs.ModeSymlink, target: "socket:[1]"})
	started := &process{since: time.Now()}
	for i, name := range nodes {
		name = strings.TrimPrefix(name, "/")
		if n := p.files.find(name); n != nil && n.mode&fs.ModeDevice != 0 {
			p.files.put(fmt.Sprintf("%s/fd/%d", dir, 3+i), &node{mode: fs.ModeSymlink, target: "/" + name, opened: n})
			started.nodes = append(started.nodes, name)
		}
	}
	p.byPID[pid] = started
	return pid
}

// exit ends a process. An ended process is not an error.
func (p *processes) exit(pid int) {
	if p.byPID[pid] != nil {
		delete(p.byPID, pid)
		p.files.dropPath(fmt.Sprintf("proc/%d", pid))
	}
}

// openSince returns the times since when processes have had a function open.
func (p *processes) openSince(f *function) (since []time.Time) {
	node := fmt.Sprintf("dev/vfio/%d", f.Group)
	switch f.driver {
	case VFIO:
	case nvme:
		node = f.nodeOf()
	default:
		return nil
	}
	for _, one := range p.byPID {
		if slices.Contains(one.nodes, node) {
			since = append(since, one.since)
		}
	}
	return since
}

// StartProcess starts a process in a control group, opens the existing ones among the nodes, and
// returns the number of the process.
func (h *Host) StartProcess(name, group string, nodes ...string) (pid int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.processes.start(name, group, nodes)
}

// Exit ends a process. An ended process is not an error.
func (h *Host) Exit(pid int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.processes.exit(pid)
}

// OpenSince returns the times since when processes have had a function open.
func (h *Host) OpenSince(address string) []time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f := h.bus.functions[address]; f != nil {
		return h.processes.openSince(f)
	}
	return nil
}

// DiskNode returns the node of a function under its own driver, "" if there is none.
func (h *Host) DiskNode(address string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f := h.bus.functions[address]; f != nil && f.driver == nvme {
		return f.nodeOf()
	}
	return ""
}
