package importer

import (
	"cmp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/replaced"
	"chandler.dev/cmd/kubectl-chandler/validation"
)

// dra translates the claims, claim templates and DeviceClasses of other DRA drivers. The result
// is not a DriverConfig but the same objects, for the devices of Chandler.
type dra struct {
	im      *importer
	format  *format
	objects []value
	kept    map[string]bool // the classes among the objects that are written, by name
}

// An object is a translated object.
type object struct {
	node *yaml.Node
	from value
}

// draFormat is the name of the format.
const draFormat = "other DRA drivers"

// Kinds of resource.k8s.io that are translated.
const (
	kindClaim    = "ResourceClaim"
	kindTemplate = "ResourceClaimTemplate"
	kindClass    = "DeviceClass"
)

func newDRA(im *importer) *format {
	d := &dra{im: im, kept: make(map[string]bool)}
	d.format = &format{
		name:   draFormat,
		forms:  "ResourceClaim, ResourceClaimTemplate, DeviceClass",
		is:     isForeign,
		read:   func(v value) { d.objects = append(d.objects, v) },
		finish: d.translateObjects,
	}
	return d.format
}

// isForeign reports whether an object selects devices of a DRA driver that Chandler replaces.
func isForeign(v value) bool {
	if !strings.HasPrefix(v.at("apiVersion").text(), "resource.k8s.io/") {
		return false
	}
	switch v.at("kind").text() {
	case kindClaim, kindTemplate:
		return mentionsDriver(v.at("spec").node)
	case kindClass:
		_, known := replaced.Classes[v.at("metadata", "name").text()]
		return known || mentionsDriver(v.at("spec").node)
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
func (d *dra) translateObjects() {
	for _, v := range d.objects {
		if v.at("kind").text() == kindClass && !d.isReplaced(v) {
			d.kept[v.at("metadata", "name").text()] = true
		}
	}
	for _, v := range d.objects {
		d.translateObject(v)
	}
}

// isReplaced reports whether a class of Chandler has the same devices and the same extended
// resource as the class that a driver installs.
func (d *dra) isReplaced(v value) bool {
	name := v.at("metadata", "name").text()
	if replaced.Classes[name].Own == "" || len(v.at("spec", "config").items()) > 0 {
		return false
	}
	extended := v.at("spec", "extendedResourceName").text()
	return extended == "" || extended == replaced.Classes[name].Extended
}

// translateObject writes the translation of an object, or notes why there is none.
func (d *dra) translateObject(v value) {
	at := v.as(strings.TrimSpace(v.at("kind").text() + " " + cmp.Or(v.at("metadata", "name").text(), v.at("metadata", "generateName").text())))
	isPod := func(owner value) bool { return owner.at("kind").text() == "Pod" }
	switch {
	case slices.ContainsFunc(v.at("metadata", "ownerReferences").items(), isPod):
		d.im.noteRemark(at, "is not written: Kubernetes creates this claim for a pod, from a template or for an extended resource")
		return
	case v.at("kind").text() == kindClass && d.isReplaced(v):
		d.im.noteRemark(at, "is not written: the class %s of Chandler has the devices", replaced.Classes[v.at("metadata", "name").text()].Own)
		return
	}
	v.node = cloneNode(v.node)
	t := &draObject{dra: d, class: v.at("kind").text() == kindClass}
	devices := v.at("spec")
	switch v.at("kind").text() {
	case kindTemplate:
		devices = v.at("spec", "spec", "devices")
	case kindClaim:
		devices = v.at("spec", "devices")
	}
	t.translateDevices(devices)
	cleanObject(v.node)
	if !t.lost {
		if left := findForeign(v.at("spec")); left.isPresent() {
			t.lose(left, "belongs to another driver, and has no counterpart here")
		}
	}
	if !t.lost {
		t.validate(at, v.node)
	}
	if t.lost {
		d.im.noteResult(at, "is not written, because a part of it has no counterpart; pods that need it stay Pending")
		return
	}
	blockStyle(v.node)
	for _, driver := range t.drivers {
		for _, family := range driver.Families {
			if !slices.Contains(d.format.families, family) {
				d.format.families = append(d.format.families, family)
			}
		}
	}
	d.im.objects = append(d.im.objects, object{v.node, at})
}

// draObject is the state of the translation of one object.
type draObject struct {
	*dra
	class   bool // the object is a DeviceClass
	lost    bool // a part of the object has no counterpart
	total   int  // the number of requests
	drivers []*replaced.Driver
	vfio    []string // the names of requests for VFIO passthrough
}

// lose notes a part of the object without a counterpart. The object is then not written.
func (t *draObject) lose(v value, format string, args ...any) {
	t.lost = true
	t.im.notePodChange(v, format, args...)
}

// validate checks the object with the code of kubectl chandler validate.
func (t *draObject) validate(at value, node *yaml.Node) {
	data, err := yaml.Marshal(node)
	if err == nil {
		err = validation.CheckObject(data)
	}
	if err != nil {
		t.lose(at, "is not valid once it is translated: %v", err)
	}
}

// translateDevices translates the part of an object that all kinds have in common.
func (t *draObject) translateDevices(devices value) {
	for _, request := range devices.at("requests").items() {
		t.total++
		t.request(request, request.at("name").text())
	}
	if t.class {
		t.total = 1
		t.selectors(devices)
		t.requireDriver(devices)
	}
	for _, constraint := range devices.at("constraints").items() {
		for _, field := range []string{"matchAttribute", "distinctAttribute"} {
			t.constraint(constraint.at(field))
		}
	}
	t.configs(devices)
}

// request translates a request, whose fields are in the request itself in v1beta1, and otherwise in
// exactly or in the alternatives of firstAvailable.
func (t *draObject) request(v value, name string) {
	if exactly := v.at("exactly"); exactly.isMap() {
		t.request(exactly, name)
	}
	t.alternatives(v, name)
	class := v.at("deviceClassName")
	if !class.isText() {
		return
	}
	foreign := replaced.DriverOf(class.text()) != nil || mentionsDriver(v.at("selectors").node)
	t.selectors(v)
	known, ok := replaced.Classes[class.text()]
	switch {
	case t.kept[class.text()]:
	case !ok:
		switch {
		case strings.HasSuffix(class.text(), ".chandler.dev"):
		case foreign:
			t.im.notePodChange(class, "the class is not in the files: import it too, because it selects devices of another driver, and the request now needs devices of Chandler")
		default:
			t.im.noteRemark(class, "is a class that is not among the files; import it too if its devices are now those of Chandler")
		}
	case known.Own == "":
		t.lose(class, "%s", replaced.DriverOf(known.Driver).Unserved)
		return
	default:
		class.node.Value = known.Own
		t.use(replaced.DriverOf(known.Driver))
		if known.CEL != "" {
			prependSelector(v.node, known.CEL)
		}
		if known.VFIO {
			t.vfio = append(t.vfio, name)
		}
	}
	t.capacityRequests(v.at("capacity", "requests"))
	t.tolerations(v)
}

// alternatives translates the alternatives of firstAvailable. An alternative without a counterpart is
// removed if another one remains: a request with no alternative is invalid.
func (t *draObject) alternatives(v value, name string) {
	list := v.at("firstAvailable")
	if !list.isList() {
		return
	}
	before, drivers, vfio := t.lost, t.drivers, t.vfio
	var content []*yaml.Node
	var without []value
	for _, alternative := range list.items() {
		t.lost = false
		t.request(alternative, name+"/"+alternative.at("name").text())
		if t.lost {
			t.drivers, t.vfio = drivers, vfio
			without = append(without, alternative)
			continue
		}
		drivers, vfio = t.drivers, t.vfio
		content = append(content, alternative.node)
	}
	t.lost = before || len(content) == 0
	if len(content) == 0 {
		return
	}
	list.node.Content = content
	for _, alternative := range without {
		t.im.noteResult(alternative.at("name"), "is removed from the alternatives, because a part of it has no counterpart")
	}
}

// use stores a driver whose devices the object selects.
func (t *draObject) use(d *replaced.Driver) {
	if d != nil && !slices.Contains(t.drivers, d) {
		t.drivers = append(t.drivers, d)
	}
}

// selectors translates the CEL expressions of a class or a request.
func (t *draObject) selectors(v value) {
	for _, selector := range v.at("selectors").items() {
		expression := selector.at("cel", "expression")
		if !expression.isText() || !replaced.IsMentioned(expression.node.Value) {
			continue
		}
		written, translation, err := translateCEL(expression.node.Value)
		if err != nil {
			for part := range strings.SplitSeq(err.Error(), "\n") {
				t.lose(expression, "%s", part)
			}
			continue
		}
		for _, remark := range translation.remarks {
			t.im.noteRemark(expression, "%s", remark)
		}
		for _, name := range sortedDrivers(expression.node.Value) {
			t.use(name)
		}
		expression.node.Value, expression.node.Style = written, 0
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
func (t *draObject) requireDriver(v value) {
	for _, selector := range v.at("selectors").items() {
		if expression := selector.at("cel", "expression").text(); strings.Contains(expression, "device.driver") || t.lost {
			return
		}
	}
	if len(t.drivers) == 1 && t.drivers[0].Devices != "" {
		prependSelector(v.node, `device.driver == "chandler.dev" && `+t.drivers[0].Devices)
	}
}

// prependSelector adds a CEL expression before the other selectors of a class or a request.
func prependSelector(node *yaml.Node, cel string) {
	selectors := value{node: node}.at("selectors").node
	if selectors == nil || selectors.Kind != yaml.SequenceNode {
		selectors = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
		setField(node, "selectors", selectors)
	}
	entry := newObject(node.Line, "cel", newObject(node.Line, "expression", newScalar(cel, node.Line)))
	selectors.Content = slices.Insert(selectors.Content, 0, entry)
}

// constraint translates the attribute of a constraint.
func (t *draObject) constraint(v value) {
	domain, name, _ := strings.Cut(v.text(), "/")
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
		t.im.noteRemark(v, "%s", remark)
	}
	if !strings.Contains(a.Name, "/") {
		a.Name = "chandler.dev/" + a.Name
	}
	v.node.Value = a.Name
}

// capacityRequests translates the names of requested capacities.
func (t *draObject) capacityRequests(v value) {
	for i := 0; v.isMap() && i+1 < len(v.node.Content); i += 2 {
		key := v.node.Content[i]
		at := v.child(fieldPath(key.Value), v.node.Content[i+1])
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
func (t *draObject) tolerations(v value) {
	list := v.at("tolerations")
	if !list.isList() {
		return
	}
	var content []*yaml.Node
	for _, toleration := range list.items() {
		if isForeignName(toleration.at("key").text()) {
			t.im.notePodChange(toleration, "is removed: the taints of Chandler have keys in the domain chandler.dev, as the page on health lists them")
			continue
		}
		content = append(content, toleration.node)
	}
	if list.node.Content = content; len(content) == 0 {
		removeField(v.node, "tolerations")
	}
}

// configs translates the parameters of an object.
func (t *draObject) configs(devices value) {
	list := devices.at("config")
	var content []*yaml.Node
	covered := false
	for _, config := range list.items() {
		driver := config.at("opaque", "driver")
		d := replaced.DriverOf(driver.text())
		if d == nil {
			content = append(content, config.node)
			continue
		}
		parameters := t.parameters(d, config)
		if parameters == nil {
			continue
		}
		covered = covered || parameters.Driver != ""
		driver.node.Value = "chandler.dev"
		node, err := nodeOf(parameters)
		if err != nil {
			t.lose(config, "cannot be written: %v", err)
			continue
		}
		setField(config.at("opaque").node, "parameters", node)
		content = append(content, config.node)
	}
	if len(t.vfio) > 0 && !covered {
		if node, err := t.passthrough(); err != nil {
			t.lose(devices, "the parameters for VFIO passthrough cannot be written: %v", err)
		} else {
			content = append(content, node)
		}
	}
	if len(content) == 0 {
		removeField(devices.node, "config")
		return
	}
	if !list.isList() {
		list.node = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
		setField(devices.node, "config", list.node)
	}
	list.node.Content = content
}

// passthrough returns the parameters of requests that had a class for VFIO passthrough.
func (t *draObject) passthrough() (*yaml.Node, error) {
	requests := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	for _, name := range t.vfio {
		requests.Content = append(requests.Content, newScalar(name, 0))
	}
	parameters := newParameters()
	parameters.Driver = v1alpha1.DriverVFIO
	node, err := nodeOf(parameters)
	return newObject(0, "requests", requests, "opaque", newObject(0, "driver", newScalar("chandler.dev", 0), "parameters", node)), err
}

// findForeign returns a value that still belongs to another driver, or the zero value.
func findForeign(v value) value {
	if v.isText() && isForeignName(v.node.Value) {
		return v
	}
	for name, field := range v.fields() {
		if name == "extendedResourceName" || name == "deviceClassName" {
			continue
		}
		if isForeignName(name) {
			return field
		}
		if found := findForeign(field); found.isPresent() {
			return found
		}
	}
	if v.isList() {
		for _, item := range v.items() {
			if found := findForeign(item); found.isPresent() {
				return found
			}
		}
	}
	return value{}
}

// isForeignName reports whether a name is in the domain of another driver, or is the domain.
func isForeignName(name string) bool {
	domain, _, _ := strings.Cut(name, "/")
	return replaced.DriverOf(domain) != nil
}

// cleanObject removes the fields that the API server sets.
func cleanObject(node *yaml.Node) {
	removeField(node, "status")
	metadata := value{node: node}.at("metadata").node
	for _, name := range []string{"uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink", "finalizers"} {
		removeField(metadata, name)
	}
	annotations := value{node: metadata}.at("annotations").node
	removeField(annotations, "kubectl.kubernetes.io/last-applied-configuration")
	if annotations != nil && len(annotations.Content) == 0 {
		removeField(metadata, "annotations")
	}
}

// cloneNode returns a copy of a node and all of its children.
func cloneNode(node *yaml.Node) *yaml.Node {
	if node == nil {
		return nil
	}
	out := *node
	out.Content = make([]*yaml.Node, len(node.Content))
	for i, child := range node.Content {
		out.Content[i] = cloneNode(child)
	}
	return &out
}

// setField sets a field of an object.
func setField(node *yaml.Node, name string, field *yaml.Node) {
	if node == nil || node.Kind != yaml.MappingNode {
		return
	}
	removeField(node, name)
	node.Content = append(node.Content, newScalar(name, node.Line), field)
}

// removeField removes a field of an object.
func removeField(node *yaml.Node, name string) {
	if node == nil || node.Kind != yaml.MappingNode {
		return
	}
	for i := 0; i+1 < len(node.Content); {
		if node.Content[i].Value == name {
			node.Content = slices.Delete(node.Content, i, i+2)
			continue
		}
		i += 2
	}
}
