package inuse

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// maxPasses is how often the processes of pods are looked at before it is said that
// they do not hold still. A process may start another and end in the middle of a look.
const maxPasses = 5

// ByPods returns which processes of some pods have a device open: its own nodes, and all
// else by which a PCI function can be driven. The processes of a pod are those in its
// control group, so one of a monitor does not count.
func ByPods(host *discovery.Host, d discovery.Device, pods []types.UID) (uses Uses) {
	for range maxPasses {
		processes, err := processesOf(host, pods)
		if err != nil {
			return Uses{{Object: "the device", Unseen: err}}
		}
		if len(processes) == 0 {
			return nil
		}
		if uses = byProcesses(host, d, processes); len(uses) > 0 {
			return uses
		}
		again, err := processesOf(host, pods)
		if err == nil && !slices.ContainsFunc(again, func(process string) bool { return !slices.Contains(processes, process) }) {
			return nil
		}
	}
	return Uses{{Object: "the device", How: "the pod starts processes faster than they can be looked at"}}
}

// processesOf returns the processes in the control groups of pods.
func processesOf(host *discovery.Host, pods []types.UID) (processes []string, err error) {
	if err := seesAll(host.FS, self); err != nil {
		return nil, err
	}
	entries, err := fs.ReadDir(host.FS, "proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	for _, entry := range entries {
		if _, err := strconv.ParseUint(entry.Name(), 10, 31); err != nil {
			continue
		}
		dir := path.Join("proc", entry.Name())
		groups, err := textOf(host.FS, path.Join(dir, "cgroup"))
		switch {
		case err != nil && ended(host.FS, dir, err):
		case err != nil:
			return nil, fmt.Errorf("read the control group of process %s: %w", entry.Name(), err)
		case slices.ContainsFunc(pods, func(pod types.UID) bool { return inPod(groups, pod) }):
			processes = append(processes, entry.Name())
		}
	}
	return processes, nil
}

// self is the process that looks, in whichever /proc (proc_pid(5)).
const self = "self"

// Sight tells why it cannot be seen what the processes of pods have open, nil if it can be. It asks for
// the first process, which has every privilege: who may look at that one may look at all.
func Sight(host fs.FS) error { return SightOf(host, self) }

// SightOfAll tells why it cannot be seen what all processes of the machine have open, besides why [Sight]
// cannot. On a node that is a container itself there are others.
func SightOfAll(host fs.FS) error {
	if namespace, err := fs.ReadLink(host, "proc/1/ns/pid"); err == nil && namespace != initialPIDs {
		return errNotAll
	}
	return nil
}

var errNotAll = errors.New("the processes in /proc are those of a container, and not those of the host")

// SightOf is Sight for another process than the caller's, which /proc of the host has under a number.
func SightOf(host fs.FS, process string) error {
	if err := seesAll(host, process); err != nil {
		return err
	}
	if _, err := fs.ReadDir(host, "proc/1/fd"); err != nil {
		return fmt.Errorf("the open files of other processes may not be seen: %w", err)
	}
	return nil
}

// seesAll returns why the processes of all pods are not in /proc, nil if they are. With the mount option hidepid, a
// process without privilege sees no processes of others, not even the first one.
//
// A node may be a container itself, as with kind. /proc is then the node's, and not that of the agent's own container,
// if its first process is in another PID namespace than the agent, or, in a pod with hostPID, in another network
// namespace: all containers of a pod share one network namespace.
func seesAll(host fs.FS, process string) error {
	if _, err := fs.Lstat(host, "proc/1"); err != nil {
		return fmt.Errorf("not all processes are visible: %w", err)
	}
	first, err := fs.ReadLink(host, "proc/1/ns/pid")
	if err != nil || first == initialPIDs {
		return nil
	}
	own, err := fs.ReadLink(host, path.Join("proc", process, "ns/pid"))
	if err != nil || own == first && !apartFromFirst(host, process) {
		return errNotAll
	}
	return nil
}

// apartFromFirst reports whether a process is in another network namespace than the first one.
func apartFromFirst(host fs.FS, process string) bool {
	first, err := fs.ReadLink(host, "proc/1/ns/net")
	if err != nil {
		return false
	}
	own, err := fs.ReadLink(host, path.Join("proc", process, "ns/net"))
	return err == nil && own != first
}

// InPods returns what reports whether a process is one of some pods; see [Options.Except].
func InPods(host fs.FS, pods []types.UID) func(process int) bool {
	return func(process int) bool {
		groups, err := textOf(host, path.Join("proc", strconv.Itoa(process), "cgroup"))
		return err == nil && slices.ContainsFunc(pods, func(pod types.UID) bool { return inPod(groups, pod) })
	}
}

// inPod reports whether a process is in the control group of a pod, by its file
// /proc/PID/cgroup. With version 1 it has a line for each hierarchy. The kubelet calls a pod's
// group pod<UID>, or for systemd kubepods-burstable-pod<UID>.slice with underscores in the
// UID (pkg/kubelet/cm, GetPodCgroupNameSuffix and ToSystemd, in 1.31 to 1.37).
func inPod(groups string, pod types.UID) bool {
	if pod == "" {
		return false
	}
	plain, systemd := "pod"+string(pod), "pod"+strings.ReplaceAll(string(pod), "-", "_")
	for line := range strings.Lines(groups) {
		_, group, _ := strings.Cut(line, "/")
		for element := range strings.SplitSeq(strings.TrimSpace(group), "/") {
			slice, isSlice := strings.CutSuffix(element, ".slice")
			if element == plain || isSlice && (slice == systemd || strings.HasSuffix(slice, "-"+systemd)) {
				return true
			}
		}
	}
	return false
}

// byProcesses returns which of the processes have a device open.
func byProcesses(host *discovery.Host, d discovery.Device, processes []string) Uses {
	v := &View{host: host, known: []discovery.Device{d}, opened: newOpened(host.FS), disks: listDisks(host)}
	for _, process := range processes {
		if _, err := v.opened.read(host, process, false); err != nil && v.opened.err == nil {
			v.opened.err = err
		}
	}
	function := sysfs.At(host.FS, d.Source)
	if sysfs.IsPCIAddress(function.Name()) && function.Exists(".") {
		return v.open(function)
	}
	var nodes []node
	for _, n := range d.OwnNodes() {
		nodes = append(nodes, node{cmp.Or(n.HostPath, n.Path), numbers(n.Type == "b", n.Major, n.Minor)})
	}
	return v.openNodes(nodes)
}
