package journal

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
)

type body struct {
	Text string `json:"text"`
}

// bench is a directory with a disk that can fail.
type bench struct {
	t    *testing.T
	dir  string
	disk *disktest.Disk
}

func newBench(t *testing.T) *bench {
	return &bench{t: t, dir: t.TempDir(), disk: &disktest.Disk{}}
}

func (b *bench) journal(boot string) *Journal[body] {
	return New(Config{Files: disk.Files{FS: b.disk}, Dir: filepath.Join(b.dir, "journal"), Boot: boot}, "create", Earlier[body]{
		Dir: filepath.Join(b.dir, "made"),
		Convert: func(name string, data []byte) (*Record[body], error) {
			r := &Record[body]{Boot: "1", Group: strings.TrimRight(name, "0123456789")}
			switch err := json.Unmarshal(data, &r.Body); {
			case err != nil:
				return nil, err
			case r.Body.Text == "void":
				return nil, nil
			}
			return r, nil
		},
		Merge: func(there, converted *Record[body]) *Record[body] {
			merged := *there
			if !strings.Contains(there.Body.Text, converted.Body.Text) {
				merged.Body.Text += converted.Body.Text
			}
			return &merged
		},
	})
}

func (b *bench) file(name, data string) {
	b.t.Helper()
	name = filepath.Join(b.dir, name)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(data), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// files returns the paths of all files, including hidden ones.
func (b *bench) files() string {
	var all []string
	for _, pattern := range []string{"*/*.json", "*/*/*.json", "*/*/.*", "*/*/*.tmp"} {
		names, _ := filepath.Glob(filepath.Join(b.dir, pattern))
		for _, name := range names {
			all = append(all, strings.TrimPrefix(name, b.dir+"/"))
		}
	}
	return strings.Join(all, " ")
}

// texts returns the groups and bodies of all records.
func texts(j *Journal[body]) string {
	var all []string
	for _, r := range j.All() {
		all = append(all, r.Group+"="+r.Body.Text)
	}
	return strings.Join(all, " ")
}

func (b *bench) check(j *Journal[body], records, files string) {
	b.t.Helper()
	if got := texts(j); got != records {
		b.t.Errorf("records %q, want %q", got, records)
	}
	if got := b.files(); got != files {
		b.t.Errorf("files %q, want %q", got, files)
	}
}

func put(text string) *Record[body] {
	return &Record[body]{Group: "g", Silicon: "s", Devices: []string{"d"}, Body: body{text}}
}

// The next agent of the same boot reads the record unchanged. An agent of another boot removes the
// record.
func TestBoots(t *testing.T) {
	b := newBench(t)
	if err := b.journal("1").Put(put("a")); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(b.dir, "journal/create/g.json"))
	if want := `{"boot":"1","trade":"create","group":"g","silicon":"s","devices":["d"],"body":{"text":"a"}}`; err != nil || string(data) != want {
		t.Errorf("the file has %s, %v", data, err)
	}
	b.file("journal/create/.g.json.1.tmp", "{")
	j := b.journal("1")
	if problems := j.Open(); len(problems) > 0 {
		t.Error(problems)
	}
	b.check(j, "g=a", "journal/create/g.json")
	j = b.journal("2")
	if problems := j.Open(); len(problems) > 0 {
		t.Error(problems)
	}
	b.check(j, "", "")
}

// An invalid file stays, is reported, and is not a record.
func TestInvalidFile(t *testing.T) {
	for _, data := range []string{"{", `{"boot":"1","trade":"create","group":"other"}`, `{"boot":"1","trade":"reclaim","group":"g"}`, "{}"} {
		b := newBench(t)
		b.file("journal/create/g.json", data)
		j := b.journal("1")
		if problems := j.Open(); len(problems) != 1 || !strings.Contains(problems[0].Error(), "journal/create/g.json is not valid") {
			t.Errorf("problems %v", problems)
		}
		b.check(j, "", "journal/create/g.json")
	}
}

// If the trade can replace an invalid record, the replacement is on disk.
func TestDamaged(t *testing.T) {
	b := newBench(t)
	for _, group := range []string{"there", "gone"} {
		b.file("journal/create/"+group+".json", "{")
	}
	open := func() (*Journal[body], []error) {
		j := b.journal("1")
		j.Damaged = func(group string) *Record[body] {
			if group == "gone" {
				return nil
			}
			return &Record[body]{Group: group, Body: body{"unknown"}}
		}
		return j, j.Open()
	}
	if j, problems := open(); len(problems) != 2 || j.Get("there").Body.Text != "unknown" || j.Get("gone") != nil {
		t.Errorf("problems %v, records %v", problems, j.All())
	}
	if j, problems := open(); len(problems) != 1 || j.Get("there").Body.Text != "unknown" {
		t.Errorf("opened again: problems %v, records %v", problems, j.All())
	}
}

// If the disk does not write a record, the host must not change, and the previous record stays. The
// error names the directory and a way to make the directory available.
func TestPutThatFails(t *testing.T) {
	b := newBench(t)
	j := b.journal("1")
	if err := j.Put(put("a")); err != nil {
		t.Fatal(err)
	}
	b.disk.Before = func(op disktest.Op, _ string) error {
		if op == disktest.Rename {
			return syscall.EROFS
		}
		return nil
	}
	err := j.Put(put("b"))
	if !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), b.dir+"/journal must be a writable directory") || !strings.Contains(err.Error(), "--run-dir") {
		t.Errorf("error %v", err)
	}
	b.check(j, "g=a", "journal/create/g.json")
	if err := j.Put(&Record[body]{Group: "a/b"}); err == nil {
		t.Error("a group that cannot be the name of a file was written")
	}
}

// A temporary file that a killed agent or a failed write left, and that the disk did not remove, is
// removed later.
func TestTemporaryFilesAreRemovedLater(t *testing.T) {
	for name, leave := range map[string]func(b *bench, j *Journal[body]){
		"of a killed agent": func(b *bench, j *Journal[body]) {
			b.file("journal/create/.g.json.1.tmp", "{")
			if problems := j.Open(); len(problems) != 1 {
				b.t.Errorf("problems %v", problems)
			}
		},
		"of a failed write": func(b *bench, j *Journal[body]) {
			if err := j.Put(put("a")); !errors.Is(err, syscall.EIO) {
				b.t.Errorf("written with %v", err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.file("journal/create/.keep", "")
			j := b.journal("1")
			b.disk.Before = func(op disktest.Op, _ string) error {
				if op == disktest.Rename || op == disktest.Remove {
					return syscall.EIO
				}
				return nil
			}
			leave(b, j)
			if err := j.RestoreRecords(); !errors.Is(err, syscall.EIO) || !strings.Contains(b.files(), ".tmp") {
				t.Errorf("restored with %v, files %s", err, b.files())
			}
			b.disk.Before = nil
			if err := j.RestoreRecords(); err != nil {
				t.Error(err)
			}
			b.check(j, "", "journal/create/.keep")
		})
	}
}

// A completed change is in memory even if the disk does not write the record, which is written
// later. A record removed by another program is written again, unless the change was undone.
func TestRestore(t *testing.T) {
	b := newBench(t)
	j := b.journal("1")
	if err := j.Put(put("a")); err != nil {
		t.Fatal(err)
	}
	b.disk.Before = func(disktest.Op, string) error { return syscall.ENOSPC }
	if err := j.AmendRecord(put("b")); !errors.Is(err, syscall.ENOSPC) || j.Get("g").Body.Text != "b" {
		t.Errorf("amended with %v: %s", err, texts(j))
	}
	if err := j.RestoreRecords(); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("restored with %v", err)
	}
	b.disk.Before = nil
	for range 2 {
		if err := j.RestoreRecords(); err != nil {
			t.Fatal(err)
		}
		next := b.journal("1")
		next.Open()
		b.check(next, "g=b", "journal/create/g.json")
		if err := os.RemoveAll(filepath.Join(b.dir, "journal")); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(j.Remove("g"), j.Remove("g"), j.RestoreRecords()); err != nil {
		t.Fatal(err)
	}
	b.check(j, "", "")
}

// A record stays if it cannot be removed, so that the change is undone again.
func TestRemoveThatFails(t *testing.T) {
	b := newBench(t)
	j := b.journal("1")
	if err := j.Put(put("a")); err != nil {
		t.Fatal(err)
	}
	b.disk.Before = func(disktest.Op, string) error { return syscall.EIO }
	if err := j.Remove("g"); !errors.Is(err, syscall.EIO) {
		t.Errorf("removed with %v", err)
	}
	b.check(j, "g=a", "journal/create/g.json")
}

// Records that the disk does not list or read at the start are read later, unless their group was
// changed again.
func TestReadAgain(t *testing.T) {
	for _, fails := range []string{"create", "g.json"} {
		for _, changed := range []bool{false, true} {
			b := newBench(t)
			if err := b.journal("1").Put(put("a")); err != nil {
				t.Fatal(err)
			}
			b.disk.BeforeRead = func(name string) error {
				if filepath.Base(name) == fails {
					return syscall.EIO
				}
				return nil
			}
			j := b.journal("1")
			problems := j.Open()
			if len(problems) == 0 || !j.MayLack() {
				t.Errorf("%s: problems %v", fails, problems)
			}
			if found, problems, unread := j.ReadAgain(); len(found) > 0 || len(problems) > 0 || !unread {
				t.Errorf("%s: found %v, problems %v, unread %v", fails, found, problems, unread)
			}
			want := "g=a"
			if changed {
				want = "g=b"
				if err := j.Put(put("b")); err != nil {
					t.Fatal(err)
				}
			}
			b.disk.BeforeRead = nil
			found, problems, unread := j.ReadAgain()
			if (len(found) > 0) == changed || len(problems) > 0 || unread {
				t.Errorf("%s: found %v, problems %v, unread %v", fails, found, problems, unread)
			}
			b.check(j, want, "journal/create/g.json")
		}
	}
}

// Files of an earlier version become records: several files become a single record, and void files
// none. Invalid files stay. The result is the same after a kill at any step.
func TestEarlierVersion(t *testing.T) {
	for steps := range 12 {
		b := newBench(t)
		b.file("made/g1.json", `{"text":"a"}`)
		b.file("made/g2.json", `{"text":"b"}`)
		b.file("made/h.json", `{"text":"void"}`)
		b.file("made/x.json", `{`)
		left := steps
		b.disk.Before = func(disktest.Op, string) error {
			if left--; left < 0 {
				return syscall.EIO
			}
			return nil
		}
		j := b.journal("1")
		j.Open()
		if got := texts(j); got != "g=ab" {
			t.Errorf("records %q before the kill after %d steps", got, steps)
		}
		b.disk.Before = nil
		j = b.journal("1")
		if problems := j.Open(); len(problems) != 1 || !strings.Contains(problems[0].Error(), "made/x.json") {
			t.Errorf("problems %v after %d steps", problems, steps)
		}
		b.check(j, "g=ab", "made/x.json journal/create/g.json")
	}
}

// A converted record that could not be written is written later. The old files are removed
// afterwards.
func TestConvertedLater(t *testing.T) {
	for _, undone := range []bool{false, true} {
		b := newBench(t)
		b.file("made/g1.json", `{"text":"a"}`)
		b.disk.Before = func(disktest.Op, string) error { return syscall.EROFS }
		j := b.journal("1")
		if problems := j.Open(); len(problems) != 1 {
			t.Errorf("problems %v", problems)
		}
		b.check(j, "g=a", "made/g1.json")
		b.disk.Before = nil
		if undone {
			if err := errors.Join(j.Remove("g"), j.RestoreRecords()); err != nil {
				t.Fatal(err)
			}
			b.check(j, "", "")
			continue
		}
		if err := j.RestoreRecords(); err != nil {
			t.Fatal(err)
		}
		b.check(j, "g=a", "journal/create/g.json")
	}
}
