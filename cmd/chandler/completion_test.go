package main

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// Shells complete the values of flags and the files of recorded hosts. Every completed format is
// valid.
func TestCompletion(t *testing.T) {
	if help := mustRun(t, "--help"); !strings.Contains(help, "completion ") {
		t.Errorf("the help does not name the command:\n%s", help)
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if script := mustRun(t, "completion", shell); !strings.Contains(script, "chandler") {
			t.Errorf("script of %s: %.100s", shell, script)
		}
	}
	for name, formats := range outputs {
		got := mustRun(t, append([]string{cobra.ShellCompNoDescRequestCmd}, append(strings.Fields(name), "--output", "")...)...)
		if want := strings.Join(formats, "\n") + "\n"; !strings.HasPrefix(got, want) {
			t.Errorf("%s --output: completed %q, want %q", name, got, want)
		}
		if name == "discover" || name == "inventory" {
			for _, format := range formats {
				mustRun(t, name, eightGPUs, "-o", format)
			}
		}
	}
	for _, name := range []string{"discover", "inventory", "slices"} {
		if got := mustRun(t, cobra.ShellCompNoDescRequestCmd, name, ""); !strings.HasPrefix(got, "host\n:8") {
			t.Errorf("%s: completed %q, want files that end in .host", name, got)
		}
	}
}
