package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/cmd/chandler/agent/telemetry"
	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/pciids"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/command"
	"chandler.dev/internal/doctor/gather"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/inventory/text"
	"chandler.dev/internal/terminal"
)

type inventoryOptions struct {
	migrateOptions

	ascii bool
	serve string // address of the web UI, "" for none
}

func newInventoryCommand() *cobra.Command {
	var o inventoryOptions
	cmd := &cobra.Command{
		Use:   "inventory [RECORDED.host]",
		Short: "Print the devices of this node with their topology and consumers",
		Long: `Print the devices of this node, or of a host recording, by their place in the
machine: below NUMA nodes, PCIe roots and switches, with private links on the right.
The output has the health of each device, its consumers with their API and age, and
pending moves to the other API.

On a node, the command reads the agent's directory and the kubelet's PodResources
API, and therefore must run as root. In the agent's pod, it uses the agent's options.
It does not contact the API server, and changes nothing. On a machine without a
kubelet, and for a host recording, the consumers are unknown, unless --kubelet-root
names a copy of the kubelet's directory.

With --serve, the command serves the web UI instead, until it is interrupted.`,
		Example: `  kubectl -n chandler exec POD -- /chandler inventory
  chandler inventory rack7.host
  chandler inventory --serve rack7.host
  chandler inventory -o json | jq '.devices[] | select(.state == "free") | .name'`,
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
	output := cmd.Flags().Lookup("output")
	output.Usage, output.DefValue = "tree, json or yaml", "tree"
	o.output = "tree"
	cmd.Flags().BoolVar(&o.ascii, "ascii", false, "print only ASCII characters")
	cmd.Flags().StringVar(&o.serve, "serve", "", "serve the web UI at this `address`, written as --serve=ADDRESS; it shows pods and has no authentication")
	cmd.Flags().Lookup("serve").NoOptDefVal = pageAddress
	return cmd
}

func (o *inventoryOptions) run(ctx context.Context, out, errOut io.Writer, args []string) error {
	if o.output != "tree" && o.output != "json" && o.output != "yaml" {
		return command.UsageError(fmt.Errorf("output format %q: want tree, json or yaml", o.output))
	}
	facts, err := o.facts(ctx, errOut, args)
	if err != nil {
		return err
	}
	if o.output != "tree" || o.serve != "" {
		if facts.Classes, err = shippedClasses(); err != nil {
			return err
		}
	}
	if o.serve != "" {
		return o.serveInventory(ctx, out, facts, args) //nolint:contextcheck // evaluating an expression does not block
	}
	return printInventory(out, errOut, inventory.Make(facts), o.output, o.ascii) //nolint:contextcheck // evaluating an expression does not block
}

// facts returns the input of the inventory.
func (o *inventoryOptions) facts(ctx context.Context, errOut io.Writer, args []string) (inventory.Facts, error) {
	host, err := settings.HostOf(args, o.hostRoot), error(nil)
	if o.node.Name, err = host.NodeName(o.node.Name); err != nil {
		return inventory.Facts{}, err
	}
	kubelet := o.kubeletRoot
	asked := len(args) == 0 || kubelet != defaultKubeletRoot
	if _, err := os.Stat(kubelet); err != nil && kubelet == defaultKubeletRoot {
		asked = false
	}
	warnings := errOut
	if !asked {
		warnings = io.Discard // there is no kubelet to query
	}
	n, err := o.readNode(ctx, warnings, args)
	if err != nil {
		return inventory.Facts{}, err
	}
	files := os.DirFS(kubelet)
	if asked {
		n.Devices = applyStates(files, n.Devices)
	}
	facts := telemetry.StandingFacts(n.Standing, n.listing, files, stateDir) //nolint:contextcheck // evaluating an expression does not block
	facts.ConsumersKnown, facts.Functions, facts.Products, facts.At = asked, n.functions, n.products, time.Now()
	facts.Name, facts.Version, facts.Families = o.node.Name, buildVersion(), len(families.All)
	if host.Recording != "" {
		facts.Recorded = filepath.Base(host.Recording)
		facts.Name, err = host.Name()
	}
	return facts, err
}

// lookInterval is the minimum interval between two scans for the web UI.
const lookInterval = 2 * time.Second

// serveInventory serves the web UI. The machine is scanned again on request, at most once per
// lookInterval.
func (o *inventoryOptions) serveInventory(ctx context.Context, out io.Writer, facts inventory.Facts, args []string) error {
	var mu sync.Mutex
	last := inventory.Make(facts)
	read := func() *inventory.Inventory {
		mu.Lock()
		defer mu.Unlock()
		if facts.Recorded != "" || time.Since(last.At) < lookInterval {
			return last
		}
		if now, err := o.facts(ctx, io.Discard, args); err == nil {
			now.Classes = facts.Classes
			last = inventory.Make(now)
		}
		return last
	}
	return servePage(ctx, out, o.serve, read)
}

// applyStates returns a snapshot with the device states from the agent's file, and the times since
// when they hold. If the file is missing or unreadable, the snapshot is returned unchanged.
func applyStates(kubelet fs.FS, s *discovery.Snapshot) *discovery.Snapshot {
	var settler scan.Settler
	data, err := fs.ReadFile(kubelet, stateDir+"/"+agent.HealthFile)
	if err != nil || json.Unmarshal(data, &settler) != nil {
		return s
	}
	said, _ := settler.SettleStates(s, time.Now())
	return said
}

// printInventory prints an inventory, and the problems on errOut.
func printInventory(out, errOut io.Writer, inv *inventory.Inventory, format string, ascii bool) error {
	if err := writeInventory(out, inv, format, ascii); err != nil {
		return err
	}
	printProblems(errOut, inv.Problems, func(device string) string {
		if d := inv.Device(device); d != nil && format == "tree" {
			return d.Health.Reason
		}
		return ""
	})
	return nil
}

// printProblems prints each cause of each problem once, with the devices that have it. It leaves out the
// causes in the text that shown returns for a device, and causes that another cause of the same device
// ends with: two families may have failed to read the same file.
func printProblems(errOut io.Writer, problems []inventory.Problem, shown func(device string) string) {
	causes, order, devices := make(map[string][]string), []string(nil), make(map[string][]string)
	for _, p := range problems {
		causes[p.Device] = append(causes[p.Device], strings.Split(p.Error, "\n")...)
	}
	for _, p := range problems {
		printed := strings.Split(shown(p.Device), "\n")
		for cause := range strings.SplitSeq(p.Error, "\n") {
			longer := func(other string) bool { return strings.HasSuffix(other, ": "+cause) }
			if slices.Contains(printed, cause) || slices.ContainsFunc(slices.Concat(printed, causes[p.Device]), longer) {
				continue
			}
			if devices[cause] == nil {
				order = append(order, cause)
			}
			if !slices.Contains(devices[cause], p.Device) {
				devices[cause] = append(devices[cause], p.Device)
			}
		}
	}
	for _, cause := range order {
		fmt.Fprintf(errOut, "problem: %s: %s\n", terminal.SafeText(strings.Join(devices[cause], ", ")), terminal.SafeText(cause))
	}
}

// problemsOf returns the problems of a scan.
func problemsOf(problems []discovery.Problem) []inventory.Problem {
	texts := make([]inventory.Problem, len(problems))
	for i, p := range problems {
		texts[i] = inventory.Problem{Device: p.Device, Error: p.Text()}
	}
	return texts
}

func writeInventory(out io.Writer, inv *inventory.Inventory, format string, ascii bool) error {
	switch format {
	case "json":
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		return encoder.Encode(inv)
	case "yaml":
		data, err := yaml.Marshal(inv)
		if err != nil {
			return err
		}
		_, err = out.Write(data)
		return err
	}
	return text.Print(out, inv, terminal.StyleOf(out, os.LookupEnv, ascii))
}

// treePrinter returns a function that prints a snapshot as a tree, without consumers.
func (o discoverOptions) treePrinter(args []string) printFunc {
	return func(out io.Writer, s *rules.Snapshot, products pciids.Names) error {
		name, err := settings.HostOf(args, o.hostRoot).Name()
		if err != nil {
			return err
		}
		if len(args) == 0 {
			name = cmp.Or(o.node.Name, name)
		}
		facts := inventory.Facts{Snapshot: s, Products: products, Families: len(families.All), At: time.Now(), Name: name}
		return writeInventory(out, inventory.Make(facts), "tree", o.ascii)
	}
}
