package userspace

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"
)

func whole() Answer {
	return Answer{Driver: "570.124.06", Edits: specs.ContainerEdits{
		Env: []string{"NVIDIA_CTK_LIBCUDA_DIR=/usr/lib64"},
		Mounts: []*specs.Mount{
			{HostPath: "/run/nvidia/driver/usr/lib64/libcuda.so.570.124.06", ContainerPath: "/usr/lib64/libcuda.so.570.124.06", Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}},
			{HostPath: "/run/nvidia/driver/run/nvidia-persistenced/socket", ContainerPath: "/run/nvidia-persistenced/socket", Options: []string{"nosuid", "nodev", "rbind", "rprivate", "noexec"}},
		},
		Hooks: []*specs.Hook{
			{HookName: "createContainer", Path: HookProgram, Args: []string{HookProgram, "create-symlinks", "--link", "libcuda.so.1::/usr/lib64/libcuda.so"}, Env: []string{"NVIDIA_CTK_DEBUG=false"}},
		},
	}}
}

// Parse reads the answer that Format writes.
func TestFormatAndParse(t *testing.T) {
	text, err := Format(whole())
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(whole(), got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// Parse refuses a text with anything besides driver files as a whole, and Format does not write
// such a text.
func TestRefused(t *testing.T) {
	for name, test := range map[string]struct {
		change func(a *Answer)
		want   string
	}{
		"no version":             {func(a *Answer) { a.Driver = "" }, "no version"},
		"a pattern as version":   {func(a *Answer) { a.Driver = "*.*" }, "no version"},
		"a relative path":        {func(a *Answer) { a.Edits.Mounts[0].HostPath = "usr/lib64/libcuda.so" }, "no path"},
		"a path with dots":       {func(a *Answer) { a.Edits.Mounts[0].HostPath = "/run/../etc/shadow" }, "no path"},
		"a line break in a path": {func(a *Answer) { a.Edits.Mounts[0].ContainerPath = "/a\nb" }, "no path"},
		"the container's root":   {func(a *Answer) { a.Edits.Mounts[0].ContainerPath = "/" }, "no path"},
		"the container's proc":   {func(a *Answer) { a.Edits.Mounts[0].ContainerPath = "/proc/driver" }, "kernel"},
		"the container's dev":    {func(a *Answer) { a.Edits.Mounts[0].ContainerPath = "/dev" }, "kernel"},
		"an option":              {func(a *Answer) { a.Edits.Mounts[0].Options = []string{"rshared"} }, "rshared"},
		"a type":                 {func(a *Answer) { a.Edits.Mounts[0].Type = "tmpfs" }, "tmpfs"},
		"no mount":               {func(a *Answer) { a.Edits.Mounts[0] = nil }, "nothing"},
		"a device node":          {func(a *Answer) { a.Edits.DeviceNodes = []*specs.DeviceNode{{Path: "/dev/mem"}} }, "more than"},
		"a group":                {func(a *Answer) { a.Edits.AdditionalGIDs = []uint32{44} }, "more than"},
		"another program":        {func(a *Answer) { a.Edits.Hooks[0].Path = "/bin/sh" }, "/bin/sh"},
		"another moment":         {func(a *Answer) { a.Edits.Hooks[0].HookName = "poststop" }, "poststop"},
		"no hook":                {func(a *Answer) { a.Edits.Hooks[0].Args = nil }, "hook"},
		"a variable":             {func(a *Answer) { a.Edits.Env = []string{"no variable"} }, "no variable"},
		"too much":               {func(a *Answer) { a.Edits.Env = []string{"A=" + strings.Repeat("x", MaxSize)} }, "at most"},
	} {
		t.Run(name, func(t *testing.T) {
			answer := whole()
			test.change(&answer)
			if text, err := Format(answer); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%s: error %v, want %q in it", text, err, test.want)
			}
		})
	}
	text, err := Format(whole())
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"empty":          "",
		"half":           string(text[:len(text)/2]),
		"twice":          string(text) + string(text),
		"another format": strings.Replace(string(text), `"version":1`, `"version":2`, 1),
		"a new field":    strings.Replace(string(text), `"driver"`, `"privileged":true,"driver"`, 1),
	} {
		if _, err := Parse(text); err == nil {
			t.Errorf("%s: taken", name)
		}
	}
}

func FuzzParse(f *testing.F) {
	text, err := Format(whole())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(text))
	f.Add(string(text[:len(text)/2]))
	f.Add(`{"version":1,"driver":"1.2","edits":{"mounts":[null],"hooks":[null],"env":["="]}}`)
	f.Fuzz(func(t *testing.T, text string) {
		answer, err := Parse(text)
		if err != nil {
			return
		}
		again, err := Format(answer)
		if err != nil {
			t.Fatalf("it was read and is not written: %v", err)
		}
		if got, err := Parse(string(again)); err != nil || !cmp.Equal(got, answer) {
			t.Errorf("written it is another: %v\n%s", err, cmp.Diff(answer, got))
		}
	})
}
