//go:build cgo

package main

import (
	"bytes"
	"errors"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/families/nvidia/userspace"
	"chandler.dev/discovery/families/nvidia/userspace/drivertest"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/scan"
)

const (
	driverRoot  = "/run/nvidia/driver"
	hookProgram = "/opt/chandler"
)

// layOut creates a host with a GPU and a driver, and returns the path of its root.
func layOut(t *testing.T, libraryDir string) string {
	t.Helper()
	// The path of a temporary directory may have links, like that of any host's root.
	root := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(t.TempDir(), root); err != nil {
		t.Fatal(err)
	}
	host, err := recorded.Parse([]byte(drivertest.RecordedHost("")))
	if err != nil {
		t.Fatal(err)
	}
	if err := host.WriteHost(root); err != nil {
		t.Fatal(err)
	}
	drivertest.InstallDriver(t, root+driverRoot, libraryDir)
	return root
}

// given returns the edits for a container with the host's GPU. text is the answer that lies over
// the host's files, or nil for no answer.
func given(t *testing.T, root, hooks string, text []byte) specs.ContainerEdits {
	t.Helper()
	return givenOf(t, root, driverRoot, hooks, text)
}

func givenOf(t *testing.T, root, driverRoot, hooks string, text []byte) specs.ContainerEdits {
	t.Helper()
	files, err := hostfs.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	overlay := hostfs.NewOverlay(files)
	overlay.Set(userspace.Path[1:], text)
	host := &discovery.Host{FS: overlay, Roots: map[string]string{"nvidia": driverRoot}, Hooks: hooks}
	snapshot := scan.ReadHost(host, []*discovery.Family{nvidia.Family})
	if len(snapshot.Devices) != 1 {
		t.Fatalf("devices %v, problems %v", snapshot.Devices, snapshot.Problems)
	}
	return discovery.Join(snapshot.Devices[0].Edits, nvidia.Family.Grant(snapshot.Devices, discovery.Grant{}))
}

// entry is a single edit.
type entry struct{ kind, name, value string }

func (e entry) String() string { return strings.TrimSpace(e.kind + " " + e.name + " " + e.value) }

// entries splits edits, so that those of NVIDIA's code and ours can be compared. A hook's program
// is left out, and so is its environment, which only NVIDIA's hook reads.
func entries(t *testing.T, edits specs.ContainerEdits) (all []entry) {
	t.Helper()
	for _, variable := range edits.Env {
		name, value, _ := strings.Cut(variable, "=")
		all = append(all, entry{"variable", name, value})
	}
	for _, m := range edits.Mounts {
		all = append(all, entry{"mount", m.ContainerPath, m.HostPath + " " + strings.Join(m.Options, ",")})
	}
	for _, h := range edits.Hooks {
		args := h.Args[1:]
		if h.Path == hookProgram {
			args = h.Args[2:]
		}
		flags := strings.ReplaceAll(strings.Join(args[1:], " "), "--link ", "--link=")
		flags = strings.ReplaceAll(flags, "--folder ", "--folder=")
		if args[0] != "create-symlinks" {
			all = append(all, entry{"hook", args[0], flags})
			continue
		}
		for flag := range strings.FieldsSeq(flags) {
			target, name, _ := strings.Cut(strings.TrimPrefix(flag, "--link="), "::")
			all = append(all, entry{"link", name, target})
		}
	}
	return all
}

// Reasons for differences of ours. The user documentation lists them.
const (
	linkIsMount = "The library is mounted again at the path of each link to it"
	moreLinks   = "Links that the host has beside its libraries are included"
)

// difference returns the reason for an entry only in ours, or only in NVIDIA's, "" if there is
// none.
func difference(root string, e entry, others []entry) string {
	leads := func(l, m entry) bool { // a link to the file that is mounted at its path
		file, err := filepath.EvalSymlinks(filepath.Join(root, driverRoot, path.Dir(l.name), l.value))
		mounted, _, _ := strings.Cut(m.value, " ")
		return err == nil && l.name == m.name && strings.HasSuffix(file, mounted)
	}
	_, linked := os.Readlink(filepath.Join(root, driverRoot, e.name))
	switch {
	case e.kind == "link" && slices.ContainsFunc(others, func(o entry) bool { return o.kind == "mount" && leads(e, o) }):
		return linkIsMount
	case e.kind == "mount" && slices.ContainsFunc(others, func(o entry) bool { return o.kind == "link" && leads(o, e) }):
		return linkIsMount
	case e.kind == "mount" && linked == nil:
		return moreLinks
	}
	return ""
}

// A container gets all entries of NVIDIA's own spec for the same root. Each difference has a
// reason, which the user documentation has too.
func TestUserspaceAgainstNVIDIA(t *testing.T) {
	page, err := os.ReadFile("../../docs/nvidia.md")
	if err != nil {
		t.Fatal(err)
	}
	for name, dir := range map[string]string{"Debian": drivertest.Debian, "RHEL": drivertest.RHEL} {
		t.Run(name, func(t *testing.T) {
			root := layOut(t, dir)
			text, err := (&options{hostRoot: root, driverRoot: driverRoot}).userspaceFiles()
			if err != nil {
				t.Fatal(err)
			}
			real, err := filepath.EvalSymlinks(root)
			if err != nil {
				t.Fatal(err)
			}
			raw, err := commonEdits(real + driverRoot)
			if err != nil {
				t.Fatal(err)
			}
			theirs := entries(t, *raw)
			for i := range theirs {
				theirs[i].value = strings.TrimPrefix(theirs[i].value, real)
			}
			ours := entries(t, given(t, root, hookProgram, text))
			found := make(map[string]int)
			compare := func(where string, these, others []entry) {
				seen := make(map[entry]bool)
				for _, e := range these {
					if ours := &these[0] != &theirs[0]; ours && seen[e] {
						t.Errorf("twice: %s", e)
					}
					seen[e] = true
					if slices.Contains(others, e) {
						continue
					}
					reason := difference(root, e, others)
					if reason == "" {
						t.Errorf("only in %s, without a reason: %s", where, e)
					}
					found[reason]++
				}
			}
			compare("NVIDIA's", theirs, ours)
			compare("ours", ours, theirs)
			for _, reason := range []string{linkIsMount, moreLinks} {
				if found[reason] == 0 {
					t.Errorf("no difference any more: %s", reason)
				}
				if !bytes.Contains(page, []byte(reason)) {
					t.Errorf("docs/nvidia.md does not say: %s", reason)
				}
			}
			t.Logf("of NVIDIA's %d entries and ours %d: %v", len(theirs), len(ours), found)
		})
	}
}

// A container gets exactly the files in the user documentation. The fake driver's other files, of
// an earlier version and of the system, are left out.
func TestUserspaceHasAll(t *testing.T) {
	root := layOut(t, drivertest.RHEL)
	text, err := (&options{hostRoot: root, driverRoot: driverRoot}).userspaceFiles()
	if err != nil {
		t.Fatal(err)
	}
	for _, hooks := range []string{hookProgram, ""} {
		edits := given(t, root, hooks, text)
		at := make(map[string]string)
		for _, m := range edits.Mounts {
			at[m.ContainerPath] = strings.TrimPrefix(m.HostPath, driverRoot)
		}
		const version = drivertest.Version
		for name, file := range map[string]string{
			"/usr/lib64/libcuda.so":                                     "/usr/lib64/libcuda.so." + version,
			"/usr/lib64/libcuda.so.1":                                   "/usr/lib64/libcuda.so." + version,
			"/usr/lib64/libnvidia-egl-gbm.so.1":                         "/usr/lib64/libnvidia-egl-gbm.so.1.1.2",
			"/usr/lib64/gbm/nvidia-drm_gbm.so":                          "/usr/lib64/libnvidia-allocator.so." + version,
			"/usr/lib64/libGLX_indirect.so.0":                           "/usr/lib64/libGLX_nvidia.so." + version,
			"/usr/lib64/vdpau/libvdpau_nvidia.so.1":                     "/usr/lib64/vdpau/libvdpau_nvidia.so." + version,
			"/usr/bin/nvidia-imex-ctl":                                  "/usr/bin/nvidia-imex-ctl",
			"/lib/firmware/nvidia/" + version + "/gsp_ga10x.bin":        "/lib/firmware/nvidia/" + version + "/gsp_ga10x.bin",
			"/run/nvidia-persistenced/socket":                           "/run/nvidia-persistenced/socket",
			"/run/nvidia-fabricmanager/socket":                          "/run/nvidia-fabricmanager/socket",
			"/etc/OpenCL/vendors/nvidia.icd":                            "/etc/OpenCL/vendors/nvidia.icd",
			"/etc/vulkan/icd.d/nvidia_icd.json":                         "/etc/vulkan/icd.d/nvidia_icd.json",
			"/usr/share/glvnd/egl_vendor.d/10_nvidia.json":              "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
			"/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json": "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
			"/usr/share/nvidia/nvoptix.bin":                             "/usr/share/nvidia/nvoptix.bin",
		} {
			if at[name] != file {
				t.Errorf("hooks %q: at %s is %q, want %q", hooks, name, at[name], file)
			}
		}
		for name := range at {
			if strings.Contains(name, "470.57.02") || path.Base(name) == "bash" || path.Base(name) == "passwd" {
				t.Errorf("hooks %q: a container gets %s", hooks, name)
			}
		}
		if (len(edits.Hooks) > 0) != (hooks != "") {
			t.Errorf("hooks %q: %v", hooks, edits.Hooks)
		}
	}
}

// A driver may be in the host's own directories, which are visible below another directory.
func TestUserspaceOfTheHost(t *testing.T) {
	root := t.TempDir()
	drivertest.InstallDriver(t, root, drivertest.Debian)
	text, err := (&options{hostRoot: root, driverRoot: "/"}).userspaceFiles()
	if err != nil {
		t.Fatal(err)
	}
	answer, err := userspace.Parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range answer.Edits.Mounts {
		if m.HostPath != m.ContainerPath {
			t.Errorf("%s is at %s", m.HostPath, m.ContainerPath)
		}
	}
	if len(answer.Edits.Mounts) < 30 {
		t.Errorf("mounts: %v", answer.Edits.Mounts)
	}
}

// With nvidiaDriver.root=/, the chart mounts only some of the host's directories into the agent's
// pod. In the layouts of distributions, these contain all files of the driver, except sockets.
// Debian has libraries in a separate directory, and links to libraries and programs through
// /etc/alternatives.
func TestUserspaceOfTheDirectoriesThatTheChartShows(t *testing.T) {
	const current = "usr/lib/x86_64-linux-gnu/nvidia/current"
	for name, libraryDir := range map[string]string{"Debian": current, "Ubuntu": drivertest.Debian, "Red Hat": drivertest.RHEL} {
		t.Run(name, func(t *testing.T) {
			host, agent := t.TempDir(), t.TempDir()
			drivertest.InstallDriver(t, host, libraryDir)
			for _, dir := range []string{"lib", "etc/alternatives", host + "/etc/alternatives", host + "/usr/lib/nvidia/current"} {
				if !filepath.IsAbs(dir) {
					dir = filepath.Join(agent, dir)
				}
				if err := os.MkdirAll(dir, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if libraryDir == current {
				err := errors.Join(
					os.Symlink("/etc/alternatives/nvidia--libcuda.so.1", host+"/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
					os.Symlink("/"+current+"/libcuda.so.1", host+"/etc/alternatives/nvidia--libcuda.so.1"),
					os.Rename(host+"/usr/bin/nvidia-smi", host+"/usr/lib/nvidia/current/nvidia-smi"),
					os.Symlink("/etc/alternatives/nvidia--nvidia-smi", host+"/usr/bin/nvidia-smi"),
					os.Symlink("/usr/lib/nvidia/current/nvidia-smi", host+"/etc/alternatives/nvidia--nvidia-smi"),
				)
				if err != nil {
					t.Fatal(err)
				}
			}
			recording, err := recorded.Parse([]byte(drivertest.RecordedHost("")))
			if err != nil {
				t.Fatal(err)
			}
			if err := recording.WriteHost(agent); err != nil {
				t.Fatal(err)
			}
			for _, dir := range []string{"/usr", "/lib/firmware", "/etc/alternatives", "/etc/OpenCL", "/etc/vulkan"} {
				os.Remove(agent + dir)
				if err := os.Rename(host+dir, agent+dir); err != nil {
					t.Fatal(err)
				}
			}
			text, err := (&options{hostRoot: agent, driverRoot: "/"}).userspaceFiles()
			if err != nil {
				t.Fatal(err)
			}
			at := make(map[string]bool)
			for _, m := range givenOf(t, agent, "/", hookProgram, text).Mounts {
				at[m.ContainerPath] = true
			}
			const version = drivertest.Version
			for _, want := range []string{
				"/" + libraryDir + "/libcuda.so.1", "/" + libraryDir + "/libnvidia-ml.so." + version, "/usr/bin/nvidia-smi", "/usr/bin/nvidia-imex",
				"/lib/firmware/nvidia/" + version + "/gsp_ga10x.bin", "/etc/OpenCL/vendors/nvidia.icd", "/etc/vulkan/icd.d/nvidia_icd.json",
				"/usr/share/glvnd/egl_vendor.d/10_nvidia.json", "/usr/share/nvidia/nvoptix.bin",
			} {
				if !at[want] {
					t.Errorf("a container does not get %s", want)
				}
			}
			if at["/run/nvidia-persistenced/socket"] {
				t.Error("a socket is there, which the agent cannot see")
			}
		})
	}
}

// NVIDIA's code loads no library below the root: these libraries cannot be loaded, and a library
// that hangs while it is loaded would hang the program.
func TestUserspaceLoadsNothing(t *testing.T) {
	root := layOut(t, drivertest.Debian)
	dir := filepath.Join(root, driverRoot, drivertest.Debian)
	for _, name := range []string{"libnvidia-sandboxutils.so.1", "libnvidia-ml.so.1"} {
		file := filepath.Join(dir, name)
		os.Remove(file)
		if err := os.WriteFile(file, []byte("no library"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := (&options{hostRoot: root, driverRoot: driverRoot}).userspaceFiles(); err != nil {
		t.Error(err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(maps, []byte("libnvidia")) || bytes.Contains(maps, []byte("libcuda")) {
		t.Error("a library of the driver is in memory")
	}
}

// A root without a driver, and a root that leads out of the host's files, are errors.
func TestUserspaceWithoutADriver(t *testing.T) {
	root := layOut(t, drivertest.Debian)
	if err := os.Symlink("/", filepath.Join(root, "out")); err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{"/usr", "/out", "/out/proc/self"} {
		if text, err := (&options{hostRoot: root, driverRoot: at}).userspaceFiles(); err == nil {
			t.Errorf("%s: %s", at, text)
		}
	}
}

// The path of the driver root may contain links, such as /var/run on most hosts. The family and the
// container runtime use that path.
func TestUserspaceOfARootWithLinks(t *testing.T) {
	root := layOut(t, drivertest.RHEL)
	if err := os.MkdirAll(filepath.Join(root, "var"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/run", filepath.Join(root, "var/run")); err != nil {
		t.Fatal(err)
	}
	text, err := (&options{hostRoot: root, driverRoot: "/var/run/nvidia/driver/"}).userspaceFiles()
	if err != nil {
		t.Fatal(err)
	}
	answer, err := userspace.Parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	if len(answer.Edits.Mounts) < 30 {
		t.Errorf("mounts: %v", answer.Edits.Mounts)
	}
	for _, m := range answer.Edits.Mounts {
		if !userspace.IsBelow(m.HostPath, "/var/run/nvidia/driver") {
			t.Errorf("%s is not below the root as it is named", m.HostPath)
		}
		if _, err := os.Lstat(filepath.Join(root, strings.TrimPrefix(m.HostPath, "/var"))); err != nil {
			t.Error(err)
		}
	}
}
