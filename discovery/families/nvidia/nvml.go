package nvidia

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/sysfs"
)

// readNVML reads the NVML facts of the host's GPUs. A host without the file has no NVML facts.
func (d *driver) readNVML() {
	text, err := d.host.ReadText(facts.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		d.nvml, err = facts.Parse(text)
	}
	d.nvmlErr = err
	d.links = linksOf(d.nvml)
}

// nvmlFacts returns the NVML facts of a GPU. If the facts belong to another GPU in the same slot,
// they predate a swap of the GPUs, and nvmlFacts returns an error.
func (d *driver) nvmlFacts(address string, info information) (facts.GPU, error) {
	told := d.nvml[address]
	switch {
	case d.nvmlErr != nil:
		return facts.GPU{}, d.nvmlErr
	case told.Err != nil:
		return facts.GPU{}, told.Err
	case told.UUID != "" && info.uuid != "" && told.UUID != info.uuid:
		return facts.GPU{}, fmt.Errorf("NVML facts: the UUID is %s, but the driver reports %s", told.UUID, info.uuid)
	}
	return told, nil
}

// setNVMLAttributes sets the attributes and the capacity of a whole GPU that only NVML reports.
func setNVMLAttributes(gpu *discovery.Device, told facts.GPU) {
	if told.MemoryBytes > 0 {
		gpu.Capacity.Set("memory", told.MemoryBytes)
	}
	gpu.Attributes.SetVersion("cudaComputeCapability", told.ComputeCapability)
	gpu.Attributes.SetString("architecture", architecture(told.ComputeCapability))
}

// architectures lists the NVIDIA names of GPU generations by the first compute capability of each,
// as gpu-feature-discovery writes them.
var architectures = []struct {
	major, minor int
	name         string
}{
	{1, 0, "tesla"},
	{2, 0, "fermi"},
	{3, 0, "kepler"},
	{5, 0, "maxwell"},
	{6, 0, "pascal"},
	{7, 0, "volta"},
	{7, 5, "turing"},
	{8, 0, "ampere"},
	{8, 9, "ada-lovelace"},
	{9, 0, "hopper"},
	{10, 0, "blackwell"}, // also 12
	{13, 0, "rubin"},
	{14, 0, ""}, // not named yet
}

// architecture returns the generation name of a compute capability, "" if the generation is
// unknown.
func architecture(capability string) string {
	var major, minor int
	if _, err := fmt.Sscanf(capability, "%d.%d", &major, &minor); err != nil {
		return ""
	}
	name := ""
	for _, a := range architectures {
		if major > a.major || major == a.major && minor >= a.minor {
			name = a.name
		}
	}
	return name
}

// wholeGPU is used in place of the number of a GPU instance for a GPU without instances.
const wholeGPU = -1

// nvmlHealth returns the health that NVML reports for a GPU, or for one of its GPU instances.
//
// A newer driver reports which action the GPU needs before further use, or that none is needed, and
// clears the report after the action. An older driver only reports errors. They last until a reset
// of the GPU or a reload of the driver. chandler-host leaves out errors that applications cause and
// errors that the driver has handled.
func nvmlHealth(told facts.GPU, gi int) discovery.Health {
	var xids []string
	for _, xid := range told.XIDs {
		if xid.GI == nil || gi == wholeGPU || *xid.GI == gi {
			xids = append(xids, fmt.Sprintf("XID %d at %s", xid.Code, xid.Time.UTC().Format("2006-01-02T15:04:05Z")))
		}
	}
	reasons := xids
	if told.Recovery != "" && told.Recovery != "none" {
		reasons = append([]string{"the driver requires " + told.Recovery}, xids...)
	}
	if told.Lost {
		reasons = append([]string{"NVML can no longer reach the GPU"}, reasons...)
	}
	if len(reasons) == 0 {
		return discovery.Health{Status: discovery.Healthy}
	}
	health := discovery.Health{Status: discovery.Unhealthy, Reason: strings.Join(reasons, "; ")}
	if gi == wholeGPU {
		health.Fix = recoveryFix(told)
	}
	return health
}

// recoveryFix returns the command for the action that the driver requires (GPU Memory Error Management,
// "Error Recovery and Response Flags"), or "" if no command is known. A reset by the attribute of the
// PCI function would bypass the driver. A GPU that NVML cannot reach has fallen off the bus
// (NVML_ERROR_GPU_IS_LOST), and an error without an action lasts until a reset.
func recoveryFix(told facts.GPU) string {
	switch {
	case told.Lost, told.Recovery == "node-reboot", told.Recovery == "system-reboot":
		return "sudo reboot"
	case told.Recovery == "gpu-reset", told.Recovery == "drain-and-reset", told.Recovery == "":
		return fmt.Sprintf("sudo nvidia-smi --gpu-reset -i %s   # after all processes on the GPU have ended", told.Address)
	}
	return fmt.Sprintf("sudo dmesg | grep %s   # shows the kernel's messages; the driver requires an action that has no command", told.Address)
}

// worseOf returns the first reading, or the second if the first is healthy.
func worseOf(a, b discovery.Health) discovery.Health {
	if a.Status == discovery.Healthy {
		return b
	}
	return a
}

// links are the NVLink connections between GPUs of a host, by PCI address.
type links struct {
	peers  map[string][]string // the GPUs at the other ends of a GPU's links
	clique map[string]string   // the same for all GPUs that reach each other
}

// linksOf returns the links that both ends report, or that lead to a common switch.
func linksOf(gpus map[string]facts.GPU) links {
	l := links{make(map[string][]string), make(map[string]string)}
	addresses := slices.Sorted(maps.Keys(gpus))
	reached := make(map[string][]string) // in order, including the GPU itself
	for _, a := range addresses {
		for _, b := range addresses {
			direct := slices.Contains(gpus[a].Peers, b) && slices.Contains(gpus[b].Peers, a)
			if direct && a != b {
				l.peers[a] = append(l.peers[a], b)
			}
			if a == b || direct || shareOne(gpus[a].Switches, gpus[b].Switches) {
				reached[a] = append(reached[a], b)
			}
		}
	}
	for _, a := range addresses {
		all := reached[a]
		if len(all) > 1 && !slices.ContainsFunc(all, func(b string) bool { return !slices.Equal(reached[b], all) }) {
			l.clique[a] = "nvlink-" + all[0]
		}
	}
	return l
}

func shareOne(a, b []string) bool {
	return slices.ContainsFunc(a, func(s string) bool { return slices.Contains(b, s) })
}

// setLinks sets fabric and linkedTo. The fabric is the cluster and clique of the NVLink domain, in
// the form of gpu-feature-discovery. Without a domain, the fabric is the group of GPUs on this host
// that all reach each other by NVLink, named after the first GPU. GPUs that are only partly
// connected have no fabric.
func (d *driver) setLinks(gpu *discovery.Device, told facts.GPU) {
	fabric := d.links.clique[told.Address]
	if f := told.Fabric; f != nil {
		fabric = fmt.Sprintf("%s.%d", f.Cluster, f.Clique)
	}
	gpu.Attributes.SetString("fabric", fabric)
	var names []string
	for _, peer := range d.links.peers[told.Address] {
		names = append(names, discovery.DeviceName(sysfs.At(d.host.FS, path.Join("sys/bus/pci/devices", peer))))
	}
	gpu.SetNames("linkedTo", names)
}
