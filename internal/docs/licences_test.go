package docs

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/licensecheck"
)

// The page of licences lists each module that is linked into a program.
func TestDocsOfLicences(t *testing.T) {
	var table strings.Builder
	table.WriteString("| module | licence | programs |\n|---|---|---|\n")
	programs := make(map[module][]string)
	for _, program := range []string{"chandler", "kubectl-chandler", "chandler-host"} {
		for _, m := range linkedModules(t, "./cmd/"+program) {
			programs[m] = append(programs[m], "`"+program+"`")
		}
	}
	byPath := func(a, b module) int { return strings.Compare(a.Path, b.Path) }
	for _, m := range slices.SortedFunc(maps.Keys(programs), byPath) {
		fmt.Fprintf(&table, "| [%s](https://pkg.go.dev/%s) | %s | %s |\n", m.Path, m.Path, licencesOf(t, m), strings.Join(programs[m], ", "))
	}
	CompareSection(t, filepath.Join(root, "docs/licences.md"), "licences", table.String()+"\n", *update)
}

// A module is a dependency of a program.
type module struct{ Path, Dir string }

// linkedModules returns the modules of the packages that a program contains.
func linkedModules(t *testing.T, program string) (modules []module) {
	t.Helper()
	command := exec.Command("go", "list", "-deps", "-json=Module", program)
	command.Dir, command.Env = root, append(os.Environ(), "CGO_ENABLED=1", "GOFLAGS=-tags=grpcnotrace")
	out, err := command.Output()
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	for decoder := json.NewDecoder(bytes.NewReader(out)); decoder.More(); {
		var listed struct {
			Module *struct {
				module

				Main bool
			}
		}
		if err := decoder.Decode(&listed); err != nil {
			t.Fatal(err)
		}
		if listed.Module != nil && !listed.Module.Main && !slices.Contains(modules, listed.Module.module) {
			modules = append(modules, listed.Module.module)
		}
	}
	return modules
}

// licencesOf returns the SPDX identifiers of the licences in the files LICENSE and COPYING of a
// module.
func licencesOf(t *testing.T, m module) string {
	t.Helper()
	var found []string
	for _, pattern := range []string{"LICEN[SC]E*", "COPYING*"} {
		files, err := filepath.Glob(filepath.Join(m.Dir, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, match := range licensecheck.Scan(text).Match {
				if !match.IsURL && !slices.Contains(found, match.ID) {
					found = append(found, match.ID)
				}
			}
		}
	}
	if len(found) == 0 {
		t.Errorf("module %s has no licence that is known", m.Path)
	}
	slices.Sort(found)
	return strings.Join(found, ", ")
}
