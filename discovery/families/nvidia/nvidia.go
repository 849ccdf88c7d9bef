// Package nvidia describes NVIDIA GPUs, their MIG instances and IMEX channels as the kernel driver
// shows them in /sys, /proc and /dev. If the host has the file of package facts, the family also
// reads the facts that only NVML reports: memory, architecture, MIG profiles, NVLink, errors. The
// package needs no NVIDIA library. It does not describe GPUs bound to another driver, such as a
// driver for virtual machines, virtual functions of vGPU, Tegra GPUs or GPUs in WSL.
package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/families/nvidia/userspace"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/pattern"
)

const name = "nvidia"

// Family recognises NVIDIA GPUs.
var Family = &discovery.Family{
	Name: name,
	Doc:  "NVIDIA GPUs, their MIG instances and IMEX channels",
	Match: []discovery.Match{
		{Bus: "pci", Vendor: "10de", PCIClass: "03", Driver: "nvidia"},
		{Bus: "pci", Vendor: "10de", PCIClass: "03", Unbound: true},
	},
	Describe:    describe,
	CommonNodes: []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"},
	MakeNodes:   "sudo nvidia-modprobe -u -c=0   # and once with the number of each other GPU",
	Create:      makePart,
	Remove:      unmakePart,
	Grant:       grant,
	Variables:   variables,
	Parameters:  []discovery.Parameter{ComputePercentage, MPS, MPSMemory, TimeSlice},
	Order:       daemonOrder,
	Accept:      accept,
	Roots:       []string{"nvidia", mpsRoot},
	Labels:      labels,
	Programs: []*discovery.Program{{
		Name:    "chandler-host",
		Library: "NVML",

		Provides: "memory, architecture, MIG profiles and XID errors",

		File:       facts.Path,
		Driver:     "/proc/driver/nvidia",
		Service:    facts.Program,
		ChangeArgs: facts.ChangeArgs,
		Args: func(hostRoot, root string) []string {
			return []string{"--host-root=" + hostRoot, "--driver-root=" + root, "--gpus=" + path.Join(hostRoot, "proc/driver/nvidia/gpus")}
		},
		MaxSize: facts.MaxSize,
		Check:   func(text string) error { _, err := facts.Parse(text); return err },
		Lost:    facts.FormatError,
	}, {
		Name:      "chandler-host",
		Library:   "NVIDIA's code for CDI specs",
		File:      userspace.Path,
		Driver:    "/proc/driver/nvidia",
		NeedsRoot: true,
		Service:   userspace.ServiceProgram,
		Args: func(hostRoot, root string) []string {
			return []string{"--files", "--host-root=" + hostRoot, "--driver-root=" + root}
		},
		Interval: userspace.ScanInterval,
		MaxSize:  userspace.MaxSize,
		Check:    func(text string) error { _, err := userspace.Parse(text); return err },
		Lost:     func(error) []byte { return nil }, // without an answer, the family searches for the files itself
	}},
}

// variables tune the libraries of CUDA, MPS and NCCL, and the NVIDIA container runtime.
var variables = []string{
	"CUDA_CACHE_DISABLE", "CUDA_CACHE_MAXSIZE", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DISABLE_PTX_JIT",
	"CUDA_FORCE_PTX_JIT", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_MPS_CLIENT_PRIORITY",
	"CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_DEBUG",
	"NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NTHREADS", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE",
	"NCCL_P2P_LEVEL", "NCCL_PROTO", "NVIDIA_DRIVER_CAPABILITIES",
}

func describe(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	driver, problems := readDriver(host)
	for _, function := range found {
		if function.HasEntry("physfn") {
			continue
		}
		described, trouble := driver.describe(function)
		devices = append(devices, described...)
		problems = append(problems, trouble...)
	}
	channels, err := driver.channels()
	problems = append(problems, discovery.Problems("nvidia", err)...)
	return append(devices, channels...), problems
}

// describe returns the GPU as one device, or its MIG instances if there are any. It returns nothing
// for a GPU that is not meant for computing.
func (d *driver) describe(function sysfs.Device) ([]discovery.Device, []discovery.Problem) {
	if !function.HasDriver() {
		gpu, err := pci.DescribeUnbound(d.host, function, "gpu", "nvidia")
		return []discovery.Device{gpu}, discovery.Problems(gpu.Name, err)
	}
	gpu, err := pci.DescribeFunction(d.host, function)
	gpu.Attributes.SetString("kind", "gpu")
	gpu.Attributes.SetString("vendor", "nvidia")
	gpu.Attributes.SetVersion("driverVersion", d.version)
	gpu.Edits = d.files
	text, infoErr := d.host.ReadText("/proc/driver/nvidia/gpus/" + function.Name() + "/information")
	info := information{minor: -1}
	if infoErr == nil {
		info, infoErr = parseInformation(text)
	}
	if infoErr != nil && info.minor < 0 && !errors.Is(infoErr, fs.ErrNotExist) {
		// The GPU may be partitioned, so it must not be described as a whole GPU.
		return nil, discovery.Problems(gpu.Name, infoErr)
	}
	told, toldErr := d.nvmlFacts(function.Name(), info)
	info.uuid, info.model = cmp.Or(info.uuid, told.UUID), cmp.Or(info.model, told.Name)
	if info.excluded || unwanted[info.model] {
		return nil, nil
	}
	gpu.Attributes.SetString("model", info.model)
	gpu.Attributes.SetString("uuid", info.uuid)
	gpu.Identity = info.uuid
	setNVMLAttributes(&gpu, told)
	gpu.Facts = d.facts(function, told)
	if info.minor >= 0 {
		gpu.Edits.DeviceNodes = d.nodes(info.minor)
	}
	devices, problems := d.devices(gpu, info, told, toldErr, infoErr == nil)
	for i := range devices {
		if devices[i].Name == gpu.Name { // partitions have no graphics
			d.setDRM(&devices[i], function)
		}
	}
	if err := errors.Join(err, infoErr, toldErr, d.rootErr, d.mpsErr); err != nil {
		for _, device := range devices {
			problems = append(problems, discovery.Problem{Device: device.Name, Err: err})
		}
	}
	return devices, problems
}

// devices returns the devices of a GPU: all possible partitions, the existing instances, or the
// whole GPU.
func (d *driver) devices(gpu discovery.Device, info information, told facts.GPU, toldErr error, known bool) ([]discovery.Device, []discovery.Problem) {
	allowed, allowedErr := discovery.IsSelected(d.host.Partitionings, gpu)
	switch {
	case allowed && told.MIG == "enabled" && len(told.Profiles) > 0 && !told.PlacesUnknown && known:
		return d.partitions(gpu, info, told)
	case allowed && (told.MIG != "enabled" || told.PlacesUnknown) && len(numberedChildren(d.capabilities(info), "gi")) > 0:
		// The placements of the existing instances are not known now. A consumer may have an
		// instance under the name of its placement, so the instances must not appear under other
		// names.
		return nil, discovery.Problems(gpu.Name, cmp.Or(toldErr, errNoPlacements))
	case allowed && told.MIG == "enabled":
		allowedErr = errNotListed
	}
	devices, problems := d.describeInstances(gpu, info, told)
	if len(devices) == 0 && len(problems) == 0 {
		d.setWhole(&gpu, info, told, known)
		d.setLinks(&gpu, told)
		devices = []discovery.Device{gpu}
	}
	if allowedErr != nil {
		problems = append(problems, discovery.Problem{Device: gpu.Name, Setting: discovery.SettingPartitions, Err: allowedErr})
	}
	return devices, problems
}

// unwanted lists the models of GPUs that drive a display in a machine whose other GPUs compute. The
// NVIDIA device plugin skips the same models.
var unwanted = map[string]bool{"DGX Display": true, "NVIDIA DGX Display": true}

// setWhole describes the use of a GPU without MIG instances. In MIG mode such a GPU is unusable.
func (d *driver) setWhole(gpu *discovery.Device, info information, told facts.GPU, known bool) {
	if told.MIG == "enabled" {
		at := gpu.Attributes.String("resource.kubernetes.io/pciBusID")
		gpu.Health = discovery.Health{
			Status: discovery.Unhealthy, Reason: "MIG mode is on and no MIG instance exists",
			Fix: fmt.Sprintf("sudo nvidia-smi -i %s -mig 0   # turns MIG off; alternatively, create MIG instances", at),
		}
		return
	}
	gpu.SharedEdits = d.mps
	d.setAllowed(gpu)
	if known {
		gpu.Health = discovery.NodeHealth(d.host, gpu.Edits.DeviceNodes)
		gpu.Health = worseOf(gpu.Health, nvmlHealth(told, wholeGPU))
	}
	switch {
	case d.installer && info.minor >= 0:
		gpu.PluginOffers = installerOffers(fmt.Sprintf("nvidia%d", info.minor))
	case !d.installer && info.uuid != "":
		gpu.PluginOffers = []discovery.Offer{{Resource: "nvidia.com/gpu", IDs: []string{info.uuid}}}
	}
}

// information is the content of /proc/driver/nvidia/gpus/ADDRESS/information.
type information struct {
	model    string
	uuid     string // empty until the first initialisation of the GPU
	minor    int64  // -1 if the file has none
	excluded bool
}

// uuidText is the driver's form of a UUID. While the UUID is unknown, the driver writes "?" for
// each digit.
var uuidText = pattern.Lazy(`^GPU-(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(\?{8}(?:-\?{4}){3}-\?{12}))$`)

// parseInformation parses lines such as "Device Minor:    0". The error lists required fields that
// are missing, and invalid values.
func parseInformation(text string) (information, error) {
	info := information{minor: -1}
	var errs []error
	named := false
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(name) {
		case "Model":
			info.model = value
		case "GPU UUID":
			m := uuidText().FindStringSubmatch(value)
			if named = m != nil; named && m[1] == "" {
				info.uuid = value
			}
		case "Device Minor":
			// 195:255 is nvidiactl and 195:254 is nvidia-modeset.
			if minor, err := strconv.ParseUint(value, 10, 8); err == nil && minor < 254 {
				info.minor = int64(minor)
			}
		case "GPU Excluded":
			info.excluded = value == "Yes"
			if value != "Yes" && value != "No" {
				errs = append(errs, fmt.Errorf("information: GPU excluded: neither Yes nor No: %.32q", value))
			}
		}
	}
	if info.model == "" {
		errs = append(errs, errors.New("information: no model"))
	}
	if !named {
		errs = append(errs, errors.New("information: no GPU UUID"))
	}
	if info.minor < 0 {
		errs = append(errs, errors.New("information: no device minor"))
	}
	return info, errors.Join(errs...)
}

// grant returns the edits that name the devices and limit their use.
func grant(given []discovery.Device, to discovery.Grant) specs.ContainerEdits {
	edits := discovery.Join(visibleDevices(given, to.Naming), graphicsEdits(given, to))
	edits.Env = append(edits.Env, mpsLimits(given, to)...)
	return discovery.Join(edits, daemonEdits(to))
}

// visibleMounts is the directory in which the NVIDIA container runtime looks for mounts that name
// devices, if the environment variable has this value.
const visibleMounts = "/var/run/nvidia-container-devices"

// visibleDevices names the devices to the NVIDIA container runtime if that runtime adds the
// driver's libraries. The value is "void", so that the runtime does nothing, if Chandler mounts the
// libraries, or if no device has a name yet: images from NVIDIA request all GPUs by default.
//
// Two kinds of devices need no variable. The runtime takes channels from another variable, and
// Chandler adds their nodes itself. Hosts where Google's installer put the libraries have no such
// runtime.
func visibleDevices(given []discovery.Device, naming discovery.Naming) (edits specs.ContainerEdits) {
	const variable = "NVIDIA_VISIBLE_DEVICES="
	var names []string
	runtime, ours := false, naming.None
	for _, d := range given {
		switch {
		case d.Attributes.String("kind") == "other" || isInstalled(d.Edits.Mounts):
			continue
		case slices.ContainsFunc(d.Edits.Mounts, ofDriver):
			ours = true
		case d.Identity != "":
			name := d.Identity
			if naming.Index {
				name = cmp.Or(d.Facts[index], name)
			}
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
		runtime = true
	}
	switch {
	case !runtime:
	case ours || len(names) == 0:
		edits.Env = []string{variable + "void"}
	case naming.Mounts:
		edits.Env = []string{variable + visibleMounts}
		for _, name := range names {
			edits.Mounts = append(edits.Mounts, &specs.Mount{HostPath: "/dev/null", ContainerPath: path.Join(visibleMounts, name), Options: []string{"bind"}})
		}
	default:
		edits.Env = []string{variable + strings.Join(names, ",")}
	}
	return edits
}
