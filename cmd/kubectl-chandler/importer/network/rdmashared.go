package network

import (
	"cmp"
	"slices"
	"strconv"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
)

// rdmaShared reads configurations of the Mellanox shared RDMA device plugin (README.md and
// pkg/types in Mellanox/k8s-rdma-shared-dev-plugin v1.5).
type rdmaShared struct {
	im       *plugin.Import
	settings *plugin.Settings
	shared   *Adapters
	seen     map[string]bool // the pools so far
}

func newRDMAShared(im *plugin.Import, shared *Adapters) *plugin.Format {
	r := &rdmaShared{im: im, shared: shared, seen: make(map[string]bool)}
	r.settings = plugin.NewSettings(im, []plugin.Option{
		{Name: "config-file", Harmless: []string{"/k8s-rdma-shared-dev-plugin/config.json"}, Reason: "import that file too, if it is not among the files"},
		{Name: "use-cdi", NoValue: true, Harmless: []string{"false"}, Reason: "containers get the same device nodes without it"},
	})
	return &plugin.Format{
		Name:          "the shared RDMA device plugin",
		Forms:         "config.json alone, in a ConfigMap or a NicClusterPolicy, flags, DaemonSet, Helm values",
		Families:      []string{"rdma"},
		Alternatives:  true,
		NeedsDocument: true,
		IsDocument: func(v source.Value) bool {
			return v.Has("configList") || isOldRDMA(v) || isSection(v, "rdmaSharedDevicePlugin")
		},
		ReadDocument: r.read,
		IsContainer: func(c plugin.Container) bool {
			return c.HasName("k8s-rdma-shared-d", "rdma-shared-d", "rdma-shared-device-plugin", "k8s-rdma-device-plugin", "k8s-rdma-sriov-dev-plugin")
		},
		ReadContainer: func(c plugin.Container) { r.settings.ReadFlags(c) },
		Finish:        r.settings.FinishOptions,
	}
}

// isOldRDMA recognises the configuration format from before 2019.
func isOldRDMA(v source.Value) bool {
	mode := v.At("mode").Text()
	return (mode == "hca" || mode == "sriov") && (v.Has("pfNetdevices") || len(v.Node.Content) == 2)
}

func (r *rdmaShared) read(v source.Value) {
	if isOldRDMA(v) {
		r.readOld(v)
		return
	}
	if isSection(v, "rdmaSharedDevicePlugin") {
		r.section(v)
		return
	}
	r.im.Notes.AddUnknownExcept(v, "configList", "periodicUpdateInterval", "kubeletRootDir")
	if root := v.At("kubeletRootDir"); !root.IsNull() {
		r.im.Notes.AddRemark(root, "the agent has a flag for the kubelet's directory")
	}
	if interval := v.At("periodicUpdateInterval"); !interval.IsNull() {
		r.im.Notes.AddRemark(interval, "the agent looks for devices whenever the kernel reports a change")
	}
	for _, pool := range v.At("configList").ListItems() {
		r.readPool(pool)
	}
}

// defaultCount is the default number of containers per pool in the network operator's chart.
const defaultCount = 1000

// section reads pools from chart values, which have the selectors beside the name.
func (r *rdmaShared) section(v source.Value) {
	for _, one := range v.At("resources").ListItems() {
		count := one.At("rdmaHcaMax").Node
		if count == nil {
			count = yamlnode.NewScalar(strconv.Itoa(defaultCount), one.Node.Line)
		}
		selectors := yamlnode.NewObject(one.Node.Line)
		for name, field := range one.Fields() {
			if name != "name" && name != "rdmaHcaMax" {
				selectors.Content = append(selectors.Content, yamlnode.NewScalar(name, one.Node.Line), field.Node)
			}
		}
		one.Node = yamlnode.NewObject(one.Node.Line, "resourceName", one.At("name").Node, "rdmaHcaMax", count, "selectors", selectors)
		r.readPool(one)
	}
}

// sharedPrefix is the default prefix of resources.
const sharedPrefix = "rdma"

// readPool reads a pool of adapters that containers share.
func (r *rdmaShared) readPool(v source.Value) {
	fields := []string{"resourceName", "resourcePrefix", "rdmaHcaMax", "devices", "selectors"}
	v = v.RespellFields(fields...)
	r.im.Notes.AddUnknownExcept(v, fields...)
	name := cmp.Or(v.At("resourcePrefix").Text(), sharedPrefix) + "/" + v.At("resourceName").Text()
	count := v.At("rdmaHcaMax")
	replicas, ok := count.AsInteger()
	if !ok || replicas < 1 {
		r.im.Notes.AddPodChange(count.OrPlaceOf(v), "rdmaHcaMax is not a number above 0, so the plugin offers no %s", name)
		return
	}
	// The plugin lists PCI functions, and no sub-functions.
	cel := []string{expression.OneOf(expression.Family, []string{"rdma"}), expression.Attributes + `?rdmaNamespaces.orValue("shared") == "shared"`, "!(" + expression.OneOf(expression.Text("function"), []string{"partition"}) + ")"}
	chosen := make(map[string][]string)
	one := func(attribute string, values []string) {
		if len(values) > 0 {
			cel = append(cel, expression.OneOf(attribute, values))
			chosen[attribute] = values
		}
	}
	fields = []string{"vendors", "deviceIDs", "drivers", "ifNames", "linkTypes"}
	selectors := v.At("selectors").RespellFields(fields...)
	r.im.Notes.AddUnknownExcept(selectors, fields...)
	one(expression.Text("pciVendor"), pciIDs(selectors.At("vendors")))
	one(expression.Text("pciDevice"), pciIDs(selectors.At("deviceIDs")))
	one(expression.Text("driver"), selectors.At("drivers").ListTexts())
	if len(v.At("devices").ListTexts()) > 0 && len(selectors.FieldsWithText()) > 0 {
		r.im.Notes.AddPodChange(v.At("devices"), "the plugin does not take devices and selectors together; here both must hold")
	}
	one(expression.Text("ifName"), slices.Concat(v.At("devices").ListTexts(), selectors.At("ifNames").ListTexts()))
	one(expression.Text("linkLayer"), linkLayers(selectors.At("linkTypes")))
	if len(chosen) == 0 {
		r.im.Notes.AddPodChange(selectors.OrPlaceOf(v), "selects nothing, and the plugin does not take such a pool")
		return
	}
	id := name + expression.All(cel)
	if r.seen[id] {
		return // the same object can be imported twice
	}
	r.seen[id] = true
	if r.shared.overlap(chosen) {
		r.im.Notes.AddPodChange(v.At("resourceName"), "an adapter that a pool before selects too is in that one only, where the plugin has it in both")
	}
	if slices.Contains(chosen[expression.Text("driver")], "hfi1") || slices.Contains(chosen[expression.Text("pciVendor")], "434e") {
		r.im.Notes.AddPodChange(v.At("resourceName"), "the plugin for Cornelis adapters sets FI_PROVIDER=opx in containers, and the agent does not: set it in the pods. Containers get /dev/hfi1_… as before")
	}
	*r.shared = append(*r.shared, chosen)
	r.im.Config.AddSharing(v, expression.All(cel), v1alpha1.Sharing{Resource: name, Replicas: replicas, Pool: true})
}

// readOld reads a configuration from before pools, which offers all adapters, or the virtual
// functions of some, under one name.
func (r *rdmaShared) readOld(v source.Value) {
	r.im.Notes.AddUnknownExcept(v, "mode", "pfNetdevices")
	if v.At("mode").Text() == "hca" {
		cel := expression.All([]string{expression.OneOf(expression.Family, []string{"rdma"}), expression.Attributes + `?rdmaNamespaces.orValue("shared") == "shared"`})
		r.im.Config.AddSharing(v, cel, v1alpha1.Sharing{Resource: "rdma/hca", Replicas: 1000, Pool: true})
		return
	}
	cel := []string{expression.OneOf(expression.Family, []string{"rdma"}), expression.OneOf(expression.Text("function"), []string{"virtual"})}
	if names := v.At("pfNetdevices").ListTexts(); len(names) > 0 {
		cel = append(cel, expression.OneOf(expression.Text("pfName"), names))
	}
	r.im.Config.AddResource(v, "rdma/vhca", expression.All(cel))
}

// Adapters are the selectors of the pools of shared adapters so far: the values of each attribute.
type Adapters []map[string][]string

// overlap reports whether an adapter can match the selectors of a pool and other selectors.
func (a Adapters) overlap(selectors map[string][]string) bool {
	return slices.ContainsFunc(a, func(pool map[string][]string) bool { return !areDisjoint(pool, selectors) })
}

// areDisjoint reports whether no device can match both sets of selectors.
func areDisjoint(a, b map[string][]string) bool {
	for attribute, values := range a {
		others, both := b[attribute]
		if both && !slices.ContainsFunc(values, func(v string) bool { return slices.Contains(others, v) }) {
			return true
		}
	}
	return false
}
