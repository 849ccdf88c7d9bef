// Package facts is what NVML, NVIDIA's management library, says of a host's
// GPUs, as the text of a file of the host. Command chandler-nvml writes it, and
// the nvidia family reads it. This package itself knows no NVML.
package facts

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
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

	// Layouts are the Profiles of GPUs, each list of them once: a host's GPUs are
	// mostly of one model.
	Layouts [][]Profile `json:"layouts,omitempty"`
	GPUs    []entry     `json:"gpus,omitempty"`
}

// entry is a GPU as the text has it.
type entry struct {
	GPU

	Layout *int `json:"layout,omitempty"` // the index in Layouts of its Profiles, nil if it has none
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

	// Profiles are the GPU instances that could be cut of a GPU in MIG mode, none if
	// NVML does not say. GPUs may share one list, which nobody modifies.
	Profiles []Profile `json:"-"`

	// Peers are the PCI addresses of GPUs, and Switches those of NVSwitches, at
	// the other ends of NVLinks that are up, each once, in order.
	Peers    []string `json:"peers,omitempty"`
	Switches []string `json:"switches,omitempty"`

	// Empty are the GPU instances that nothing computes in, as far as they are known.
	Empty []Empty `json:"empty,omitempty"`

	// PlacesUnknown says that NVML did not answer where instances lie, or could, and may
	// answer later.
	PlacesUnknown bool `json:"placesUnknown,omitempty"`

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

	// Placement is where its GPU instance lies, nil if not known.
	Placement *Placement `json:"placement,omitempty"`
}

// Profile is a kind of GPU instance.
type Profile struct {
	Name        string  `json:"name"`   // "1g.10gb+me"
	Slices      int     `json:"slices"` // of compute
	Max         int     `json:"max"`    // how many there may be on a GPU
	MemoryBytes int64   `json:"memoryBytes"`
	Engines     Engines `json:"engines"`

	// Placements are where on a GPU such an instance may lie.
	Placements []Placement `json:"placements"`
}

// Placement is a run of a GPU's slices of memory.
type Placement struct {
	Start int `json:"start"`
	Size  int `json:"size"`
}

// Empty is a GPU instance without a compute instance.
type Empty struct {
	Placement

	Profile string `json:"profile"` // "1g.10gb+me"
}

// Cut is what chandler-nvml answers when it is asked to cut an instance.
type Cut struct {
	Instance

	// Found says that the instance was there already, and somebody else has made it.
	Found bool `json:"found,omitempty"`

	// Refused is why the instance is not there. Nothing of it was left.
	Refused string `json:"refused,omitempty"`
}

// Overlaps reports whether two placements have a slice in common.
func (p Placement) Overlaps(other Placement) bool {
	return p.Start < other.Start+other.Size && other.Start < p.Start+p.Size
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

// layout returns where a list of profiles is among the layouts, nil if it is empty.
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
func parseGPU(raw json.RawMessage, layouts []json.RawMessage) (GPU, error) {
	var of struct {
		Address string `json:"address"`
	}
	if err := json.Unmarshal(raw, &of); err != nil {
		return GPU{}, err
	}
	if !addresses.MatchString(of.Address) {
		return GPU{}, fmt.Errorf("no PCI address: %.40q", of.Address)
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
		return refused(of.Address, err), nil
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
