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
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/types"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/cmd/chandler/informant"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger"
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

	plan     bool // else the status
	to, next string
}

func newMigrateCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Say what a move from one API to the other does on a node, and how far it is",
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
		Short: "Print, device by device, what a move would do",
		Long: `Print what would become of each device of this node, or of a recorded host, if the
node got the label chandler.dev/mode (--to) or another configuration (--next):
which devices move at once, which wait for which pods, what the scheduler counts
twice meanwhile, and what pods lose and gain. It changes nothing, and asks no API
server: a claim that is allocated and not prepared yet is not known here.

On a node it reads the agent's directory and asks the kubelet's PodResources API.
Of a recorded host it takes all devices for free, unless --kubelet-root and
--device-plugin-dir name copies of the directories of its kubelet.`,
		Example: `  kubectl -n chandler exec POD -- /chandler migrate plan --host-root=/host
  chandler migrate plan --to=DevicePlugin -o json
  chandler migrate plan rack7.host --config config.yaml --node-labels=pool=training
  chandler migrate plan --next new-config.yaml`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), args)
		},
	}
	o.addFlags(cmd)
	cmd.Flags().StringVar(&o.to, "to", string(v1alpha1.ModeDRA), "value of the label chandler.dev/mode that the node would get: DRA, DevicePlugin or Auto")
	cmd.Flags().StringVar(&o.next, "next", "", "instead, the DriverConfig `file` that the agent would get")
	cmd.MarkFlagsMutuallyExclusive("to", "next")
	return cmd
}

func newMigrateStatusCommand() *cobra.Command {
	var o migrateOptions
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Print how far the devices of this node have come",
		Long: `Print which API offers each device of this node, and which devices wait for which
pods, by the configuration and the labels that are in force and by what the agent
has decided.`,
		Example: `  kubectl -n chandler exec POD -- /chandler migrate status --host-root=/host`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), nil)
		},
	}
	o.addFlags(cmd)
	return cmd
}

// defaultKubeletRoot is the kubelet's --root-dir where nothing else is said.
const defaultKubeletRoot = "/var/lib/kubelet"

func (o *migrateOptions) addFlags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&o.hostRoot, "host-root", "/", "`directory` that holds the host's /sys, /proc and /dev")
	flags.StringVar(&o.kubeletRoot, "kubelet-root", defaultKubeletRoot, "the kubelet's `directory`, its --root-dir")
	flags.StringVar(&o.devicePluginDir, "device-plugin-dir", pluginapi.DevicePluginPath, "the kubelet's device-plugins `directory`, which is here whatever its --root-dir")
	flags.StringVar(&o.config, "config", "", "DriverConfig `file` that is in force; that which the agent keeps if left out")
	nodeFlags(flags, &o.node)
	flags.StringVarP(&o.output, "output", "o", "table", "table or json")
}

// run plans a move, or else says how far the last one is.
func (o *migrateOptions) run(ctx context.Context, out, errOut io.Writer, args []string) error {
	if o.output != "table" && o.output != "json" {
		return fmt.Errorf("output format %q: want table or json", o.output)
	}
	var err error
	if o.node.Name, err = nodeName(o.node.Name); err != nil {
		return err
	}
	n, err := o.look(ctx, errOut, args)
	if err != nil {
		return err
	}
	next := n.Rules
	switch {
	case o.plan:
		if next, err = o.nextRules(n.text); err != nil {
			return err
		}
	case n.API == nil:
		return fmt.Errorf("%s: no agent has decided yet which API offers what", filepath.Join(o.kubeletRoot, stateDir))
	}
	m := migration{Node: o.node.Name, plan: o.plan}
	m.add(n.Plan(next), n.Entries, n.pods) //nolint:contextcheck // evaluating an expression does not block
	if o.output == "json" {
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		return encoder.Encode(m)
	}
	return m.print(out)
}

// stateDir is the agent's directory below the kubelet's.
const stateDir = "plugins/" + discovery.Domain

// nodeNow is a node as it is.
type nodeNow struct {
	agent.Standing
	text []byte                            // of the configuration that is in force
	pods map[types.NamespacedName][]string // that have each claim
	said *kubeletapi.Listing               // the kubelet's word, nil if it was not asked or did not answer

	functions int // PCI functions of the host
}

// look reads how a node is.
func (o *migrateOptions) look(ctx context.Context, errOut io.Writer, args []string) (n nodeNow, err error) {
	kubelet, devicePlugins := os.DirFS(o.kubeletRoot), os.DirFS(o.devicePluginDir)
	if _, err := fs.Stat(kubelet, "."); err != nil && o.kubeletRoot != defaultKubeletRoot {
		return n, fmt.Errorf("the kubelet's directory %s: %w", o.kubeletRoot, err)
	}
	listing, unlisted := o.listing(ctx)
	host := &discovery.Host{}
	if len(args) == 1 {
		recorded, err := readRecorded(args[0])
		if err != nil {
			return n, err
		}
		host.FS = recorded.FS()
		if o.kubeletRoot == defaultKubeletRoot { // this machine's says nothing of the recorded one
			kubelet, _ = fs.Sub(host.FS, "var/lib/kubelet") // the paths are right
			devicePlugins, _ = fs.Sub(kubelet, "device-plugins")
			listing = nil
		}
	} else if host.FS, err = hostfs.Open(o.hostRoot); err != nil {
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
	host = configuredHost(host.FS, config)
	if len(args) == 0 {
		informant.Ask(ctx, host, families.All, o.hostRoot, errOut)
		if unlisted != nil {
			fmt.Fprintln(errOut, unlistedText(o.podResources(), unlisted))
		}
	}
	if n.Devices, err = (discovery.Watch{Host: host, Families: families.All}).Once(ctx); err != nil {
		return n, err
	}
	boot, _ := host.ReadText("/proc/sys/kernel/random/boot_id") // without it, records of any boot count
	if n.Entries, err = ledger.ReadEntries(kubelet, stateDir, boot); err != nil {
		return n, fmt.Errorf("who has what: %w", err)
	}
	n.said = listing
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

// inForce reads the configuration, the labels and the placement that are in force.
func (o *migrateOptions) inForce(ctx context.Context, state fs.FS, n *nodeNow) (config *v1alpha1.DriverConfig, err error) {
	if o.config != "" {
		n.text, err = os.ReadFile(o.config)
	} else if n.text, err = fs.ReadFile(state, agent.KeptConfig); errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return nil, fmt.Errorf("read config: %w", err)
	}
	if o.node.Labels == nil {
		o.node.Labels = keptLabels(ctx, state)
	}
	if config, n.Rules, err = parseConfig(n.text, o.node); err != nil {
		return nil, fmt.Errorf("config %s: %w", cmp.Or(o.config, "that the agent keeps"), err)
	}
	if n.API, n.Auto, err = agent.ReadPlacement(state); err != nil {
		return nil, err
	}
	if n.Auto == discovery.ModeAuto { // it is not known, so that all that can move counts as to be moved
		n.Auto = discovery.ModeDevicePlugin
		if o.to == string(v1alpha1.ModeDevicePlugin) {
			n.Auto = discovery.ModeDRA
		}
	}
	return config, nil
}

// nextRules returns the rules that the node would get.
func (o *migrateOptions) nextRules(text []byte) (*rules.Rules, error) {
	node := o.node
	if o.next != "" {
		_, compiled, err := loadConfig(o.next, node)
		return compiled, err
	}
	node.Labels = maps.Clone(node.Labels)
	if node.Labels == nil {
		node.Labels = make(map[string]string)
	}
	node.Labels[v1alpha1.LabelMode] = o.to
	_, compiled, err := parseConfig(text, node)
	return compiled, err
}

// grant adds what a container has by the device-plugin API, unless the agent has written
// it down. Another plugin may have given it, or the agent has not seen it yet.
func (n *nodeNow) grant(stock *list.Stock, resource, container string, ids []string) {
	for _, id := range ids {
		if slices.ContainsFunc(n.Entries, func(e ledger.Entry) bool { return e.Key() == ledger.GrantKey(resource, id) }) {
			continue
		}
		if g, _ := stock.WithID(resource, id); g != nil {
			g.Container = container
			n.Entries = append(n.Entries, g)
		}
	}
}

// addListed adds what the kubelet says.
func (n *nodeNow) addListed(listing *kubeletapi.Listing) {
	n.pods = make(map[types.NamespacedName][]string)
	stock := list.StockOf(n.Devices.Devices, list.Lists{})
	for _, pod := range listing.Pods {
		name := kubeletapi.PodName(pod)
		for _, c := range pod.Containers {
			for _, d := range c.Devices {
				n.grant(stock, d.ResourceName, name+" "+c.Name, d.DeviceIds)
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

// addWritten adds what the kubelet has in its checkpoint. It keeps entries of pods that have
// ended, whose directories are gone.
func (n *nodeNow) addWritten(kubelet, devicePlugins fs.FS) error {
	written, err := legacy.Written(devicePlugins)
	_, unknown := fs.Stat(kubelet, "pods")
	stock := list.StockOf(n.Devices.Devices, list.Lists{})
	for _, h := range written {
		if _, err := fs.Stat(kubelet, path.Join("pods", h.PodUID)); unknown == nil && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		n.grant(stock, h.Resource, fmt.Sprintf("UID/%s %s", h.PodUID, h.Container), h.IDs)
	}
	return err
}

// listing asks the kubelet what containers have.
func (o *migrateOptions) listing(ctx context.Context) (*kubeletapi.Listing, error) {
	ctx, cancel := context.WithTimeout(ctx, listingTimeout)
	defer cancel()
	return kubeletapi.ListPods(ctx, o.podResources())
}

// podResources is the socket at which the kubelet says who has devices.
func (o *migrateOptions) podResources() string {
	return filepath.Join(o.kubeletRoot, "pod-resources", "kubelet.sock")
}

// unlistedText says what it means that the kubelet did not say at a socket who has devices.
func unlistedText(socket string, err error) string {
	why := err.Error()
	if errors.Is(err, fs.ErrNotExist) {
		why = socket + " is not there"
	}
	return "The kubelet does not say which pods have devices: " + why + ". Its checkpoint is read instead, which may name pods that have ended, and does not name the pods of claims."
}

// listingTimeout is how long the kubelet may take to answer.
const listingTimeout = 10 * time.Second

// migration is what becomes of the devices of a node.
type migration struct {
	Node      string            `json:"node"`
	Devices   []migratingDevice `json:"devices"`
	Resources []*migratingName  `json:"resources"`
	Notes     []string          `json:"notes"`

	plan bool
}

type migratingDevice struct {
	agent.Step
	WaitsFor []string `json:"waitsFor,omitempty"`
}

// migratingName is a classic name, and how many devices of it there are.
type migratingName struct {
	Name         string `json:"name"`
	Moves        int    `json:"moves"`        // to another API at once
	Waits        int    `json:"waits"`        // for pods
	DRA          int    `json:"dra"`          // that DRA is to offer
	DevicePlugin int    `json:"devicePlugin"` // that the device plugin is to offer, and that nobody has by DRA

	// CountedTwice is how many of the name pods have through DRA that asked for it by
	// limits, while the device plugin offers others. The scheduler counts these
	// pods against what the device plugin has.
	CountedTwice int `json:"countedTwice"`
}

// add adds the devices.
func (m *migration) add(steps []agent.Step, entries []ledger.Entry, pods map[types.NamespacedName][]string) {
	names := make(map[string]*migratingName)
	m.Devices, m.Resources = make([]migratingDevice, 0, len(steps)), []*migratingName{}
	for _, step := range steps {
		d := migratingDevice{Step: step}
		for _, owner := range step.Owners {
			d.WaitsFor = append(d.WaitsFor, ownerText(owner, pods))
		}
		m.Devices = append(m.Devices, d)
		for _, name := range step.Resources {
			if names[name] == nil {
				names[name] = &migratingName{Name: name}
				m.Resources = append(m.Resources, names[name])
			}
			names[name].count(step, entries)
		}
	}
	for _, n := range m.Resources {
		if n.DevicePlugin == 0 {
			n.CountedTwice = 0 // without any of the name on the node, DRA alone counts
		}
	}
	m.note()
}

func ownerText(owner ledger.Owner, pods map[types.NamespacedName][]string) string {
	if owner.API == discovery.ModeDevicePlugin {
		return "pod " + owner.String()
	}
	if by := pods[types.NamespacedName{Namespace: owner.Namespace, Name: owner.Name}]; len(by) > 0 {
		return fmt.Sprintf("pod %s, %s", strings.Join(by, " and "), owner)
	}
	return owner.String()
}

// limitRequest is how the scheduler names the requests of the claim that it makes for a
// pod that asks by limits (pkg/scheduler/framework/plugins/dynamicresources/
// extendeddynamicresources.go, createRequestsAndMappings, in 1.35 to 1.37).
var limitRequest = regexp.MustCompile(`^container-\d+-request-\d+$`)

func (n *migratingName) count(step agent.Step, entries []ledger.Entry) {
	switch step.Fate {
	case agent.Moves:
		n.Moves++
	case agent.Waits:
		n.Waits++
	}
	switch {
	case step.Fate == agent.Excluded:
	case step.To == discovery.ModeDRA:
		n.DRA++
	case step.Fate != agent.Waits:
		n.DevicePlugin++
	}
	for _, e := range entries {
		claim, ok := e.(*ledger.Claim)
		if !ok {
			continue
		}
		for _, r := range claim.Results {
			if r.Source == step.Device && limitRequest.MatchString(r.Request) {
				n.CountedTwice++
			}
		}
	}
}

// note says what the move means for the scheduler and for pods. The scheduler's rules
// are those of pkg/scheduler/framework/plugins/noderesources/fit.go, fitsRequest and
// shouldDelegateResourceToDRA, read in 1.35 to 1.37.
func (m *migration) note() {
	m.Notes = []string{}
	say := func(format string, args ...any) { m.Notes = append(m.Notes, fmt.Sprintf(format, args...)) }
	for _, n := range m.Resources {
		switch {
		case n.CountedTwice > 0:
			say("%s: pods that asked for it by limits have %d through DRA. The scheduler counts them against the %d that the device plugin offers, too, so that %d more fit until these pods end.",
				n.Name, n.CountedTwice, n.DevicePlugin, max(0, n.DevicePlugin-n.CountedTwice))
		case n.DRA > 0 && n.DevicePlugin > 0:
			say("%s: the device plugin keeps %d of them. While it has a healthy one, pods that ask for the name by limits get no device through DRA on this node, and the %d there are for claims only.", n.Name, n.DevicePlugin, n.DRA)
		case n.DRA > 0 && n.Moves+n.Waits > 0:
			say("%s: the node has none of the device plugin's from now on, so nothing is counted twice: pods that ask for the name by limits go to DRA, if a DeviceClass has it as extendedResourceName.", n.Name)
		}
	}
	to := func(mode discovery.Mode) bool {
		return slices.ContainsFunc(m.Devices, func(d migratingDevice) bool { return d.To == mode && (d.Fate == agent.Moves || d.Fate == agent.Waits) })
	}
	if to(discovery.ModeDRA) {
		say("New pods lose: hints for the Topology Manager, which knows nothing of DRA; the choice of neighbours by GetPreferredAllocation (the scheduler takes the first free devices); their device IDs in PodResources, where the devices are under dynamicResources, by claim and CDI name.")
		say("New pods gain: claims with selectors and constraints, the devices' health in the claim's status, eviction by taints, files with the devices' attributes.")
	}
	if to(discovery.ModeDevicePlugin) {
		say("New pods lose: claims (a pod that names one waits for another node), constraints, the devices' health in the claim's status, eviction by taints, files with the devices' attributes.")
		say("New pods gain: hints for the Topology Manager, the choice of neighbours by GetPreferredAllocation, their device IDs in PodResources.")
	}
}

// print prints a table, how many devices move and wait, and the notes.
func (m *migration) print(out io.Writer) error {
	var b strings.Builder
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	what := "NOW"
	if m.plan {
		what = "WHAT"
	}
	fmt.Fprintf(table, "DEVICE\tRESOURCE\tFROM\tTO\t%s\tFOR\n", what)
	count, words := make(map[agent.Fate]int), standing
	if m.plan {
		words = planned
	}
	for _, d := range m.Devices {
		count[d.Fate]++
		reason := strings.Join(d.WaitsFor, "; ")
		if d.Fate == agent.Waits && reason == "" {
			reason = d.Reason
		}
		row := []string{d.Device, strings.Join(d.Resources, ","), string(d.From), string(d.To), string(d.Fate), reason}
		for i := range row {
			row[i] = cmp.Or(row[i], "-")
		}
		fmt.Fprintln(table, strings.Join(row, "\t"))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(&b, "\n%s: ", inventory.Plural(len(m.Devices), "device"))
	var counts []string
	for _, fate := range []agent.Fate{agent.Stays, agent.Moves, agent.Changes, agent.Excluded, agent.Waits} {
		if count[fate] > 0 {
			one := min(count[fate], 2) - 1
			counts = append(counts, fmt.Sprintf("%d %s", count[fate], words[fate][one]))
		}
	}
	fmt.Fprintln(&b, cmp.Or(strings.Join(counts, ", "), "nothing to do"))
	for _, note := range m.Notes {
		fmt.Fprintf(&b, "\n- %s", note)
	}
	if len(m.Notes) > 0 {
		fmt.Fprintln(&b)
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// Words for what becomes of a device, and of several, in a plan and in a status.
var (
	planned = map[agent.Fate][2]string{
		agent.Stays:    {"stays", "stay"},
		agent.Moves:    {"moves at once", "move at once"},
		agent.Changes:  {"changes at once", "change at once"},
		agent.Excluded: {"is excluded at once", "are excluded at once"},
		agent.Waits:    {"waits", "wait"},
	}
	standing = map[agent.Fate][2]string{
		agent.Stays:    {"is where it is to be", "are where they are to be"},
		agent.Moves:    {"moves next", "move next"},
		agent.Changes:  {"changes next", "change next"},
		agent.Excluded: {"is excluded next", "are excluded next"},
		agent.Waits:    {"waits", "wait"},
	}
)
