// Package facts is what NVML, NVIDIA's management library, says of a host's
// GPUs, as the text of a file of the host. Command chandler-nvml writes it, and
// the nvidia family reads it. This package itself knows no NVML.
package facts

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Path is where the family finds the file. No such file lies on a host's disk:
// the agent lays what the program says over the host's file system.
const Path = "/run/chandler/nvml.json"

// MaxSize is how long the text may be, in bytes: as much as a family reads of
// any file. Sixteen GPUs of seven instances each take half of it.
const MaxSize = 64 << 10

// version is that of the format. A text of another one is not read.
const version = 1

// document is the text.
type document struct {
	Version int    `json:"version"`
	Error   string `json:"error,omitempty"` // why nothing is known any more of what was
	GPUs    []GPU  `json:"gpus,omitempty"`
}

// GPU is what NVML says of one. A value that it does not say is zero.
type GPU struct {
	Address           string     `json:"address"` // of the PCI function, as the kernel writes it
	UUID              string     `json:"uuid,omitempty"`
	Index             *int       `json:"index,omitempty"`             // by which NVIDIA's tools name it too; nil if not known
	Name              string     `json:"name,omitempty"`              // "NVIDIA H100 80GB HBM3"
	MemoryBytes       int64      `json:"memoryBytes,omitempty"`       // of the whole GPU
	ComputeCapability string     `json:"computeCapability,omitempty"` // "9.0"
	CUDA              string     `json:"cuda,omitempty"`              // the newest version that the driver serves, "12.4"
	MIG               string     `json:"mig,omitempty"`               // "enabled" or "disabled", "" if it has no such mode
	Instances         []Instance `json:"instances,omitempty"`
	Fabric            *Fabric    `json:"fabric,omitempty"`

	// Peers are the PCI addresses of GPUs, and Switches those of NVSwitches, at
	// the other ends of NVLinks that are up, each once, in order.
	Peers    []string `json:"peers,omitempty"`
	Switches []string `json:"switches,omitempty"`

	// Lost says that the GPU is there and NVML cannot reach it any more.
	Lost bool `json:"lost,omitempty"`

	// Recovery is what the driver wants done before the GPU is used again:
	// "none", "gpu-reset", …; "" from drivers that do not say
	// (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION).
	Recovery string `json:"recovery,omitempty"`

	// XIDs are the errors of the hardware or the driver since the program
	// began, the last of each number.
	XIDs []XID `json:"xids,omitempty"`

	// Err says why this GPU's part of the text was refused; the rest of it is
	// zero then, but for Address.
	Err error `json:"-"`
}

// Instance is a MIG device: a compute instance (CI) in a GPU instance (GI).
type Instance struct {
	GI          int    `json:"gi"`
	CI          int    `json:"ci"`
	Index       *int   `json:"index,omitempty"` // among the MIG devices of its GPU, nil if not known
	UUID        string `json:"uuid,omitempty"`
	Profile     string `json:"profile,omitempty"` // "1g.10gb+me", "1c.3g.40gb"
	MemoryBytes int64  `json:"memoryBytes,omitempty"`

	Engines *Engines `json:"engines,omitempty"` // nil if not known
}

// Engines are how many of a GPU's parts of each sort an instance has.
type Engines struct {
	Multiprocessors uint32 `json:"multiprocessors"`
	Copy            uint32 `json:"copy"`
	Decoder         uint32 `json:"decoder"`
	Encoder         uint32 `json:"encoder"`
	JPEG            uint32 `json:"jpeg"`
	OFA             uint32 `json:"ofa"`
}

// Fabric is the NVLink domain that a GPU is part of, which may be larger than
// the host, and its clique in it, whose GPUs reach each other.
type Fabric struct {
	Cluster string `json:"cluster"` // a UUID
	Clique  uint32 `json:"clique"`
}

// XID is an error that the driver reported, by its number in NVIDIA's catalogue.
type XID struct {
	Code uint64    `json:"code"`
	Time time.Time `json:"time"`
	GI   *int      `json:"gi,omitempty"` // the GPU instance concerned, nil for the whole GPU
}

// Format returns the text that says this of GPUs. Too much of it is an error.
func Format(gpus []GPU) ([]byte, error) {
	text, err := json.Marshal(document{Version: version, GPUs: gpus})
	if err != nil {
		return nil, fmt.Errorf("format NVML facts: %w", err)
	}
	if len(text) > MaxSize {
		return nil, fmt.Errorf("format NVML facts: %d bytes for %d GPUs, at most %d", len(text), len(gpus), MaxSize)
	}
	return text, nil
}

// FormatError returns the text that says why nothing is known any more. It is
// not the same as that there is no text: what was known of the GPUs before may
// still be true, and the reader should say that it does not know.
func FormatError(reason error) []byte {
	text, _ := json.Marshal(document{Version: version, Error: reason.Error()}) // two plain fields
	return text
}

// Parse reads a text, and returns what it says of GPUs by PCI address. A part
// of it that makes no sense is refused with all that is said of that GPU, which
// then has an Err. The error is that of a text which is none, is of another
// version, or says itself that nothing is known.
func Parse(text string) (map[string]GPU, error) {
	var read struct {
		document

		GPUs []json.RawMessage `json:"gpus"`
	}
	if err := json.Unmarshal([]byte(text), &read); err != nil {
		return nil, fmt.Errorf("NVML facts: %w", err)
	}
	if read.Version != version {
		return nil, fmt.Errorf("NVML facts: version %d, want %d", read.Version, version)
	}
	if read.Error != "" {
		return nil, fmt.Errorf("NVML: %.200s", read.Error)
	}
	gpus := make(map[string]GPU, len(read.GPUs))
	for i, raw := range read.GPUs {
		gpu, err := parseGPU(raw)
		if err != nil {
			return nil, fmt.Errorf("NVML facts: GPU %d: %w", i, err)
		}
		if _, twice := gpus[gpu.Address]; twice {
			gpu = refused(gpu.Address, errors.New("listed twice"))
		}
		gpus[gpu.Address] = gpu
	}
	refuseTwins(gpus)
	return gpus, nil
}

// refused returns what is left of a GPU that makes no sense.
func refused(address string, err error) GPU {
	return GPU{Address: address, Err: fmt.Errorf("NVML facts: %w", err)}
}

// parseGPU reads what is said of one GPU. The error is that it cannot be told
// of which.
func parseGPU(raw json.RawMessage) (GPU, error) {
	var of struct {
		Address string `json:"address"`
	}
	if err := json.Unmarshal(raw, &of); err != nil {
		return GPU{}, err
	}
	if !addresses.MatchString(of.Address) {
		return GPU{}, fmt.Errorf("no PCI address: %.40q", of.Address)
	}
	var gpu GPU
	err := json.Unmarshal(raw, &gpu)
	if err == nil {
		err = gpu.check()
	}
	if err != nil {
		return refused(of.Address, err), nil
	}
	return gpu, nil
}

// refuseTwins refuses GPUs of one UUID, and those with MIG devices of one: it
// cannot be told whose it is.
func refuseTwins(gpus map[string]GPU) {
	owners := make(map[string][]string)
	for address, gpu := range gpus {
		if gpu.UUID != "" {
			owners[gpu.UUID] = append(owners[gpu.UUID], address)
		}
		for _, instance := range gpu.Instances {
			if instance.UUID != "" {
				owners[instance.UUID] = append(owners[instance.UUID], address)
			}
		}
	}
	for uuid, addresses := range owners {
		if len(addresses) < 2 {
			continue
		}
		for _, address := range addresses {
			gpus[address] = refused(address, fmt.Errorf("more than one device is %s", uuid))
		}
	}
}
