package recorded_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
)

const good = `A machine.

-- sys/class/misc/kvm -> ../../devices/virtual/misc/kvm --
-- sys/devices/virtual/misc/kvm/dev --
10:232
-- sys/devices/virtual/misc/kvm/power/ --
-- sys/devices/virtual/misc/kvm/secret ! permission denied --
-- dev/kvm c 10:232 --
-- dev/sda b 8:0 --
-- end --
`

func parse(t *testing.T, text string) *recorded.Host {
	t.Helper()
	h, err := recorded.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestParseRefuses(t *testing.T) {
	for name, test := range map[string]struct{ text, want string }{
		"nothing":              {"", "no entry"},
		"no archive":           {"a text\nof two lines\n", "no entry"},
		"cut between entries":  {good[:strings.Index(good, "-- dev/sda")], "cut short: the last entry is dev/kvm"},
		"cut in a content":     {good[:strings.Index(good, "232\n-- sys")+1], "cut short"},
		"cut in an entry":      {good[:strings.Index(good, "8:0")], "line 9: begins with"},
		"cut in the end":       {good[:len(good)-4], "line 10: begins with"},
		"marker in a comment":  {"-- sys/a\n-- end --\n", "line 1: begins with"},
		"after the end":        {good + "more\n", "line 11: something follows"},
		"entry after the end":  {good + "-- sys/a --\n", "line 11: something follows"},
		"absolute":             {"-- /sys/a --\n-- end --\n", `line 1: "/sys/a" is no path`},
		"leaves the directory": {"\n-- sys/../../etc/passwd --\n-- end --\n", `line 2: "sys/../../etc/passwd" is no path`},
		"root":                 {"-- ./ --\n-- end --\n", "is no path"},
		"control character":    {"-- sys/\x07a --\n-- end --\n", "is no path"},
		"twice":                {"-- sys/a --\n1\n-- sys/a -> b --\n-- end --\n", "line 3: sys/a appears twice"},
		"below a file":         {"-- sys/a/b --\n-- sys/a --\n-- end --\n", "sys/a/b lies below sys/a, which is no directory"},
		"below a link":         {"-- sys/a -> b --\n-- sys/a/b/c --\n-- end --\n", "sys/a/b/c lies below sys/a"},
		"content of a link":    {"-- sys/a -> b --\nc\n-- end --\n", "line 1: sys/a: only a file has a content"},
		"content of a node":    {"-- dev/a c 1:2 --\nc\n-- end --\n", "only a file has a content"},
		"absolute link":        {"-- sys/a -> /etc/passwd --\n-- end --\n", "not below the host's root"},
		"link out":             {"-- sys/a -> ../../etc/passwd --\n-- end --\n", "not below the host's root"},
		"link out by a link":   {"-- sys/x/y/z -> ../.. --\n-- sys/a -> x/y/z/../../.. --\n-- end --\n", "goes up after going down"},
		"link to nothing":      {"-- sys/a ->  --\n-- end --\n", "where the link leads"},
		"node outside dev":     {"-- sys/a c 10:130 --\n-- end --\n", "sys/a: a device node that is not below dev"},
		"node in place of dev": {"-- dev c 10:130 --\n-- end --\n", "not below dev"},
		"block device outside": {"-- device/a b 8:0 --\n-- end --\n", "not below dev"},
		"reason that is shown": {"-- sys/a ! \x1b]0;a\x07 --\n-- end --\n", "control characters"},
	} {
		t.Run(name, func(t *testing.T) {
			h, err := recorded.Parse([]byte(test.text))
			if err == nil {
				t.Fatalf("accepted as %+v", h)
			}
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %q, want %q in it", err, test.want)
			}
		})
	}
}

func TestLayout(t *testing.T) {
	h := parse(t, good)
	if h.Comment() != "A machine.\n\n" {
		t.Errorf("comment %q", h.Comment())
	}
	dir := filepath.Join(t.TempDir(), "made", "for it")
	if err := h.WriteHost(dir); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "sys/class/misc/kvm/dev")); string(text) != "10:232\n" {
		t.Errorf("dev through the link: %q, %v", text, err)
	}
	if info, err := os.Stat(filepath.Join(dir, "sys/devices/virtual/misc/kvm/power")); err != nil || !info.IsDir() {
		t.Errorf("empty directory: %v, %v", info, err)
	}
	if _, err := os.ReadFile(filepath.Join(dir, "sys/devices/virtual/misc/kvm/secret")); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what could not be read: %v, want it to be there and not to be read", err)
	}
	for _, name := range []string{"dev/kvm", "dev/sda"} {
		if info, err := os.Lstat(filepath.Join(dir, name)); err != nil || !info.Mode().IsRegular() || info.Size() > 0 {
			t.Errorf("%s: %v, %v; want an empty file, since device nodes were not requested", name, info, err)
		}
	}
}

// Device nodes are created only on request.
func TestLayoutNodes(t *testing.T) {
	dir := t.TempDir()
	standIns, err := parse(t, good).LayoutNodes(dir)
	if err != nil {
		t.Fatal(err)
	}
	for name, char := range map[string]bool{"dev/kvm": true, "dev/sda": false} {
		info, err := os.Lstat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if slices.Contains(standIns, name) {
			if !info.Mode().IsRegular() {
				t.Errorf("%s stands in for a node and is %v", name, info.Mode())
			}
			continue
		}
		if info.Mode()&fs.ModeDevice == 0 || (info.Mode()&fs.ModeCharDevice != 0) != char {
			t.Errorf("%s is %v", name, info.Mode())
		}
	}
}

// FS returns the same results as a layout of the recorded host, without creating files.
func TestFS(t *testing.T) {
	h := parse(t, good[:strings.Index(good, "-- end")]+`-- sys/class/misc/loop -> loop --
-- sys/class/misc/gone -> ../gone --
-- end --
`)
	f := h.FS()
	files := parse(t, good[:strings.Index(good, "-- sys/devices/virtual/misc/kvm/secret")]+"-- end --\n").FS()
	if err := fstest.TestFS(files, "sys/class/misc/kvm", "sys/devices/virtual/misc/kvm/dev", "sys/devices/virtual/misc/kvm/power"); err != nil {
		t.Error(err)
	}
	for name, want := range map[string]string{
		"sys/class/misc/kvm/dev":               "10:232\n",
		"sys/devices/virtual/misc/kvm/dev":     "10:232\n",
		"sys/devices/virtual/misc/kvm/dev/dev": "not a directory",
		"sys/devices/virtual/misc/kvm/secret":  "permission denied",
		"sys/devices/virtual/misc/kvm":         "is a directory",
		"sys/devices/virtual/misc/none":        "not exist",
		"sys/class/misc/gone":                  "not exist",
		"sys/class/misc/loop":                  "too many levels of symbolic links",
		"dev/kvm":                              "a device node",
		"/dev/kvm":                             "invalid argument",
	} {
		text, err := fs.ReadFile(f, name)
		if err != nil {
			text = []byte(err.Error())
		}
		if !strings.Contains(string(text), want) {
			t.Errorf("%s: %q, want %q", name, text, want)
		}
	}
	if target, err := fs.ReadLink(f, "sys/class/misc/kvm"); target != "../../devices/virtual/misc/kvm" || err != nil {
		t.Errorf("link: %q, %v", target, err)
	}
	if _, err := fs.ReadDir(f, "sys/devices/virtual/misc/kvm/secret"); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("list of what cannot be read: %v", err)
	}
	for name, char := range map[string]bool{"dev/kvm": true, "dev/sda": false} {
		info, err := fs.Stat(f, name)
		if err != nil || info.Mode()&fs.ModeDevice == 0 || (info.Mode()&fs.ModeCharDevice != 0) != char {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
}

// A scan of the file system in memory has the same result as a scan of the directory.
func TestFSIsTheHost(t *testing.T) {
	family := &discovery.Family{
		Name: "misc", Doc: "misc devices", Match: []discovery.Match{{Class: "misc", Name: "*"}},
		Describe: func(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
			for _, d := range found {
				device, err := discovery.SharedNode(host, d, "/dev")
				devices, problems = append(devices, device), append(problems, discovery.Problems(device.Name, err)...)
			}
			return devices, problems
		},
	}
	h, dir := parse(t, good), t.TempDir()
	if err := h.WriteHost(dir); err != nil {
		t.Fatal(err)
	}
	want := scan.ReadHost(&discovery.Host{FS: os.DirFS(dir)}, []*discovery.Family{family})
	got := scan.ReadHost(&discovery.Host{FS: h.FS()}, []*discovery.Family{family})
	if len(want.Devices) != 1 {
		t.Fatalf("%+v", want)
	}
	if diff := cmp.Diff(want.Devices, got.Devices); diff != "" {
		t.Errorf("devices (-laid out +in memory):\n%s", diff)
	}
	// A recording of a recorded host equals the host, including device nodes.
	data, err := recorded.RecordHost(&discovery.Host{FS: h.FS()}, []*discovery.Family{family}, "")
	if err != nil || !bytes.Contains(data, []byte("-- dev/kvm c 10:232 --")) {
		t.Errorf("recorded again: %v\n%s", err, data)
	}
}

// TestLayoutOver lays out a host in a directory with links and device nodes at the host's paths.
// Nothing may be written through them.
func TestLayoutOver(t *testing.T) {
	outside := t.TempDir()
	victim := filepath.Join(outside, "victim")
	if err := os.WriteFile(victim, []byte("untouched"), 0o644); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, target := range map[string]string{"sys": outside, "dev": outside} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "proc/devices/deep"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, filepath.Join(dir, "proc/version")); err != nil {
		t.Fatal(err)
	}
	h := parse(t, "-- sys/victim --\nnew\n-- dev/victim c 1:3 --\n-- proc/devices --\nnew\n-- proc/version --\nnew\n-- end --\n")
	for range 2 { // the second layout replaces the first
		if err := h.WriteHost(dir); err != nil {
			t.Fatal(err)
		}
	}
	if text, _ := os.ReadFile(victim); string(text) != "untouched" {
		t.Errorf("a file outside was written: %q", text)
	}
	for _, name := range []string{"sys/victim", "proc/devices", "proc/version"} {
		if text, err := os.ReadFile(filepath.Join(dir, name)); string(text) != "new\n" {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
}

// TestRecordAnyFile records a family that reads unusual files: the record is still a valid archive,
// and a scan of the record has the same result.
func TestRecordAnyFile(t *testing.T) {
	family := &discovery.Family{
		Name: "odd", Doc: "reads odd files", Match: []discovery.Match{{Class: "odd", Name: "*"}},
		Describe: func(host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
			for _, d := range found {
				device := discovery.Device{Name: d.Name(), Source: d.Path, Attributes: discovery.Attributes{}}
				text, err := d.Text("text")
				if err != nil {
					problems = append(problems, discovery.Problem{Device: d.Name(), Err: errors.New("unreadable")})
				}
				device.Attributes.SetString("model", text)
				devices = append(devices, device)
			}
			return devices, problems
		},
	}
	long := strings.Repeat("long ", 100_000)
	host := &discovery.Host{FS: fstest.MapFS{
		"sys/class/odd/marker/text": {Data: []byte("a\n-- sys/b --\nc\n")},
		"sys/class/odd/nul/text":    {Data: []byte("a\x00b")},
		"sys/class/odd/long/text":   {Data: []byte(long)},
		"sys/class/odd/open/text":   {Data: []byte("no newline")},
		"sys/class/odd/none":        {Mode: fs.ModeDir | 0o755},
		"sys/class/odd/dir/text/a":  {Data: []byte("in a directory")},
		"sys/class/odd/link/text":   {Data: []byte("../../../../../etc/hostname"), Mode: fs.ModeSymlink},
	}}
	families := []*discovery.Family{family}
	data, err := recorded.RecordHost(host, families, "Odd files.")
	if err != nil {
		t.Fatal(err)
	}
	if len(data) > 20_000 {
		t.Errorf("recorded %d bytes, and only so much as a page is read of an attribute", len(data))
	}
	dir := t.TempDir()
	if err := parse(t, string(data)).WriteHost(dir); err != nil {
		t.Fatal(err)
	}
	want, got := summary(scan.ReadHost(host, families)), summary(scan.ReadHost(&discovery.Host{FS: os.DirFS(dir)}, families))
	// An archive cannot represent the link out of the host and the file that looks like an entry.
	// Both are recorded as unreadable.
	want["link"], want["marker"] = "; unreadable", "; unreadable"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("record (-host +record):\n%s\n%s", diff, data)
	}
}

func summary(s *discovery.Snapshot) map[string]string {
	found := make(map[string]string)
	for _, d := range s.Devices {
		found[d.Name] = d.Attributes.String("model")
	}
	for _, p := range s.Problems {
		found[p.Device] += "; " + p.Err.Error()
	}
	return found
}

// FuzzParse checks that no archive causes a panic. A valid archive is laid out below its directory,
// can be laid out again in the same place, and has the same content in memory. No device node is
// created or opened.
func FuzzParse(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte("-- a -> b --\n-- b -> a --\n-- end --\n"))
	f.Add([]byte("-- a -> b/c --\n-- b/c -> ../d --\n-- d --\n-- end --\n"))
	f.Add([]byte("-- a/ --\n-- a/b ! c --\n-- end --\n"))
	f.Add([]byte("-- a/b --\n-- a/ --\n-- end --\n"))
	f.Add([]byte("-- dev/a c 4095:1048575 --\n-- dev/b c 0:0 --\n-- end --\n"))
	f.Add([]byte("-- a c 10:130 --\n-- end --\n"))
	f.Add([]byte("-- a --\n-- end --\nb"))
	f.Add([]byte("-- ../a --\n-- end --\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := recorded.Parse(data)
		if err != nil {
			return
		}
		parent := t.TempDir()
		dir := filepath.Join(parent, "host")
		for range 2 {
			if err := h.WriteHost(dir); err != nil {
				if !strings.Contains(err.Error(), "too long") {
					t.Errorf("accepted and not laid out: %v", err)
				}
				return
			}
		}
		if entries, _ := os.ReadDir(parent); len(entries) != 1 {
			t.Errorf("written outside the directory: %v", entries)
		}
		_ = fs.WalkDir(os.DirFS(dir), ".", func(name string, laidOut fs.DirEntry, err error) error {
			if err != nil {
				t.Error(err)
				return nil
			}
			if laidOut.Type()&^(fs.ModeDir|fs.ModeSymlink) != 0 {
				t.Errorf("%s was made as %v", name, laidOut)
			}
			found, err := fs.Lstat(h.FS(), name)
			if err != nil || found.IsDir() != laidOut.IsDir() || found.Name() != laidOut.Name() {
				t.Errorf("%s: %v, %v in memory, and %v laid out", name, found, err, laidOut)
			}
			if laidOut.Type() == 0 {
				want, _ := os.ReadFile(filepath.Join(dir, name))
				got, err := fs.ReadFile(h.FS(), name)
				if found.Mode().IsRegular() != (err == nil) || err == nil && !bytes.Equal(got, want) {
					t.Errorf("%s: %q, %v in memory, and %q laid out", name, got, err, want)
				}
			}
			return nil
		})
	})
}
