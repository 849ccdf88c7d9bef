package recorded_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/recorded"
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
	standIns, err := h.Layout(dir)
	if err != nil {
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
	info, err := os.Lstat(filepath.Join(dir, "dev/kvm"))
	if err != nil {
		t.Fatal(err)
	}
	device := info.Mode()&fs.ModeCharDevice != 0
	if device == (len(standIns) > 0) {
		t.Errorf("/dev/kvm is %v, stand-ins %v", info.Mode(), standIns)
	}
}

// TestLayoutOver lays a host over a directory where links and device nodes lie
// in the way: nothing may be written through them.
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
	for range 2 { // the second time over itself
		if _, err := h.Layout(dir); err != nil {
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

// TestRecordAnyFile records a family that reads what it should not have to:
// the record is still an archive, and gives the same answers.
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
	data, err := recorded.Record(host, families, "Odd files.")
	if err != nil {
		t.Fatal(err)
	}
	if len(data) > 20_000 {
		t.Errorf("recorded %d bytes, and only so much as a page is read of an attribute", len(data))
	}
	dir := t.TempDir()
	if _, err := parse(t, string(data)).Layout(dir); err != nil {
		t.Fatal(err)
	}
	want, got := summary(discovery.Scan(host, families)), summary(discovery.Scan(&discovery.Host{FS: os.DirFS(dir)}, families))
	// The link out of the host and the file that looks like an entry cannot be
	// told in an archive; they are there, and cannot be read.
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

// FuzzParse checks that no archive panics, and that one that is accepted is
// laid out below its directory and can be laid out over itself.
func FuzzParse(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte("-- a -> b --\n-- b -> a --\n-- end --\n"))
	f.Add([]byte("-- a/ --\n-- a/b ! c --\n-- end --\n"))
	f.Add([]byte("-- a c 4095:1048575 --\n-- b c 0:0 --\n-- end --\n"))
	f.Add([]byte("-- a --\n-- end --\nb"))
	f.Add([]byte("-- ../a --\n-- end --\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := recorded.Parse(data)
		if err != nil || bytes.Contains(data, []byte(" c ")) || bytes.Contains(data, []byte(" b ")) {
			return // devices are not to be made at random
		}
		parent := t.TempDir()
		for range 2 {
			if _, err := h.Layout(filepath.Join(parent, "host")); err != nil && !strings.Contains(err.Error(), "too long") {
				t.Errorf("accepted and not laid out: %v", err)
			}
		}
		if entries, _ := os.ReadDir(parent); len(entries) != 1 {
			t.Errorf("written outside the directory: %v", entries)
		}
	})
}
