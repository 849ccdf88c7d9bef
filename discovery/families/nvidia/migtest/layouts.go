package migtest

import "chandler.dev/discovery/families/nvidia/facts"

// profile returns a GPU's profile from the NVIDIA MIG User Guide. The engines are copy engines,
// decoders, JPEG decoders and optical flow accelerators.
func profile(name string, compute, most, size int, starts []int, engines [4]uint32) facts.Profile {
	p := facts.Profile{
		Name: name, Slices: compute, Max: most, MemoryBytes: int64(size) * 4 << 30,
		Engines: facts.Engines{Multiprocessors: uint32(14 * compute), Copy: engines[0], Decoder: engines[1], JPEG: engines[2], OFA: engines[3]},
	}
	for _, start := range starts {
		p.Placements = append(p.Placements, facts.Placement{Start: start, Size: size})
	}
	return p
}

var (
	seven = []int{0, 1, 2, 3, 4, 5, 6}

	// Layouts are the MIG profiles of GPU models.
	Layouts = map[string][]facts.Profile{
		"A100": {
			profile("1g.5gb", 1, 7, 1, seven, [4]uint32{1, 0, 0, 0}), profile("1g.5gb+me", 1, 1, 1, seven, [4]uint32{1, 1, 1, 1}),
			profile("1g.10gb", 1, 4, 2, []int{0, 2, 4, 6}, [4]uint32{1, 1, 0, 0}), profile("2g.10gb", 2, 3, 2, []int{0, 2, 4}, [4]uint32{2, 1, 0, 0}),
			profile("3g.20gb", 3, 2, 4, []int{0, 4}, [4]uint32{3, 2, 0, 0}), profile("4g.20gb", 4, 1, 4, []int{0}, [4]uint32{4, 2, 0, 0}),
			profile("7g.40gb", 7, 1, 8, []int{0}, [4]uint32{7, 5, 1, 1}),
		},
		"A30": {
			profile("1g.6gb", 1, 4, 1, []int{0, 1, 2, 3}, [4]uint32{1, 0, 0, 0}), profile("1g.6gb+me", 1, 1, 1, []int{0, 1, 2, 3}, [4]uint32{1, 1, 1, 1}),
			profile("2g.12gb", 2, 2, 2, []int{0, 2}, [4]uint32{2, 2, 0, 0}), profile("2g.12gb+me", 2, 1, 2, []int{0, 2}, [4]uint32{2, 2, 1, 1}),
			profile("4g.24gb", 4, 1, 4, []int{0}, [4]uint32{4, 4, 1, 1}),
		},
		"H100": {
			profile("1g.10gb", 1, 7, 1, seven, [4]uint32{1, 1, 1, 0}), profile("1g.10gb+me", 1, 1, 1, seven, [4]uint32{1, 1, 1, 1}),
			profile("1g.20gb", 1, 4, 2, []int{0, 2, 4, 6}, [4]uint32{1, 1, 1, 0}), profile("2g.20gb", 2, 3, 2, []int{0, 2, 4}, [4]uint32{2, 2, 2, 0}),
			profile("3g.40gb", 3, 2, 4, []int{0, 4}, [4]uint32{3, 3, 3, 0}), profile("4g.40gb", 4, 1, 4, []int{0}, [4]uint32{4, 4, 4, 0}),
			profile("7g.80gb", 7, 1, 8, []int{0}, [4]uint32{8, 7, 7, 1}),
		},
	}
)
