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
	"k8s.io/apimachinery/pkg/util/validation/field"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/families/fpgaintel"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/network"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/selectors"
)

// NodeConfig is the part of a configuration that applies to a node, with the compiled expressions.
type NodeConfig struct {
	*v1alpha1.DriverConfig
	Rules *rules.Rules

	Passthroughs     []discovery.Selection[string]                                   // as in [discovery.Host]
	VirtualFunctions []discovery.Selection[int]                                      // as in [discovery.Host]
	Partitionings    []discovery.Selection[struct{}]                                 // as in [discovery.Host]
	SharingDaemons   map[discovery.SharingDaemonKind][]discovery.Selection[struct{}] // as in [discovery.Host]
	Reclaims         []discovery.Selection[v1alpha1.Reclaim]
}

// Config decodes and checks a configuration with its expressions, for all nodes. Without data,
// it returns the defaults.
func Config(data []byte) (*v1alpha1.DriverConfig, error) {
	return newCompiler(rules.Compile).check(data)
}

// ForNode checks a configuration, and compiles the part for a node. With the error
// [v1alpha1.ErrNoLabels], the result contains only the parts independent of labels.
func ForNode(data []byte, node v1alpha1.Node) (*NodeConfig, error) {
	return newCompiler(rules.Compile).forNode(data, node)
}

// compiler compiles each expression once, although the expressions of a configuration are checked for
// all nodes and used for one.
type compiler struct {
	compile  func(expression string) (rules.Selector, error)
	compiled map[string]rules.Selector // by expression

	// fields are the fields of the file with an expression, by list and expression. The lists of one
	// node have other indices than the file. If a list has an expression twice, the first one counts:
	// both fail for the same devices.
	fields map[[2]string]string
}

func newCompiler(compile func(expression string) (rules.Selector, error)) *compiler {
	return &compiler{compile, make(map[string]rules.Selector), make(map[[2]string]string)}
}

// selector returns the compiled form of an expression.
func (c *compiler) selector(expression string) (rules.Selector, error) {
	selector, is := c.compiled[expression]
	if is {
		return selector, nil
	}
	selector, err := c.compile(expression)
	if err == nil {
		c.compiled[expression] = selector
	}
	return selector, err
}

// check is [Config].
func (c *compiler) check(data []byte) (*v1alpha1.DriverConfig, error) {
	if data == nil {
		return &v1alpha1.DriverConfig{Mode: v1alpha1.ModeAuto}, nil
	}
	config, err := v1alpha1.ParseDriverConfig(data)
	if err != nil {
		return nil, err
	}
	_, errs := c.convert(config)
	errs = slices.Concat(checkRoots(config.DriverRoots), checkSeverity(config.Health.Severity), checkAttributes(config.Attributes), errs)
	if len(errs) > 0 {
		return nil, v1alpha1.JoinErrors(errs)
	}
	return config, nil
}

// forNode is [ForNode].
func (c *compiler) forNode(data []byte, node v1alpha1.Node) (*NodeConfig, error) {
	config, err := c.check(data)
	if err != nil {
		return nil, err
	}
	config, unknown := config.ForNode(node)
	if config == nil {
		return nil, unknown
	}
	compiled, errs := c.convert(config)
	return compiled, errors.Join(v1alpha1.JoinErrors(errs), unknown)
}

// checkRoots reports unknown driver roots.
func checkRoots(roots map[string]string) (errs field.ErrorList) {
	var known []string
	for _, f := range families.All {
		known = append(known, f.Roots...)
	}
	for _, name := range slices.Sorted(maps.Keys(roots)) {
		if !slices.Contains(known, name) {
			errs = append(errs, v1alpha1.InvalidField(field.NewPath("driverRoots").Key(name), "no family uses this root; want one of %s", strings.Join(known, ", "))...)
		}
	}
	return errs
}

// checkAttributes reports names of unknown attributes.
func checkAttributes(attributes []string) (errs field.ErrorList) {
	known := discovery.AttributeNames()
	for i, name := range attributes {
		if slices.Contains(known, name) {
			continue
		}
		detail := fmt.Sprintf("is %q; no device has this attribute", name)
		if nearest := selectors.NearestWord(name, known); nearest != "" {
			detail += "; the nearest name is " + nearest
		}
		errs = append(errs, v1alpha1.InvalidField(field.NewPath("attributes").Index(i), "%s", detail)...)
	}
	return errs
}

// checkSeverity reports names of unknown conditions.
func checkSeverity(effects map[string]v1alpha1.Effect) (errs field.ErrorList) {
	known := discovery.Conditions()
	for _, name := range slices.Sorted(maps.Keys(effects)) {
		if !slices.Contains(known, discovery.Condition(name)) {
			errs = append(errs, v1alpha1.InvalidField(field.NewPath("health", "severity").Key(name), "unknown condition; want one of %v", known)...)
		}
	}
	return errs
}

// convert returns a configuration with compiled expressions, and the errors of all expressions.
func (c *compiler) convert(config *v1alpha1.DriverConfig) (*NodeConfig, field.ErrorList) {
	out := &rules.Rules{Mode: deviceMode(config.Mode), ReportOnly: config.Mode == v1alpha1.ModeReportOnly, Allocation: allocations(config.Allocation)}
	for _, name := range config.Attributes {
		out.Attributes = append(out.Attributes, resourceapi.QualifiedName(name))
	}
	node := &NodeConfig{DriverConfig: config, Rules: out, SharingDaemons: make(map[discovery.SharingDaemonKind][]discovery.Selection[struct{}])}
	var errs field.ErrorList
	compile := func(list string, i int, selector v1alpha1.Selector) rules.Selector {
		at := field.NewPath(list).Index(i).Child("cel")
		compiled, err := c.selector(selector.CEL)
		if err != nil {
			errs = append(errs, v1alpha1.InvalidField(at, "%v", err)...)
		}
		key := [2]string{list, selector.CEL}
		if c.fields[key] == "" { // the whole configuration is converted first
			c.fields[key] = at.String()
		}
		return compiled.WithEntry(c.fields[key])
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
		selector := compile("passthrough", i, entry.Selector)
		node.Passthroughs = append(node.Passthroughs, rules.NewSelection(selector, cmp.Or(entry.Driver, "vfio-pci")))
	}
	for i, entry := range config.Reclaim {
		selector := compile("reclaim", i, entry.Selector)
		node.Reclaims = append(node.Reclaims, rules.NewSelection(selector, entry))
	}
	for i, entry := range config.OnDemand.VirtualFunctions {
		selector := compile("onDemand.virtualFunctions", i, entry.Selector)
		node.VirtualFunctions = append(node.VirtualFunctions, rules.NewSelection(selector, entry.Count))
	}
	for i, entry := range config.OnDemand.Partitions {
		selector := compile("onDemand.partitions", i, entry)
		node.Partitionings = append(node.Partitionings, rules.NewSelection(selector, struct{}{}))
	}
	sharing := func(kind discovery.SharingDaemonKind, entries []v1alpha1.Selector) {
		for i, entry := range entries {
			selector := compile("onDemand."+string(kind), i, entry)
			node.SharingDaemons[kind] = append(node.SharingDaemons[kind], rules.NewSelection(selector, struct{}{}))
		}
	}
	sharing(discovery.SharingDaemonMPS, config.OnDemand.MPS)
	sharing(discovery.SharingDaemonTimeSlices, config.OnDemand.TimeSlices)
	for i, overhead := range config.Overhead {
		out.Overhead = append(out.Overhead, rules.Overhead{
			Selector:      compile("overhead", i, overhead.Selector),
			HostResources: hostResources(overhead),
		})
	}
	return node, errs
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
			Naming:          discovery.Naming{Mounts: lists(v1alpha1.ListVolumeMounts), Index: a.DeviceIDStrategy == v1alpha1.DeviceIDIndex},
			Env:             variables(a.Env),
			MatchAttributes: qualifiedNames(a.MatchAttributes),
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
	if mode == v1alpha1.ModeAuto || mode == v1alpha1.ModeReportOnly {
		return discovery.ModeAuto
	}
	return discovery.Mode(mode)
}
