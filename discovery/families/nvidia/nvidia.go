// Package nvidia describes NVIDIA GPUs, their MIG instances and IMEX channels as
// the kernel driver shows them in /sys, /proc and /dev. It takes from a
// file, if the host has one, the facts that only NVML knows: memory, architecture,
// MIG profiles, NVLink, errors (see package facts). It needs no NVIDIA library. GPUs bound to
// another driver, such as one for a virtual machine, are not its own, nor are
// the virtual functions of vGPU, Tegra's GPUs and those of WSL.
package nvidia

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
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/families/nvidia/userspace"
	"chandler.dev/discovery/sysfs"
)

const name = "nvidia"

// Family is NVIDIA's GPUs.
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
	Make:        makePart,
	Unmake:      unmakePart,
	Grant:       grant,
	Variables:   variables,
	Parameters:  []discovery.Parameter{ComputePercentage, MPS, MPSMemory, TimeSlice},
	Order:       order,
	Accept:      accept,
	Roots:       []string{"nvidia", mpsRoot},
	Labels:      labels,
	Programs: []*discovery.Program{{
		Name:    "chandler-nvml",
		Library: "NVML",
		File:    facts.Path,
		Driver:  "/proc/driver/nvidia",
		Changes: gpuOf,
		Args: func(hostRoot, root string) []string {
			return []string{"--host-root=" + hostRoot, "--driver-root=" + root, "--gpus=" + path.Join(hostRoot, "proc/driver/nvidia/gpus")}
		},
		MaxSize: facts.MaxSize,
		Check:   func(text string) error { _, err := facts.Parse(text); return err },
		Lost:    facts.FormatError,
	}, {
		Name:      "chandler-nvml",
		Library:   "NVIDIA's code for CDI specs",
		File:      userspace.Path,
		Driver:    "/proc/driver/nvidia",
		NeedsRoot: true,
		Args: func(hostRoot, root string) []string {
			return []string{"--files", "--host-root=" + hostRoot, "--driver-root=" + root}
		},
		Interval: time.Minute,
		MaxSize:  userspace.MaxSize,
		Check:    func(text string) error { _, err := userspace.Parse(text); return err },
		Lost:     func(error) []byte { return nil }, // the files are looked for here
	}},
}

// variables tune the libraries of CUDA, MPS, NCCL and NVIDIA's container runtime.
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
		if function.Exists("physfn") {
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

// describe returns the GPU as one device, its MIG instances instead if it has
// any, or nothing if nobody is meant to compute with it.
func (d *driver) describe(function sysfs.Device) ([]discovery.Device, []discovery.Problem) {
	if !function.Bound() {
		gpu, err := discovery.Unbound(d.host, function, "gpu", "nvidia")
		return []discovery.Device{gpu}, discovery.Problems(gpu.Name, err)
	}
	gpu, err := discovery.PCI(d.host, function)
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
		// The GPU may be divided into instances, and must not be taken for a whole.
		return nil, discovery.Problems(gpu.Name, infoErr)
	}
	told, toldErr := d.told(function.Name(), info)
	info.uuid, info.model = cmp.Or(info.uuid, told.UUID), cmp.Or(info.model, told.Name)
	if info.excluded || unwanted[info.model] {
		return nil, nil
	}
	gpu.Attributes.SetString("model", info.model)
	gpu.Attributes.SetString("uuid", info.uuid)
	gpu.Identity = info.uuid
	setTold(&gpu, told)
	gpu.Facts = d.facts(function, told)
	if info.minor >= 0 {
		gpu.Edits.DeviceNodes = d.nodes(info.minor)
	}
	devices, problems := d.devices(gpu, info, told, toldErr, infoErr == nil)
	for i := range devices {
		if devices[i].Name == gpu.Name { // no part of one draws
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

// devices returns what is had of a GPU: what could be cut of it, the instances that it has
// been divided into, or all of it.
func (d *driver) devices(gpu discovery.Device, info information, told facts.GPU, toldErr error, known bool) ([]discovery.Device, []discovery.Problem) {
	allowed, allowedErr := d.host.Partitions(gpu)
	switch {
	case allowed && told.MIG == "enabled" && len(told.Profiles) > 0 && !told.PlacesUnknown && known:
		return d.cut(gpu, info, told)
	case allowed && (told.MIG != "enabled" || told.PlacesUnknown) && len(numbered(d.capabilities(info), "gi")) > 0:
		// Which instance is at which placement will be known, or known again. Somebody may have
		// one by the name of its place, and nobody is to get it by another.
		return nil, discovery.Problems(gpu.Name, cmp.Or(toldErr, errNotTold))
	case allowed && told.MIG == "enabled":
		allowedErr = errNotListed
	}
	devices, problems := d.divide(gpu, info, told)
	if len(devices) == 0 && len(problems) == 0 {
		d.setWhole(&gpu, info, told, known)
		d.setLinks(&gpu, told)
		devices = []discovery.Device{gpu}
	}
	if allowedErr != nil {
		problems = append(problems, discovery.Problem{Device: "partitioning", Err: fmt.Errorf("device %s: %w", gpu.Name, allowedErr)})
	}
	return devices, problems
}

// unwanted are the models of GPUs that drive a screen in a machine made for
// computing with others. NVIDIA's device plugin skips them too.
var unwanted = map[string]bool{"DGX Display": true, "NVIDIA DGX Display": true}

// setWhole says how a GPU is used that has no MIG instances. In MIG mode, that
// is not at all.
func (d *driver) setWhole(gpu *discovery.Device, info information, told facts.GPU, known bool) {
	if told.MIG == "enabled" {
		gpu.Health = discovery.Health{Status: discovery.Unhealthy, Reason: "MIG mode is on and there is no instance to compute in", Setting: true}
		return
	}
	gpu.SharedEdits = d.mps
	d.setAllowed(gpu)
	if known {
		gpu.Health = discovery.NodeHealth(d.host, gpu.Edits.DeviceNodes)
		gpu.Health = worse(gpu.Health, toldHealth(told, wholeGPU))
	}
	switch {
	case d.installer && info.minor >= 0:
		gpu.Classic = installerOffers(fmt.Sprintf("nvidia%d", info.minor))
	case !d.installer && info.uuid != "":
		gpu.Classic = []discovery.Offer{{Resource: "nvidia.com/gpu", IDs: []string{info.uuid}}}
	}
}

// information is what /proc/driver/nvidia/gpus/ADDRESS/information says.
type information struct {
	model    string
	uuid     string // "" until the GPU has been initialised for the first time
	minor    int64  // -1 if it is not told
	excluded bool
}

// uuidText is how the driver writes a UUID, with "?" for each digit while it is
// not known.
var uuidText = regexp.MustCompile(`^GPU-(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(\?{8}(?:-\?{4}){3}-\?{12}))$`)

// parseInformation parses lines such as "Device Minor: 	 0". The error is what
// all drivers write and the text lacks, and what none would write.
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
			m := uuidText.FindStringSubmatch(value)
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

// grant names the devices, and says how much of them there is to use.
func grant(given []discovery.Device, to discovery.Grant) specs.ContainerEdits {
	edits := discovery.Join(visible(given, to.Naming), graphics(given, to))
	edits.Env = append(edits.Env, limits(given, to)...)
	return discovery.Join(edits, daemonEdits(to))
}

// visibleMounts is where NVIDIA's container runtime looks for mounts that name
// devices, if the variable says so.
const visibleMounts = "/var/run/nvidia-container-devices"

// visible names the devices to NVIDIA's container runtime, where it is the one
// that brings the driver's libraries. Where we mount them it is to do nothing,
// and neither where a device has no name yet: images of NVIDIA's ask for all.
//
// Nothing is said of channels, which the runtime knows by another variable and
// we bring ourselves, nor where Google's installer put the libraries: no such
// runtime is there.
func visible(given []discovery.Device, naming discovery.Naming) (edits specs.ContainerEdits) {
	const variable = "NVIDIA_VISIBLE_DEVICES="
	var names []string
	runtime, ours := false, naming.None
	for _, d := range given {
		switch {
		case d.Attributes.String("kind") == "other" || installed(d.Edits.Mounts):
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
