package main

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The Dockerfile copies the directory of each package that the agent imports.
func TestDockerfile(t *testing.T) {
	file, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	stage, _, _ := strings.Cut(string(file), "AS build-host")
	var copied []string
	for _, line := range regexp.MustCompile(`(?m)^COPY ([a-z]+) ([a-z]+)$`).FindAllStringSubmatch(stage, -1) {
		if line[1] == line[2] {
			copied = append(copied, line[1])
		}
	}
	out, err := exec.Command("go", "list", "-deps", "-tags=grpcnotrace", ".").Output()
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
		if dir, _, _ := strings.Cut(in, "/"); !slices.Contains(copied, dir) {
			t.Errorf("the Dockerfile does not copy the directory of package %s", path)
		}
	}
	if own < 20 {
		t.Errorf("the agent imports %d packages of the project", own)
	}
}
