package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
)

// driver is what all GPUs of a host share.
type driver struct {
	host    *discovery.Host
	version string // "535.104.05", "" if not known
	majors  map[string]int64
	files   specs.ContainerEdits // by which containers have its libraries and programs, where a root is named for them
	rootErr error                // why there are none below the root that is named

	mps    specs.ContainerEdits // by which a GPU that is shared is used
	mpsErr error                // why it is not, though a root is named for it

	machine string // the model of the host, "" if not known

	installer bool // the root is as Google's installer leaves it

	nvml    map[string]facts.GPU // by PCI address; nil if NVML was not asked
	nvmlErr error                // why nothing of it is known
	links   links
}

// nvidiaMajor is the major of /dev/nvidia*, the same on every host
// (NV_MAJOR_DEVICE_NUMBER). The others are given out by the kernel.
const nvidiaMajor = 195

// readDriver reads what all GPUs share. Problems name no device: a GPU that
// lacks no more than a version or a node's numbers can still be used.
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
	d.machine, _ = host.ReadText("/sys/class/dmi/id/product_name") // of which only a label depends
	d.readNVML()
	return d, problems
}

// versionText finds the version in /proc/driver/nvidia/version, of which a line
// is "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 …".
var versionText = regexp.MustCompile(`NVRM version:.*?\s([0-9]+\.[0-9]+(?:\.[0-9]+)?)\s`)

func readVersion(host *discovery.Host) (string, error) {
	version, err := host.ReadText("/sys/module/nvidia/version")
	if err == nil && version != "" {
		return version, nil
	}
	text, procErr := host.ReadText("/proc/driver/nvidia/version")
	if m := versionText.FindStringSubmatch(text); m != nil {
		return m[1], nil
	}
	return "", errors.Join(err, procErr)
}

// parseMajors returns the majors of character devices by name, from lines of
// /proc/devices such as "511 nvidia-uvm".
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

// nodes returns the node of a GPU and those that all GPUs share: always
// nvidiactl, and of the others what is there. Where we bring the libraries,
// nobody else loads the module for CUDA, and its node is missed if it is not
// there.
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
		if needed || d.host.Exists(shared.HostPath) {
			nodes = append(nodes, shared)
		}
	}
	return nodes
}

// node returns a node of the driver of that name. Its numbers are left out
// where the kernel does not list the driver.
func (d *driver) node(name, nodePath string, minor int64) *specs.DeviceNode {
	node := &specs.DeviceNode{Path: nodePath, HostPath: nodePath, Permissions: "rw"}
	if d.installer {
		node.Permissions = "mrw" // as Google's plugin has it
	}
	if major, ok := d.majors[name]; ok {
		node.Type, node.Major, node.Minor = "c", major, minor
	}
	return node
}
