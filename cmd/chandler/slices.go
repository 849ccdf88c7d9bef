package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/cmd/chandler/informant"
	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver/features"
	"chandler.dev/driver/pool"
	"chandler.dev/internal/command"
	"chandler.dev/internal/compile"
)

type slicesOptions struct {
	hostRoot string
	config   string
	node     v1alpha1.Node
	version  string
	gates    map[string]string
	output   string
}

func newSlicesCommand() *cobra.Command {
	var o slicesOptions
	cmd := &cobra.Command{
		Use:   "slices [RECORDED.host]",
		Short: "Print the ResourceSlices that a node with this host would publish",
		Long: `Print the ResourceSlices that the agent publishes on a node with this host, or with a
host recording, while no device is allocated. They describe a node that does not exist
yet, for example to an autoscaler, a scheduler simulation or a test. The command needs
no cluster.

The slices depend on the API server, which drops the fields of features that it does
not support. Set its version, and its feature gates that differ from the default. The
agent's metric chandler_dra_server_feature_enabled lists them.

The names end with the name of the pool, and not with the random suffix that the API
server adds. The slices have no owner.`,
		Example: `  chandler slices rack7.host --node-name gpu-node-template
  chandler slices rack7.host --kubernetes-version 1.35 --feature-gates DRAPartitionableDevices=true,SeparateCounters=true
  chandler slices -o json | jq '.items[].spec.devices[].name'`,
		Args:    cobra.MaximumNArgs(1),
		PreRunE: settings.OneHost,
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), args)
		},
	}
	cmd.Flags().StringVar(&o.hostRoot, "host-root", "/", "`directory` with the host's /sys, /proc and /dev")
	cmd.Flags().StringVar(&o.config, "config", "", "the agent's DriverConfig `file`")
	settings.NodeFlags(cmd.Flags(), &o.node)
	cmd.Flags().StringVar(&o.version, "kubernetes-version", features.Newest, "`version` of the API server")
	cmd.Flags().StringToStringVar(&o.gates, "feature-gates", nil, "`features` of ResourceSlices that it keeps or drops, other than by default: DRAListTypeAttributes=true")
	cmd.Flags().StringVarP(&o.output, "output", "o", "yaml", "yaml for a document per slice, or json for a list")
	return cmd
}

func (o slicesOptions) run(ctx context.Context, out, errOut io.Writer, args []string) error {
	if o.output != "yaml" && o.output != "json" {
		return command.UsageError(fmt.Errorf("output format %q: want yaml or json", o.output))
	}
	kept, err := o.keptFeatures()
	if err != nil {
		return command.UsageError(err)
	}
	host := settings.HostOf(args, o.hostRoot)
	node, err := host.NodeName(o.node.Name)
	if err != nil {
		return err
	}
	config, err := settings.LoadHere(o.config, o.node, host)
	if err != nil {
		return err
	}
	found, err := o.scan(ctx, config, errOut, args)
	if err != nil {
		return err
	}
	published, problems := agent.PoolTemplate(node, found, agent.Settings{Rules: config.Rules, Severity: settings.SeverityOf(config.Health.Severity)}, kept) //nolint:contextcheck // evaluating an expression does not block
	if err := printSlices(out, o.output, pool.SliceObjects(node, published)); err != nil {
		return err
	}
	printProblems(errOut, problemsOf(problems), func(string) string { return "" })
	return nil
}

// keptFeatures returns the features of ResourceSlices that the API server keeps.
func (o slicesOptions) keptFeatures() (features.Set, error) {
	kept, err := features.Default(o.version)
	if err != nil {
		return kept, err
	}
	gates := make(map[string]bool, len(o.gates))
	for name, text := range o.gates {
		if text != "true" && text != "false" {
			return kept, fmt.Errorf("feature %s=%s: want true or false", name, text)
		}
		gates[name] = text == "true"
	}
	return kept.With(gates)
}

// scan scans the host.
func (o slicesOptions) scan(ctx context.Context, config *compile.NodeConfig, errOut io.Writer, args []string) (*discovery.Snapshot, error) {
	if len(args) == 1 {
		recorded, err := readRecorded(args[0])
		if err != nil {
			return nil, err
		}
		return scan.Watch{Host: settings.ConfiguredHost(recorded.FS(), config), Families: families.All}.ScanOnce(ctx)
	}
	hostFS, err := settings.OpenHostRoot(o.hostRoot)
	if err != nil {
		return nil, err
	}
	host := settings.ConfiguredHost(hostFS, config)
	informant.AskInformants(ctx, host, families.All, o.hostRoot, errOut)
	return scan.Watch{Host: host, Families: families.All}.ScanOnce(ctx)
}

// printSlices prints slices in a format.
func printSlices(out io.Writer, format string, list *resourceapi.ResourceSliceList) error {
	if format == "json" {
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		return encoder.Encode(list)
	}
	for i := range list.Items {
		data, err := yaml.Marshal(&list.Items[i])
		if err != nil {
			return err
		}
		if i > 0 {
			data = append([]byte("---\n"), data...)
		}
		if _, err := out.Write(data); err != nil {
			return err
		}
	}
	return nil
}
