package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/cmd/chandler/informant"
	"chandler.dev/cmd/chandler/migration"
	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/pciids"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/command"
	"chandler.dev/internal/compile"
	"chandler.dev/internal/doctor/gather"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/legacy"
	"chandler.dev/legacy/list"
)

type migrateOptions struct {
	hostRoot        string
	kubeletRoot     string
	devicePluginDir string
	config          string
	node            v1alpha1.Node
	output          string

	plan     bool // plan a move; otherwise print the status
	to, next string
}

func newMigrateCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Show the effect and the progress of a move between APIs on a node",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newMigratePlanCommand(), newMigrateStatusCommand())
	return cmd
}

func newMigratePlanCommand() *cobra.Command {
	o := migrateOptions{plan: true}
	cmd := &cobra.Command{
		Use:   "plan [RECORDED.host]",
		Short: "Print the effect of a move on each device",
		Long: `Print the effect of a move on each device of this node, or of a host recording: the
effect of the label chandler.dev/mode (--to) or of another configuration (--next).
The output shows which devices move at once, which pods the other devices wait for,
what the scheduler counts twice in the meantime, and the consequences for pods. The
command changes nothing. It does not contact the API server, so claims that are
allocated and not yet prepared are unknown.

On a node, the command reads the agent's directory and the kubelet's PodResources API.
For a host recording, all devices are assumed to be free, unless --kubelet-root and
--device-plugin-dir name copies of the directories of its kubelet.`,
		Example: `  kubectl -n chandler exec POD -- /chandler migrate plan
  chandler migrate plan --to=DevicePlugin -o json
  chandler migrate plan rack7.host --config config.yaml --node-labels=pool=training
  chandler migrate plan --next new-config.yaml`,
		Args:    cobra.MaximumNArgs(1),
		PreRunE: settings.OneHost,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				inheritFlags(cmd.Flags(), gather.OwnFlags(), places...)
			}
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), args)
		},
	}
	o.addFlags(cmd)
	cmd.Flags().StringVar(&o.to, "to", string(v1alpha1.ModeDRA), "new value of the node's label chandler.dev/mode: DRA, DevicePlugin or Auto")
	cmd.Flags().StringVar(&o.next, "next", "", "instead of --to, the new DriverConfig `file` of the agent")
	cmd.MarkFlagsMutuallyExclusive("to", "next")
	return cmd
}

func newMigrateStatusCommand() *cobra.Command {
	var o migrateOptions
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Print the progress of the move",
		Long: `Print which API offers each device of this node, and which pods the devices wait
for, according to the current configuration, the node's labels and the agent's
records.`,
		Example: `  kubectl -n chandler exec POD -- /chandler migrate status`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			inheritFlags(cmd.Flags(), gather.OwnFlags(), places...)
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), nil)
		},
	}
	o.addFlags(cmd)
	return cmd
}

// defaultKubeletRoot is the kubelet's default --root-dir.
const defaultKubeletRoot = "/var/lib/kubelet"

func (o *migrateOptions) addFlags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&o.hostRoot, "host-root", "/", "`directory` with the host's /sys, /proc and /dev")
	flags.StringVar(&o.kubeletRoot, "kubelet-root", defaultKubeletRoot, "the kubelet's `directory`, its --root-dir")
	flags.StringVar(&o.devicePluginDir, "device-plugin-dir", pluginapi.DevicePluginPath, "the kubelet's device-plugins `directory`, which does not depend on the kubelet's --root-dir")
	flags.StringVar(&o.config, "config", "", "current DriverConfig `file`; by default, the agent's copy")
	settings.NodeFlags(flags, &o.node)
	flags.StringVarP(&o.output, "output", "o", "table", "table or json")
}

// run plans a move, or prints the status of the last one.
func (o *migrateOptions) run(ctx context.Context, out, errOut io.Writer, args []string) error {
	if o.output != "table" && o.output != "json" {
		return command.UsageError(fmt.Errorf("output format %q: want table or json", o.output))
	}
	if to := v1alpha1.Mode(o.to); o.plan && to != v1alpha1.ModeDRA && to != v1alpha1.ModeDevicePlugin && to != v1alpha1.ModeAuto {
		return command.UsageError(fmt.Errorf("--to %q: want DRA, DevicePlugin or Auto", o.to))
	}
	var err error
	if o.node.Name, err = settings.HostOf(args, o.hostRoot).NodeName(o.node.Name); err != nil {
		return err
	}
	n, err := o.readNode(ctx, errOut, args)
	if err != nil {
		return err
	}
	next := n.Rules
	switch {
	case o.plan:
		planned, err := o.nextConfig(n.text)
		if err != nil {
			return err
		}
		next = planned.Rules
	case n.API == nil:
		return fmt.Errorf("%s: no agent has decided yet which API offers what", filepath.Join(o.kubeletRoot, stateDir))
	}
	m := migration.Move{Node: o.node.Name, Plan: o.plan}
	m.AddSteps(n.PlanSteps(next), n.Entries, n.pods) //nolint:contextcheck // evaluating an expression does not block
	if o.output == "json" {
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		return encoder.Encode(m)
	}
	return m.Print(out)
}

// stateDir is the agent's directory below the kubelet's.
const stateDir = "plugins/" + discovery.Domain

// nodeNow is the current state of a node.
type nodeNow struct {
	placement.Standing
	text    []byte                            // the configuration in force
	pods    map[types.NamespacedName][]string // the pods of each claim
	listing *kubeletapi.Listing               // the kubelet's list, nil if there is none

	functions int          // number of the host's PCI functions
	products  pciids.Names // of the devices
}

// readNode reads the current state of the node.
func (o *migrateOptions) readNode(ctx context.Context, errOut io.Writer, args []string) (n nodeNow, err error) {
	kubelet, devicePlugins := os.DirFS(o.kubeletRoot), os.DirFS(o.devicePluginDir)
	if _, err := fs.Stat(kubelet, "."); err != nil && o.kubeletRoot != defaultKubeletRoot {
		return n, fmt.Errorf("the kubelet's directory %s: %w", o.kubeletRoot, err)
	}
	listing, unlisted := o.listPods(ctx)
	host := &discovery.Host{}
	if len(args) == 1 {
		recorded, err := readRecorded(args[0])
		if err != nil {
			return n, err
		}
		host.FS = recorded.FS()
		if o.kubeletRoot == defaultKubeletRoot { // this machine's kubelet is unrelated to the recorded host
			kubelet, _ = fs.Sub(host.FS, "var/lib/kubelet") // the paths are valid
			devicePlugins, _ = fs.Sub(kubelet, "device-plugins")
			listing = nil
		}
	} else if host.FS, err = settings.OpenHostRoot(o.hostRoot); err != nil {
		return n, err
	}
	state, err := fs.Sub(kubelet, stateDir)
	if err != nil {
		return n, err
	}
	config, err := o.inForce(ctx, state, &n)
	if err != nil {
		return n, err
	}
	host = settings.ConfiguredHost(host.FS, config)
	if len(args) == 0 {
		informant.AskInformants(ctx, host, families.All, o.hostRoot, errOut)
		if unlisted != nil {
			fmt.Fprintln(errOut, unlistedText(o.podResources(), unlisted))
		}
	}
	if n.Devices, err = (scan.Watch{Host: host, Families: families.All}).ScanOnce(ctx); err != nil {
		return n, err
	}
	boot, _ := host.ReadText("/proc/sys/kernel/random/boot_id") // without a boot ID, records of every boot apply
	if n.Entries, err = allocation.ReadEntries(kubelet, stateDir, boot); err != nil {
		return n, fmt.Errorf("who has what: %w", err)
	}
	n.listing, n.products = listing, pciids.Read(host.FS, n.Devices.Devices)
	if functions, err := fs.ReadDir(host.FS, "sys/bus/pci/devices"); err == nil {
		n.functions = len(functions)
	}
	if listing == nil {
		err = n.addWritten(kubelet, devicePlugins)
	} else {
		n.addListed(listing)
	}
	return n, err
}

// inForce reads the configuration, the labels and the placement in force.
func (o *migrateOptions) inForce(ctx context.Context, state fs.FS, n *nodeNow) (config *compile.NodeConfig, err error) {
	if o.config != "" {
		n.text, err = os.ReadFile(o.config)
	} else if n.text, err = fs.ReadFile(state, agent.KeptConfig); errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return nil, fmt.Errorf("read config: %w", err)
	}
	if o.node.Labels == nil {
		o.node.Labels = settings.KeptLabels(ctx, state)
	}
	if config, err = compile.ForNode(n.text, o.node); err != nil {
		return nil, fmt.Errorf("config %s: %w", cmp.Or(o.config, "that the agent keeps"), err)
	}
	n.Rules = config.Rules
	if n.API, n.Auto, err = placement.ReadPlacement(state); err != nil {
		return nil, err
	}
	if n.Auto == discovery.ModeAuto { // without a known mode, every device that can move is counted as moving
		n.Auto = discovery.ModeDevicePlugin
		if o.to == string(v1alpha1.ModeDevicePlugin) {
			n.Auto = discovery.ModeDRA
		}
	}
	return config, nil
}

// nextConfig returns the configuration that the node would get.
func (o *migrateOptions) nextConfig(text []byte) (*compile.NodeConfig, error) {
	node := o.node
	if o.next != "" {
		return settings.Load(o.next, node)
	}
	node.Labels = maps.Clone(node.Labels)
	if node.Labels == nil {
		node.Labels = make(map[string]string)
	}
	node.Labels[v1alpha1.LabelMode] = o.to
	return compile.ForNode(text, node)
}

// addGrant adds an allocation of the device plugin API without a record of the agent. Another
// plugin made such an allocation, or the agent has not seen it yet.
func (n *nodeNow) addGrant(stock *list.Stock, resource, container string, ids []string) {
	for _, id := range ids {
		if slices.ContainsFunc(n.Entries, func(e allocation.Entry) bool { return e.Key() == allocation.GrantKey(resource, id) }) {
			continue
		}
		if g, _ := stock.WithID(resource, id); g != nil {
			g.Container = container
			n.Entries = append(n.Entries, g)
		}
	}
}

// addListed adds the allocations of the kubelet's list.
func (n *nodeNow) addListed(listing *kubeletapi.Listing) {
	n.pods = make(map[types.NamespacedName][]string)
	stock := list.StockOf(n.Devices.Devices, list.Lists{})
	for _, pod := range listing.Pods {
		name := kubeletapi.PodName(pod)
		for _, c := range pod.Containers {
			for _, d := range c.Devices {
				n.addGrant(stock, d.ResourceName, name+" "+c.Name, d.DeviceIds)
			}
			for _, claim := range c.DynamicResources {
				of := types.NamespacedName{Namespace: claim.ClaimNamespace, Name: claim.ClaimName}
				if !slices.Contains(n.pods[of], name) {
					n.pods[of] = append(n.pods[of], name)
				}
			}
		}
	}
}

// addWritten adds the allocations of the kubelet's checkpoint. It skips pods without a directory:
// the checkpoint also contains pods that have ended.
func (n *nodeNow) addWritten(kubelet, devicePlugins fs.FS) error {
	written, err := legacy.ReadHoldings(devicePlugins)
	_, unknown := fs.Stat(kubelet, "pods")
	stock := list.StockOf(n.Devices.Devices, list.Lists{})
	for _, h := range written {
		if _, err := fs.Stat(kubelet, path.Join("pods", h.PodUID)); unknown == nil && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		n.addGrant(stock, h.Resource, fmt.Sprintf("UID/%s %s", h.PodUID, h.Container), h.IDs)
	}
	return err
}

// listPods queries the kubelet for the devices of all containers.
func (o *migrateOptions) listPods(ctx context.Context) (*kubeletapi.Listing, error) {
	ctx, cancel := context.WithTimeout(ctx, listingTimeout)
	defer cancel()
	return kubeletapi.ListPods(ctx, o.podResources())
}

// podResources returns the path of the kubelet's PodResources socket.
func (o *migrateOptions) podResources() string {
	return filepath.Join(o.kubeletRoot, "pod-resources", "kubelet.sock")
}

// unlistedText explains the consequences of a failed query at a PodResources socket.
func unlistedText(socket string, err error) string {
	why := err.Error()
	if errors.Is(err, fs.ErrNotExist) {
		why = socket + " is not there"
	}
	return "The kubelet does not report the devices of pods: " + why + ". Its checkpoint is read instead, which may name pods that have ended, and does not name the pods of claims."
}

// listingTimeout limits the kubelet's time to answer.
const listingTimeout = 10 * time.Second
