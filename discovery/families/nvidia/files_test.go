package nvidia

import (
	"fmt"
	"strings"
	"testing"
	"testing/fstest"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/userspace"
)

// told returns a host with an answer of the NVIDIA CDI code for its driver root.
func told(t *testing.T, change func(a *userspace.Answer)) *discovery.Host {
	t.Helper()
	hook := func(args ...string) *specs.Hook {
		return &specs.Hook{HookName: "createContainer", Path: userspace.HookProgram, Args: append([]string{userspace.HookProgram}, args...)}
	}
	answer := userspace.Answer{Driver: "570.1.2", Edits: specs.ContainerEdits{
		Env: []string{"NVIDIA_CTK_LIBCUDA_DIR=/usr/lib64", "NVIDIA_VISIBLE_DEVICES=void"},
		Mounts: []*specs.Mount{
			mount("/drv/usr/lib64/libcuda.so.570.1.2", "/usr/lib64/libcuda.so.570.1.2"),
			mount("/drv/usr/lib64/libcuda.so.570.1.2", "/usr/lib64/libcuda.so.570.1.2"),
			mount("/drv/run/socket", "/run/socket"),
		},
		Hooks: []*specs.Hook{
			hook("create-symlinks", "--link", "libcuda.so.1::/usr/lib64/libcuda.so"),
			hook("create-symlinks", "--link", "libcuda.so.570.1.2::/usr/lib64/libcuda.so.1", "--link=../away.so::/usr/lib64/gbm/a.so"),
			hook("update-ldcache", "--folder", "/usr/lib64", "--folder", "/usr/lib64/vdpau"),
		},
	}}
	if change != nil {
		change(&answer)
	}
	text, err := userspace.Format(answer)
	if err != nil {
		t.Fatal(err)
	}
	return &discovery.Host{
		Roots: map[string]string{"nvidia": "/drv"}, Hooks: "/opt/chandler",
		FS: fstest.MapFS{
			userspace.Path[1:]:                 {Data: text},
			"drv/usr/lib64/libcuda.so.570.1.2": {},
			"drv/run/socket":                   {},
			"drv/usr/bin/nvidia-smi":           {},
		},
	}
}

// summary returns the driver files of containers in a short form.
func summary(e specs.ContainerEdits) string {
	var all []string
	for _, m := range e.Mounts {
		all = append(all, m.ContainerPath+"<"+m.HostPath)
	}
	for _, h := range e.Hooks {
		all = append(all, h.Path+" "+strings.Join(h.Args, " "))
	}
	return strings.Join(append(all, e.Env...), "\n")
}

const (
	libcuda = "/usr/lib64/libcuda.so.570.1.2</drv/usr/lib64/libcuda.so.570.1.2"
	byHooks = `
/opt/chandler chandler hook create-symlinks --link=../away.so::/usr/lib64/gbm/a.so
/opt/chandler chandler hook update-ldcache --folder=/usr/lib64 --folder=/usr/lib64/vdpau`
	everything = `/run/socket</drv/run/socket
/usr/bin/nvidia-smi</drv/usr/bin/nvidia-smi
/usr/lib64/libcuda.so</drv/usr/lib64/libcuda.so.570.1.2
/usr/lib64/libcuda.so.1</drv/usr/lib64/libcuda.so.570.1.2
` + libcuda
	variable = "\nNVIDIA_CTK_LIBCUDA_DIR=/usr/lib64"
)

// The NVIDIA answer replaces the agent's own search, without duplicates, if the answer is valid and
// belongs to the loaded driver. Unusable parts are reported and do no harm to the GPUs.
func TestFilesThatNVIDIANames(t *testing.T) {
	const found = "/usr/bin/nvidia-smi</drv/usr/bin/nvidia-smi\n" + libcuda
	for name, test := range map[string]struct {
		change    func(a *userspace.Answer)
		on        func(h *discovery.Host)
		want, odd string
	}{
		"all of it":                {want: everything + byHooks + variable},
		"no hooks":                 {on: func(h *discovery.Host) { h.Hooks = "" }, want: everything + variable},
		"a socket that has gone":   {on: func(h *discovery.Host) { delete(h.FS.(fstest.MapFS), "drv/run/socket") }, want: strings.TrimPrefix(everything, "/run/socket</drv/run/socket\n") + byHooks + variable},
		"another driver":           {change: func(a *userspace.Answer) { a.Driver = "535.1" }, want: found},
		"nonsense":                 {on: func(h *discovery.Host) { h.FS.(fstest.MapFS)[userspace.Path[1:]].Data = []byte("{") }, want: found, odd: "unexpected EOF"},
		"files of the system":      {change: func(a *userspace.Answer) { a.Edits.Mounts[2].HostPath = "/etc/shadow" }, want: found, odd: "/etc/shadow is not below"},
		"files beside the root":    {change: func(a *userspace.Answer) { a.Edits.Mounts[2].HostPath = "/drv-2/a" }, want: found, odd: "/drv-2/a is not below"},
		"a hook that is not known": {change: func(a *userspace.Answer) { a.Edits.Hooks[2].Args[1] = "chmod" }, want: everything + "\n" + strings.Split(byHooks, "\n")[1] + variable, odd: `hook "chmod" is not known`},
		"a flag that is not known": {change: func(a *userspace.Answer) { a.Edits.Hooks[2].Args[2] = "--run" }, want: everything + "\n" + strings.Split(byHooks, "\n")[1] + variable, odd: `flag "run" is not known`},
		"a link to no path":        {change: func(a *userspace.Answer) { a.Edits.Hooks[0].Args[3] = "a::../b" }, want: strings.Replace(everything, "/usr/lib64/libcuda.so</drv/usr/lib64/libcuda.so.570.1.2\n", "", 1) + byHooks + variable, odd: "no link"},
		"links that lead round":    {change: func(a *userspace.Answer) { a.Edits.Hooks[1].Args[4] = "--link=b::/usr/lib64/b" }, want: everything + strings.Replace(byHooks, "../away.so::/usr/lib64/gbm/a.so", "b::/usr/lib64/b", 1) + variable},
		"no answer yet":            {on: func(h *discovery.Host) { delete(h.FS.(fstest.MapFS), userspace.Path[1:]) }, want: found},
		"an unreadable answer":     {on: func(h *discovery.Host) { h.FS.(fstest.MapFS)[userspace.Path[1:]].Mode = 1 << 31 }, want: found, odd: "read run/chandler"},
	} {
		t.Run(name, func(t *testing.T) {
			host := told(t, test.change)
			if test.on != nil {
				test.on(host)
			}
			d := &driver{host: host, version: "570.1.2"}
			edits, odd, err := d.filesBelow("/drv")
			if err != nil {
				t.Fatal(err)
			}
			if got := summary(edits); got != test.want && (test.want != found || !strings.HasPrefix(got, found)) {
				t.Errorf("got\n%s\n\nwant\n%s", got, test.want)
			}
			if (odd == nil) != (test.odd == "") || !strings.Contains(fmt.Sprint(odd), test.odd) {
				t.Errorf("odd: %v, want %q in it", odd, test.odd)
			}
		})
	}
}
