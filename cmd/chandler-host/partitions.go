//go:build cgo

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"chandler.dev/discovery/families/nvidia/facts"
)

// partitioner creates and removes MIG instances of one GPU. An instance is a GPU instance with a
// single compute instance of the same size.
type partitioner struct {
	lib      nvml.Interface
	device   nvml.Device
	kinds    []kind
	hasBegun bool   // the caller's record has a started creation or removal at the place
	proc     string // the host's /proc
	dev      string // the host's /dev
	errOut   io.Writer
}

// place is a profile at a placement.
type place struct {
	kind

	at nvml.GpuInstancePlacement
}

// String returns the place in the form of the flags: "1g.10gb@4".
func (p *place) String() string { return fmt.Sprintf("%s@%d", p.profile.Name, p.at.Start) }

// changeInstance creates or removes an instance, as the flags request, and writes the result of a
// creation. After an error, the GPU's state is uncertain.
func (o *options) changeInstance(lib nvml.Interface, out, errOut io.Writer) error {
	if (o.create == "") == (o.remove == "") {
		return errors.New("either --create or --remove")
	}
	c, err := newPartitioner(lib, o.gpu)
	if err != nil {
		return o.refuseCreation(out, err)
	}
	c.hasBegun = o.hasBegun
	c.proc, c.dev, c.errOut = filepath.Join(o.hostRoot, "proc"), filepath.Join(o.hostRoot, "dev"), errOut
	if o.remove != "" {
		p, err := c.parsePlace(o.remove)
		if err == nil {
			err = c.remove(p, o.uuid)
		}
		return err
	}
	p, err := c.parsePlace(o.create)
	if err != nil {
		return o.refuseCreation(out, err)
	}
	made, left, err := c.createInstance(p)
	if left {
		return err
	}
	if err != nil {
		made = facts.CreatedInstance{Refused: err.Error()}
	}
	return json.NewEncoder(out).Encode(made)
}

// refuseCreation writes the reason why no instance was created. If the caller has begun a
// creation, an instance may still exist; in this case, as for a removal, refuseCreation returns the
// error instead.
func (o *options) refuseCreation(out io.Writer, err error) error {
	if o.create == "" || o.hasBegun {
		return err
	}
	return json.NewEncoder(out).Encode(facts.CreatedInstance{Refused: err.Error()})
}

// newPartitioner opens a GPU in MIG mode.
func newPartitioner(lib nvml.Interface, address string) (*partitioner, error) {
	device, ret := lib.DeviceGetHandleByPciBusId(address)
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("open GPU %s: %s", address, describeReturn(ret))
	}
	mode, _, ret := device.GetMigMode()
	if ret != nvml.SUCCESS || mode != nvml.DEVICE_MIG_ENABLE {
		return nil, fmt.Errorf("GPU %s is not in MIG mode", address)
	}
	memory, ret := device.GetMemoryInfo()
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("size of memory of GPU %s: %s", address, describeReturn(ret))
	}
	all, told := listKinds(lib, device, memory.Total)
	if !told {
		return nil, fmt.Errorf("GPU %s: NVML does not list the possible MIG instances at present", address)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("GPU %s: NVML does not list the possible MIG instances; this needs root and a recent driver", address)
	}
	return &partitioner{lib: lib, device: device, kinds: all}, nil
}

// parsePlace returns the place with the given name, or an error if NVML lists no such place.
func (c *partitioner) parsePlace(text string) (*place, error) {
	name, at, _ := strings.Cut(text, "@")
	start, err := strconv.ParseUint(at, 10, 8)
	if err != nil {
		return nil, fmt.Errorf("place %q: want PROFILE@START", text)
	}
	for _, k := range c.kinds {
		for _, placement := range k.profile.Placements {
			if k.profile.Name == name && placement.Start == int(start) {
				return &place{k, nvml.GpuInstancePlacement{Start: uint32(placement.Start), Size: uint32(placement.Size)}}, nil
			}
		}
	}
	return nil, fmt.Errorf("the GPU has no place %s", text)
}

var errInTheWay = errors.New("something else is in the way")

// at returns the GPU instance at a place, nil if there is none. It fails if another GPU instance
// overlaps the place.
func (c *partitioner) at(p *place) (at nvml.GpuInstance, number int, err error) {
	for _, k := range c.kinds {
		info := k.info
		instances, ret := c.device.GetGpuInstances(&info)
		if ret != nvml.SUCCESS {
			return nil, 0, fmt.Errorf("list GPU instances of profile %s: %s", k.profile.Name, describeReturn(ret))
		}
		for _, instance := range instances {
			found, ret := instance.GetInfo()
			if ret != nvml.SUCCESS {
				return nil, 0, fmt.Errorf("look at a GPU instance of profile %s: %s", k.profile.Name, describeReturn(ret))
			}
			switch {
			case found.ProfileId == p.info.Id && found.Placement == p.at:
				at, number = instance, int(found.Id)
			case found.Placement.Start < p.at.Start+p.at.Size && p.at.Start < found.Placement.Start+found.Placement.Size:
				return nil, 0, fmt.Errorf("%w: GPU instance %d, %s@%d", errInTheWay, found.Id, k.profile.Name, found.Placement.Start)
			}
		}
	}
	return at, number, nil
}

// errNotOurs is the error for a foreign GPU instance without a compute instance.
var errNotOurs = errors.New("another program has created its GPU instance, without a compute instance")

// createInstance creates an instance at a place, or uses the existing one. A GPU instance without a compute
// instance is used only if the caller has begun the creation, for example before this program was
// killed. If the creation fails, the new GPU instance is removed. With an error, left reports
// whether a GPU instance of the caller or of this call may remain.
func (c *partitioner) createInstance(p *place) (made facts.CreatedInstance, left bool, err error) {
	instance, number, err := c.at(p)
	if err != nil {
		return made, c.hasBegun && !errors.Is(err, errInTheWay), fmt.Errorf("create %s: %w", p, err)
	}
	found := instance != nil
	if !found {
		info := p.info
		var ret nvml.Return
		if instance, ret = c.device.CreateGpuInstanceWithPlacement(&info, &p.at); ret != nvml.SUCCESS {
			return made, false, fmt.Errorf("create %s: create its GPU instance: %s", p, describeReturn(ret))
		}
	}
	made.Found = found && !c.hasBegun
	made.Instance, err = c.computeInstance(p, instance, !made.Found)
	if err != nil {
		left = found && c.hasBegun && !errors.Is(err, errDivided)
		if !found {
			if ret := instance.Destroy(); ret != nvml.SUCCESS {
				err, left = errors.Join(err, fmt.Errorf("remove its GPU instance again: %s", describeReturn(ret))), true
			}
		}
		return facts.CreatedInstance{}, left, fmt.Errorf("create %s: %w", p, err)
	}
	if found {
		made.GI = number
	}
	if err := c.makeNodes(made.GI, made.CI); err != nil {
		fmt.Fprintf(c.errOut, "chandler-host: device nodes of %s: %v\n", p, err) // a scan of the host reports missing nodes
	}
	return made, false, nil
}

var errDivided = errors.New("another program has divided its GPU instance")

// computeInstance returns the instance of a GPU instance with a single compute instance of the same
// size. If there is no compute instance and the GPU instance is ours, computeInstance creates one.
func (c *partitioner) computeInstance(p *place, instance nvml.GpuInstance, ours bool) (facts.Instance, error) {
	made := facts.Instance{Profile: p.profile.Name, Placement: &facts.Placement{Start: int(p.at.Start), Size: int(p.at.Size)}}
	info, ret := instance.GetInfo()
	if ret != nvml.SUCCESS {
		return made, fmt.Errorf("look at its GPU instance: %s", describeReturn(ret))
	}
	made.GI = int(info.Id)
	existing, err := computeInstances(instance)
	if err != nil {
		return made, err
	}
	switch {
	case len(existing) > 1 || len(existing) == 1 && existing[0].slices != p.profile.Slices:
		return made, errDivided
	case len(existing) == 1:
		made.CI = existing[0].number
	case !ours:
		return made, errNotOurs
	default:
		if made.CI, err = createCompute(instance, p.profile.Slices); err != nil {
			return made, err
		}
	}
	made.UUID = c.uuid(made.GI, made.CI)
	return made, nil
}

// part is a compute instance.
type part struct {
	handle nvml.ComputeInstance
	number int
	slices int
}

// computeProfiles returns the possible compute instance profiles of a GPU instance.
func computeProfiles(instance nvml.GpuInstance) (all []nvml.ComputeInstanceProfileInfo) {
	for i := range nvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		if info, ret := instance.GetComputeInstanceProfileInfo(i, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED); ret == nvml.SUCCESS && info.InstanceCount > 0 {
			all = append(all, info)
		}
	}
	return all
}

// computeInstances returns the compute instances of a GPU instance.
func computeInstances(instance nvml.GpuInstance) (all []part, err error) {
	for _, profile := range computeProfiles(instance) {
		handles, ret := instance.GetComputeInstances(&profile)
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("list its compute instances: %s", describeReturn(ret))
		}
		for _, handle := range handles {
			info, ret := handle.GetInfo()
			if ret != nvml.SUCCESS {
				return nil, fmt.Errorf("look at a compute instance: %s", describeReturn(ret))
			}
			all = append(all, part{handle, int(info.Id), int(profile.SliceCount)})
		}
	}
	return all, nil
}

// createCompute creates a compute instance with the given number of slices. If several profiles
// have this number, the GPU instance accepts only one of them.
func createCompute(instance nvml.GpuInstance, slices int) (number int, err error) {
	err = fmt.Errorf("create its compute instance: there is no profile of %d slices", slices)
	for _, profile := range computeProfiles(instance) {
		if int(profile.SliceCount) != slices {
			continue
		}
		handle, ret := instance.CreateComputeInstance(&profile)
		if ret != nvml.SUCCESS {
			err = fmt.Errorf("create its compute instance: %s", describeReturn(ret))
			continue
		}
		info, ret := handle.GetInfo()
		if ret == nvml.SUCCESS {
			return int(info.Id), nil
		}
		err = fmt.Errorf("look at its compute instance: %s", describeReturn(ret))
		if ret := handle.Destroy(); ret != nvml.SUCCESS {
			err = errors.Join(err, fmt.Errorf("remove it again: %s", describeReturn(ret)))
		}
		break
	}
	return 0, err
}

// uuid returns the UUID of an instance, "" if unknown.
func (c *partitioner) uuid(gi, ci int) string {
	count, ret := c.device.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return ""
	}
	for i := range count {
		mig, ret := c.device.GetMigDeviceHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue
		}
		itsGI, giRet := mig.GetGpuInstanceId()
		itsCI, ciRet := mig.GetComputeInstanceId()
		if giRet != nvml.SUCCESS || ciRet != nvml.SUCCESS || itsGI != gi || itsCI != ci {
			continue
		}
		if uuid, ret := mig.GetUUID(); ret == nvml.SUCCESS {
			return uuid
		}
	}
	return ""
}

// remove removes the instance at a place, and succeeds if there is none. An instance with a UUID
// other than the given one belongs to another creator, and stays. Instances in use and divided
// instances stay too. A GPU instance without a compute instance stays unless the caller has begun
// its creation or removal.
func (c *partitioner) remove(p *place, uuid string) error {
	instance, number, err := c.at(p)
	if errors.Is(err, errInTheWay) {
		return nil // ours is gone, and another instance was created
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", p, err)
	}
	if instance == nil {
		return nil
	}
	existing, err := computeInstances(instance)
	if err != nil {
		return fmt.Errorf("remove %s: %w", p, err)
	}
	if len(existing) > 1 || len(existing) == 1 && existing[0].slices != p.profile.Slices {
		return fmt.Errorf("remove %s: %w", p, errDivided)
	}
	if len(existing) == 0 && !c.hasBegun {
		fmt.Fprintf(c.errOut, "chandler-host: %s is gone; GPU instance %d there is left alone: %v\n", p, number, errNotOurs)
		return nil
	}
	for _, part := range existing {
		if now := c.uuid(number, part.number); uuid != "" && now != "" && now != uuid {
			return fmt.Errorf("remove %s: it is %s now, which another program has created", p, now)
		}
		if ret := part.handle.Destroy(); ret != nvml.SUCCESS {
			return fmt.Errorf("remove %s: its compute instance: %s", p, describeReturn(ret))
		}
	}
	if ret := instance.Destroy(); ret != nvml.SUCCESS {
		return fmt.Errorf("remove %s: its GPU instance: %s", p, describeReturn(ret))
	}
	return nil
}
