//go:build cgo

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"chandler.dev/discovery/families/nvidia/facts"
)

// reader reads NVML's facts about GPUs.
type reader struct {
	lib  nvml.Interface
	gpus []*gpu
}

// gpu is an open or lost GPU.
type gpu struct {
	device nvml.Device // nil if the GPU was lost before it was opened
	last   facts.GPU   // the last facts
	xids   []facts.XID

	kinds []kind // once known: they are constant until the driver is reloaded
}

// newReader opens the GPUs at the given addresses. It leaves out GPUs unknown to NVML, for example
// because the driver is configured to ignore them, and fails if no GPU can be opened.
func newReader(lib nvml.Interface, addresses []string) (*reader, error) {
	r := &reader{lib: lib}
	var errs []error
	for _, address := range addresses {
		device, ret := lib.DeviceGetHandleByPciBusId(address)
		switch ret {
		case nvml.SUCCESS:
			r.gpus = append(r.gpus, &gpu{device: device, last: facts.GPU{Address: address}})
		case nvml.ERROR_GPU_IS_LOST:
			r.gpus = append(r.gpus, &gpu{last: facts.GPU{Address: address, Lost: true}})
		default:
			errs = append(errs, fmt.Errorf("open GPU %s: %s", address, describeReturn(ret)))
		}
	}
	if len(r.gpus) == 0 && len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return r, nil
}

// has reports whether the library has a function. Calling a missing function would end the program.
func (r *reader) has(function string) bool {
	return r.lib.Extensions().LookupSymbol(function) == nil
}

// write writes the current facts in one line.
func (r *reader) write(out io.Writer) error {
	gpus := make([]facts.GPU, len(r.gpus))
	for i, g := range r.gpus {
		gpus[i] = r.read(g)
	}
	text, err := facts.Format(gpus)
	if err != nil {
		return err
	}
	_, err = out.Write(append(text, '\n'))
	return err
}

// read returns the facts about a GPU. For a lost GPU, these are the last known facts.
func (r *reader) read(g *gpu) facts.GPU {
	if g.device == nil {
		return g.last
	}
	uuid, ret := g.device.GetUUID()
	if ret == nvml.ERROR_GPU_IS_LOST || ret == nvml.ERROR_RESET_REQUIRED {
		lost := g.last
		lost.Lost, lost.XIDs = true, g.xids
		return lost
	}
	now := facts.GPU{Address: g.last.Address}
	if ret == nvml.SUCCESS {
		now.UUID = uuid
	}
	if index, ret := g.device.GetIndex(); ret == nvml.SUCCESS {
		now.Index = &index
	}
	if name, ret := g.device.GetName(); ret == nvml.SUCCESS {
		now.Name = name
	}
	// A GPU that uses the host's memory has none of its own.
	if memory, ret := g.device.GetMemoryInfo(); ret == nvml.SUCCESS {
		now.MemoryBytes = int64(memory.Total)
	} else if ret != nvml.ERROR_NOT_SUPPORTED {
		now.MemoryBytes = g.last.MemoryBytes // profile names depend on the memory
	}
	if major, minor, ret := g.device.GetCudaComputeCapability(); ret == nvml.SUCCESS && major > 0 {
		now.ComputeCapability = fmt.Sprintf("%d.%d", major, minor)
	}
	now.CUDA = r.cuda()
	r.readMIG(g, &now)
	g.forgetGone(&now)
	now.Fabric = r.fabric(g.device)
	r.readLinks(g.device, &now)
	now.Recovery = r.recovery(g.device)
	now.XIDs = g.pending(now.Recovery)
	g.last = now
	return now
}

// cuda returns the newest supported version of CUDA, "" if unknown.
func (r *reader) cuda() string {
	if !r.has("nvmlSystemGetCudaDriverVersion") {
		return ""
	}
	version, ret := r.lib.SystemGetCudaDriverVersion()
	if ret != nvml.SUCCESS || version <= 0 {
		return ""
	}
	return fmt.Sprintf("%d.%d", version/1000, version%1000/10)
}

// fabric returns the NVLink domain of a GPU, nil if the GPU has none yet. The GPUs of a single host
// behind NVSwitches have a domain with the UUID zero, which is not unique among hosts.
func (r *reader) fabric(device nvml.Device) *facts.Fabric {
	if !r.has("nvmlDeviceGetGpuFabricInfo") {
		return nil
	}
	info, ret := device.GetGpuFabricInfo()
	id := info.ClusterUuid
	if ret != nvml.SUCCESS || info.State != nvml.GPU_FABRIC_STATE_COMPLETED || nvml.Return(info.Status) != nvml.SUCCESS || id == [16]uint8{} {
		return nil
	}
	return &facts.Fabric{
		Cluster: fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:]),
		Clique:  info.CliqueId,
	}
}

// readLinks reads the remote ends of a GPU's NVLinks.
func (r *reader) readLinks(device nvml.Device, now *facts.GPU) {
	if !r.has("nvmlDeviceGetNvLinkRemoteDeviceType") {
		return
	}
	for link := range nvml.NVLINK_MAX_LINKS {
		state, ret := device.GetNvLinkState(link)
		if ret != nvml.SUCCESS || state != nvml.FEATURE_ENABLED {
			continue
		}
		kind, ret := device.GetNvLinkRemoteDeviceType(link)
		if ret != nvml.SUCCESS {
			continue
		}
		pci, ret := device.GetNvLinkRemotePciInfo(link)
		if ret != nvml.SUCCESS || pci.Domain == 0xffffffff {
			continue
		}
		address := fmt.Sprintf("%04x:%02x:%02x.0", pci.Domain, pci.Bus, pci.Device)
		switch kind {
		case nvml.NVLINK_DEVICE_TYPE_GPU:
			now.Peers = append(now.Peers, address)
		case nvml.NVLINK_DEVICE_TYPE_SWITCH:
			now.Switches = append(now.Switches, address)
		}
	}
	slices.Sort(now.Peers)
	slices.Sort(now.Switches)
	now.Peers, now.Switches = slices.Compact(now.Peers), slices.Compact(now.Switches)
}

// recoveries are the driver's recovery actions for a GPU (nvmlDeviceGpuRecoveryAction_t).
var recoveries = []string{
	"none", "gpu-reset", "node-reboot", "drain-p2p", "drain-and-reset", "recover-imex-domain", "bus-reset", "system-reboot",
}

// recovery returns the driver's requested recovery action for a GPU, "" if unknown.
func (r *reader) recovery(device nvml.Device) string {
	if !r.has("nvmlDeviceGetFieldValues") {
		return ""
	}
	values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	ret := device.GetFieldValues(values)
	if ret != nvml.SUCCESS || nvml.Return(values[0].NvmlReturn) != nvml.SUCCESS || nvml.ValueType(values[0].ValueType) != nvml.VALUE_TYPE_UNSIGNED_INT {
		return ""
	}
	action := binary.NativeEndian.Uint32(values[0].Value[:4])
	if int(action) < len(recoveries) {
		return recoveries[action]
	}
	return fmt.Sprintf("action-%d", action)
}
