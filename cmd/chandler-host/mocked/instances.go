//go:build cgo

package mocked

import (
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
)

// createGI creates a GPU instance if NVML lists the placement, the placement is free, and the GPU
// has enough resources left for the profile.
func (m *Machine) createGI(gpu, profile, start, size int) (made nvml.GpuInstance, _ nvml.Return) {
	ret := m.do("create-gi", func(s *state) nvml.Return {
		listed := slices.Contains(m.Placements(gpu, profile), nvml.GpuInstancePlacement{Start: uint32(start), Size: uint32(size)})
		if !listed {
			return nvml.ERROR_INVALID_ARGUMENT
		}
		one := Instance{GI: 1, Start: start, Size: size, Profile: profile}
		if !m.fitsGPU(gpu, append(slices.Clone(s.Instances[gpu]), one)) {
			return nvml.ERROR_INSUFFICIENT_RESOURCES
		}
		for slices.ContainsFunc(s.Instances[gpu], func(other Instance) bool { return other.GI == one.GI }) {
			one.GI++
		}
		s.Instances[gpu] = append(s.Instances[gpu], one)
		made = m.gpuInstance(gpu, one.GI)
		return nvml.SUCCESS
	})
	return made, ret
}

// fitsGPU reports whether a GPU has room for GPU instances.
func (m *Machine) fitsGPU(gpu int, all []Instance) bool {
	profiles := m.device(gpu).Config.MIGProfiles.GpuInstanceProfiles
	taken, of := make(map[int]bool), make(map[int]uint32)
	var compute uint32
	for _, one := range all {
		info := profiles[one.Profile]
		compute += info.SliceCount
		if of[one.Profile]++; of[one.Profile] > info.InstanceCount || compute > 7 {
			return false
		}
		for slice := one.Start; slice < one.Start+one.Size; slice++ {
			if taken[slice] {
				return false
			}
			taken[slice] = true
		}
	}
	return true
}

// findInstance finds a GPU instance in the state, nil if it is gone.
func (s *state) findInstance(gpu, gi int) *Instance {
	i := slices.IndexFunc(s.Instances[gpu], func(one Instance) bool { return one.GI == gi })
	if i < 0 {
		return nil
	}
	return &s.Instances[gpu][i]
}

// gpuInstance returns the handle of a GPU instance.
func (m *Machine) gpuInstance(gpu, gi int) nvml.GpuInstance {
	profiles := m.device(gpu).Config.MIGProfiles
	now := func() (one Instance, ret nvml.Return) {
		for _, one := range m.Instances(gpu) {
			if one.GI == gi {
				return one, nvml.SUCCESS
			}
		}
		return Instance{}, nvml.ERROR_NOT_FOUND
	}
	return &mock.GpuInstance{
		GetInfoFunc: func() (nvml.GpuInstanceInfo, nvml.Return) {
			one, ret := now()
			at := nvml.GpuInstancePlacement{Start: uint32(one.Start), Size: uint32(one.Size)}
			return nvml.GpuInstanceInfo{Device: m.Devices[gpu], Id: uint32(gi), ProfileId: id(one.Profile), Placement: at}, ret
		},
		GetComputeInstanceProfileInfoFunc: func(i, engines int) (nvml.ComputeInstanceProfileInfo, nvml.Return) {
			one, ret := now()
			info, found := profiles.ComputeInstanceProfiles[one.Profile][i]
			if ret == nvml.SUCCESS && (!found || engines != nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED) {
				ret = nvml.ERROR_NOT_SUPPORTED
			}
			info.Id = id(i)
			return info, ret
		},
		GetComputeInstancesFunc: func(info *nvml.ComputeInstanceProfileInfo) (found []nvml.ComputeInstance, _ nvml.Return) {
			one, ret := now()
			for _, part := range one.Parts {
				if part.Profile == index(info.Id) {
					found = append(found, m.computeInstance(gpu, gi, part))
				}
			}
			return found, ret
		},
		CreateComputeInstanceFunc: func(info *nvml.ComputeInstanceProfileInfo) (made nvml.ComputeInstance, _ nvml.Return) {
			ret := m.do("create-ci", func(s *state) nvml.Return {
				one := s.findInstance(gpu, gi)
				if one == nil {
					return nvml.ERROR_NOT_FOUND
				}
				slicesOf := func(profile int) uint32 { return profiles.ComputeInstanceProfiles[one.Profile][profile].SliceCount }
				taken := slicesOf(index(info.Id))
				part := Part{Profile: index(info.Id)}
				for _, other := range one.Parts {
					taken += slicesOf(other.Profile)
					part.CI = max(part.CI, other.CI+1)
				}
				if taken > profiles.GpuInstanceProfiles[one.Profile].SliceCount {
					return nvml.ERROR_INSUFFICIENT_RESOURCES
				}
				s.Made++
				part.UUID = uuid(gpu, gi, s.Made)
				one.Parts = append(one.Parts, part)
				made = m.computeInstance(gpu, gi, part)
				return nvml.SUCCESS
			})
			return made, ret
		},
		DestroyFunc: func() nvml.Return {
			return m.do("destroy-gi", func(s *state) nvml.Return {
				one := s.findInstance(gpu, gi)
				switch {
				case one == nil:
					return nvml.ERROR_NOT_FOUND
				case len(one.Parts) > 0:
					return nvml.ERROR_IN_USE
				}
				s.Instances[gpu] = slices.DeleteFunc(s.Instances[gpu], func(other Instance) bool { return other.GI == gi })
				return nvml.SUCCESS
			})
		},
	}
}

// computeInstance returns the handle of a compute instance.
func (m *Machine) computeInstance(gpu, gi int, part Part) nvml.ComputeInstance {
	return &mock.ComputeInstance{
		GetInfoFunc: func() (nvml.ComputeInstanceInfo, nvml.Return) {
			return nvml.ComputeInstanceInfo{Device: m.Devices[gpu], Id: uint32(part.CI), ProfileId: id(part.Profile)}, nvml.SUCCESS
		},
		DestroyFunc: func() nvml.Return {
			return m.do("destroy-ci", func(s *state) nvml.Return {
				one := s.findInstance(gpu, gi)
				if one == nil {
					return nvml.ERROR_NOT_FOUND
				}
				i := slices.IndexFunc(one.Parts, func(other Part) bool { return other.CI == part.CI })
				switch {
				case i < 0:
					return nvml.ERROR_NOT_FOUND
				case one.Parts[i].Busy:
					return nvml.ERROR_IN_USE
				}
				one.Parts = slices.Delete(one.Parts, i, i+1)
				return nvml.SUCCESS
			})
		},
	}
}
