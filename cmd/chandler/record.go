package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/informant"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/recorded"
	"chandler.dev/internal/doctor/gather"
)

func newRecordCommand() *cobra.Command {
	var hostRoot, config, output, comment string
	var node v1alpha1.Node
	cmd := &cobra.Command{
		Use:   "record",
		Short: "Write what discovery reads of this host as a recorded host",
		Long: `Write what discovery reads of this host's /sys, /proc and /dev as one text file,
a recorded host. "chandler discover FILE" finds the same devices in it,
"chandler simulate" lays it out as a directory, and a device family can be tested
with it. Serial numbers, UUIDs and the host's network addresses are in it as they
are.`,
		Example: `  chandler record -o $(hostname).host
  chandler record | ssh laptop chandler discover -`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			inherit(cmd.Flags(), gather.OwnFlags(), places...)
			hostFS, err := hostfs.Open(hostRoot)
			if err != nil {
				return err
			}
			loaded, _, err := loadConfigHere(config, node)
			if err != nil {
				// A recording is most useful when something is wrong.
				fmt.Fprintln(cmd.ErrOrStderr(), "chandler: recorded without what the configuration names:", err)
				loaded = &v1alpha1.DriverConfig{}
			}
			host := configuredHost(hostFS, loaded)
			informant.Ask(cmd.Context(), host, families.All, hostRoot, cmd.ErrOrStderr())
			data, err := recorded.Record(host, families.All, comment)
			if err != nil {
				return fmt.Errorf("record host %s: %w", hostRoot, err)
			}
			return writeFile(cmd.OutOrStdout(), output, data)
		},
	}
	cmd.Flags().StringVar(&hostRoot, "host-root", "/", "`directory` that holds the host's /sys, /proc and /dev")
	cmd.Flags().StringVar(&config, "config", "", "record what this DriverConfig `file` names, too")
	nodeFlags(cmd.Flags(), &node)
	cmd.Flags().StringVarP(&output, "output", "o", "-", "`file` to write, - for standard output")
	cmd.Flags().StringVar(&comment, "comment", "", "what to say of the host at the head of the file")
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
