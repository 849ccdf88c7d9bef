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

// readNVML reads what NVML said of the host's GPUs. A host without the file is
// one where nobody asked it.
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

// told returns what NVML said of a GPU. If it speaks of another GPU in the same
// slot, it was asked before the one was swapped for the other.
func (d *driver) told(address string, info information) (facts.GPU, error) {
	told := d.nvml[address]
	switch {
	case d.nvmlErr != nil:
		return facts.GPU{}, d.nvmlErr
	case told.Err != nil:
		return facts.GPU{}, told.Err
	case told.UUID != "" && info.uuid != "" && told.UUID != info.uuid:
		return facts.GPU{}, fmt.Errorf("NVML facts: they are of %s, and the driver has %s there", told.UUID, info.uuid)
	}
	return told, nil
}

// setTold sets what NVML alone knows of a whole GPU.
func setTold(gpu *discovery.Device, told facts.GPU) {
	if told.MemoryBytes > 0 {
		gpu.Capacity.Set("memory", told.MemoryBytes)
	}
	gpu.Attributes.SetVersion("cudaComputeCapability", told.ComputeCapability)
	gpu.Attributes.SetString("architecture", architecture(told.ComputeCapability))
}

// architectures are NVIDIA's names of the generations of GPUs, by the first
// compute capability of each, as gpu-feature-discovery writes them.
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
	{10, 0, "blackwell"}, // and 12
	{13, 0, "rubin"},
	{14, 0, ""}, // not named yet
}

// architecture returns the name of the generation of a compute capability, ""
// if it has none that is known.
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

// wholeGPU stands for the number of a GPU instance where there is none.
const wholeGPU = -1

// toldHealth returns what NVML says of the health of a GPU, or of one of its
// GPU instances.
//
// A newer driver says itself what is to be done before a GPU is used again, also
// when nothing is, and takes it back when it was done. Of an older one there are only the errors that it reported, which hold until the GPU was
// reset or the driver was loaded anew; chandler-nvml leaves out those that an
// application brings upon itself, and those that its driver is done with.
func toldHealth(told facts.GPU, gi int) discovery.Health {
	var xids []string
	for _, xid := range told.XIDs {
		if xid.GI == nil || gi == wholeGPU || *xid.GI == gi {
			xids = append(xids, fmt.Sprintf("XID %d at %s", xid.Code, xid.Time.UTC().Format("2006-01-02T15:04:05Z")))
		}
	}
	reasons := xids
	if told.Recovery != "" && told.Recovery != "none" {
		reasons = append([]string{"its driver asks for " + told.Recovery}, xids...)
	}
	if told.Lost {
		reasons = append([]string{"NVML cannot reach it any more"}, reasons...)
	}
	if len(reasons) == 0 {
		return discovery.Health{Status: discovery.Healthy}
	}
	return discovery.Health{Status: discovery.Unhealthy, Reason: strings.Join(reasons, "; ")}
}

// worse returns the first reading unless that is healthy.
func worse(a, b discovery.Health) discovery.Health {
	if a.Status == discovery.Healthy {
		return b
	}
	return a
}

// links are NVLinks between GPUs of a host, by their PCI addresses.
type links struct {
	peers  map[string][]string // at the other ends of a GPU's links
	clique map[string]string   // what all GPUs share that reach each other
}

// linksOf returns the links that both ends know of, or that lead to one switch.
func linksOf(gpus map[string]facts.GPU) links {
	l := links{make(map[string][]string), make(map[string]string)}
	addresses := slices.Sorted(maps.Keys(gpus))
	reached := make(map[string][]string) // and itself, in order
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

// setLinks sets fabric and linkedTo. The fabric is the cluster and clique of
// NVLink domains, as gpu-feature-discovery writes them, or else the GPUs of this
// host that all reach each other by NVLink, by the first of them. GPUs of which
// some reach only some have none.
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
