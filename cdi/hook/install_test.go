package hook

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestInstall(t *testing.T) {
	dir := t.TempDir()
	program, name := dir+"/program", dir+"/plugins/bin/chandler"
	write := func(file, content string, at time.Time) {
		t.Helper()
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file, at, at); err != nil {
			t.Fatal(err)
		}
	}
	check := func(want string) os.FileInfo {
		t.Helper()
		if err := InstallProgram(program, name); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(name)
		if err != nil || info.Mode().Perm() != 0o755 || read(t, name) != want {
			t.Fatalf("installed is %q, mode %v, %v; want %q", read(t, name), info.Mode(), err, want)
		}
		entries, err := os.ReadDir(filepath.Dir(name))
		if err != nil || len(entries) != 1 {
			t.Fatalf("beside it: %v, %v", entries, err)
		}
		return info
	}
	old := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	write(program, "one", old)
	first := check("one")
	if second := check("one"); !os.SameFile(first, second) {
		t.Error("the same program is installed again")
	}
	write(program, "two", old.Add(time.Hour)) // the same size
	second := check("two")
	if os.SameFile(first, second) {
		t.Error("the program was changed in place, and not replaced")
	}
	write(name, "cut", old.Add(time.Hour)) // another file with the same size and time, which is not executable
	if err := os.Chmod(name, 0o644); err != nil {
		t.Fatal(err)
	}
	check("two")
	if err := InstallProgram(dir+"/missing", name); err == nil {
		t.Error("a program that is not there is installed")
	}
}

func TestKeep(t *testing.T) {
	dir := t.TempDir()
	program, name := dir+"/program", dir+"/bin/chandler"
	if err := os.WriteFile(program, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	leftover := dir + "/bin/.chandler.123.tmp"
	if err := os.MkdirAll(dir+"/bin", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(leftover, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(leftover, time.Time{}, time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC)); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var failures []string
		done := make(chan struct{})
		go func() {
			defer close(done)
			KeepInstalled(ctx, program, name, time.Second, func(err error) { failures = append(failures, err.Error()) })
		}()
		synctest.Wait()
		if read(t, name) != "x" {
			t.Error("it is not installed")
		}
		if _, err := os.Stat(leftover); err == nil {
			t.Error("the file of an installation that was cut short stays")
		}
		if err := os.RemoveAll(dir + "/bin"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if read(t, name) != "x" {
			t.Error("it is not installed again")
		}
		if err := os.Remove(program); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if len(failures) != 1 || !strings.Contains(failures[0], "install the program for hooks: ") {
			t.Errorf("failures: %q; want one", failures)
		}
		cancel()
		<-done
	})
}
