package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
)

func newSimulateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "simulate DIRECTORY RECORDED.host...",
		Short: "Lay recorded hosts out as a directory to run on",
		Long: `Lay one or several recorded hosts out over each other in a directory, with stand-in
device nodes, so that the agent runs on this machine as if it stood in those:

  chandler run --host-root DIRECTORY --runtime-root DIRECTORY

Root makes real device nodes with the recorded numbers; a container gets such a
node, and can open it if this machine has a driver of that number. Without root
empty files stand in for them, which discovery takes for nodes and containers
cannot be given. What lies in the directory already is written over where a
recorded host has the same file, and kept elsewhere.`,
		Example: `  chandler record -o own.host
  sudo chandler simulate /tmp/host eight-gpus.host own.host
  chandler discover --host-root /tmp/host`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return simulate(cmd.ErrOrStderr(), args[0], args[1:])
		},
	}
}

// simulate reads every host before it lays the first one out.
func simulate(errOut io.Writer, dir string, files []string) error {
	layouts := make([]func(string) ([]string, error), len(files))
	for i, file := range files {
		host, err := readRecorded(file)
		if err != nil {
			return err
		}
		layouts[i] = host.Layout
	}
	for _, mount := range []string{"sys", "proc", "dev"} { // every host has them, whatever was recorded
		if err := os.MkdirAll(filepath.Join(dir, mount), 0o755); err != nil {
			return fmt.Errorf("simulate: %w", err)
		}
	}
	for i, layout := range layouts {
		standIns, err := layout(dir)
		if err != nil {
			return fmt.Errorf("lay out %s in %s: %w", files[i], dir, err)
		}
		if len(standIns) > 0 {
			fmt.Fprintf(errOut, "%s: %d device nodes are empty files, since making nodes needs root\n", files[i], len(standIns))
		}
	}
	return nil
}
