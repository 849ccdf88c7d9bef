// Package migtest simulates, for tests, a host with one GPU in MIG mode. Instances are created by
// the rules of the NVIDIA MIG User Guide: only at placements that NVML lists and that are free.
package migtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing/fstest"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
)

// GPU is the only GPU of a host. The methods are safe for concurrent use.
type GPU struct {
	Profiles []facts.Profile
	Empty    []facts.Empty // GPU instances without compute instances; [GPU.CreateInstance] does not check them

	Silent bool // the host has no NVML facts

	// Refuse returns the error of NVML for an argument such as "--create=1g.10gb@0", or nil for
	// success. It may be nil.
	Refuse func(arg string) error

	mu        sync.Mutex
	instances []facts.Instance
	xids      []facts.XID
	made      int // the number of instances ever created
	calls     []string
	seen      fstest.MapFS // the cached files, nil after a change
}

// Names of the GPU.
const (
	Address = "0000:1b:00.0"
	Device  = "pci-0000-1b-00-0"
	dir     = "sys/devices/pci0000:00/0000:00:01.0/0000:1b:00.0"
)

// Open opens a file of the host in the present state of the kernel and NVML.
func (g *GPU) Open(name string) (fs.File, error) { return g.Files().Open(name) }

// ReadLink returns the target of a link. ReadLink and Lstat implement [fs.ReadLinkFS].
func (g *GPU) ReadLink(name string) (string, error) { return g.Files().ReadLink(name) }

// Lstat describes a file or link.
func (g *GPU) Lstat(name string) (fs.FileInfo, error) { return g.Files().Lstat(name) }

// Files returns the files of the host.
func (g *GPU) Files() fstest.MapFS {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.seen == nil {
		g.seen = g.files()
	}
	return g.seen
}

func (g *GPU) files() fstest.MapFS {
	text := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	node := &fstest.MapFile{Mode: fs.ModeDevice | fs.ModeCharDevice | 0o666}
	files := fstest.MapFS{
		"sys/bus/pci/devices/0000:1b:00.0": {Mode: fs.ModeSymlink, Data: []byte("../../../devices/pci0000:00/0000:00:01.0/0000:1b:00.0")},
		dir + "/driver":                    {Mode: fs.ModeSymlink, Data: []byte("../../../../bus/pci/drivers/nvidia")},
		dir + "/vendor":                    text("0x10de\n"),
		dir + "/device":                    text("0x2330\n"),
		dir + "/class":                     text("0x030200\n"),
		"sys/bus/pci/drivers/nvidia/bind":  text(""),
		"sys/module/nvidia/version":        text("570.86.15\n"),
		"proc/devices":                     text("Character devices:\n195 nvidia\n506 nvidia-caps\n511 nvidia-uvm\n\nBlock devices:\n"),
		"proc/driver/nvidia/gpus/0000:1b:00.0/information": text("Model: A GPU\nGPU UUID: GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9ae41b\nDevice Minor: 0\nGPU Excluded: No\n"),
		"dev/nvidiactl": node, "dev/nvidia0": node,
	}
	for _, i := range g.instances {
		dir, minor := fmt.Sprintf("proc/driver/nvidia/capabilities/gpu0/mig/gi%d", i.GI), 10*i.GI+i.CI+1
		files[dir+"/access"] = text(fmt.Sprintf("DeviceFileMinor: %d\n", 10*i.GI))
		files[fmt.Sprintf("%s/ci%d/access", dir, i.CI)] = text(fmt.Sprintf("DeviceFileMinor: %d\n", minor))
		files[fmt.Sprintf("dev/nvidia-caps/nvidia-cap%d", 10*i.GI)] = node
		files[fmt.Sprintf("dev/nvidia-caps/nvidia-cap%d", minor)] = node
	}
	if g.Silent {
		return files
	}
	told, err := facts.Format([]facts.GPU{{
		Address: Address, UUID: "GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9ae41b", MIG: "enabled", MemoryBytes: 80 << 30,
		Profiles: g.Profiles, Instances: g.instances, Empty: g.Empty, XIDs: g.xids,
	}})
	if err != nil {
		told = facts.FormatError(err)
	}
	files[strings.TrimPrefix(facts.Path, "/")] = &fstest.MapFile{Data: told}
	return files
}

// Instances returns the places of the instances, in order: "1g.10gb@4".
func (g *GPU) Instances() (places []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, i := range g.instances {
		places = append(places, placeOf(i))
	}
	slices.Sort(places)
	return places
}

func placeOf(i facts.Instance) string { return fmt.Sprintf("%s@%d", i.Profile, i.Placement.Start) }

// Calls returns the calls of [GPU.ChangePartition] since the previous call of Calls.
func (g *GPU) Calls() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	calls := g.calls
	g.calls = nil
	return calls
}

// Fail makes the driver report an error of the whole GPU, or no error if xid is zero.
func (g *GPU) Fail(xid facts.XID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.xids, g.seen = nil, nil
	if xid.Code != 0 {
		g.xids = []facts.XID{xid}
	}
}

// ChangePartition simulates chandler-host, which makes a change.
func (g *GPU) ChangePartition(_ context.Context, c discovery.PartitionChange) ([]byte, error) {
	args, err := facts.ChangeArgs(c)
	if err != nil || c.Function != Address {
		return nil, fmt.Errorf("called with %+v: %w", c, err)
	}
	g.mu.Lock()
	g.calls = append(g.calls, strings.TrimPrefix(args[1], "--"))
	g.mu.Unlock()
	if g.Refuse != nil {
		if err := g.Refuse(args[1]); err != nil {
			return nil, err
		}
	}
	if c.Remove {
		if now := g.At(c.Place); now != nil && c.UUID != "" && now.UUID != c.UUID {
			return nil, fmt.Errorf("it is %s now", now.UUID)
		}
		g.Remove(c.Place)
		return nil, nil
	}
	answer := facts.CreatedInstance{Found: g.At(c.Place) != nil && !c.HasBegun}
	if err := g.CreateInstance(c.Place); err != nil {
		answer = facts.CreatedInstance{Refused: err.Error()}
	} else {
		answer.Instance = *g.At(c.Place)
	}
	return json.Marshal(answer)
}

// At returns the instance at a place, nil if there is none.
func (g *GPU) At(place string) *facts.Instance {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, i := range g.instances {
		if placeOf(i) == place {
			return &i
		}
	}
	return nil
}

// CreateInstance creates an instance unless it exists. The error is the driver's refusal by the rules of the
// NVIDIA MIG User Guide.
func (g *GPU) CreateInstance(place string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seen = nil
	name, at, _ := strings.Cut(place, "@")
	i := slices.IndexFunc(g.Profiles, func(p facts.Profile) bool { return p.Name == name })
	if i < 0 {
		return errors.New("no such profile")
	}
	p := g.Profiles[i]
	j := slices.IndexFunc(p.Placements, func(p facts.Placement) bool { return fmt.Sprint(p.Start) == at })
	if j < 0 {
		return errors.New("no such placement")
	}
	here, of, compute, media := p.Placements[j], 1, p.Slices, p.Engines.OFA
	for _, other := range g.instances {
		if placeOf(other) == place {
			return nil
		}
		if here.Overlaps(*other.Placement) {
			return fmt.Errorf("%s lies at %d already", other.Profile, other.Placement.Start)
		}
		kind := g.Profiles[slices.IndexFunc(g.Profiles, func(p facts.Profile) bool { return p.Name == other.Profile })]
		compute, media = compute+kind.Slices, media+kind.Engines.OFA
		if other.Profile == name {
			of++
		}
	}
	if of > p.Max || compute > 7 || media > 1 {
		return fmt.Errorf("%d instances, %d slices of compute, %d accelerators", of, compute, media)
	}
	g.made++
	one := facts.Instance{GI: 1, Profile: name, Placement: &here, UUID: fmt.Sprintf("MIG-3f1b7c52-1d0e-5c6b-9a87-41f0%08x", g.made), MemoryBytes: p.MemoryBytes}
	for slices.ContainsFunc(g.instances, func(other facts.Instance) bool { return other.GI == one.GI }) {
		one.GI++
	}
	g.instances = append(g.instances, one)
	return nil
}

// Remove removes the instance at a place, if there is one.
func (g *GPU) Remove(place string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seen = nil
	g.instances = slices.DeleteFunc(slices.Clone(g.instances), func(i facts.Instance) bool { return placeOf(i) == place })
}
