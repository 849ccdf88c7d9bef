package main

import (
	"os/exec"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
)

// TestNoTemplatesInTheAgent checks the effect of the agent's build tag. Of the packages that call
// methods by name, cobra has one, in a function that is never called and that the linker removes.
func TestNoTemplatesInTheAgent(t *testing.T) {
	for tags, templates := range map[string]bool{"": true, "grpcnotrace": false} {
		out, err := exec.Command("go", "list", "-deps", "-tags="+tags, ".").Output()
		if err != nil {
			t.Fatal(err)
		}
		if found := slices.Contains(strings.Fields(string(out)), "html/template"); found != templates {
			t.Errorf("with tags %q html/template is there: %v", tags, found)
		}
	}
}

func TestCollectOften(t *testing.T) {
	before := debug.SetGCPercent(100)
	defer debug.SetGCPercent(before)
	for gogc, want := range map[string]int{"": 50, "100": 100} {
		t.Setenv("GOGC", gogc)
		debug.SetGCPercent(100)
		collectOften()
		if got := debug.SetGCPercent(100); got != want {
			t.Errorf("with GOGC=%q it is %d, want %d", gogc, got, want)
		}
	}
}
