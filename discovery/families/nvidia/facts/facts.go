// Package facts defines the text format for facts that NVML, the NVIDIA management library, reports
// about a host's GPUs. The command chandler-host writes the text, and the nvidia family reads it.
// The package itself does not use NVML.
package facts

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"
)

// Path is the path of the text in the host's file system. No such file exists on the host's disk:
// the agent overlays the program's output on the host's file system.
const Path = "/run/chandler/nvml.json"

// Program is the name of the program that writes the text, in a host service.
const Program = "nvml"

// MaxSize limits the text, in bytes. A family reads no more of any file. Sixteen GPUs with seven
// instances each take half of the limit.
const MaxSize = 64 << 10

// version is the version of the format. Parse refuses other versions.
const version = 1

// document is the text as JSON.
type document struct {
	Version int    `json:"version"`
	Error   string `json:"error,omitempty"` // why earlier facts are no longer known

	// Layouts contains each distinct list of Profiles once, because most hosts have GPUs of a
	// single model.
	Layouts [][]Profile `json:"layouts,omitempty"`
	GPUs    []entry     `json:"gpus,omitempty"`
}

// entry is a GPU in the text.
type entry struct {
	GPU

	Layout *int `json:"layout,omitempty"` // the index of the Profiles in Layouts, nil if there are none
}

// GPU holds the NVML facts of one GPU. Unknown values are zero.
type GPU struct {
	Address           string     `json:"address"` // PCI address in the kernel's form
	UUID              string     `json:"uuid,omitempty"`
	Index             *int       `json:"index,omitempty"`             // the GPU's number in NVIDIA tools, nil if unknown
	Name              string     `json:"name,omitempty"`              // "NVIDIA H100 80GB HBM3"
	MemoryBytes       int64      `json:"memoryBytes,omitempty"`       // of the whole GPU
	ComputeCapability string     `json:"computeCapability,omitempty"` // "9.0"
	CUDA              string     `json:"cuda,omitempty"`              // the newest version that the driver supports, "12.4"
	MIG               string     `json:"mig,omitempty"`               // "enabled" or "disabled", "" without MIG support
	Instances         []Instance `json:"instances,omitempty"`
	Fabric            *Fabric    `json:"fabric,omitempty"`

	// Profiles are the profiles for new GPU instances of a GPU in MIG mode, empty if NVML lists
	// none. GPUs may share one list, so the list is read-only.
	Profiles []Profile `json:"-"`

	// Peers are the PCI addresses of GPUs, and Switches those of NVSwitches, at the other ends of
	// active NVLinks. Each address occurs once, in order.
	Peers    []string `json:"peers,omitempty"`
	Switches []string `json:"switches,omitempty"`

	// Empty lists the known GPU instances without compute instances.
	Empty []Empty `json:"empty,omitempty"`

	// PlacesUnknown means that NVML did not return the placements of existing or possible
	// instances, and may return them later.
	PlacesUnknown bool `json:"placesUnknown,omitempty"`

	// Lost means that the GPU is present but NVML can no longer reach it.
	Lost bool `json:"lost,omitempty"`

	// Recovery is the action that the driver requires before the GPU is used again: "none",
	// "gpu-reset", …; "" from drivers without this report (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION).
	Recovery string `json:"recovery,omitempty"`

	// XIDs are the errors of the hardware or the driver since the program started, the last error
	// of each number.
	XIDs []XID `json:"xids,omitempty"`

	// Err is the reason why Parse refused this GPU's part of the text. All other fields except
	// Address are zero then.
	Err error `json:"-"`
}

// Instance is a MIG device: a compute instance (CI) in a GPU instance (GI).
type Instance struct {
	GI          int    `json:"gi"`
	CI          int    `json:"ci"`
	Index       *int   `json:"index,omitempty"` // among the MIG devices of the GPU, nil if unknown
	UUID        string `json:"uuid,omitempty"`
	Profile     string `json:"profile,omitempty"` // "1g.10gb+me", "1c.3g.40gb"
	MemoryBytes int64  `json:"memoryBytes,omitempty"`

	Engines *Engines `json:"engines,omitempty"` // nil if unknown

	// Placement is the placement of the GPU instance, nil if unknown.
	Placement *Placement `json:"placement,omitempty"`
}

// Profile is a kind of GPU instance.
type Profile struct {
	Name        string  `json:"name"`   // "1g.10gb+me"
	Slices      int     `json:"slices"` // compute slices
	Max         int     `json:"max"`    // the maximum number of such instances on a GPU
	MemoryBytes int64   `json:"memoryBytes"`
	Engines     Engines `json:"engines"`

	// Placements are the possible placements of such an instance on a GPU.
	Placements []Placement `json:"placements"`
}

// Placement is a range of a GPU's memory slices.
type Placement struct {
	Start int `json:"start"`
	Size  int `json:"size"`
}

// Empty is a GPU instance without a compute instance.
type Empty struct {
	Placement

	Profile string `json:"profile"` // "1g.10gb+me"
}

// CreatedInstance is the answer of chandler-host to a request to create an instance.
type CreatedInstance struct {
	Instance

	// Found means that the instance existed already and was created by another user.
	Found bool `json:"found,omitempty"`

	// Refused is the reason why the instance does not exist. No part of the instance remains.
	Refused string `json:"refused,omitempty"`
}

// Overlaps reports whether two placements have a slice in common.
func (p Placement) Overlaps(other Placement) bool {
	return p.Start < other.Start+other.Size && other.Start < p.Start+p.Size
}

// Engines are the numbers of a GPU's units of each type in an instance.
type Engines struct {
	Multiprocessors uint32 `json:"multiprocessors"`
	Copy            uint32 `json:"copy"`
	Decoder         uint32 `json:"decoder"`
	Encoder         uint32 `json:"encoder"`
	JPEG            uint32 `json:"jpeg"`
	OFA             uint32 `json:"ofa"`
}

// Fabric identifies the NVLink domain of a GPU, which may be larger than the host, and the GPU's
// clique in the domain. GPUs of one clique reach each other.
type Fabric struct {
	Cluster string `json:"cluster"` // a UUID
	Clique  uint32 `json:"clique"`
}

// XID is an error that the driver reported, by its number in the NVIDIA catalogue.
type XID struct {
	Code uint64    `json:"code"`
	Time time.Time `json:"time"`
	GI   *int      `json:"gi,omitempty"` // the affected GPU instance, nil for the whole GPU
}

// Format returns the text for the facts of GPUs. It returns an error if the text exceeds [MaxSize].
func Format(gpus []GPU) ([]byte, error) {
	doc := document{Version: version}
	for _, gpu := range gpus {
		doc.GPUs = append(doc.GPUs, entry{GPU: gpu, Layout: doc.layout(gpu.Profiles)})
	}
	text, err := json.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("format NVML facts: %w", err)
	}
	if len(text) > MaxSize {
		return nil, fmt.Errorf("format NVML facts: %d bytes for %d GPUs, at most %d", len(text), len(gpus), MaxSize)
	}
	return text, nil
}

// layout returns the index of a list of profiles in the layouts, nil if the list is empty.
func (d *document) layout(profiles []Profile) *int {
	if len(profiles) == 0 {
		return nil
	}
	same := func(other []Profile) bool { return reflect.DeepEqual(profiles, other) }
	i := slices.IndexFunc(d.Layouts, same)
	if i < 0 {
		i, d.Layouts = len(d.Layouts), append(d.Layouts, profiles)
	}
	return &i
}

// FormatError returns a text with the reason why the facts are no longer known. Such a text differs
// from a missing text: earlier facts of the GPUs may still be true, and the reader should report
// them as unknown.
func FormatError(reason error) []byte {
	text, _ := json.Marshal(document{Version: version, Error: reason.Error()}) // cannot fail: two plain fields
	return text
}

// Parse returns the facts of GPUs by PCI address. If a part of the text is invalid, the whole GPU
// is refused and has only an Err. Parse returns an error if the text is malformed or has another
// version, or if it comes from [FormatError].
func Parse(text string) (map[string]GPU, error) {
	var read struct {
		document

		Layouts []json.RawMessage `json:"layouts"`
		GPUs    []json.RawMessage `json:"gpus"`
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
		gpu, err := parseGPU(raw, read.Layouts)
		if err != nil {
			return nil, fmt.Errorf("NVML facts: GPU %d: %w", i, err)
		}
		if _, twice := gpus[gpu.Address]; twice {
			gpu = invalidGPU(gpu.Address, errors.New("listed twice"))
		}
		gpus[gpu.Address] = gpu
	}
	refuseTwins(gpus)
	return gpus, nil
}

// invalidGPU returns a GPU whose part of the text is invalid.
func invalidGPU(address string, err error) GPU {
	return GPU{Address: address, Err: fmt.Errorf("NVML facts: %w", err)}
}

// parseGPU reads the facts of one GPU. It returns an error only if the GPU's address is invalid.
func parseGPU(raw json.RawMessage, layouts []json.RawMessage) (GPU, error) {
	var of struct {
		Address string `json:"address"`
	}
	if err := json.Unmarshal(raw, &of); err != nil {
		return GPU{}, err
	}
	if !addresses().MatchString(of.Address) {
		return GPU{}, fmt.Errorf("not a PCI address: %.40q", of.Address)
	}
	var read entry
	err := json.Unmarshal(raw, &read)
	gpu := read.GPU
	if err == nil && read.Layout != nil {
		gpu.Profiles, err = parseLayout(layouts, *read.Layout)
	}
	if err == nil {
		err = gpu.check()
	}
	if err != nil {
		return invalidGPU(of.Address, err), nil
	}
	return gpu, nil
}

// parseLayout reads one of the layouts.
func parseLayout(layouts []json.RawMessage, i int) (profiles []Profile, err error) {
	if i < 0 || i >= len(layouts) {
		return nil, fmt.Errorf("layout %d: there is none", i)
	}
	if err := json.Unmarshal(layouts[i], &profiles); err != nil {
		return nil, fmt.Errorf("layout %d: %w", i, err)
	}
	return profiles, nil
}

// refuseTwins refuses GPUs that share a UUID, or that have MIG devices with the same UUID, because
// the UUID identifies none of them.
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
			gpus[address] = invalidGPU(address, fmt.Errorf("several devices have the UUID %s", uuid))
		}
	}
}
