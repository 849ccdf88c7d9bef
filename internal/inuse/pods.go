package inuse

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// maxPasses is how often the processes of pods are listed before ByPods gives up. A process may
// start another process and end during a pass.
const maxPasses = 5

// ByPods returns which processes of some pods have a device open: its own nodes, and every other
// file that can drive a PCI function. The processes of a pod are the processes in its control
// group, so the process of a monitor is ignored.
func ByPods(host *discovery.Host, d discovery.Device, pods []types.UID) (uses Uses) {
	return byPods(host, d, func(groups string) bool {
		return slices.ContainsFunc(pods, func(pod types.UID) bool { return inPod(groups, pod) })
	})
}

// ByUnlistedPods is [ByPods] for the pods that are not listed. The API server does not list a pod
// that was deleted by force, while processes of the pod may still run. Static pods are ignored: the
// API server lists them under other UIDs, and they cannot have claims.
func ByUnlistedPods(host *discovery.Host, d discovery.Device, listed []types.UID) (uses Uses) {
	return byPods(host, d, func(groups string) bool {
		pod := podIn(groups)
		return pod != "" && !slices.Contains(listed, pod)
	})
}

func byPods(host *discovery.Host, d discovery.Device, inPods func(groups string) bool) (uses Uses) {
	for range maxPasses {
		processes, err := processesOf(host, inPods)
		if err != nil {
			return Uses{{Object: "the device", ReadError: err}}
		}
		if len(processes) == 0 {
			return nil
		}
		if uses = byProcesses(host, d, processes); len(uses) > 0 {
			return uses
		}
		again, err := processesOf(host, inPods)
		if err == nil && !slices.ContainsFunc(again, func(process string) bool { return !slices.Contains(processes, process) }) {
			return nil
		}
	}
	return Uses{{Object: "the device", How: "the pod starts processes faster than they can be checked"}}
}

// processesOf returns the processes that are in the control group of one of some pods.
func processesOf(host *discovery.Host, inPods func(groups string) bool) (processes []string, err error) {
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
		case err != nil && hasEnded(host.FS, dir, err):
		case err != nil:
			return nil, fmt.Errorf("read the control group of process %s: %w", entry.Name(), err)
		case inPods(groups):
			processes = append(processes, entry.Name())
		}
	}
	return processes, nil
}

// self is the calling process in any mount of /proc (proc_pid(5)).
const self = "self"

// CheckVisibility returns why the open files of pods' processes are not visible, nil if they are. It
// reads the open files of the first process, which has every privilege: a reader with access to
// that process has access to all.
func CheckVisibility(host fs.FS) error { return VisibilityOf(host, self) }

// VisibilityOfAll returns why the open files of all processes of the machine are not visible, in
// addition to the reasons of [CheckVisibility]. If the node is a container, other processes run outside.
func VisibilityOfAll(host fs.FS) error {
	if namespace, err := fs.ReadLink(host, "proc/1/ns/pid"); err == nil && namespace != initialPIDs {
		return errNotAll
	}
	return nil
}

var errNotAll = errors.New("the processes in /proc are those of a container, and not those of the host")

// VisibilityOf is [CheckVisibility] for another process than the caller, by its number in the host's /proc.
func VisibilityOf(host fs.FS, process string) error {
	if err := seesAll(host, process); err != nil {
		return err
	}
	if _, err := fs.ReadDir(host, "proc/1/fd"); err != nil {
		return fmt.Errorf("the open files of other processes may not be seen: %w", err)
	}
	return nil
}

// seesAll returns why the processes of all pods are not in /proc, nil if they are. With the mount
// option hidepid, an unprivileged process sees no processes of other users, not even the first one.
//
// A node may be a container, as with kind. In that case /proc is the node's, and not that of the
// agent's own container, if its first process is in another PID namespace than the agent, or, in a
// pod with hostPID, in another network namespace: all containers of a pod share one network
// namespace.
func seesAll(host fs.FS, process string) error {
	if _, err := fs.Lstat(host, "proc/1"); err != nil {
		return fmt.Errorf("not all processes are visible: %w", err)
	}
	if first, err := fs.ReadLink(host, "proc/1/ns/pid"); err != nil || first == initialPIDs {
		return nil
	}
	same, err := sameNamespace(host, process, "pid")
	if err == nil && same {
		same, err = sameNamespace(host, process, "net")
	}
	if err != nil || same {
		return errNotAll
	}
	return nil
}

// sameNamespace reports whether a process and the first process are in the same namespace of a
// type, such as "net".
func sameNamespace(host fs.FS, process, kind string) (bool, error) {
	first, err := fs.ReadLink(host, path.Join("proc/1/ns", kind))
	if err != nil {
		return false, err
	}
	own, err := fs.ReadLink(host, path.Join("proc", process, "ns", kind))
	return own == first, err
}

// inPods returns a function that reports whether a process belongs to one of some pods.
func inPods(host fs.FS, pods []types.UID) func(process string) bool {
	if len(pods) == 0 {
		return func(string) bool { return false }
	}
	return func(process string) bool {
		groups, err := textOf(host, path.Join("proc", process, "cgroup"))
		return err == nil && slices.ContainsFunc(pods, func(pod types.UID) bool { return inPod(groups, pod) })
	}
}

// inPod reports whether the text of /proc/PID/cgroup shows a process in the control group of a pod.
// With version 1 the file has a line for each hierarchy. The kubelet names a pod's group pod<UID>,
// or for systemd kubepods-burstable-pod<UID>.slice with underscores in the UID (pkg/kubelet/cm,
// GetPodCgroupNameSuffix and ToSystemd, in 1.31 to 1.37).
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

// podGroup matches the part of a control group's path that the kubelet made from a pod's UID: see
// [inPod]. The UIDs of static pods have another form (pkg/kubelet/config/common.go, applyDefaults,
// in 1.31 to 1.37).
var podGroup = regexp.MustCompile(`/(?:[^/]+-pod|pod)([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?:\.slice)?(?:/|$)`)

// podIn returns the pod in the text of /proc/PID/cgroup, "" for the processes of no pod and of
// static pods.
func podIn(groups string) types.UID {
	for line := range strings.Lines(groups) {
		if match := podGroup.FindStringSubmatch(strings.TrimSpace(line)); match != nil {
			return types.UID(strings.ReplaceAll(match[1], "_", "-"))
		}
	}
	return ""
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
	if sysfs.IsPCIAddress(function.Name()) && function.HasEntry(".") {
		return v.open(function)
	}
	var nodes []node
	for _, n := range d.OwnNodes() {
		nodes = append(nodes, node{cmp.Or(n.HostPath, n.Path), formatNumbers(n.Type == "b", n.Major, n.Minor)})
	}
	return v.openNodes(nodes)
}
