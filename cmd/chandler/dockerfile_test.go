package main

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The Dockerfile copies the directory of each package that the agent and chandler-host import.
func TestDockerfile(t *testing.T) {
	file, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	agent, rest, _ := strings.Cut(string(file), "AS build-host")
	host, _, _ := strings.Cut(rest, "\nFROM ")
	t.Run("agent", func(t *testing.T) { checkCopies(t, agent, ".", 20) })
	t.Run("chandler-host", func(t *testing.T) { checkCopies(t, host, "../chandler-host", 10) })
}

// checkCopies checks that a stage of the Dockerfile copies the project's packages that a program
// imports, which are at least a given number.
func checkCopies(t *testing.T, stage, program string, atLeast int) {
	t.Helper()
	var copied []string
	for _, line := range regexp.MustCompile(`(?m)^COPY ([a-z/-]+) ([a-z/-]+)$`).FindAllStringSubmatch(stage, -1) {
		if line[1] == line[2] {
			copied = append(copied, line[1]+"/")
		}
	}
	list := exec.Command("go", "list", "-deps", "-tags=grpcnotrace", program)
	list.Env = append(os.Environ(), "CGO_ENABLED=1")
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	own := 0
	for path := range strings.FieldsSeq(string(out)) {
		in, is := strings.CutPrefix(path, "chandler.dev/")
		if !is {
			continue
		}
		own++
		if !slices.ContainsFunc(copied, func(dir string) bool { return strings.HasPrefix(in+"/", dir) }) {
			t.Errorf("the Dockerfile does not copy the directory of package %s", path)
		}
	}
	if own < atLeast {
		t.Errorf("%s imports %d packages of the project", program, own)
	}
}
