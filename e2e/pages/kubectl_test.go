// Package pages checks the commands on the pages against the programs themselves.
package pages

import (
	"errors"
	"io"
	"slices"
	"testing"

	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/kubectl/pkg/cmd"

	"chandler.dev/internal/docs"
)

var errNoCommand = errors.New("there is no such command")

// TestKubectl parses every kubectl command on the pages with kubectl's own code. The command and
// its flags must exist. A test of cmd/chandler checks the commands of kubectl chandler.
func TestKubectl(t *testing.T) {
	pages, err := docs.All("../..")
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, page := range pages {
		for _, block := range page.Blocks() {
			commands, err := block.Commands()
			if err != nil {
				t.Errorf("%s: %v", page.Path, err)
			}
			for _, c := range commands {
				if c.Words[0] != "kubectl" || len(c.Words) > 1 && c.Words[1] == "chandler" {
					continue
				}
				checked++
				if err := parse(c.Words[1:]); err != nil {
					t.Errorf("%s:%d: %q: %v", page.Path, c.Line, c.Words, err)
				}
			}
		}
	}
	if checked < 20 {
		t.Errorf("%d commands were checked, fewer than there are", checked)
	}
}

// TestParse expects parse to refuse unknown commands and flags.
func TestParse(t *testing.T) {
	for _, words := range [][]string{{"get", "pods", "--no-such-flag"}, {"aply", "-f", "x"}, {"rollout", "states", "ds/x"}} {
		if err := parse(words); err == nil {
			t.Errorf("kubectl %q is taken", words)
		}
	}
}

// parse parses a command with kubectl's own code without running it.
func parse(words []string) error {
	streams := genericiooptions.IOStreams{In: nil, Out: io.Discard, ErrOut: io.Discard}
	root := cmd.NewKubectlCommand(cmd.KubectlOptions{IOStreams: streams, Arguments: append([]string{"kubectl"}, words...)})
	c, rest, err := root.Find(words)
	if err != nil {
		return err
	}
	if i := slices.Index(rest, "--"); i >= 0 {
		rest = rest[:i] // the command of a container
	}
	if err := c.ParseFlags(rest); err != nil {
		return err
	}
	if !c.Runnable() || c.HasSubCommands() && len(c.Flags().Args()) > 0 && c.Name() != "apply" {
		return errNoCommand
	}
	return nil
}
