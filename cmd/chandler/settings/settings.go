// Package settings reads the agent's configuration for a node, follows its changes, and opens the host that a
// command examines.
package settings

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/internal/command"
	"chandler.dev/internal/compile"
	"chandler.dev/internal/reclaim"
)

// Load reads a configuration file and returns the part for a node. Without a file, Load
// returns the defaults.
func Load(file string, node v1alpha1.Node) (*compile.NodeConfig, error) {
	var data []byte
	if file != "" {
		var err error
		if data, err = os.ReadFile(file); err != nil {
			return nil, fmt.Errorf("read config: %w", err)
		}
	}
	config, err := compile.ForNode(data, node)
	if err != nil {
		return nil, fmt.Errorf("config %s: %w", file, err)
	}
	return config, nil
}

// NodeFlags adds the flags that select the node whose configuration a command reads.
func NodeFlags(flags *pflag.FlagSet, node *v1alpha1.Node) {
	flags.StringVar(&node.Name, "node-name", os.Getenv("NODE_NAME"), "read the configuration of the `node` with this name; by default $NODE_NAME, or else the host's name")
	flags.StringToStringVar(&node.Labels, "node-labels", nil, "and with these `labels`: pool=training,chandler.dev/mode=DRA")
}

// A Host is the host that a command examines: this machine, a directory tree of another host,
// or a host recording.
type Host struct {
	root      string // directory
	Recording string // file, or ""
}

// HostOf returns the host of a command with the argument [RECORDED.host] and the flag --host-root.
func HostOf(args []string, hostRoot string) Host {
	h := Host{root: hostRoot}
	if len(args) == 1 {
		h.Recording = args[0]
	}
	return h
}

// OneHost returns an error if the argument [RECORDED.host] and the flag --host-root name two hosts.
// Commands with both have it as PreRunE.
func OneHost(cmd *cobra.Command, args []string) error {
	if len(args) == 1 && cmd.Flags().Changed("host-root") {
		return command.UsageError(errors.New("a host recording and --host-root cannot be combined"))
	}
	return nil
}

// OpenHostRoot opens the directory with the files of a host.
func OpenHostRoot(dir string) (fs.FS, error) {
	if dir == "" {
		return nil, command.UsageError(errors.New("--host-root is empty; want the root directory of a host"))
	}
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return nil, fmt.Errorf("host root %s is a file and not a directory; pass a host recording as an argument, without --host-root", dir)
	}
	host, err := hostfs.Open(dir)
	if err != nil {
		return nil, err
	}
	if missing := MissingSys(host); missing != "" {
		return nil, fmt.Errorf("host root %s has %s; want the root directory of a host", dir, missing)
	}
	return host, nil
}

// MissingSys returns what is missing of a host's directory sys, or "". A directory without sysfs is not
// a host without devices.
func MissingSys(host fs.FS) string {
	if info, err := fs.Stat(host, "sys"); errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
		return "no directory sys"
	}
	if entries, err := fs.ReadDir(host, "sys"); err == nil && len(entries) == 0 {
		return "an empty directory sys"
	}
	return ""
}

// Name returns the name of the host. For a recording or another host, it is never the name of this
// machine.
func (h Host) Name() (string, error) {
	switch {
	case h.Recording == "-":
		return "recording", nil
	case h.Recording != "":
		return strings.TrimSuffix(filepath.Base(h.Recording), ".host"), nil
	case filepath.Clean(cmp.Or(h.root, "/")) == "/":
		name, err := os.Hostname()
		if err != nil {
			return "", fmt.Errorf("host name: %w", err)
		}
		return name, nil
	}
	host, err := OpenHostRoot(h.root) // links do not lead to the files of this machine
	if err != nil {
		return "", err
	}
	for _, file := range []string{"proc/sys/kernel/hostname", "etc/hostname"} {
		if data, err := fs.ReadFile(host, file); err == nil && len(bytes.TrimSpace(data)) > 0 {
			return string(bytes.TrimSpace(data)), nil
		}
	}
	return filepath.Base(h.root), nil
}

var notInNames = regexp.MustCompile(`[^a-z0-9.-]+`)

// NodeName returns the name of a node in Kubernetes: the given name, or else the host's name.
func (h Host) NodeName(given string) (string, error) {
	if given == "" {
		name, err := h.Name()
		if err != nil {
			return "", err
		}
		given = strings.ToLower(name)
		if h.Recording != "" { // the name of a file
			given = cmp.Or(strings.Trim(notInNames.ReplaceAllString(given, "-"), "-."), "recording")
		}
	}
	if messages := validation.IsDNS1123Subdomain(given); len(messages) > 0 {
		return "", fmt.Errorf("node name %q: %s; set --node-name", given, strings.Join(messages, "; "))
	}
	return given, nil
}

// LoadHere is [Load] for a node whose name is optional. Without a file, nothing depends
// on the name, so that an invalid host name, such as "(none)", does no harm.
func LoadHere(file string, node v1alpha1.Node, host Host) (*compile.NodeConfig, error) {
	var err error
	if file != "" || node.Name != "" {
		node.Name, err = host.NodeName(node.Name)
	}
	if err != nil {
		return nil, err
	}
	config, err := Load(file, node)
	if errors.Is(err, v1alpha1.ErrNoLabels) {
		err = fmt.Errorf("%w: set --node-labels", err)
	}
	return config, err
}

// ConfiguredHost returns a host with the settings of a configuration.
func ConfiguredHost(fsys fs.FS, config *compile.NodeConfig) *discovery.Host {
	pool := func(r v1alpha1.Resource) bool { return r.SRIOV != nil }
	host := &discovery.Host{
		FS: fsys, Roots: config.DriverRoots, Pools: slices.ContainsFunc(config.Resources, pool),
		Passthroughs: config.Passthroughs, VirtualFunctions: config.VirtualFunctions, Partitionings: config.Partitionings, SharingDaemons: config.SharingDaemons,
	}
	for _, resource := range config.Paths {
		named := discovery.PathResource{Name: resource.Name, Kind: resource.Kind, Env: resource.Env}
		for _, group := range resource.Groups {
			named.Groups = append(named.Groups, pathGroup(group))
		}
		host.Paths = append(host.Paths, named)
	}
	return host
}

// reclaimRules returns the reclaim rules: what the agent does with a device between two consumers.
func reclaimRules(config *compile.NodeConfig) (out []discovery.Selection[reclaim.Rule]) {
	for _, s := range config.Reclaims {
		rule := reclaim.Rule{Reset: s.Value.Reset == v1alpha1.ResetFunction, Methods: s.Value.ResetMethods}
		out = append(out, discovery.Selection[reclaim.Rule]{Expression: s.Expression, Selects: s.Selects, Value: rule})
	}
	return out
}

func pathGroup(group v1alpha1.PathGroup) discovery.PathGroup {
	out := discovery.PathGroup{Each: group.Each, Count: group.Count, Units: group.Units, UnitEnv: group.UnitEnv}
	for _, p := range group.Paths {
		out.Paths = append(out.Paths, discovery.HostPath{
			Path:        p.Path,
			MountPath:   p.MountPath,
			Permissions: p.Permissions,
			Mount:       p.Type == v1alpha1.PathTypeMount,
			ReadOnly:    p.ReadOnly,
			Limit:       p.Limit,
			Optional:    p.Optional,
		})
	}
	for _, device := range group.USB {
		out.USB = append(out.USB, discovery.USBID{
			Vendor:  fmt.Sprintf("%04s", strings.ToLower(device.Vendor)),
			Product: fmt.Sprintf("%04s", strings.ToLower(device.Product)),
			Serial:  device.Serial,
		})
	}
	return out
}

// SeverityOf returns the configured effects of conditions.
func SeverityOf(effects map[string]v1alpha1.Effect) discovery.Severity {
	out := make(discovery.Severity, len(effects))
	for name, effect := range effects {
		out[discovery.Condition(name)] = resourceapi.DeviceTaintEffect(effect)
	}
	return out
}
