package nvidia_test

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/families/nvidia/migtest"
	"chandler.dev/discovery/scan"
)

// A GPU instance without compute instances that an agent has begun is usable for an instance of the
// same size and place. It takes its counters: no other profile is offered in its place, and beside
// it nothing that exceeds the rest of the GPU. An instance that another user created remains that
// user's.
func TestEmptyGPUInstances(t *testing.T) {
	for name, test := range map[string]struct {
		empty         facts.Empty
		there, absent string
	}{
		"another profile at the same place": {
			facts.Empty{Placement: facts.Placement{Start: 0, Size: 4}, Profile: "4g.40gb"},
			"4g-40gb-at-0 3g-40gb-at-4 1g-10gb-at-4", "3g-40gb-at-0 2g-20gb-at-0 1g-10gb-at-3 7g-80gb-at-0",
		},
		"the only one with the media engines": {
			facts.Empty{Placement: facts.Placement{Start: 0, Size: 1}, Profile: "1g.10gb+me"},
			"1g-10gb-me-at-0 1g-10gb-at-1", "1g-10gb-at-0 1g-10gb-me-at-3 1g-20gb-at-0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			host := &partitionedHost{&migtest.GPU{Profiles: migtest.Layouts["H100"], Empty: []facts.Empty{test.empty}}, nil}
			here, _, _ := strings.Cut(test.there, " ")
			for state, how := range map[string]map[string]string{"begun": {}, "half removed": {"state": "removing"}, "made": {"state": "cut"}, "of another program": nil} {
				host.ours = nil
				if how != nil {
					host.ours = map[string]map[string]string{migtest.Device + "-mig-" + here: how}
				}
				offered := names(host.scan(t))
				for place := range strings.FieldsSeq(test.there + " " + test.absent) {
					got, want := slices.Contains(offered, migtest.Device+"-mig-"+place), slices.Contains(strings.Fields(test.there), place)
					if place == here && (state == "made" || state == "of another program") {
						want = false
					}
					if got != want {
						t.Errorf("%s: %s is offered: %v, want %v", state, place, got, want)
					}
				}
			}
		})
	}
}

// While NVML has not reported placements, as when an agent has just started, instances are not
// offered under other names: a claim may have them under the names of their placements.
func TestInstancesThatNVMLHasNotToldOf(t *testing.T) {
	gpu := &migtest.GPU{Profiles: migtest.Layouts["H100"]}
	if err := gpu.CreateInstance("2g.20gb@2"); err != nil {
		t.Fatal(err)
	}
	host := &partitionedHost{gpu, nil}
	if offered := names(host.scan(t)); !slices.Contains(offered, migtest.Device+"-mig-2g-20gb-at-2") {
		t.Errorf("offered are %v", offered)
	}
	other, err := facts.Format([]facts.GPU{{Address: "0000:43:00.0"}})
	if err != nil {
		t.Fatal(err)
	}
	told := func(change func(gpu *facts.GPU)) []byte {
		all, err := facts.Parse(string(gpu.Files()[facts.Path[1:]].Data))
		if err != nil {
			t.Fatal(err)
		}
		one := all[migtest.Address]
		change(&one)
		text, err := facts.Format([]facts.GPU{one})
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	for name, change := range map[string]func(files fstest.MapFS){
		"nothing yet":        func(files fstest.MapFS) { delete(files, facts.Path[1:]) },
		"only of other GPUs": func(files fstest.MapFS) { files[facts.Path[1:]] = &fstest.MapFile{Data: other} },
		"not where it lies": func(files fstest.MapFS) {
			files[facts.Path[1:]] = &fstest.MapFile{Data: told(func(gpu *facts.GPU) {
				gpu.PlacesUnknown, gpu.Instances[0].Placement = true, nil
			})}
		},
		"not where instances could lie": func(files fstest.MapFS) {
			files[facts.Path[1:]] = &fstest.MapFile{Data: told(func(gpu *facts.GPU) { gpu.PlacesUnknown, gpu.Profiles = true, nil })}
		},
		"why it tells no more": func(files fstest.MapFS) {
			files[facts.Path[1:]] = &fstest.MapFile{Data: facts.FormatError(errors.New("gone"))}
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := host.host()
			files := maps.Clone(gpu.Files())
			change(files)
			h.FS = files
			snapshot := scan.ReadHost(h, []*discovery.Family{nvidia.Family})
			if len(snapshot.Devices) > 0 || len(snapshot.Problems) == 0 {
				t.Errorf("devices %v, problems %v", snapshot.Devices, snapshot.Problems)
			}
		})
	}
}

// With a driver that lists no placements, an instance keeps the name of its placement: a claim may
// have the instance under that name since the placement was listed.
func TestInstancesWhereNoPlacesAreListed(t *testing.T) {
	gpu := &migtest.GPU{Profiles: migtest.Layouts["H100"]}
	if err := gpu.CreateInstance("2g.20gb@2"); err != nil {
		t.Fatal(err)
	}
	all, err := facts.Parse(string(gpu.Files()[facts.Path[1:]].Data))
	if err != nil {
		t.Fatal(err)
	}
	one := all[migtest.Address]
	one.Profiles = nil
	text, err := facts.Format([]facts.GPU{one})
	if err != nil {
		t.Fatal(err)
	}
	files := maps.Clone(gpu.Files())
	files[facts.Path[1:]] = &fstest.MapFile{Data: text}
	h := (&partitionedHost{gpu, nil}).host()
	h.FS = files
	snapshot := scan.ReadHost(h, []*discovery.Family{nvidia.Family})
	if len(snapshot.Devices) != 1 || snapshot.Devices[0].Name != migtest.Device+"-mig-2g-20gb-at-2" || len(snapshot.Problems) != 1 {
		t.Errorf("devices %v, problems %v", snapshot.Devices, snapshot.Problems)
	}
}
