package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/families/fpgaintel"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/network"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/handover"
)

// loadConfig reads a configuration file and returns the part for a node. Without a file, loadConfig
// returns the defaults.
func loadConfig(file string, node v1alpha1.Node) (*v1alpha1.DriverConfig, *rules.Rules, error) {
	var data []byte
	if file != "" {
		var err error
		if data, err = os.ReadFile(file); err != nil {
			return nil, nil, fmt.Errorf("read config: %w", err)
		}
	}
	config, compiled, err := parseConfig(data, node)
	if err != nil {
		return nil, nil, fmt.Errorf("config %s: %w", file, err)
	}
	return config, compiled, nil
}

// checkConfig decodes and checks a configuration with its expressions, for all nodes. Without data,
// it returns the defaults.
func checkConfig(data []byte) (*v1alpha1.DriverConfig, error) {
	if data == nil {
		return &v1alpha1.DriverConfig{Mode: v1alpha1.ModeAuto}, nil
	}
	config, err := v1alpha1.ParseDriverConfig(data)
	if err != nil {
		return nil, err
	}
	_, err = compileRules(config)
	if err := errors.Join(checkRoots(config.DriverRoots), checkSeverity(config.Health.Severity), err); err != nil {
		return nil, err
	}
	return config, nil
}

// parseConfig checks a configuration, and compiles the part for a node. With the error
// [v1alpha1.ErrNoLabels], the result contains only the parts independent of labels.
func parseConfig(data []byte, node v1alpha1.Node) (*v1alpha1.DriverConfig, *rules.Rules, error) {
	config, err := checkConfig(data)
	if err != nil {
		return nil, nil, err
	}
	config, unknown := config.On(node)
	if config == nil {
		return nil, nil, unknown
	}
	compiled, err := compileRules(config)
	return config, compiled, errors.Join(err, unknown)
}

// nodeFlags adds the flags that select the node whose configuration a command reads.
func nodeFlags(flags *pflag.FlagSet, node *v1alpha1.Node) {
	flags.StringVar(&node.Name, "node-name", os.Getenv("NODE_NAME"), "read the configuration of the `node` with this name; by default $NODE_NAME, or else the host's name")
	flags.StringToStringVar(&node.Labels, "node-labels", nil, "and with these `labels`: pool=training,chandler.dev/mode=DRA")
}

// nodeName returns the name of a node in Kubernetes: the given name, or else the host's name.
func nodeName(said string) (string, error) {
	if said == "" {
		name, err := os.Hostname()
		if err != nil {
			return "", fmt.Errorf("node name: %w", err)
		}
		said = strings.ToLower(name)
	}
	if messages := validation.IsDNS1123Subdomain(said); len(messages) > 0 {
		return "", fmt.Errorf("node name %q: %s; set --node-name", said, strings.Join(messages, "; "))
	}
	return said, nil
}

// loadConfigHere is [loadConfig] for a node whose name is optional. Without a file, nothing depends
// on the name, so that an invalid host name, such as "(none)", does no harm.
func loadConfigHere(file string, node v1alpha1.Node) (*v1alpha1.DriverConfig, *rules.Rules, error) {
	var err error
	if file != "" || node.Name != "" {
		node.Name, err = nodeName(node.Name)
	}
	if err != nil {
		return nil, nil, err
	}
	config, compiled, err := loadConfig(file, node)
	if errors.Is(err, v1alpha1.ErrNoLabels) {
		err = fmt.Errorf("%w: set --node-labels", err)
	}
	return config, compiled, err
}

// configuredHost returns a host with the settings of a configuration.
func configuredHost(fsys fs.FS, config *v1alpha1.DriverConfig) *discovery.Host {
	pool := func(r v1alpha1.Resource) bool { return r.SRIOV != nil }
	host := &discovery.Host{FS: fsys, Roots: config.DriverRoots, Pools: slices.ContainsFunc(config.Resources, pool)}
	for _, entry := range config.Passthrough {
		selector, err := rules.Compile(entry.CEL)
		if err != nil {
			continue // compileRules reports the error
		}
		host.Rebind = append(host.Rebind, discovery.Rebinding{Expression: entry.CEL, Selects: selector.Selects, Driver: cmp.Or(entry.Driver, "vfio-pci")})
	}
	for _, entry := range config.OnDemand.VirtualFunctions {
		selector, err := rules.Compile(entry.CEL)
		if err != nil {
			continue // compileRules reports the error
		}
		host.VirtualFunctions = append(host.VirtualFunctions, discovery.VirtualFunctions{Expression: entry.CEL, Selects: selector.Selects, Count: entry.Count})
	}
	for _, entry := range config.OnDemand.Partitions {
		selector, err := rules.Compile(entry.CEL)
		if err != nil {
			continue // compileRules reports the error
		}
		host.Partition = append(host.Partition, discovery.Partitioning{Expression: entry.CEL, Selects: selector.Selects})
	}
	for _, kind := range []discovery.UpkeepKind{discovery.UpkeepMPS, discovery.UpkeepTimeSlices} {
		for _, entry := range upkeep(config, kind) {
			if selector, err := rules.Compile(entry.CEL); err == nil { // compileRules reports the error
				host.Upkeep = append(host.Upkeep, discovery.Upkeep{Kind: kind, Expression: entry.CEL, Selects: selector.Selects})
			}
		}
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

// upkeep returns the selectors of the devices for a kind of sharing daemon.
func upkeep(config *v1alpha1.DriverConfig, kind discovery.UpkeepKind) []v1alpha1.Selector {
	if kind == discovery.UpkeepMPS {
		return config.OnDemand.MPS
	}
	return config.OnDemand.TimeSlices
}

// handoverRules returns the reclaim rules: what the agent does with a device between two consumers.
func handoverRules(config *v1alpha1.DriverConfig) (out []handover.Rule) {
	for _, entry := range config.Reclaim {
		selector, err := rules.Compile(entry.CEL)
		if err != nil {
			continue // compileRules reports the error
		}
		out = append(out, handover.Rule{Expression: entry.CEL, Selects: selector.Selects, Reset: entry.Reset == v1alpha1.ResetFunction, Methods: entry.ResetMethods})
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

// checkRoots reports unknown driver roots.
func checkRoots(roots map[string]string) error {
	var known []string
	for _, f := range families.All {
		known = append(known, f.Roots...)
	}
	for _, name := range slices.Sorted(maps.Keys(roots)) {
		if !slices.Contains(known, name) {
			return fmt.Errorf("driverRoots[%s]: no family uses this root; want one of %s", name, strings.Join(known, ", "))
		}
	}
	return nil
}

// checkSeverity reports names of unknown conditions.
func checkSeverity(effects map[string]v1alpha1.Effect) error {
	known := discovery.Conditions()
	for name := range effects {
		if !slices.Contains(known, discovery.Condition(name)) {
			return fmt.Errorf("health.severity[%s]: unknown condition; want one of %v", name, known)
		}
	}
	return nil
}

// severityOf returns the configured effects of conditions.
func severityOf(effects map[string]v1alpha1.Effect) discovery.Severity {
	out := make(discovery.Severity, len(effects))
	for name, effect := range effects {
		out[discovery.Condition(name)] = resourceapi.DeviceTaintEffect(effect)
	}
	return out
}

// compileRules compiles the configuration's expressions. It reports all errors, each with its place
// in the file.
func compileRules(config *v1alpha1.DriverConfig) (*rules.Rules, error) {
	out := &rules.Rules{Mode: deviceMode(config.Mode), Allocation: allocations(config.Allocation)}
	var errs []error
	compile := func(list string, i int, selector v1alpha1.Selector) rules.Selector {
		compiled, err := rules.Compile(selector.CEL)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s[%d].cel: %w", list, i, err))
		}
		return compiled
	}
	for i, selector := range config.Exclude {
		out.Exclude = append(out.Exclude, compile("exclude", i, selector))
	}
	for i, sharing := range config.Sharing {
		share := rules.Share{
			Selector: compile("sharing", i, sharing.Selector),
			Resource: sharing.Resource,
			Replicas: sharing.Replicas,
			Pool:     sharing.Pool,
			Capacity: resourceapi.QualifiedName(cmp.Or(sharing.Capacity, "memory")),
		}
		if sharing.Unit != nil {
			share.Unit = *sharing.Unit
		}
		out.Sharing = append(out.Sharing, share)
	}
	for i, resource := range config.Resources {
		rule := rules.Resource{Selector: compile("resources", i, resource.Selector), Name: resource.Name}
		if resource.Mode != "" {
			mode := deviceMode(resource.Mode)
			rule.Mode = &mode
		}
		if id := functionID(resource.AcceleratorFunction); id != "" {
			rule.Want = discovery.Parameters{fpgaintel.AcceleratorFunction: id}
		}
		if resource.Driver != "" {
			rule.Want = discovery.Parameters{discovery.Driver: string(resource.Driver)}
		}
		if pool := resource.SRIOV; pool != nil {
			rule.SRIOV = &discovery.SRIOVPool{AdditionalInfo: pool.AdditionalInfo, NeedVhostNet: pool.NeedVhostNet, ExcludeTopology: pool.ExcludeTopology}
		}
		out.Resources = append(out.Resources, rule)
	}
	for i, entry := range config.Passthrough {
		compile("passthrough", i, entry.Selector)
	}
	for i, entry := range config.Reclaim {
		compile("reclaim", i, entry.Selector)
	}
	for i, entry := range config.OnDemand.VirtualFunctions {
		compile("onDemand.virtualFunctions", i, entry.Selector)
	}
	for i, entry := range config.OnDemand.Partitions {
		compile("onDemand.partitions", i, entry)
	}
	for _, kind := range []discovery.UpkeepKind{discovery.UpkeepMPS, discovery.UpkeepTimeSlices} {
		for i, entry := range upkeep(config, kind) {
			compile("onDemand."+string(kind), i, entry)
		}
	}
	for i, overhead := range config.Overhead {
		out.Overhead = append(out.Overhead, rules.Overhead{
			Selector:      compile("overhead", i, overhead.Selector),
			HostResources: hostResources(overhead),
		})
	}
	return out, errors.Join(errs...)
}

// allocations returns the allocation settings by resource.
func allocations(config []v1alpha1.Allocation) map[string]rules.Allocation {
	out := make(map[string]rules.Allocation, len(config))
	for _, a := range config {
		lists := func(strategies ...v1alpha1.DeviceListStrategy) bool {
			return slices.ContainsFunc(strategies, func(s v1alpha1.DeviceListStrategy) bool { return slices.Contains(a.DeviceListStrategy, s) })
		}
		out[a.Resource] = rules.Allocation{
			Policy: rules.Policy(a.Policy),
			One:    a.FailRequestsGreaterThanOne,
			Lists: rules.Lists{
				Plain:       lists(v1alpha1.ListEnvVar, v1alpha1.ListVolumeMounts),
				Annotations: lists(v1alpha1.ListCDIAnnotations),
				CDIDevices:  lists(v1alpha1.ListCDIDevices),
			},
			Naming: discovery.Naming{Mounts: lists(v1alpha1.ListVolumeMounts), Index: a.DeviceIDStrategy == v1alpha1.DeviceIDIndex},
			Env:    variables(a.Env),
			Alike:  qualified(a.Alike),
		}
	}
	return out
}

// qualified returns attribute names as devices have them, without the driver's own domain.
func qualified(attributes []string) (names []resourceapi.QualifiedName) {
	for _, name := range attributes {
		names = append(names, resourceapi.QualifiedName(strings.TrimPrefix(name, discovery.Domain+"/")))
	}
	return names
}

// variables returns environment variables as NAME=value, sorted by name.
func variables(env map[string]string) (variables []string) {
	for _, name := range slices.Sorted(maps.Keys(env)) {
		variables = append(variables, name+"="+env[name])
	}
	return variables
}

// hostResources returns an overhead by resource.
func hostResources(overhead v1alpha1.Overhead) rules.HostResources {
	out := make(rules.HostResources)
	for name, amount := range overhead.PerPod {
		out[corev1.ResourceName(name)] = resourceapi.NodeAllocatableOverhead{PerPod: &amount}
	}
	for name, amount := range overhead.PerContainer {
		of := out[corev1.ResourceName(name)]
		of.PerContainer = &amount
		out[corev1.ResourceName(name)] = of
	}
	return out
}

// readParameters decodes the parameters of a claim.
func readParameters(raw []byte) (discovery.Parameters, error) {
	said, err := v1alpha1.ParseClaimParameters(raw)
	if err != nil {
		return nil, err
	}
	parameters := discovery.Parameters{
		network.InterfaceName:         said.InterfaceName,
		fpgaintel.AcceleratorFunction: functionID(said.AcceleratorFunction),
		discovery.Driver:              string(said.Driver),
	}
	if said.ComputePercentage != nil {
		parameters[nvidia.ComputePercentage] = strconv.Itoa(*said.ComputePercentage)
	}
	if said.MPS != nil {
		parameters[nvidia.MPS] = "true"
		if said.MPS.MemoryMiB != nil {
			parameters[nvidia.MPSMemory] = strconv.Itoa(*said.MPS.MemoryMiB)
		}
	}
	parameters[nvidia.TimeSlice] = string(said.TimeSlice)
	for name, value := range said.Environment {
		parameters[discovery.Environment(name)] = value
	}
	maps.DeleteFunc(parameters, func(_ discovery.Parameter, value string) bool { return value == "" })
	return parameters, nil
}

// functionID returns the ID of an accelerator function in the kernel's notation.
func functionID(said string) string { return strings.ReplaceAll(strings.ToLower(said), "-", "") }

func deviceMode(mode v1alpha1.Mode) discovery.Mode {
	if mode == v1alpha1.ModeAuto {
		return discovery.ModeAuto
	}
	return discovery.Mode(mode)
}
