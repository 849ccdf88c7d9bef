package facts

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"

	"chandler.dev/internal/pattern"
)

// These patterns are the forms of NVML values. Before R470, the UUID of a MIG device consists of
// the GPU's UUID and the numbers of the instances.
var (
	addresses    = pattern.Lazy(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
	plainUUIDs   = pattern.Lazy(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	gpuUUIDs     = pattern.Lazy(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	migUUIDs     = pattern.Lazy(`^MIG-([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/[0-9]{1,2}/[0-9]{1,2})$`)
	capabilities = pattern.Lazy(`^[1-9][0-9]?\.[0-9]$`)
	cudaVersions = pattern.Lazy(`^[1-9][0-9]{0,2}\.[0-9]{1,2}$`)
	words        = pattern.Lazy(`^[a-z0-9-]{1,32}$`)
	profiles     = pattern.Lazy(`^(?:([1-8])c\.)?([1-8])g\.([1-9][0-9]{0,3})gb((?:\+[a-z]+(?:\.[a-z]+)*|-[a-z]+)?)$`)
)

// maxSuffix limits the end of a profile's name, such as "+me.all". Device names, which are DNS
// labels, include the suffix.
const maxSuffix = 15

// parseProfile returns the parts of a profile's name, nil if the name is invalid.
func parseProfile(name string) []string {
	m := profiles().FindStringSubmatch(name)
	if m == nil || len(m[4]) > maxSuffix {
		return nil
	}
	return m
}

// maxMemory exceeds the memory of any GPU, in bytes: 64 TiB.
const maxMemory = 64 << 40

// check returns an error for every invalid value of the GPU, nil if all are valid.
func (g *GPU) check() error {
	var errs []error
	wrong := func(what string, value any) {
		errs = append(errs, fmt.Errorf("invalid %s: %.40q", what, fmt.Sprint(value)))
	}
	text := func(what, value string, form func() *regexp.Regexp) {
		if value != "" && !form().MatchString(value) {
			wrong(what, value)
		}
	}
	text("UUID", g.UUID, gpuUUIDs)
	text("compute capability", g.ComputeCapability, capabilities)
	text("CUDA version", g.CUDA, cudaVersions)
	text("recovery", g.Recovery, words)
	if g.MemoryBytes < 0 || g.MemoryBytes > maxMemory {
		wrong("memory size", g.MemoryBytes)
	}
	if g.MIG != "" && g.MIG != "enabled" && g.MIG != "disabled" {
		wrong("MIG mode", g.MIG)
	}
	if g.Fabric != nil && !plainUUIDs().MatchString(g.Fabric.Cluster) {
		wrong("UUID of a fabric cluster", g.Fabric.Cluster)
	}
	for _, address := range append(append([]string(nil), g.Peers...), g.Switches...) {
		if !addresses().MatchString(address) {
			wrong("PCI address at the end of an NVLink", address)
		}
	}
	seen := make(map[[2]int]bool)
	for i := range g.Instances {
		instance := &g.Instances[i]
		place := [2]int{instance.GI, instance.CI}
		if seen[place] {
			errs = append(errs, fmt.Errorf("MIG instance %d/%d: listed twice", instance.GI, instance.CI))
		}
		seen[place] = true
		if err := instance.check(g.MemoryBytes); err != nil {
			errs = append(errs, fmt.Errorf("MIG instance %d/%d: %w", instance.GI, instance.CI, err))
		}
	}
	for _, empty := range g.Empty {
		if empty.Profile != "" && parseProfile(empty.Profile) == nil {
			wrong("profile of an empty GPU instance", empty.Profile)
		}
		errs = append(errs, empty.check())
	}
	return errors.Join(append(errs, checkProfiles(g.Profiles, g.MemoryBytes))...)
}

// Limits of partitions: no GPU exceeds them, and a resource pool has room for as many devices.
const (
	maxSlices     = 16 // memory slices, and compute slices
	maxProfiles   = 32
	maxPlacements = 128 // total of all profiles of a GPU
	maxEngines    = 4096
)

// checkProfiles returns an error for every invalid profile of a GPU with that much memory. The
// memory is 0 if unknown.
func checkProfiles(profiles []Profile, gpuMemory int64) error {
	if len(profiles) > maxProfiles {
		return fmt.Errorf("%d profiles, at most %d", len(profiles), maxProfiles)
	}
	var errs []error
	names, placements := make(map[string]bool), 0
	for _, p := range profiles {
		if names[p.Name] {
			errs = append(errs, fmt.Errorf("profile %.40q: listed twice", p.Name))
		}
		names[p.Name] = true
		if err := p.check(gpuMemory); err != nil {
			errs = append(errs, fmt.Errorf("profile %.40q: %w", p.Name, err))
		}
		placements += len(p.Placements)
	}
	if placements > maxPlacements {
		errs = append(errs, fmt.Errorf("%d placements, at most %d", placements, maxPlacements))
	}
	return errors.Join(errs...)
}

func (p *Profile) check(gpuMemory int64) error {
	if m := parseProfile(p.Name); m == nil || m[1] != "" {
		return errors.New("no name of a profile")
	}
	if p.Slices < 1 || p.Slices > maxSlices || p.Max < 1 || p.Max > maxSlices {
		return fmt.Errorf("no numbers of slices and instances: %d, %d", p.Slices, p.Max)
	}
	if p.MemoryBytes < 0 || p.MemoryBytes > maxMemory || gpuMemory > 0 && p.MemoryBytes > gpuMemory {
		return fmt.Errorf("invalid memory size: %d", p.MemoryBytes)
	}
	for _, number := range p.Engines.numbers() {
		if number > maxEngines {
			return fmt.Errorf("no number of engines: %d", number)
		}
	}
	if len(p.Placements) == 0 {
		return errors.New("no placement")
	}
	starts := make(map[int]bool)
	for _, placement := range p.Placements {
		if err := placement.check(); err != nil {
			return err
		}
		if starts[placement.Start] {
			return fmt.Errorf("two placements at %d", placement.Start)
		}
		starts[placement.Start] = true
	}
	return nil
}

func (p *Placement) check() error {
	if p.Start < 0 || p.Size < 1 || p.Size > maxSlices || p.Start > maxSlices-p.Size {
		return fmt.Errorf("no placement: %d of %d", p.Start, p.Size)
	}
	return nil
}

func (e *Engines) numbers() []uint32 {
	return []uint32{e.Multiprocessors, e.Copy, e.Decoder, e.Encoder, e.JPEG, e.OFA}
}

// check returns an error if a value of the instance is invalid on a GPU with that much memory. The
// memory is 0 if unknown.
func (i *Instance) check(gpuMemory int64) error {
	if i.GI < 0 || i.GI > 99 || i.CI < 0 || i.CI > 99 {
		return errors.New("no such number")
	}
	if i.UUID != "" && !migUUIDs().MatchString(i.UUID) {
		return fmt.Errorf("invalid UUID: %.40q", i.UUID)
	}
	if _, _, ok := i.Slices(); i.Profile != "" && !ok {
		return fmt.Errorf("no profile: %.40q", i.Profile)
	}
	if i.MemoryBytes < 0 || i.MemoryBytes > maxMemory || gpuMemory > 0 && i.MemoryBytes > gpuMemory {
		return fmt.Errorf("invalid memory size: %d", i.MemoryBytes)
	}
	if i.Placement != nil {
		return i.Placement.check()
	}
	return nil
}

// Slices returns the number of compute slices of the instance and of its GPU instance: 1 and 3 for
// "1c.3g.40gb", 3 and 3 for "3g.40gb". ok is false without a valid profile.
func (i *Instance) Slices() (compute, gpu int, ok bool) {
	m := parseProfile(i.Profile)
	if m == nil {
		return 0, 0, false
	}
	gpu, _ = strconv.Atoi(m[2])
	compute = gpu
	if m[1] != "" {
		compute, _ = strconv.Atoi(m[1])
	}
	return compute, gpu, compute <= gpu
}
