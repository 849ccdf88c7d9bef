package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/informant"
	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/labels"
	"chandler.dev/discovery/pciids"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/command"
	"chandler.dev/internal/doctor/gather"
)

type discoverOptions struct {
	hostRoot string
	config   string
	node     v1alpha1.Node
	output   string
	ascii    bool
}

func newDiscoverCommand() *cobra.Command {
	var o discoverOptions
	cmd := &cobra.Command{
		Use:   "discover [RECORDED.host]",
		Short: "Print the accelerators of this host or of a host recording",
		Long: `Print the accelerators of a host: of this host, of a directory tree of another host
(--host-root), or of a host recording by "chandler record". The command needs no
cluster and no root, and changes nothing. It opens no device, and runs no file of a
host recording, so a recording from an unknown source is safe. Data that cannot be
read is reported on standard error, and the rest is printed.`,
		Example: `  chandler discover
  chandler discover -o json | jq '.devices[].name'
  chandler discover -o tree
  chandler discover -o labels
  chandler discover --host-root /mnt/other-machine
  chandler discover rack7.host`,
		Args:    cobra.MaximumNArgs(1),
		PreRunE: settings.OneHost,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				inheritFlags(cmd.Flags(), gather.OwnFlags(), places...)
			}
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), args)
		},
	}
	cmd.Flags().StringVar(&o.hostRoot, "host-root", "/", "`directory` with the host's /sys, /proc and /dev")
	cmd.Flags().StringVar(&o.config, "config", "", "apply this DriverConfig `file`")
	settings.NodeFlags(cmd.Flags(), &o.node)
	cmd.Flags().StringVarP(&o.output, "output", "o", "table", "table, wide, tree, json, yaml, or labels for the node's labels")
	cmd.Flags().BoolVar(&o.ascii, "ascii", false, "with -o tree, print only ASCII characters")
	return cmd
}

func (o discoverOptions) run(ctx context.Context, out, errOut io.Writer, args []string) error {
	print, err := printer(o.output)
	if o.output == "tree" {
		print, err = o.treePrinter(args), nil
	}
	if err != nil {
		return err
	}
	config, err := settings.LoadHere(o.config, o.node, settings.HostOf(args, o.hostRoot))
	if err != nil {
		return err
	}
	var host *discovery.Host
	if len(args) == 1 {
		recorded, err := readRecorded(args[0])
		if err != nil {
			return err
		}
		host = settings.ConfiguredHost(recorded.FS(), config)
	} else {
		hostFS, err := settings.OpenHostRoot(o.hostRoot)
		if err != nil {
			return err
		}
		host = settings.ConfiguredHost(hostFS, config)
		informant.AskInformants(ctx, host, families.All, o.hostRoot, errOut)
	}
	found, err := scan.Watch{Host: host, Families: families.All}.ScanOnce(ctx)
	if err != nil {
		return err
	}
	snapshot := config.Rules.ApplyTo(found) //nolint:contextcheck // evaluating an expression does not block
	if err := print(out, snapshot, pciids.Read(host.FS, found.Devices)); err != nil {
		return err
	}
	printProblems(errOut, problemsOf(snapshot.Problems), func(device string) string {
		if d, found := snapshot.Lookup(device); found && (o.output == "table" || o.output == "wide" || o.output == "tree") {
			return d.Health.Reason
		}
		return ""
	})
	return nil
}

func readRecorded(file string) (*recorded.Host, error) {
	if info, err := os.Stat(file); err == nil && info.IsDir() {
		return nil, fmt.Errorf("%s is a directory and not a host recording; to examine the files of another host, use --host-root=%s", file, file)
	}
	data, err := readFile(file)
	if err != nil {
		return nil, fmt.Errorf("read host recording: %w", err)
	}
	host, err := recorded.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("%s is not a valid host recording: %w", file, err)
	}
	if missing := settings.MissingSys(host.FS()); missing != "" {
		return nil, fmt.Errorf("host recording %s has %s", file, missing)
	}
	return host, nil
}

// readFile reads a file, or standard input for "-".
func readFile(file string) ([]byte, error) {
	return command.ReadInput(os.Stdin, file)
}

// A printFunc prints a snapshot. The names of products are from the host.
type printFunc func(out io.Writer, s *rules.Snapshot, products pciids.Names) error

// printer returns the print function of a format.
func printer(format string) (printFunc, error) {
	switch format {
	case "table":
		return printTable, nil
	case "wide":
		return printWide, nil
	case "json":
		return func(out io.Writer, s *rules.Snapshot, _ pciids.Names) error {
			encoder := json.NewEncoder(out)
			encoder.SetIndent("", "  ")
			return encoder.Encode(withPaths(s))
		}, nil
	case "yaml":
		return func(out io.Writer, s *rules.Snapshot, _ pciids.Names) error {
			data, err := yaml.Marshal(withPaths(s))
			if err != nil {
				return err
			}
			_, err = out.Write(data)
			return err
		}, nil
	case "labels":
		return printLabels, nil
	}
	return nil, command.UsageError(fmt.Errorf("output format %q: want table, wide, tree, json, yaml or labels", format))
}

// locatedDevice is a device with its place on the host.
type locatedDevice struct {
	rules.Offered
	Path string `json:"path,omitempty"`
}

// withPaths returns a snapshot for printing. Each device has its sysfs directory.
func withPaths(s *rules.Snapshot) any {
	devices := make([]locatedDevice, len(s.Devices))
	for i, d := range s.Devices {
		devices[i].Offered = d
		if d.Source != "" {
			devices[i].Path = "/" + d.Source
		}
	}
	problems := s.Problems
	if problems == nil {
		problems = []discovery.Problem{}
	}
	return struct {
		Devices  []locatedDevice     `json:"devices"`
		Problems []discovery.Problem `json:"problems"`
	}{devices, problems}
}

// printLabels prints the labels that the devices give their node. Invalid labels are left out and
// returned as an error.
func printLabels(out io.Writer, s *rules.Snapshot, _ pciids.Names) error {
	made, err := labels.NodeLabels(s, families.All)
	if _, writeErr := io.WriteString(out, labels.Lines(made)); writeErr != nil {
		return writeErr
	}
	return err
}
