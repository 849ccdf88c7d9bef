// Package compile turns the configurations that users write into data: it checks them with their
// CEL expressions, and converts DriverConfigs to rules, ProvisionConfigs to plans, and the
// parameters of claims to the names of the families. It reads no host and no file.
package compile

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/families/fpgaintel"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/network"
	"chandler.dev/discovery/rules"
)

// Config decodes and checks a configuration with its expressions, for all nodes. Without data,
// it returns the defaults.
func Config(data []byte) (*v1alpha1.DriverConfig, error) {
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

// ForNode checks a configuration, and compiles the part for a node. With the error
// [v1alpha1.ErrNoLabels], the result contains only the parts independent of labels.
func ForNode(data []byte, node v1alpha1.Node) (*v1alpha1.DriverConfig, *rules.Rules, error) {
	config, err := Config(data)
	if err != nil {
		return nil, nil, err
	}
	config, unknown := config.ForNode(node)
	if config == nil {
		return nil, nil, unknown
	}
	compiled, err := compileRules(config)
	return config, compiled, errors.Join(err, unknown)
}

// UpkeepSelectors returns the selectors of the devices for a kind of sharing daemon.
func UpkeepSelectors(config *v1alpha1.DriverConfig, kind discovery.SharingDaemonKind) []v1alpha1.Selector {
	if kind == discovery.SharingDaemonMPS {
		return config.OnDemand.MPS
	}
	return config.OnDemand.TimeSlices
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
	for _, kind := range []discovery.SharingDaemonKind{discovery.SharingDaemonMPS, discovery.SharingDaemonTimeSlices} {
		for i, entry := range UpkeepSelectors(config, kind) {
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
			Alike:  qualifiedNames(a.Alike),
		}
	}
	return out
}

// qualifiedNames returns attribute names as devices have them, without the driver's own domain.
func qualifiedNames(attributes []string) (names []resourceapi.QualifiedName) {
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

// Parameters decodes the parameters of a claim.
func Parameters(raw []byte) (discovery.Parameters, error) {
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
		parameters[discovery.EnvironmentParameter(name)] = value
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
