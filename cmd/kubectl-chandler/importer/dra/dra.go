// Package dra translates the claims, claim templates and DeviceClasses of other DRA drivers to the same
// objects for the devices of Chandler. A part without a counterpart becomes a note.
package dra

import (
	"cmp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
	"chandler.dev/cmd/kubectl-chandler/replaced"
	"chandler.dev/cmd/kubectl-chandler/validation"
)

// translator translates the claims, claim templates and DeviceClasses of other DRA drivers. The result
// is not a DriverConfig but the same objects, for the devices of Chandler.
type translator struct {
	im      *plugin.Import
	format  *plugin.Format
	objects []source.Value
	kept    map[string]bool // the classes among the objects that are written, by name
}

// FormatName is the name of the format.
const FormatName = "other DRA drivers"

// Kinds of resource.k8s.io that are translated.
const (
	kindClaim    = "ResourceClaim"
	kindTemplate = "ResourceClaimTemplate"
	kindClass    = "DeviceClass"
)

// NewFormat returns the format of the objects of other DRA drivers.
func NewFormat(im *plugin.Import) *plugin.Format {
	d := &translator{im: im, kept: make(map[string]bool)}
	d.format = &plugin.Format{
		Name:         FormatName,
		Forms:        "ResourceClaim, ResourceClaimTemplate, DeviceClass",
		IsDocument:   isForeign,
		ReadDocument: func(v source.Value) { d.objects = append(d.objects, v) },
		Finish:       d.translateObjects,
	}
	return d.format
}

// isForeign reports whether an object selects devices of a DRA driver that Chandler replaces.
func isForeign(v source.Value) bool {
	if !strings.HasPrefix(v.At("apiVersion").Text(), "resource.k8s.io/") {
		return false
	}
	switch v.At("kind").Text() {
	case kindClaim, kindTemplate:
		return mentionsDriver(v.At("spec").Node)
	case kindClass:
		_, known := replaced.Classes[v.At("metadata", "name").Text()]
		return known || mentionsDriver(v.At("spec").Node)
	}
	return false
}

// mentionsDriver reports whether a value contains the name of a driver or of its class. An extended
// resource name such as gpu.intel.com/i915 is none.
func mentionsDriver(node *yaml.Node) bool {
	if node == nil {
		return false
	}
	for i, child := range node.Content {
		key := node.Kind == yaml.MappingNode && i%2 == 0
		extended := node.Kind == yaml.MappingNode && i%2 == 1 && node.Content[i-1].Value == "extendedResourceName"
		if extended || key && !replaced.IsMentioned(child.Value) {
			continue
		}
		if mentionsDriver(child) {
			return true
		}
	}
	return node.Kind == yaml.ScalarNode && replaced.IsMentioned(node.Value)
}

// translateObjects writes the objects, after all files were read.
func (d *translator) translateObjects() {
	for _, v := range d.objects {
		if v.At("kind").Text() == kindClass && !d.isReplaced(v) {
			d.kept[v.At("metadata", "name").Text()] = true
		}
	}
	for _, v := range d.objects {
		d.translateObject(v)
	}
}

// isReplaced reports whether a class of Chandler has the same devices and the same extended
// resource as the class that a driver installs.
func (d *translator) isReplaced(v source.Value) bool {
	name := v.At("metadata", "name").Text()
	if replaced.Classes[name].Own == "" || len(v.At("spec", "config").ListItems()) > 0 {
		return false
	}
	extended := v.At("spec", "extendedResourceName").Text()
	return extended == "" || extended == replaced.Classes[name].Extended
}

// translateObject writes the translation of an object, or notes why there is none.
func (d *translator) translateObject(v source.Value) {
	at := v.WithText(strings.TrimSpace(v.At("kind").Text() + " " + cmp.Or(v.At("metadata", "name").Text(), v.At("metadata", "generateName").Text())))
	isPod := func(owner source.Value) bool { return owner.At("kind").Text() == "Pod" }
	switch {
	case slices.ContainsFunc(v.At("metadata", "ownerReferences").ListItems(), isPod):
		d.im.Notes.AddRemark(at, "is not written: Kubernetes creates this claim for a pod, from a template or for an extended resource")
		return
	case v.At("kind").Text() == kindClass && d.isReplaced(v):
		d.im.Notes.AddRemark(at, "is not written: the class %s of Chandler has the devices", replaced.Classes[v.At("metadata", "name").Text()].Own)
		return
	}
	v.Node = yamlnode.Clone(v.Node)
	t := &objectTranslation{translator: d, class: v.At("kind").Text() == kindClass}
	devices := v.At("spec")
	switch v.At("kind").Text() {
	case kindTemplate:
		devices = v.At("spec", "spec", "devices")
	case kindClaim:
		devices = v.At("spec", "devices")
	}
	t.translateDevices(devices)
	cleanObject(v.Node)
	if !t.lost {
		if left := findForeign(v.At("spec")); left.IsPresent() {
			t.lose(left, "belongs to another driver, and has no counterpart here")
		}
	}
	if !t.lost {
		t.validate(at, v.Node)
	}
	if t.lost {
		d.im.Notes.AddResult(at, "is not written, because a part of it has no counterpart; pods that need it stay Pending")
		return
	}
	yamlnode.SetBlockStyle(v.Node)
	for _, driver := range t.drivers {
		for _, family := range driver.Families {
			if !slices.Contains(d.format.Families, family) {
				d.format.Families = append(d.format.Families, family)
			}
		}
	}
	d.im.Objects = append(d.im.Objects, plugin.Object{Node: v.Node, From: at})
}

// objectTranslation is the state of the translation of one object.
type objectTranslation struct {
	*translator
	class   bool // the object is a DeviceClass
	lost    bool // a part of the object has no counterpart
	total   int  // the number of requests
	drivers []*replaced.Driver
	vfio    []string // the names of requests for VFIO passthrough
}

// lose notes a part of the object without a counterpart. The object is then not written.
func (t *objectTranslation) lose(v source.Value, format string, args ...any) {
	t.lost = true
	t.im.Notes.AddPodChange(v, format, args...)
}

// validate checks the object with the code of kubectl chandler validate.
func (t *objectTranslation) validate(at source.Value, node *yaml.Node) {
	data, err := yaml.Marshal(node)
	if err == nil {
		err = validation.CheckObject(data)
	}
	if err != nil {
		t.lose(at, "is not valid once it is translated: %v", err)
	}
}

// translateDevices translates the part of an object that all kinds have in common.
func (t *objectTranslation) translateDevices(devices source.Value) {
	for _, request := range devices.At("requests").ListItems() {
		t.total++
		t.request(request, request.At("name").Text())
	}
	if t.class {
		t.total = 1
		t.selectors(devices)
		t.requireDriver(devices)
	}
	for _, constraint := range devices.At("constraints").ListItems() {
		for _, field := range []string{"matchAttribute", "distinctAttribute"} {
			t.constraint(constraint.At(field))
		}
	}
	t.configs(devices)
}

// request translates a request, whose fields are in the request itself in v1beta1, and otherwise in
// exactly or in the alternatives of firstAvailable.
func (t *objectTranslation) request(v source.Value, name string) {
	if exactly := v.At("exactly"); exactly.IsMap() {
		t.request(exactly, name)
	}
	t.alternatives(v, name)
	class := v.At("deviceClassName")
	if !class.IsText() {
		return
	}
	foreign := replaced.DriverOf(class.Text()) != nil || mentionsDriver(v.At("selectors").Node)
	t.selectors(v)
	known, ok := replaced.Classes[class.Text()]
	switch {
	case t.kept[class.Text()]:
	case !ok:
		switch {
		case strings.HasSuffix(class.Text(), ".chandler.dev"):
		case foreign:
			t.im.Notes.AddPodChange(class, "the class is not in the files: import it too, because it selects devices of another driver, and the request now needs devices of Chandler")
		default:
			t.im.Notes.AddRemark(class, "is a class that is not among the files; import it too if its devices are now those of Chandler")
		}
	case known.Own == "":
		t.lose(class, "%s", replaced.DriverOf(known.Driver).Unserved)
		return
	default:
		class.Node.Value = known.Own
		t.use(replaced.DriverOf(known.Driver))
		if known.CEL != "" {
			prependSelector(v.Node, known.CEL)
		}
		if known.VFIO {
			t.vfio = append(t.vfio, name)
		}
	}
	t.capacityRequests(v.At("capacity", "requests"))
	t.tolerations(v)
}

// alternatives translates the alternatives of firstAvailable. An alternative without a counterpart is
// removed if another one remains: a request with no alternative is invalid.
func (t *objectTranslation) alternatives(v source.Value, name string) {
	list := v.At("firstAvailable")
	if !list.IsList() {
		return
	}
	before, drivers, vfio := t.lost, t.drivers, t.vfio
	var content []*yaml.Node
	var without []source.Value
	for _, alternative := range list.ListItems() {
		t.lost = false
		t.request(alternative, name+"/"+alternative.At("name").Text())
		if t.lost {
			t.drivers, t.vfio = drivers, vfio
			without = append(without, alternative)
			continue
		}
		drivers, vfio = t.drivers, t.vfio
		content = append(content, alternative.Node)
	}
	t.lost = before || len(content) == 0
	if len(content) == 0 {
		return
	}
	list.Node.Content = content
	for _, alternative := range without {
		t.im.Notes.AddResult(alternative.At("name"), "is removed from the alternatives, because a part of it has no counterpart")
	}
}

// use stores a driver whose devices the object selects.
func (t *objectTranslation) use(d *replaced.Driver) {
	if d != nil && !slices.Contains(t.drivers, d) {
		t.drivers = append(t.drivers, d)
	}
}

// selectors translates the CEL expressions of a class or a request.
func (t *objectTranslation) selectors(v source.Value) {
	for _, selector := range v.At("selectors").ListItems() {
		expression := selector.At("cel", "expression")
		if !expression.IsText() || !replaced.IsMentioned(expression.Node.Value) {
			continue
		}
		written, translation, err := translateCEL(expression.Node.Value)
		if err != nil {
			for part := range strings.SplitSeq(err.Error(), "\n") {
				t.lose(expression, "%s", part)
			}
			continue
		}
		for _, remark := range translation.remarks {
			t.im.Notes.AddRemark(expression, "%s", remark)
		}
		for _, name := range sortedDrivers(expression.Node.Value) {
			t.use(name)
		}
		expression.Node.Value, expression.Node.Style = written, 0
	}
}

// sortedDrivers returns the drivers that an expression names, in the order of the table.
func sortedDrivers(expression string) (drivers []*replaced.Driver) {
	for i := range replaced.Drivers {
		if strings.Contains(expression, replaced.Drivers[i].Name) {
			drivers = append(drivers, &replaced.Drivers[i])
		}
	}
	return drivers
}

// requireDriver adds a selector to a class without a test of the family: only the attribute names
// of the other driver excluded the devices of other vendors.
func (t *objectTranslation) requireDriver(v source.Value) {
	for _, selector := range v.At("selectors").ListItems() {
		if expression := selector.At("cel", "expression").Text(); strings.Contains(expression, "device.driver") || t.lost {
			return
		}
	}
	if len(t.drivers) == 1 && t.drivers[0].Devices != "" {
		prependSelector(v.Node, `device.driver == "chandler.dev" && `+t.drivers[0].Devices)
	}
}

// prependSelector adds a CEL expression before the other selectors of a class or a request.
func prependSelector(node *yaml.Node, cel string) {
	selectors := source.Value{Node: node}.At("selectors").Node
	if selectors == nil || selectors.Kind != yaml.SequenceNode {
		selectors = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
		yamlnode.SetField(node, "selectors", selectors)
	}
	entry := yamlnode.NewObject(node.Line, "cel", yamlnode.NewObject(node.Line, "expression", yamlnode.NewScalar(cel, node.Line)))
	selectors.Content = slices.Insert(selectors.Content, 0, entry)
}

// constraint translates the attribute of a constraint.
func (t *objectTranslation) constraint(v source.Value) {
	domain, name, _ := strings.Cut(v.Text(), "/")
	d := replaced.DriverOf(domain)
	if d == nil {
		return
	}
	a, ok := d.Attributes[name]
	if !ok || a.Name == "" {
		t.lose(v, "the attribute %s of %s has no counterpart for constraints", name, domain)
		return
	}
	if remark := validation.PublicationNote(a.Name); remark != "" {
		t.im.Notes.AddRemark(v, "%s", remark)
	}
	if !strings.Contains(a.Name, "/") {
		a.Name = "chandler.dev/" + a.Name
	}
	v.Node.Value = a.Name
}

// capacityRequests translates the names of requested capacities.
func (t *objectTranslation) capacityRequests(v source.Value) {
	for i := 0; v.IsMap() && i+1 < len(v.Node.Content); i += 2 {
		key := v.Node.Content[i]
		at := v.FieldValue(key.Value, v.Node.Content[i+1])
		domain, name, qualified := strings.Cut(key.Value, "/")
		var d *replaced.Driver
		switch {
		case qualified:
			d = replaced.DriverOf(domain)
		case len(t.drivers) > 0:
			d, name = t.drivers[len(t.drivers)-1], key.Value
		}
		if d == nil {
			continue
		}
		own, ok := d.Capacities[name]
		if !ok {
			t.lose(at, "the capacity %s of %s has no counterpart", name, d.Name)
			continue
		}
		key.Value = own
	}
}

// tolerations removes tolerations of taints of another driver.
func (t *objectTranslation) tolerations(v source.Value) {
	list := v.At("tolerations")
	if !list.IsList() {
		return
	}
	var content []*yaml.Node
	for _, toleration := range list.ListItems() {
		if isForeignName(toleration.At("key").Text()) {
			t.im.Notes.AddPodChange(toleration, "is removed: the taints of Chandler have keys in the domain chandler.dev, as the page on health lists them")
			continue
		}
		content = append(content, toleration.Node)
	}
	if list.Node.Content = content; len(content) == 0 {
		yamlnode.RemoveField(v.Node, "tolerations")
	}
}

// configs translates the parameters of an object.
func (t *objectTranslation) configs(devices source.Value) {
	list := devices.At("config")
	var content []*yaml.Node
	covered := false
	for _, config := range list.ListItems() {
		driver := config.At("opaque", "driver")
		d := replaced.DriverOf(driver.Text())
		if d == nil {
			content = append(content, config.Node)
			continue
		}
		parameters := t.parameters(d, config)
		if parameters == nil {
			continue
		}
		covered = covered || parameters.Driver != ""
		driver.Node.Value = "chandler.dev"
		node, err := yamlnode.FromObject(parameters)
		if err != nil {
			t.lose(config, "cannot be written: %v", err)
			continue
		}
		yamlnode.SetField(config.At("opaque").Node, "parameters", node)
		content = append(content, config.Node)
	}
	if len(t.vfio) > 0 && !covered {
		if node, err := t.passthrough(); err != nil {
			t.lose(devices, "the parameters for VFIO passthrough cannot be written: %v", err)
		} else {
			content = append(content, node)
		}
	}
	if len(content) == 0 {
		yamlnode.RemoveField(devices.Node, "config")
		return
	}
	if !list.IsList() {
		list.Node = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
		yamlnode.SetField(devices.Node, "config", list.Node)
	}
	list.Node.Content = content
}

// passthrough returns the parameters of requests that had a class for VFIO passthrough.
func (t *objectTranslation) passthrough() (*yaml.Node, error) {
	requests := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	for _, name := range t.vfio {
		requests.Content = append(requests.Content, yamlnode.NewScalar(name, 0))
	}
	parameters := newParameters()
	parameters.Driver = v1alpha1.DriverVFIO
	node, err := yamlnode.FromObject(parameters)
	return yamlnode.NewObject(0, "requests", requests, "opaque", yamlnode.NewObject(0, "driver", yamlnode.NewScalar("chandler.dev", 0), "parameters", node)), err
}

// findForeign returns a value that still belongs to another driver, or the zero value.
func findForeign(v source.Value) source.Value {
	if v.IsText() && isForeignName(v.Node.Value) {
		return v
	}
	for name, field := range v.Fields() {
		if name == "extendedResourceName" || name == "deviceClassName" {
			continue
		}
		if isForeignName(name) {
			return field
		}
		if found := findForeign(field); found.IsPresent() {
			return found
		}
	}
	if v.IsList() {
		for _, item := range v.ListItems() {
			if found := findForeign(item); found.IsPresent() {
				return found
			}
		}
	}
	return source.Value{}
}

// isForeignName reports whether a name is in the domain of another driver, or is the domain.
func isForeignName(name string) bool {
	domain, _, _ := strings.Cut(name, "/")
	return replaced.DriverOf(domain) != nil
}

// cleanObject removes the fields that the API server sets.
func cleanObject(node *yaml.Node) {
	yamlnode.RemoveField(node, "status")
	metadata := source.Value{Node: node}.At("metadata").Node
	for _, name := range []string{"uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink", "finalizers"} {
		yamlnode.RemoveField(metadata, name)
	}
	annotations := source.Value{Node: metadata}.At("annotations").Node
	yamlnode.RemoveField(annotations, "kubectl.kubernetes.io/last-applied-configuration")
	if annotations != nil && len(annotations.Content) == 0 {
		yamlnode.RemoveField(metadata, "annotations")
	}
}
