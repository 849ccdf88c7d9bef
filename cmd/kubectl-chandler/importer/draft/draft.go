// Package draft builds the DriverConfig of an import. It writes an entry once, for the nodes of the
// entry's source, and checks that the entry is valid; the reason against an entry becomes a note.
package draft

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/notes"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// A Config is a DriverConfig under construction.
type Config struct {
	Driver    v1alpha1.DriverConfig
	Provision v1alpha1.ProvisionConfig // the work of plugins on PCI functions
	Origins   map[string][]string      // the sources of each list entry, by the name of the list

	Scope []*v1alpha1.Nodes // entries apply to the nodes of any of these terms, or to all nodes if empty
	Nodes *v1alpha1.Nodes   // the nodes of the entries that are being added; if nil, each entry's source decides

	notes *notes.List
	names map[string]bool // the resource names in the configuration
}

// New returns a configuration without entries. The list gets the reasons against entries.
func New(list *notes.List) *Config {
	c := &Config{notes: list, Origins: make(map[string][]string), names: make(map[string]bool)}
	c.Driver.APIVersion, c.Driver.Kind = v1alpha1.APIVersion, v1alpha1.KindDriverConfig
	c.Driver.Mode = v1alpha1.ModeDevicePlugin
	c.Provision.APIVersion, c.Provision.Kind = v1alpha1.APIVersion, v1alpha1.KindProvisionConfig
	return c
}

// AddExclude adds an expression for devices that are not offered.
func (c *Config) AddExclude(from source.Value, cel string) {
	for _, nodes := range c.NodesOf(from) {
		entry := v1alpha1.Selector{CEL: expression.BindDomain(cel), Nodes: nodes}
		if slices.ContainsFunc(c.Driver.Exclude, func(s v1alpha1.Selector) bool { return reflect.DeepEqual(s, entry) }) {
			continue
		}
		if c.fitsConfig(from, "", v1alpha1.DriverConfig{Exclude: []v1alpha1.Selector{entry}}) {
			c.Driver.Exclude = append(c.Driver.Exclude, entry)
			c.addOrigin("exclude", from)
		}
	}
}

// AddFunction adds PCI functions that "chandler provision" binds to a driver, as the plugin does.
func (c *Config) AddFunction(cel, driver string) {
	function := v1alpha1.Function{CEL: expression.BindDomain(cel), Driver: driver}
	if !slices.ContainsFunc(c.Provision.Functions, func(f v1alpha1.Function) bool { return reflect.DeepEqual(f, function) }) {
		c.Provision.Functions = append(c.Provision.Functions, function)
	}
}

// AddSharing adds an entry of sharing.
func (c *Config) AddSharing(from source.Value, cel string, sharing v1alpha1.Sharing) {
	sharing.CEL = expression.BindDomain(cel)
	if sharing.Replicas > MaxShares {
		c.notes.AddRemark(from, "%d containers at once are more than the %d that can be written, and than a node has", sharing.Replicas, MaxShares)
		sharing.Replicas = MaxShares
	}
	for _, nodes := range c.NodesOf(from) {
		sharing.Nodes = nodes
		if slices.ContainsFunc(c.Driver.Sharing, func(s v1alpha1.Sharing) bool { return reflect.DeepEqual(s, sharing) }) {
			continue // a pod and its DaemonSet can be imported together
		}
		if c.fitsConfig(from, sharing.Resource, v1alpha1.DriverConfig{Sharing: []v1alpha1.Sharing{sharing}}) {
			c.Driver.Sharing = append(c.Driver.Sharing, sharing)
			c.addOrigin("sharing", from)
		}
	}
}

// MaxShares is the highest number of containers per device.
const MaxShares = 4096

// AddResource adds an entry of resources, and reports whether the entry is valid.
func (c *Config) AddResource(from source.Value, name, cel string) bool {
	return c.AddPool(from, name, cel, nil)
}

// AddPool adds an entry of resources that may be a pool of the SR-IOV plugin, and reports whether
// the entry is valid.
func (c *Config) AddPool(from source.Value, name, cel string, sriov *v1alpha1.SRIOVPool) bool {
	ok := true
	for _, nodes := range c.NodesOf(from) {
		entry := v1alpha1.Resource{Name: name, Selector: v1alpha1.Selector{CEL: expression.BindDomain(cel), Nodes: nodes}, SRIOV: sriov}
		if slices.ContainsFunc(c.Driver.Resources, func(r v1alpha1.Resource) bool { return reflect.DeepEqual(r, entry) }) {
			continue
		}
		if !c.fitsConfig(from, name, v1alpha1.DriverConfig{Resources: []v1alpha1.Resource{entry}}) {
			ok = false
			continue
		}
		c.Driver.Resources = append(c.Driver.Resources, entry)
		c.addOrigin("resources", from)
	}
	return ok
}

// AddPaths adds an entry of paths, and reports whether the entry is valid.
func (c *Config) AddPaths(from source.Value, entry v1alpha1.PathResource) bool {
	ok := true
	for _, nodes := range c.NodesOf(from) {
		entry.Nodes = nodes
		if slices.ContainsFunc(c.Driver.Paths, func(p v1alpha1.PathResource) bool { return reflect.DeepEqual(p, entry) }) {
			continue
		}
		if !c.fitsConfig(from, entry.Name, v1alpha1.DriverConfig{Paths: []v1alpha1.PathResource{entry}}) {
			ok = false
			continue
		}
		c.Driver.Paths = append(c.Driver.Paths, entry)
		c.addOrigin("paths", from)
	}
	return ok
}

// SetAllocation changes the allocation settings of a resource.
func (c *Config) SetAllocation(from source.Value, name string, set func(*v1alpha1.Allocation)) {
	for _, nodes := range c.NodesOf(from) {
		i := slices.IndexFunc(c.Driver.Allocation, func(a v1alpha1.Allocation) bool {
			return a.Resource == name && reflect.DeepEqual(a.Nodes, nodes)
		})
		if i >= 0 {
			set(&c.Driver.Allocation[i])
			continue
		}
		entry := v1alpha1.Allocation{Resource: name, Nodes: nodes}
		set(&entry)
		if c.fitsConfig(from, "", v1alpha1.DriverConfig{Allocation: []v1alpha1.Allocation{entry}}) {
			c.Driver.Allocation = append(c.Driver.Allocation, entry)
			c.addOrigin("allocation", from)
		}
	}
}

// SetPolicy sets the allocation policy of resources.
func (c *Config) SetPolicy(from source.Value, policy v1alpha1.Policy, names ...string) {
	for _, name := range names {
		c.SetAllocation(from, name, func(a *v1alpha1.Allocation) { a.Policy = policy })
	}
}

// SetRoot sets the host directory of a family.
func (c *Config) SetRoot(from source.Value, family, dir string) {
	roots := map[string]string{family: dir}
	if !c.fitsConfig(from, "", v1alpha1.DriverConfig{DriverRoots: roots}) {
		return
	}
	if c.Driver.DriverRoots == nil {
		c.Driver.DriverRoots = roots
	}
	c.Driver.DriverRoots[family] = dir
}

// fitsConfig reports whether an entry can be added to the configuration, and otherwise notes the
// reason. name is the entry's resource name, or "".
func (c *Config) fitsConfig(from source.Value, name string, entry v1alpha1.DriverConfig) bool {
	if name != "" && !c.checkName(from, name) {
		return false
	}
	if data, err := json.Marshal(entry); err == nil && bytes.Contains(data, []byte(ellipsis)) {
		c.notes.AddPodChange(from, "is left out: it contains a literal ..., which documentation writes in place of something else")
		return false
	}
	errs := entry.Validate()
	if len(errs) == 0 && name != "" && c.names[name] {
		both := c.Driver
		both.Sharing = slices.Concat(both.Sharing, entry.Sharing)
		both.Resources = slices.Concat(both.Resources, entry.Resources)
		both.Paths = slices.Concat(both.Paths, entry.Paths)
		errs = both.Validate()
	}
	if len(errs) > 0 {
		for _, err := range errs {
			err.Field = pathInEntry(err.Field)
		}
		c.notes.AddPodChange(from, "cannot be written: %s", strings.ReplaceAll(v1alpha1.JoinErrors(errs).Error(), "\n", "; "))
		return false
	}
	c.names[name] = true
	return true
}

// ellipsis is the JSON string "..." inside a JSON string.
const ellipsis = `\"...\"`

// pathInEntry returns the part of a field's path below its list entry: "cel" for "exclude[0].cel". The
// index is the entry's place in the new configuration, and the source has another one.
func pathInEntry(path string) string {
	_, entry, _ := strings.Cut(path, "[")
	index, below, _ := strings.Cut(entry, "]")
	if _, err := strconv.Atoi(index); err != nil {
		return path // the field is in no list
	}
	return strings.TrimPrefix(below, ".")
}

// addOrigin stores the source of a list entry.
func (c *Config) addOrigin(list string, from source.Value) {
	c.Origins[list] = append(c.Origins[list], from.Origin())
}

// checkName reports whether the kubelet accepts a resource name, and otherwise adds a note
// (IsExtendedResourceName in pkg/apis/core/v1/helper of Kubernetes, read in 1.25 and 1.37; the
// kubelet's device manager refuses registrations by the same rule).
func (c *Config) checkName(from source.Value, name string) bool {
	if len(validation.IsQualifiedName("requests."+name)) == 0 && strings.Contains(name, "/") {
		return true
	}
	from = from.WithText(name)
	c.notes.AddRemark(from, "is not a valid resource name for the kubelet, so the plugin offers nothing under it")
	return false
}

// NodesOf returns the nodes of an entry with the given source, one value for each entry to write. A
// nil value stands for all nodes.
func (c *Config) NodesOf(from source.Value) []*v1alpha1.Nodes {
	nodes := c.Nodes
	if nodes == nil {
		nodes = from.Nodes
	}
	if len(c.Scope) == 0 {
		return []*v1alpha1.Nodes{nodes}
	}
	var all []*v1alpha1.Nodes
	for _, term := range c.Scope {
		if both, ok := Intersect(nodes, term); ok {
			all = append(all, both)
		}
	}
	return all
}

// Intersect returns the nodes that both a and b select, and whether there can be any. A nil value
// selects all nodes.
func Intersect(a, b *v1alpha1.Nodes) (*v1alpha1.Nodes, bool) {
	if a == nil || b == nil || reflect.DeepEqual(a, b) {
		if a == nil {
			a = b
		}
		return a, true
	}
	both := &v1alpha1.Nodes{Names: slices.Clone(a.Names)}
	switch {
	case len(a.Names) == 0:
		both.Names = slices.Clone(b.Names)
	case len(b.Names) > 0:
		both.Names = slices.DeleteFunc(both.Names, func(name string) bool { return !slices.Contains(b.Names, name) })
		if len(both.Names) == 0 {
			return nil, false
		}
	}
	for _, labels := range []map[string]string{a.MatchLabels, b.MatchLabels} {
		for name, text := range labels {
			if before, ok := both.MatchLabels[name]; ok && before != text {
				return nil, false
			}
			if both.MatchLabels == nil {
				both.MatchLabels = make(map[string]string)
			}
			both.MatchLabels[name] = text
		}
	}
	both.MatchExpressions = slices.Concat(a.MatchExpressions, b.MatchExpressions)
	return both, true
}
