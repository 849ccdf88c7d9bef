package importer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// A Note is a setting that is not imported, or an action that keeps pods working as before.
type Note struct {
	Place string // such as config.yaml:4
	Field string // such as flags.plugin.deviceListStrategy
	Value string // such as volume-mounts
	Why   string

	// Pods reports whether pods get something else as a result.
	Pods bool

	result bool // the note describes the result of other notes

	file string
	line int
}

func (n Note) String() string {
	parts := []string{n.Place, n.Field, n.Value, n.Why}
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), ": ")
}

// A Result is a configuration and the translated objects of DRA drivers, with notes.
type Result struct {
	Config  *v1alpha1.DriverConfig // nil if the files contain no configuration of a device plugin
	Formats []string               // the names of the formats in the files
	Notes   []Note

	// Provision is the configuration for "chandler provision" that replaces what a plugin does with
	// PCI functions, without functions if there is nothing to do.
	Provision *v1alpha1.ProvisionConfig

	origins map[string][]string
	objects []object
}

// ChangedPods returns the number of settings with a change for pods. A setting can have several
// notes.
func (r *Result) ChangedPods() int {
	type setting struct{ place, field string }
	changed := make(map[setting]bool)
	for _, n := range r.Notes {
		if n.Pods && !n.result {
			changed[setting{n.Place, n.Field}] = true
		}
	}
	return len(changed)
}

func (im *importer) result() *Result {
	result := &Result{Provision: &im.provision, origins: im.origins, objects: im.objects}
	if im.hasPlugin() {
		result.Config = &im.config
	}
	for _, f := range im.formats {
		if im.found[f.name] && !slices.Contains(result.Formats, f.name) {
			result.Formats = append(result.Formats, f.name)
		}
	}
	slices.SortStableFunc(im.notes, func(a, b Note) int {
		return cmp.Or(strings.Compare(a.file, b.file), cmp.Compare(a.line, b.line))
	})
	result.Notes = slices.CompactFunc(im.notes, func(a, b Note) bool { return a.String() == b.String() })
	return result
}

// addNote adds a note about a value. n has the kind of the note.
func (im *importer) addNote(v source.Value, n Note, format string, args ...any) {
	n.Field, n.Value, n.Why = source.OneLine(v.Path), source.OneLine(v.Short()), source.OneLine(fmt.Sprintf(format, args...))
	n.file, n.line = v.File, v.Line()
	if n.file != "" {
		n.Place = source.OneLine(n.file)
		if n.line > 0 {
			n.Place = fmt.Sprintf("%s:%d", n.Place, n.line)
		}
	}
	if !slices.Contains(im.notes, n) { // a flag can apply to several configurations
		im.notes = append(im.notes, n)
	}
}

// notePodChange adds a note about a change for pods.
func (im *importer) notePodChange(v source.Value, format string, args ...any) {
	im.addNote(v, Note{Pods: true}, format, args...)
}

// noteResult adds a note about the result of changes for pods that other notes describe.
func (im *importer) noteResult(v source.Value, format string, args ...any) {
	im.addNote(v, Note{Pods: true, result: true}, format, args...)
}

// noteRemark adds a note without a change for pods.
func (im *importer) noteRemark(v source.Value, format string, args ...any) {
	im.addNote(v, Note{}, format, args...)
}

// addExclude adds an expression for devices that are not offered.
func (im *importer) addExclude(from source.Value, cel string) {
	for _, nodes := range im.nodesOf(from) {
		entry := v1alpha1.Selector{CEL: bindDomain(cel), Nodes: nodes}
		if slices.ContainsFunc(im.config.Exclude, func(s v1alpha1.Selector) bool { return reflect.DeepEqual(s, entry) }) {
			continue
		}
		if im.fitsConfig(from, "", v1alpha1.DriverConfig{Exclude: []v1alpha1.Selector{entry}}) {
			im.config.Exclude = append(im.config.Exclude, entry)
			im.origin("exclude", from)
		}
	}
}

// addFunction adds PCI functions that "chandler provision" binds to a driver, as the plugin does.
func (im *importer) addFunction(cel, driver string) {
	function := v1alpha1.Function{CEL: bindDomain(cel), Driver: driver}
	if !slices.ContainsFunc(im.provision.Functions, func(f v1alpha1.Function) bool { return reflect.DeepEqual(f, function) }) {
		im.provision.Functions = append(im.provision.Functions, function)
	}
}

// addSharing adds an entry of sharing.
func (im *importer) addSharing(from source.Value, cel string, sharing v1alpha1.Sharing) {
	sharing.CEL = bindDomain(cel)
	if sharing.Replicas > maxShares {
		im.noteRemark(from, "%d containers at once are more than the %d that can be written, and than a node has", sharing.Replicas, maxShares)
		sharing.Replicas = maxShares
	}
	for _, nodes := range im.nodesOf(from) {
		sharing.Nodes = nodes
		if slices.ContainsFunc(im.config.Sharing, func(s v1alpha1.Sharing) bool { return reflect.DeepEqual(s, sharing) }) {
			continue // a pod and its DaemonSet can be imported together
		}
		if im.fitsConfig(from, sharing.Resource, v1alpha1.DriverConfig{Sharing: []v1alpha1.Sharing{sharing}}) {
			im.config.Sharing = append(im.config.Sharing, sharing)
			im.origin("sharing", from)
		}
	}
}

// maxShares is the highest number of containers per device.
const maxShares = 4096

// addResource adds an entry of resources, and reports whether the entry is valid.
func (im *importer) addResource(from source.Value, name, cel string) bool {
	return im.addPool(from, name, cel, nil)
}

// addPool adds an entry of resources that may be a pool of the SR-IOV plugin, and reports whether
// the entry is valid.
func (im *importer) addPool(from source.Value, name, cel string, sriov *v1alpha1.SRIOVPool) bool {
	ok := true
	for _, nodes := range im.nodesOf(from) {
		entry := v1alpha1.Resource{Name: name, Selector: v1alpha1.Selector{CEL: bindDomain(cel), Nodes: nodes}, SRIOV: sriov}
		if slices.ContainsFunc(im.config.Resources, func(r v1alpha1.Resource) bool { return reflect.DeepEqual(r, entry) }) {
			continue
		}
		if !im.fitsConfig(from, name, v1alpha1.DriverConfig{Resources: []v1alpha1.Resource{entry}}) {
			ok = false
			continue
		}
		im.config.Resources = append(im.config.Resources, entry)
		im.origin("resources", from)
	}
	return ok
}

// addPaths adds an entry of paths, and reports whether the entry is valid.
func (im *importer) addPaths(from source.Value, entry v1alpha1.PathResource) bool {
	ok := true
	for _, nodes := range im.nodesOf(from) {
		entry.Nodes = nodes
		if slices.ContainsFunc(im.config.Paths, func(p v1alpha1.PathResource) bool { return reflect.DeepEqual(p, entry) }) {
			continue
		}
		if !im.fitsConfig(from, entry.Name, v1alpha1.DriverConfig{Paths: []v1alpha1.PathResource{entry}}) {
			ok = false
			continue
		}
		im.config.Paths = append(im.config.Paths, entry)
		im.origin("paths", from)
	}
	return ok
}

// setAllocation changes the allocation settings of a resource.
func (im *importer) setAllocation(from source.Value, name string, set func(*v1alpha1.Allocation)) {
	for _, nodes := range im.nodesOf(from) {
		i := slices.IndexFunc(im.config.Allocation, func(a v1alpha1.Allocation) bool {
			return a.Resource == name && reflect.DeepEqual(a.Nodes, nodes)
		})
		if i >= 0 {
			set(&im.config.Allocation[i])
			continue
		}
		entry := v1alpha1.Allocation{Resource: name, Nodes: nodes}
		set(&entry)
		if im.fitsConfig(from, "", v1alpha1.DriverConfig{Allocation: []v1alpha1.Allocation{entry}}) {
			im.config.Allocation = append(im.config.Allocation, entry)
			im.origin("allocation", from)
		}
	}
}

// onlyOne rejects containers that request more than one device of a resource.
func (im *importer) onlyOne(from source.Value, name string) {
	im.setAllocation(from, name, func(a *v1alpha1.Allocation) { a.FailRequestsGreaterThanOne = true })
}

// listStrategies maps the device list strategies of the NVIDIA plugin.
var listStrategies = map[string]v1alpha1.DeviceListStrategy{
	"envvar":          v1alpha1.ListEnvVar,
	"volume-mounts":   v1alpha1.ListVolumeMounts,
	"cdi-annotations": v1alpha1.ListCDIAnnotations,
	"cdi-cri":         v1alpha1.ListCDIDevices,
}

// listStrategy sets the device list strategy of resources: a list, or strings separated by commas.
func (im *importer) listStrategy(v source.Value, names ...string) {
	var strategies []v1alpha1.DeviceListStrategy
	for _, text := range v.ListTexts() {
		for one := range strings.SplitSeq(text, ",") {
			strategy, ok := listStrategies[strings.ToLower(strings.TrimSpace(one))]
			if !ok {
				im.notePodChange(v, "%s is an unknown strategy", one)
				return
			}
			strategies = append(strategies, strategy)
		}
	}
	if len(strategies) == 0 || slices.Equal(strategies, []v1alpha1.DeviceListStrategy{v1alpha1.ListEnvVar}) {
		return // the default
	}
	for _, name := range names {
		im.setAllocation(v, name, func(a *v1alpha1.Allocation) { a.DeviceListStrategy = strategies })
	}
}

// isListed reports whether a resource has a device list strategy.
func (im *importer) isListed(name string) bool {
	return slices.ContainsFunc(im.config.Allocation, func(a v1alpha1.Allocation) bool {
		return a.Resource == name && len(a.DeviceListStrategy) > 0 &&
			slices.ContainsFunc(im.nodesOf(source.Value{}), func(nodes *v1alpha1.Nodes) bool { return reflect.DeepEqual(a.Nodes, nodes) })
	})
}

// setPolicy sets the allocation policy of resources.
func (im *importer) setPolicy(from source.Value, policy v1alpha1.Policy, names ...string) {
	for _, name := range names {
		im.setAllocation(from, name, func(a *v1alpha1.Allocation) { a.Policy = policy })
	}
}

// setRoot sets the host directory of a family.
func (im *importer) setRoot(from source.Value, family, dir string) {
	roots := map[string]string{family: dir}
	if !im.fitsConfig(from, "", v1alpha1.DriverConfig{DriverRoots: roots}) {
		return
	}
	if im.config.DriverRoots == nil {
		im.config.DriverRoots = roots
	}
	im.config.DriverRoots[family] = dir
}

// fitsConfig reports whether an entry can be added to the configuration, and otherwise notes the
// reason. name is the entry's resource name, or "".
func (im *importer) fitsConfig(from source.Value, name string, entry v1alpha1.DriverConfig) bool {
	if name != "" && !im.named(from, name) {
		return false
	}
	if data, err := json.Marshal(entry); err == nil && bytes.Contains(data, []byte(ellipsis)) {
		im.notePodChange(from, "is left out: it contains a literal ..., which documentation writes in place of something else")
		return false
	}
	err := entry.Validate()
	if err == nil && name != "" && im.names[name] {
		both := im.config
		both.Sharing = slices.Concat(both.Sharing, entry.Sharing)
		both.Resources = slices.Concat(both.Resources, entry.Resources)
		both.Paths = slices.Concat(both.Paths, entry.Paths)
		err = both.Validate()
	}
	if err != nil {
		im.notePodChange(from, "cannot be written: %s", place.ReplaceAllString(err.Error(), ""))
		return false
	}
	im.names[name] = true
	return true
}

// ellipsis is the JSON string "..." inside a JSON string.
const ellipsis = `\"...\"`

// place matches the beginning of an error: the place in the new configuration, which is not the
// place in the source.
var place = regexp.MustCompile(`^[a-z]+\[[0-9]+\](?:: |\.)`)

// origin stores the source of a list entry.
func (im *importer) origin(list string, from source.Value) {
	im.origins[list] = append(im.origins[list], from.Origin())
}

// named reports whether the kubelet accepts a resource name, and otherwise adds a note
// (IsExtendedResourceName in pkg/apis/core/v1/helper of Kubernetes, read in 1.25 and 1.37; the
// kubelet's device manager refuses registrations by the same rule).
func (im *importer) named(from source.Value, name string) bool {
	if len(validation.IsQualifiedName("requests."+name)) == 0 && strings.Contains(name, "/") {
		return true
	}
	from = from.WithText(name)
	im.noteRemark(from, "is not a valid resource name for the kubelet, so the plugin offers nothing under it")
	return false
}
