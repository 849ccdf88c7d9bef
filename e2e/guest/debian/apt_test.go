package debian

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSourcesOfMachine(t *testing.T) {
	const suites = "bookworm bookworm-updates bookworm-backports"
	tests := map[string]struct {
		targets string
		want    string // empty if there is no Debian archive
	}{
		"a mirror and other repositories": {
			targets: "Example||https://example.com/apt/\nDebian|Debian|http://mirror.example/debian/\nDebian|Debian|http://other.example/debian/\nDebian|Debian-Security|http://mirror.example/security/\n",
			want:    source("http://mirror.example/debian/", suites) + "\n" + source("http://mirror.example/security/", "bookworm-security"),
		},
		"a list of mirrors, without security updates": {
			targets: "Debian|Debian|mirror+file:/etc/apt/mirrors/debian.list\n",
			want:    source("mirror+file:/etc/apt/mirrors/debian.list", suites),
		},
		"backports of a third party": {targets: "Debian|Example|https://example.com/apt/\n"},
		"another distribution":       {targets: "Ubuntu|Ubuntu|http://mirror.example/ubuntu/\n"},
		"no lists":                   {targets: "$(ORIGIN)|$(LABEL)|http://mirror.example/debian/\n"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := sourcesOf(test.targets)
			if test.want == "" && !errors.Is(err, ErrNoArchive) {
				t.Errorf("got error %v, want %v", err, ErrNoArchive)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("sources (-want +got):\n%s", diff)
			}
		})
	}
}

// TestMachineWithoutLists uses a program in place of apt-get that has lists only after an update
// into the given directory.
func TestMachineWithoutLists(t *testing.T) {
	bin, dir := t.TempDir(), t.TempDir()
	lists := filepath.Join(dir, "apt/machine")
	script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in\n*Dir::State::lists=%[1]s*update*) echo > %[1]s/fetched; echo one server failed >&2; exit 100;;\n*Dir::State::lists=%[1]s*indextargets*) test -e %[1]s/fetched && echo 'Debian|Debian|http://mirror.example/debian/';;\n*indextargets*) ;;\n*) exit 1;;\nesac\n", lists)
	if err := os.WriteFile(filepath.Join(bin, "apt-get"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+string(os.PathListSeparator)+os.Getenv("PATH"))
	got, err := Archive{Dir: dir}.sources(t.Context())
	if want := source("http://mirror.example/debian/", "bookworm bookworm-updates bookworm-backports"); err != nil || got != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

// TestSources finds the Debian archive of this machine, if there is one.
func TestSources(t *testing.T) {
	if _, err := (Archive{Dir: t.TempDir()}).sources(t.Context()); errors.Is(err, ErrNoArchive) {
		t.Skip(err)
	} else if err != nil {
		t.Error(err)
	}
}

func TestMachineWithoutApt(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, err := (Archive{Dir: t.TempDir()}).sources(t.Context()); !errors.Is(err, ErrNoArchive) {
		t.Errorf("got error %v, want %v", err, ErrNoArchive)
	}
}
