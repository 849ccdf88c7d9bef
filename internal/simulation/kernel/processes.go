package kernel

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"
)

// process is a process with open nodes.
type process struct {
	since time.Time
	nodes []string
}

// StartProcess starts a process in a control group, opens the existing ones among the nodes, and
// returns the number of the process.
func (h *Host) StartProcess(name, group string, nodes ...string) (pid int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pids++
	pid = 100 + h.pids
	dir := fmt.Sprintf("proc/%d", pid)
	h.text(dir+"/comm", name+"\n")
	h.text(dir+"/stat", fmt.Sprintf("%d (%s) S%s %d\n", pid, name, strings.Repeat(" 0", 18), pid)) // the start time is as unique as the PID
	h.text(dir+"/cgroup", "0::"+group+"\n")
	h.put(dir+"/fd/0", &node{mode: fs.ModeSymlink, target: "socket:[1]"})
	p := &process{since: time.Now()}
	for i, name := range nodes {
		name = strings.TrimPrefix(name, "/")
		if n := h.find(name); n != nil && n.mode&fs.ModeDevice != 0 {
			h.put(fmt.Sprintf("%s/fd/%d", dir, 3+i), &node{mode: fs.ModeSymlink, target: "/" + name, opened: n})
			p.nodes = append(p.nodes, name)
		}
	}
	h.processes[pid] = p
	return pid
}

// Exit ends a process. An ended process is not an error.
func (h *Host) Exit(pid int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.exit(pid)
}

func (h *Host) exit(pid int) {
	if h.processes[pid] != nil {
		delete(h.processes, pid)
		h.dropPath(fmt.Sprintf("proc/%d", pid))
	}
}

// OpenSince returns the times since when processes have had a function open.
func (h *Host) OpenSince(address string) []time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f := h.functions[address]; f != nil {
		return h.openSince(f)
	}
	return nil
}

func (h *Host) openSince(f *function) (since []time.Time) {
	node := fmt.Sprintf("dev/vfio/%d", f.Group)
	switch f.driver {
	case VFIO:
	case nvme:
		node = f.nodeOf()
	default:
		return nil
	}
	for _, p := range h.processes {
		if slices.Contains(p.nodes, node) {
			since = append(since, p.since)
		}
	}
	return since
}

// DiskNode returns the node of a function under its own driver, "" if there is none.
func (h *Host) DiskNode(address string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if f := h.functions[address]; f != nil && f.driver == nvme {
		return f.nodeOf()
	}
	return ""
}
