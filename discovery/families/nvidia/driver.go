package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/internal/pattern"
)

// driver holds the facts that all GPUs of a host share.
type driver struct {
	host    *discovery.Host
	version string // "535.104.05"; empty if unknown
	majors  map[string]int64
	files   specs.ContainerEdits // the driver's libraries and programs for containers, if the administrator named a driver root
	rootErr error                // why files is empty although a driver root is named

	mps    specs.ContainerEdits // edits for containers that use a shared GPU through MPS
	mpsErr error                // why mps is empty although an MPS root is named

	machine string // the host's model; empty if unknown

	installer bool // the driver root has the layout of Google's installer

	nvml    map[string]facts.GPU // by PCI address; nil if NVML was not queried
	nvmlErr error                // why the NVML facts are unavailable
	links   links
}

// nvidiaMajor is the major number of /dev/nvidia*, the same on every host (NV_MAJOR_DEVICE_NUMBER).
// The kernel assigns the other majors dynamically.
const nvidiaMajor = 195

// readDriver reads the facts that all GPUs share. The problems name no device, because a GPU whose
// driver version or node numbers are unknown remains usable.
func readDriver(host *discovery.Host) (*driver, []discovery.Problem) {
	d := &driver{host: host}
	var problems []discovery.Problem
	fail := func(err error) {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			problems = append(problems, discovery.Problem{Device: "nvidia", Err: err})
		}
	}
	var err error
	d.version, err = readVersion(host)
	fail(err)
	text, err := host.ReadText("/proc/devices")
	fail(err)
	d.majors = parseMajors(text)
	d.majors["nvidia"] = nvidiaMajor
	if root := host.Roots["nvidia"]; root != "" {
		d.installer = installerRoot(host, root)
		var odd error
		d.files, odd, d.rootErr = d.filesBelow(path.Clean("/" + root))
		fail(odd)
	}
	d.mps, d.mpsErr = readMPS(host)
	d.machine, _ = host.ReadText("/sys/class/dmi/id/product_name") // only a label depends on the model
	d.readNVML()
	return d, problems
}

// versionText finds the version in /proc/driver/nvidia/version, in a line such as
// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 …".
var versionText = pattern.Lazy(`NVRM version:.*?\s([0-9]+\.[0-9]+(?:\.[0-9]+)?)\s`)

func readVersion(host *discovery.Host) (string, error) {
	version, err := host.ReadText("/sys/module/nvidia/version")
	if err == nil && version != "" {
		return version, nil
	}
	text, procErr := host.ReadText("/proc/driver/nvidia/version")
	if m := versionText().FindStringSubmatch(text); m != nil {
		return m[1], nil
	}
	return "", errors.Join(err, procErr)
}

// parseMajors returns the majors of character devices by driver name, from lines of /proc/devices
// such as "511 nvidia-uvm".
func parseMajors(text string) map[string]int64 {
	majors := make(map[string]int64)
	characters, _, _ := strings.Cut(text, "Block devices:")
	for line := range strings.Lines(characters) {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			continue
		}
		if major, err := strconv.ParseUint(fields[0], 10, 12); err == nil {
			majors[fields[1]] = int64(major)
		}
	}
	return majors
}

// nodes returns the node of a GPU and the nodes that all GPUs share. nvidiactl is always included;
// each other shared node is included if the host has the node. If the agent mounts the libraries,
// no other component loads the CUDA module. /dev/nvidia-uvm is then included even if the node is
// missing, so that the missing node is reported.
func (d *driver) nodes(minor int64) []*specs.DeviceNode {
	nodes := []*specs.DeviceNode{
		d.node("nvidia", fmt.Sprintf("/dev/nvidia%d", minor), minor),
		d.node("nvidia", "/dev/nvidiactl", 255),
	}
	for _, shared := range []*specs.DeviceNode{
		d.node("nvidia-uvm", "/dev/nvidia-uvm", 0),
		d.node("nvidia-uvm", "/dev/nvidia-uvm-tools", 1),
		d.node("nvidia", "/dev/nvidia-modeset", 254),
	} {
		needed := shared.Path == "/dev/nvidia-uvm" && len(d.files.Mounts) > 0
		if needed || d.host.FileExists(shared.HostPath) {
			nodes = append(nodes, shared)
		}
	}
	return nodes
}

// node returns a node of the named driver. The node has no numbers if /proc/devices does not list
// the driver.
func (d *driver) node(name, nodePath string, minor int64) *specs.DeviceNode {
	node := &specs.DeviceNode{Path: nodePath, HostPath: nodePath, Permissions: "rw"}
	if d.installer {
		node.Permissions = "mrw" // Google's device plugin uses the same permissions
	}
	if major, ok := d.majors[name]; ok {
		node.Type, node.Major, node.Minor = "c", major, minor
	}
	return node
}
