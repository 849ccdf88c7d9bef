package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/informant"
	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/recorded"
	"chandler.dev/internal/compile"
	"chandler.dev/internal/doctor/gather"
)

func newRecordCommand() *cobra.Command {
	var hostRoot, config, output, comment string
	var node v1alpha1.Node
	cmd := &cobra.Command{
		Use:   "record",
		Short: "Record the files of this host that discovery reads",
		Long: `Write the files of /sys, /proc and /dev that discovery reads to one text file, a
host recording. "chandler discover FILE" finds the same devices in it, "chandler
simulate" extracts it to a directory, and tests of device families use it. Serial
numbers, UUIDs and network addresses of the host are included unchanged.`,
		Example: `  chandler record -o $(hostname).host
  chandler record | ssh laptop chandler discover -`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			inheritFlags(cmd.Flags(), gather.OwnFlags(), places...)
			hostFS, err := settings.OpenHostRoot(hostRoot)
			if err != nil {
				return err
			}
			loaded, err := settings.LoadHere(config, node, settings.HostOf(nil, hostRoot))
			if err != nil {
				// A recording is most useful when something is wrong.
				fmt.Fprintln(cmd.ErrOrStderr(), "chandler: recorded without what the configuration names:", err)
				loaded = &compile.NodeConfig{DriverConfig: &v1alpha1.DriverConfig{}}
			}
			host := settings.ConfiguredHost(hostFS, loaded)
			informant.AskInformants(cmd.Context(), host, families.All, hostRoot, cmd.ErrOrStderr())
			data, err := recorded.RecordHost(host, families.All, comment)
			if err != nil {
				return fmt.Errorf("record host %s: %w", hostRoot, err)
			}
			return writeFile(cmd.OutOrStdout(), output, data)
		},
	}
	cmd.Flags().StringVar(&hostRoot, "host-root", "/", "`directory` with the host's /sys, /proc and /dev")
	cmd.Flags().StringVar(&config, "config", "", "also record the files in this DriverConfig `file`")
	settings.NodeFlags(cmd.Flags(), &node)
	cmd.Flags().StringVarP(&output, "output", "o", "-", "`file` to write, - for standard output")
	cmd.Flags().StringVar(&comment, "comment", "", "description of the host at the beginning of the file")
	return cmd
}

// writeFile writes a file, or to out for "-".
func writeFile(out io.Writer, file string, data []byte) error {
	if file == "-" {
		_, err := out.Write(data)
		return err
	}
	return os.WriteFile(file, data, 0o644)
}
