package importer

import (
	"cmp"
	"slices"
	"strconv"

	"chandler.dev/api/v1alpha1"
)

// rdmaShared reads configurations of the Mellanox shared RDMA device plugin (README.md and
// pkg/types in Mellanox/k8s-rdma-shared-dev-plugin v1.5).
type rdmaShared struct {
	im       *importer
	settings *settings
	seen     map[string]bool // the pools so far
}

func newRDMAShared(im *importer) *format {
	r := &rdmaShared{im: im, seen: make(map[string]bool)}
	r.settings = newSettings(im, []option{
		{name: "config-file", fine: []string{"/k8s-rdma-shared-dev-plugin/config.json"}, why: "import that file too, if it is not among the files"},
		{name: "use-cdi", alone: true, fine: []string{"false"}, why: "containers get the same device nodes without it"},
	})
	return &format{
		name:         "the shared RDMA device plugin",
		forms:        "config.json alone, in a ConfigMap or a NicClusterPolicy, flags, DaemonSet, Helm values",
		families:     []string{"rdma"},
		alternatives: true,
		needs:        true,
		is: func(v value) bool {
			return v.has("configList") || isOldRDMA(v) || isSection(v, "rdmaSharedDevicePlugin")
		},
		read: r.read,
		runs: func(c container) bool {
			return c.names("k8s-rdma-shared-d", "rdma-shared-d", "rdma-shared-device-plugin", "k8s-rdma-device-plugin", "k8s-rdma-sriov-dev-plugin")
		},
		container: func(c container) { r.settings.flags(c) },
		finish:    r.settings.finishOptions,
	}
}

// isOldRDMA recognises the configuration format from before 2019.
func isOldRDMA(v value) bool {
	mode := v.at("mode").text()
	return (mode == "hca" || mode == "sriov") && (v.has("pfNetdevices") || len(v.node.Content) == 2)
}

func (r *rdmaShared) read(v value) {
	if isOldRDMA(v) {
		r.readOld(v)
		return
	}
	if isSection(v, "rdmaSharedDevicePlugin") {
		r.section(v)
		return
	}
	r.im.unknownExcept(v, "configList", "periodicUpdateInterval", "kubeletRootDir")
	if root := v.at("kubeletRootDir"); !root.isNull() {
		r.im.noteRemark(root, "the agent has a flag for the kubelet's directory")
	}
	if interval := v.at("periodicUpdateInterval"); !interval.isNull() {
		r.im.noteRemark(interval, "the agent looks for devices whenever the kernel reports a change")
	}
	for _, pool := range v.at("configList").items() {
		r.readPool(pool)
	}
}

// defaultCount is the default number of containers per pool in the network operator's chart.
const defaultCount = 1000

// section reads pools from chart values, which have the selectors beside the name.
func (r *rdmaShared) section(v value) {
	for _, one := range v.at("resources").items() {
		count := one.at("rdmaHcaMax").node
		if count == nil {
			count = newScalar(strconv.Itoa(defaultCount), one.node.Line)
		}
		selectors := newObject(one.node.Line)
		for name, field := range one.fields() {
			if name != "name" && name != "rdmaHcaMax" {
				selectors.Content = append(selectors.Content, newScalar(name, one.node.Line), field.node)
			}
		}
		one.node = newObject(one.node.Line, "resourceName", one.at("name").node, "rdmaHcaMax", count, "selectors", selectors)
		r.readPool(one)
	}
}

// sharedPrefix is the default prefix of resources.
const sharedPrefix = "rdma"

// readPool reads a pool of adapters that containers share.
func (r *rdmaShared) readPool(v value) {
	fields := []string{"resourceName", "resourcePrefix", "rdmaHcaMax", "devices", "selectors"}
	v = v.respell(fields...)
	r.im.unknownExcept(v, fields...)
	name := cmp.Or(v.at("resourcePrefix").text(), sharedPrefix) + "/" + v.at("resourceName").text()
	count := v.at("rdmaHcaMax")
	replicas, ok := count.number()
	if !ok || replicas < 1 {
		r.im.notePodChange(cmpValue(count, v), "rdmaHcaMax is not a number above 0, so the plugin offers no %s", name)
		return
	}
	// The plugin lists PCI functions, and no sub-functions.
	cel := []string{oneOf(familyAttribute, []string{"rdma"}), attributes + `?rdmaNamespaces.orValue("shared") == "shared"`, "!(" + oneOf(text("function"), []string{"partition"}) + ")"}
	chosen := make(map[string][]string)
	one := func(attribute string, values []string) {
		if len(values) > 0 {
			cel = append(cel, oneOf(attribute, values))
			chosen[attribute] = values
		}
	}
	fields = []string{"vendors", "deviceIDs", "drivers", "ifNames", "linkTypes"}
	selectors := v.at("selectors").respell(fields...)
	r.im.unknownExcept(selectors, fields...)
	one(text("pciVendor"), pciIDs(selectors.at("vendors")))
	one(text("pciDevice"), pciIDs(selectors.at("deviceIDs")))
	one(text("driver"), selectors.at("drivers").texts())
	if len(v.at("devices").texts()) > 0 && len(selectors.fieldsWith()) > 0 {
		r.im.notePodChange(v.at("devices"), "the plugin does not take devices and selectors together; here both must hold")
	}
	one(text("ifName"), slices.Concat(v.at("devices").texts(), selectors.at("ifNames").texts()))
	one(text("linkLayer"), linkLayers(selectors.at("linkTypes")))
	if len(chosen) == 0 {
		r.im.notePodChange(cmpValue(selectors, v), "selects nothing, and the plugin does not take such a pool")
		return
	}
	id := name + all(cel)
	if r.seen[id] {
		return // the same object can be imported twice
	}
	r.seen[id] = true
	for _, before := range r.im.shared {
		if !areDisjoint(before, chosen) {
			r.im.notePodChange(v.at("resourceName"), "an adapter that a pool before selects too is in that one only, where the plugin has it in both")
			break
		}
	}
	if slices.Contains(chosen[text("driver")], "hfi1") || slices.Contains(chosen[text("pciVendor")], "434e") {
		r.im.notePodChange(v.at("resourceName"), "the plugin for Cornelis adapters sets FI_PROVIDER=opx in containers, and the agent does not: set it in the pods. Containers get /dev/hfi1_… as before")
	}
	r.im.shared = append(r.im.shared, chosen)
	r.im.addSharing(v, all(cel), v1alpha1.Sharing{Resource: name, Replicas: replicas, Pool: true})
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

// cmpValue returns a if it is present, and otherwise the place of b.
func cmpValue(a, b value) value {
	if a.isPresent() {
		return a
	}
	b = b.as("")
	return b
}

// readOld reads a configuration from before pools, which offers all adapters, or the virtual
// functions of some, under one name.
func (r *rdmaShared) readOld(v value) {
	r.im.unknownExcept(v, "mode", "pfNetdevices")
	if v.at("mode").text() == "hca" {
		cel := all([]string{oneOf(familyAttribute, []string{"rdma"}), attributes + `?rdmaNamespaces.orValue("shared") == "shared"`})
		r.im.addSharing(v, cel, v1alpha1.Sharing{Resource: "rdma/hca", Replicas: 1000, Pool: true})
		return
	}
	cel := []string{oneOf(familyAttribute, []string{"rdma"}), oneOf(text("function"), []string{"virtual"})}
	if names := v.at("pfNetdevices").texts(); len(names) > 0 {
		cel = append(cel, oneOf(text("pfName"), names))
	}
	r.im.addResource(v, "rdma/vhca", all(cel))
}
