package importer

import (
	"cmp"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"k8s.io/apimachinery/pkg/util/validation"

	"chandler.dev/api/v1alpha1"
)

// A Note is something that was written and is not carried over, or that somebody
// has to do so that all is as before.
type Note struct {
	Place string // config.yaml:4
	Field string // flags.plugin.deviceListStrategy
	Said  string // volume-mounts
	Why   string

	// Pods says that pods get something else because of it.
	Pods bool

	file string
	line int
}

func (n Note) String() string {
	parts := []string{n.Place, n.Field, n.Said, n.Why}
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), ": ")
}

// A Result is a configuration, and what is to be said of it.
type Result struct {
	Config  *v1alpha1.DriverConfig
	Formats []string // that were found
	Notes   []Note

	origins map[string][]string
}

// Changed returns how many of the notes say that pods get something else.
func (r *Result) Changed() int {
	changed := 0
	for _, n := range r.Notes {
		if n.Pods {
			changed++
		}
	}
	return changed
}

func (im *importer) result() *Result {
	result := &Result{Config: &im.config, origins: im.origins}
	for _, f := range im.formats {
		if im.found[f.name] {
			result.Formats = append(result.Formats, f.name)
		}
	}
	slices.SortStableFunc(im.notes, func(a, b Note) int {
		return cmp.Or(strings.Compare(a.file, b.file), cmp.Compare(a.line, b.line))
	})
	result.Notes = slices.CompactFunc(im.notes, func(a, b Note) bool { return a.String() == b.String() })
	return result
}

// maxSaid is how much of what was written a note repeats.
const maxSaid = 100

// note adds a note.
func (im *importer) note(v value, pods bool, format string, args ...any) {
	n := Note{Field: oneLine(v.path), Said: oneLine(v.short()), Why: oneLine(fmt.Sprintf(format, args...)), Pods: pods, file: v.file, line: v.line()}
	if n.file != "" {
		n.Place = oneLine(n.file)
		if n.line > 0 {
			n.Place = fmt.Sprintf("%s:%d", n.Place, n.line)
		}
	}
	if !slices.Contains(im.notes, n) { // as where a flag counts for several configurations
		im.notes = append(im.notes, n)
	}
}

// lost notes what pods are without.
func (im *importer) lost(v value, format string, args ...any) { im.note(v, true, format, args...) }

// say notes what pods do not notice.
func (im *importer) say(v value, format string, args ...any) { im.note(v, false, format, args...) }

// oneLine returns text as it can stand in a comment.
func oneLine(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, text)
}

// exclude adds an expression for devices that nobody gets.
func (im *importer) exclude(from value, cel string) {
	entry := v1alpha1.Selector{CEL: bound(cel), Nodes: im.nodesOf(from)}
	if im.fits(from, "", v1alpha1.DriverConfig{Exclude: []v1alpha1.Selector{entry}}) {
		im.config.Exclude = append(im.config.Exclude, entry)
		im.origin("exclude", from)
	}
}

// share adds an entry of sharing.
func (im *importer) share(from value, cel string, sharing v1alpha1.Sharing) {
	sharing.CEL, sharing.Nodes = bound(cel), im.nodesOf(from)
	if sharing.Replicas > maxShares {
		im.say(from, "%d containers at once are more than the %d that can be written, and than a node has", sharing.Replicas, maxShares)
		sharing.Replicas = maxShares
	}
	if slices.ContainsFunc(im.config.Sharing, func(s v1alpha1.Sharing) bool { return reflect.DeepEqual(s, sharing) }) {
		return // as when a pod is imported with its DaemonSet
	}
	if im.fits(from, sharing.Resource, v1alpha1.DriverConfig{Sharing: []v1alpha1.Sharing{sharing}}) {
		im.config.Sharing = append(im.config.Sharing, sharing)
		im.origin("sharing", from)
	}
}

// maxShares is how many containers can have one thing.
const maxShares = 4096

// resource adds an entry of resources, and reports whether it could.
func (im *importer) resource(from value, name, cel string) bool {
	return im.pool(from, name, cel, nil)
}

// pool adds an entry of resources that may be a pool of the SR-IOV plugin, and
// reports whether it could.
func (im *importer) pool(from value, name, cel string, sriov *v1alpha1.SRIOVPool) bool {
	entry := v1alpha1.Resource{Name: name, Selector: v1alpha1.Selector{CEL: bound(cel), Nodes: im.nodesOf(from)}, SRIOV: sriov}
	if slices.ContainsFunc(im.config.Resources, func(r v1alpha1.Resource) bool { return reflect.DeepEqual(r, entry) }) {
		return true
	}
	ok := im.fits(from, name, v1alpha1.DriverConfig{Resources: []v1alpha1.Resource{entry}})
	if ok {
		im.config.Resources = append(im.config.Resources, entry)
		im.origin("resources", from)
	}
	return ok
}

// paths adds an entry of paths, and reports whether it could.
func (im *importer) paths(from value, entry v1alpha1.PathResource) bool {
	entry.Nodes = im.nodesOf(from)
	if slices.ContainsFunc(im.config.Paths, func(p v1alpha1.PathResource) bool { return reflect.DeepEqual(p, entry) }) {
		return true
	}
	ok := im.fits(from, entry.Name, v1alpha1.DriverConfig{Paths: []v1alpha1.PathResource{entry}})
	if ok {
		im.config.Paths = append(im.config.Paths, entry)
		im.origin("paths", from)
	}
	return ok
}

// allocation sets how what a resource counts is given out.
func (im *importer) allocation(from value, name string, set func(*v1alpha1.Allocation)) {
	nodes := im.nodesOf(from)
	i := slices.IndexFunc(im.config.Allocation, func(a v1alpha1.Allocation) bool {
		return a.Resource == name && reflect.DeepEqual(a.Nodes, nodes)
	})
	if i >= 0 {
		set(&im.config.Allocation[i])
		return
	}
	entry := v1alpha1.Allocation{Resource: name, Nodes: nodes}
	set(&entry)
	if im.fits(from, "", v1alpha1.DriverConfig{Allocation: []v1alpha1.Allocation{entry}}) {
		im.config.Allocation = append(im.config.Allocation, entry)
		im.origin("allocation", from)
	}
}

// onlyOne has containers refused that ask for more than one of a resource.
func (im *importer) onlyOne(from value, name string) {
	im.allocation(from, name, func(a *v1alpha1.Allocation) { a.FailRequestsGreaterThanOne = true })
}

// listStrategies are how NVIDIA's plugin says how containers get devices.
var listStrategies = map[string]v1alpha1.DeviceListStrategy{
	"envvar":          v1alpha1.ListEnvVar,
	"volume-mounts":   v1alpha1.ListVolumeMounts,
	"cdi-annotations": v1alpha1.ListCDIAnnotations,
	"cdi-cri":         v1alpha1.ListCDIDevices,
}

// listStrategy sets how containers get the devices of resources, as NVIDIA's plugin
// has it: a list, or texts with commas between.
func (im *importer) listStrategy(v value, names ...string) {
	var strategies []v1alpha1.DeviceListStrategy
	for _, text := range v.texts() {
		for one := range strings.SplitSeq(text, ",") {
			strategy, ok := listStrategies[strings.ToLower(strings.TrimSpace(one))]
			if !ok {
				im.lost(v, "%s is no strategy that is known here", one)
				return
			}
			strategies = append(strategies, strategy)
		}
	}
	if len(strategies) == 0 || slices.Equal(strategies, []v1alpha1.DeviceListStrategy{v1alpha1.ListEnvVar}) {
		return // the default
	}
	for _, name := range names {
		im.allocation(v, name, func(a *v1alpha1.Allocation) { a.DeviceListStrategy = strategies })
	}
}

// nodesOf returns the nodes for which an entry is that is made of a value.
func (im *importer) nodesOf(from value) *v1alpha1.Nodes {
	if im.nodes != nil {
		return im.nodes
	}
	return from.nodes
}

// listed reports whether it is said how containers get the devices of a resource.
func (im *importer) listed(name string) bool {
	return slices.ContainsFunc(im.config.Allocation, func(a v1alpha1.Allocation) bool {
		return a.Resource == name && reflect.DeepEqual(a.Nodes, im.nodes) && len(a.DeviceListStrategy) > 0
	})
}

// policy sets which of what a resource counts a container gets.
func (im *importer) policy(from value, policy v1alpha1.Policy, names ...string) {
	for _, name := range names {
		im.allocation(from, name, func(a *v1alpha1.Allocation) { a.Policy = policy })
	}
}

// root names a directory of the host for a family.
func (im *importer) root(from value, family, dir string) {
	roots := map[string]string{family: dir}
	if !im.fits(from, "", v1alpha1.DriverConfig{Roots: roots}) {
		return
	}
	if im.config.Roots == nil {
		im.config.Roots = roots
	}
	im.config.Roots[family] = dir
}

// fits reports whether an entry can be added to the configuration, and notes why
// not. A name is that of what it offers, "" if it has none.
func (im *importer) fits(from value, name string, entry v1alpha1.DriverConfig) bool {
	if name != "" && !im.named(from, name) {
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
		im.lost(from, "cannot be written: %s", place.ReplaceAllString(err.Error(), ""))
		return false
	}
	im.names[name] = true
	return true
}

// place matches where in a configuration an error is, which is not where it was
// written.
var place = regexp.MustCompile(`^[a-z]+\[[0-9]+\](?:: |\.)`)

// origin remembers what an entry of a list was made of.
func (im *importer) origin(list string, from value) {
	im.origins[list] = append(im.origins[list], from.origin())
}

// named reports whether the kubelet takes a name for a resource, and notes if not
// (IsExtendedResourceName in pkg/apis/core/v1/helper of Kubernetes, read in 1.25
// and 1.37, by which the kubelet's device manager refuses registrations).
func (im *importer) named(from value, name string) bool {
	if len(validation.IsQualifiedName("requests."+name)) == 0 && strings.Contains(name, "/") {
		return true
	}
	from = from.as(name)
	im.say(from, "is no name that the kubelet takes for a resource, so that nothing is offered by it before either")
	return false
}
