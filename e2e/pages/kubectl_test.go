// Package pages holds the commands of the pages to the programs that they are for.
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

// Every command of kubectl's on the pages is one that kubectl has, with flags that it
// takes. Those of kubectl chandler are Chandler's, which cmd/chandler checks.
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

// The test finds what kubectl does not have.
func TestParse(t *testing.T) {
	for _, words := range [][]string{{"get", "pods", "--no-such-flag"}, {"aply", "-f", "x"}, {"rollout", "states", "ds/x"}} {
		if err := parse(words); err == nil {
			t.Errorf("kubectl %q is taken", words)
		}
	}
}

// parse has kubectl's own code take a command apart, and does not run it.
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
