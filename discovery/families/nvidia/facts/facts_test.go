package facts

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

const (
	uuidA = "GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9ae41b"
	uuidB = "GPU-5d2c1f43-8a41-4e0b-9c37-0b6f3d9ae443"
	migA  = "MIG-3f1b7c52-1d0e-5c6b-9a87-41f0c2d3e401"
)

func whole() []GPU {
	gi := 1
	return []GPU{{
		Address: "0000:1b:00.0", UUID: uuidA, Name: "NVIDIA H100 80GB HBM3", MemoryBytes: 85520809984,
		ComputeCapability: "9.0", MIG: "enabled", Recovery: "gpu-reset",
		Instances: []Instance{
			{GI: 1, CI: 0, UUID: migA, Profile: "1g.10gb+me", MemoryBytes: 10334765056},
			{GI: 2, CI: 0, Placement: &Placement{4, 4}, UUID: "MIG-" + uuidA + "/2/0", Profile: "1c.3g.40gb"},
		},
		Fabric:   &Fabric{"0c1d2e3f-4a5b-6c7d-8e9f-0a1b2c3d4e5f", 7},
		Peers:    []string{"0000:43:00.0"},
		Switches: []string{"0000:c4:00.0"},
		XIDs:     []XID{{79, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), &gi}},
		Profiles: layout(), Empty: []Empty{{Placement{2, 2}, "2g.20gb"}},
	}, {Address: "0000:43:00.0", Lost: true}}
}

// layout returns the profiles of an H100 with the newest drivers, and more.
func layout() (profiles []Profile) {
	add := func(name string, slices, size int, starts ...int) {
		p := Profile{Name: name, Slices: slices, Max: len(starts), MemoryBytes: int64(size) * 10 << 30, Engines: Engines{16 * uint32(slices), 1, 1, 0, 1, 0}}
		for _, start := range starts {
			p.Placements = append(p.Placements, Placement{start, size})
		}
		profiles = append(profiles, p)
	}
	for _, suffix := range []string{"", "+me", "+gfx", "-me", "+me.all"} {
		add("1g.10gb"+suffix, 1, 1, 0, 1, 2, 3, 4, 5, 6)
		add("2g.20gb"+suffix, 2, 2, 0, 2, 4)
	}
	add("1g.20gb", 1, 2, 0, 2, 4, 6)
	add("3g.40gb", 3, 4, 0, 4)
	add("4g.40gb", 4, 4, 0)
	add("7g.80gb", 7, 8, 0)
	for i := range profiles {
		profiles[i].MemoryBytes = min(profiles[i].MemoryBytes, 79<<30)
	}
	return profiles
}

// Parse reads the facts that Format writes.
func TestFormatAndParse(t *testing.T) {
	text, err := Format(whole())
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]GPU{"0000:1b:00.0": whole()[0], "0000:43:00.0": whole()[1]}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestFormatIsBounded(t *testing.T) {
	if _, err := Format([]GPU{{Name: strings.Repeat("x", MaxSize)}}); err == nil {
		t.Error("a text longer than is read was written")
	}
	gpu := whole()[0]
	for i := range 7 {
		gpu.Instances = append(gpu.Instances, Instance{GI: 3 + i, UUID: migA, Profile: "1g.10gb+me", MemoryBytes: 1 << 34})
	}
	var gpus []GPU
	for range 32 {
		gpus = append(gpus, gpu)
	}
	if _, err := Format(gpus); err != nil {
		t.Errorf("32 GPUs of nine instances: %v", err)
	}
}

// An invalid text, or a text with a GPU whose address is invalid, is refused as a whole.
func TestParseRefusesTheText(t *testing.T) {
	for name, test := range map[string]struct{ text, want string }{
		"empty":            {"", "unexpected end"},
		"half":             {`{"version":1,"gpus":[{"address":"0000:1b:00.0","uu`, "unexpected end"},
		"a later version":  {`{"version":2,"gpus":[]}`, "version 2, want 1"},
		"no version":       {`{}`, "version 0"},
		"no address":       {`{"version":1,"gpus":[{"uuid":"` + uuidA + `"}]}`, `GPU 0: not a PCI address: ""`},
		"NVML's address":   {`{"version":1,"gpus":[{"address":"0000001B"}]}`, "not a PCI address"},
		"it says so":       {string(FormatError(errors.New("silent for a minute"))), "NVML: silent for a minute"},
		"a GPU's a number": {`{"version":1,"gpus":[1]}`, "GPU 0: "},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Parse(test.text)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %+v, error %v, want %q in it", got, err, test.want)
			}
		})
	}
}

// Invalid facts of one GPU do not affect other GPUs.
func TestParseRefusesOneGPU(t *testing.T) {
	for name, test := range map[string]struct{ fields, want string }{
		"UUID":                {`"uuid":"GPU-????????-????-????-????-????????????"`, "invalid UUID"},
		"type":                {`"memoryBytes":"much"`, "memoryBytes"},
		"memory below zero":   {`"memoryBytes":-1`, `invalid memory size: "-1"`},
		"memory of no GPU":    {`"memoryBytes":9223372036854775807`, "invalid memory size"},
		"capability":          {`"computeCapability":"9"`, "invalid compute capability"},
		"capability of -1":    {`"computeCapability":"-1.-1"`, "invalid compute capability"},
		"MIG mode":            {`"mig":"pending"`, "invalid MIG mode"},
		"fabric":              {`"fabric":{"cluster":"","clique":1}`, "invalid UUID of a fabric cluster"},
		"clique":              {`"fabric":{"cluster":"0c1d2e3f-4a5b-6c7d-8e9f-0a1b2c3d4e5f","clique":-1}`, "clique"},
		"peer":                {`"peers":["ffffffff"]`, "end of an NVLink"},
		"recovery":            {`"recovery":"Reset it!"`, "invalid recovery"},
		"profile too long":    {`"instances":[{"gi":1,"ci":0,"profile":"1g.10gb+me.and.more.of.it"}]`, "instance 1/0: no profile"},
		"empty's too long":    {`"empty":[{"start":0,"size":1,"profile":"1g.10gb+me.and.more.of.it"}]`, "invalid profile of an empty GPU instance"},
		"profile":             {`"instances":[{"gi":1,"ci":0,"profile":"1g"}]`, "instance 1/0: no profile"},
		"more C than G":       {`"instances":[{"gi":1,"ci":0,"profile":"3c.1g.10gb"}]`, "no profile"},
		"instance's memory":   {`"memoryBytes":100,"instances":[{"gi":1,"ci":0,"memoryBytes":101}]`, "invalid memory size: 101"},
		"instance's UUID":     {`"instances":[{"gi":1,"ci":0,"uuid":"` + uuidA + `"}]`, "invalid UUID"},
		"instance's number":   {`"instances":[{"gi":4294967295,"ci":0}]`, "no such number"},
		"instance twice":      {`"instances":[{"gi":1,"ci":0},{"gi":1,"ci":0}]`, "listed twice"},
		"placement":           {`"instances":[{"gi":1,"ci":0,"placement":{"start":1}}]`, "no placement: 1 of 0"},
		"an empty one":        {`"empty":[{"start":-1,"size":1}]`, "no placement: -1 of 1"},
		"an unknown layout":   {`"layout":9`, "layout 9: there is none"},
		"a layout of none":    {`"layout":0`, "layout 0: json"},
		"profile's name":      {`"layout":1`, `profile "1c.2g.10gb": no name`},
		"profile twice":       {`"layout":2`, `profile "1g.10gb": listed twice`},
		"too wide":            {`"layout":3`, `no placement: 15 of 2`},
		"two at one place":    {`"layout":4`, `two placements at 0`},
		"nowhere":             {`"layout":5`, `no placement`},
		"profile's memory":    {`"memoryBytes":5,"layout":6`, `invalid memory size: 6`},
		"too many instances":  {`"layout":7`, `no numbers of slices and instances: 1, 17`},
		"too many engines":    {`"layout":8`, `no number of engines: 4097`},
		"another GPU's UUID":  {`"uuid":"` + uuidB + `"`, "several devices have the UUID " + uuidB},
		"another's MIG's one": {`"instances":[{"gi":1,"ci":0,"uuid":"` + migA + `"},{"gi":2,"ci":0,"uuid":"` + migA + `"}]`, "several devices have the UUID " + migA},
	} {
		t.Run(name, func(t *testing.T) {
			const p = `{"name":"1g.10gb","slices":1,"max":1,"placements":[{"start":0,"size":1}]}`
			got, err := Parse(`{"version":1,"layouts":[1,[{"name":"1c.2g.10gb"}],[` + p + `,` + p + `],
				[{"name":"1g.10gb","slices":1,"max":1,"placements":[{"start":15,"size":2}]}],
				[{"name":"1g.10gb","slices":1,"max":1,"placements":[{"start":0,"size":1},{"start":0,"size":2}]}],
				[{"name":"1g.10gb","slices":1,"max":1}],
				[{"name":"1g.10gb","slices":1,"max":1,"memoryBytes":6,"placements":[{"start":0,"size":1}]}],
				[{"name":"1g.10gb","slices":1,"max":17,"placements":[{"start":0,"size":1}]}],
				[{"name":"1g.10gb","slices":1,"max":1,"engines":{"copy":4097},"placements":[{"start":0,"size":1}]}]],"gpus":[
				{"address":"0000:1b:00.0",` + test.fields + `},
				{"address":"0000:43:00.0","uuid":"` + uuidB + `"},
				{"address":"0000:52:00.0","memoryBytes":5}]}`)
			if err != nil {
				t.Fatal(err)
			}
			bad := got["0000:1b:00.0"]
			if bad.Err == nil || !strings.Contains(bad.Err.Error(), test.want) {
				t.Errorf("error %v, want %q in it", bad.Err, test.want)
			}
			if diff := cmp.Diff(GPU{Address: bad.Address}, bad, cmpopts.IgnoreFields(GPU{}, "Err")); diff != "" {
				t.Errorf("kept of it:\n%s", diff)
			}
			if got["0000:52:00.0"].MemoryBytes != 5 {
				t.Errorf("the third GPU suffers: %+v", got["0000:52:00.0"])
			}
		})
	}
	twice, err := Parse(`{"version":1,"gpus":[{"address":"0000:1b:00.0","memoryBytes":1},{"address":"0000:1b:00.0","memoryBytes":2}]}`)
	if err != nil || twice["0000:1b:00.0"].Err == nil {
		t.Errorf("one address twice: %+v, %v", twice, err)
	}
}

func FuzzParse(f *testing.F) {
	good, err := Format(whole())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(good))
	f.Add(string(good[:len(good)/2]))
	f.Add(string(FormatError(errors.New("no"))))
	f.Add(`{"version":1,"gpus":[{"address":"0000:1b:00.0","instances":[{"gi":-1,"ci":7e3}]},null]}`)
	f.Add(`{"version":1,"layouts":[[{"name":"1g.10gb","slices":1,"max":1,"placements":[{"start":0,"size":1}]}]],"gpus":[{"address":"0000:1b:00.0","layout":0}]}`)
	f.Add(`{"version":1,"gpus":[{"Address":"0000:1b:00.0","ADDRESS":"0000:1c:00.0"}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		gpus, err := Parse(text)
		if err != nil {
			return
		}
		for address, gpu := range gpus {
			if gpu.Address != address {
				t.Errorf("%s is listed as %s", gpu.Address, address)
			}
			if err := gpu.check(); err != nil {
				t.Errorf("accepted: %v", err)
			}
		}
	})
}
