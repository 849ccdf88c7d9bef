package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"chandler.dev/discovery/recorded"
)

func newSimulateCommand() *cobra.Command {
	var nodes bool
	cmd := &cobra.Command{
		Use:   "simulate DIRECTORY RECORDED.host...",
		Short: "Extract host recordings to a directory for a simulated host",
		Long: `Extract one or more host recordings to a directory, so that an agent on this machine
runs as on these hosts:

  chandler run --host-root DIRECTORY --runtime-root DIRECTORY

Empty files replace device nodes. Discovery accepts them, and containers cannot use
them. With --device-nodes, root creates real device nodes with the recorded numbers:
a container gets such a node, which opens the device of this machine with that
number. Use this only with trusted recordings.

A file of a recording replaces an existing file of the directory. Other files remain.`,
		Example: `  chandler record -o own.host
  sudo chandler simulate --device-nodes /tmp/host eight-gpus.host own.host
  chandler discover --host-root /tmp/host`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return simulateHosts(cmd.ErrOrStderr(), args[0], args[1:], nodes)
		},
	}
	cmd.Flags().BoolVar(&nodes, "device-nodes", false, "create real device nodes below DIRECTORY/dev, as root")
	return cmd
}

// simulateHosts reads all recorded hosts before it lays out the first one.
func simulateHosts(errOut io.Writer, dir string, files []string, nodes bool) error {
	hosts := make([]*recorded.Host, len(files))
	for i, file := range files {
		var err error
		if hosts[i], err = readRecorded(file); err != nil {
			return err
		}
	}
	for _, mount := range []string{"sys", "proc", "dev"} { // every host has these, even if they were not recorded
		if err := os.MkdirAll(filepath.Join(dir, mount), 0o755); err != nil {
			return fmt.Errorf("simulate: %w", err)
		}
	}
	for i, host := range hosts {
		if err := layOut(errOut, host, dir, nodes); err != nil {
			return fmt.Errorf("lay out %s in %s: %w", files[i], dir, err)
		}
	}
	return nil
}

// layOut lays out one recorded host, and reports device nodes that it could not create.
func layOut(errOut io.Writer, host *recorded.Host, dir string, nodes bool) error {
	if !nodes {
		return host.WriteHost(dir)
	}
	standIns, err := host.LayoutNodes(dir)
	if err == nil && len(standIns) > 0 {
		fmt.Fprintf(errOut, "%s: %d device nodes are empty files, since only root can make nodes\n", dir, len(standIns))
	}
	return err
}
