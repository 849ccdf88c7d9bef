package importer

import (
	"cmp"
	"maps"
	"regexp"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/api/v1alpha1"
)

// kubevirt reads the host devices that KubeVirt permits
// (docs/devel/host-devices-and-device-plugins.md in kubevirt/kubevirt, and the HyperConverged
// object of kubevirt/hyperconverged-cluster-operator).
type kubevirt struct {
	im    *importer
	leave []value // the resources that KubeVirt must leave to the agent
	kind  string  // of the object with these resources
	first value   // the first value that was read
}

func newKubeVirt(im *importer) *format {
	k := &kubevirt{im: im}
	return &format{
		name:     "KubeVirt",
		forms:    "permittedHostDevices, alone or in a KubeVirt or HyperConverged object",
		families: []string{"hypervisor", "paths", "vfio"},
		is:       func(v value) bool { return k.permittedDevices(v).isPresent() },
		read:     k.read,
		runs:     func(c container) bool { return c.names("virt-handler") },
		container: func(c container) {
			k.rememberFirst(c.value)
		},
		finish: k.finishSettings,
	}
}

// rememberFirst stores the first value that is read.
func (k *kubevirt) rememberFirst(v value) {
	if !k.first.isPresent() {
		k.first = v
	}
}

// ownNodes are the nodes where virt-handler runs.
var ownNodes = &v1alpha1.Nodes{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "kubevirt.io/schedulable", Operator: metav1.LabelSelectorOpExists}}}

// finishSettings excludes the devices that KubeVirt always serves itself where virt-handler runs:
// kvm, tun and vhost-net (getPermanentHostDevicePlugins in
// pkg/virt-handler/device-manager/device_controller.go). It notes the resources that KubeVirt must
// leave to the agent.
func (k *kubevirt) finishSettings() {
	if k.first.isPresent() {
		at := k.first.as("")
		at.path, at.nodes = "", ownNodes
		k.im.addExclude(at, oneOf(familyAttribute, []string{"hypervisor"}))
	}
	var names []string
	for _, v := range k.leave {
		names = append(names, v.text())
	}
	if len(names) > 0 {
		at := k.leave[0]
		at.path, at.node = "permittedHostDevices", newScalar("", at.node.Line)
		k.im.noteRemark(at, "set externalResourceProvider: true in the %s object, so that KubeVirt leaves these to the agent: %s", k.kind, strings.Join(names, ", "))
	}
}

// permittedDevices returns the object with the permitted devices.
func (k *kubevirt) permittedDevices(v value) value {
	for _, at := range [][]string{
		{"permittedHostDevices"},
		{"configuration", "permittedHostDevices"},
		{"spec", "configuration", "permittedHostDevices"},
		{"spec", "permittedHostDevices"},
		{"spec", "virtualization", "permittedHostDevices"}, // HyperConverged v1
	} {
		if found := v.at(at...); found.isMap() {
			return found
		}
	}
	if v.hasAny("pciHostDevices", "mediatedDevices", "usb", "usbHostDevices") && !v.hasAny("kind", "name") {
		for _, list := range []string{"pciHostDevices", "mediatedDevices", "usb", "usbHostDevices"} {
			if items := v.at(list); items.isList() && len(items.node.Content) > 0 && items.items()[0].has("resourceName") {
				return v
			}
		}
	}
	if kind := v.at("kind").text(); kind == "KubeVirt" || kind == "HyperConverged" {
		return v.at("spec") // permits no device
	}
	return value{}
}

func (k *kubevirt) read(v value) {
	k.rememberFirst(v)
	k.kind = cmp.Or(v.at("kind").text(), k.kind, "KubeVirt")
	list := k.permittedDevices(v)
	for _, device := range list.at("pciHostDevices").items() {
		k.addPCI(device)
	}
	for _, device := range list.at("mediatedDevices").items() {
		k.addMediated(device)
	}
	for _, device := range slices.Concat(list.at("usb").items(), list.at("usbHostDevices").items()) {
		k.addUSB(device)
	}
	if list.path != v.at("spec").path || list.path == "" {
		k.im.unknownExcept(list, "pciHostDevices", "mediatedDevices", "usb", "usbHostDevices", "mediatedDevicesTypes")
	}
	if v.at("kind").isPresent() {
		k.noteRest(v, list)
	}
}

// noteRest notes the other fields of a KubeVirt or HyperConverged object.
func (k *kubevirt) noteRest(v, list value) {
	var rest []value
	for _, at := range []value{v.at("spec"), v.at("spec", "configuration"), v.at("spec", "virtualization"), v.at("spec", "deployment")} {
		for name, field := range at.fields() {
			switch {
			case name == "workloads":
				placement := field.at("nodePlacement")
				rest = append(rest, otherFields(field, "nodePlacement")...)
				rest = append(rest, otherFields(placement, "nodeSelector", "affinity")...)
			case name == "nodePlacements": // HyperConverged v1
				rest = append(rest, otherFields(field, "workload")...)
				rest = append(rest, otherFields(field.at("workload"), "nodeSelector", "affinity")...)
			case name == "mediatedDevicesConfiguration":
				k.im.noteRemark(field, "KubeVirt makes these vGPUs as before")
			case !slices.Contains([]string{"configuration", "virtualization", "deployment"}, name) && field.path != list.path:
				rest = append(rest, field)
			}
		}
	}
	k.im.noteOthers(v, rest)
}

// common reports whether an entry is imported.
func (k *kubevirt) common(v value, known ...string) bool {
	k.im.unknownExcept(v, append(known, "resourceName", "externalResourceProvider", "disabled")...)
	if disabled := v.at("disabled"); disabled.is() {
		k.im.noteRemark(disabled, "%s is not offered", v.at("resourceName").text())
		return false
	}
	return true
}

// addOffered stores a resource that KubeVirt must leave to the agent.
func (k *kubevirt) addOffered(v value, ok bool) {
	if ok && !v.at("externalResourceProvider").is() {
		k.leave = append(k.leave, v.at("resourceName"))
	}
}

// vendorSelector matches a vendor and device ID such as 10DE:1EB8.
var vendorSelector = regexp.MustCompile(`^([0-9a-fA-F]{4}):([0-9a-fA-F]{4})$`)

// vfio is the end of an expression for drivers that pass functions to virtual machines.
const vfio = `.contains("vfio")`

func (k *kubevirt) addPCI(v value) {
	if !k.common(v, "pciVendorSelector", "pciDeviceSelector") {
		return
	}
	selector := v.at("pciVendorSelector")
	if !selector.isPresent() {
		selector = v.at("pciDeviceSelector") // the field of the HyperConverged object
	}
	m := vendorSelector.FindStringSubmatch(selector.text())
	if m == nil {
		k.im.notePodChange(cmpValue(selector, v), "is not a vendor and device ID, such as 10DE:1EB8")
		return
	}
	cel := []string{
		oneOf(text("pciVendor"), lowerAll(m[1:2])),
		oneOf(text("pciDevice"), lowerAll(m[2:3])),
		text("driver") + vfio,
	}
	name := v.at("resourceName").text()
	if strings.HasPrefix(name, "nvidia.com/") && !v.at("externalResourceProvider").is() {
		k.im.noteRemark(v.at("resourceName"), "the IDs of its devices become PCI addresses, as in the NVIDIA KubeVirt plugin, where KubeVirt itself uses IOMMU groups; running pods keep their devices")
	}
	if strings.EqualFold(m[1], "10de") { // a virtual function with a vGPU type uses NVIDIA's own driver
		cel[2] = anyOf([]string{cel[2], oneOf(familyAttribute, []string{"vfio"})})
	}
	k.addOffered(v, k.im.addResource(v, name, all(cel)))
}

// typeID matches the number of a vGPU type, as opposed to its name.
var typeID = regexp.MustCompile(`^nvidia-[0-9]+$`)

func (k *kubevirt) addMediated(v value) {
	if !k.common(v, "mdevNameSelector") {
		return
	}
	selector := v.at("mdevNameSelector")
	name := selector.text()
	if name == "" || typeID.MatchString(name) {
		k.im.notePodChange(cmpValue(selector, v), "is not the name of a type, such as GRID T4-1Q")
		return
	}
	// KubeVirt replaces spaces by underscores before it compares names.
	names := map[string]bool{name: true, strings.ReplaceAll(name, " ", "_"): true, strings.ReplaceAll(name, "_", " "): true}
	cel := all([]string{oneOf(familyAttribute, []string{"vfio"}), oneOf(text("profile"), sorted(names))})
	k.addOffered(v, k.im.addResource(v, v.at("resourceName").text(), cel))
}

func (k *kubevirt) addUSB(v value) {
	if !k.common(v, "selectors") {
		return
	}
	group := v1alpha1.PathGroup{Each: true} // each set has one device for each selector
	for _, selector := range v.at("selectors").items() {
		k.im.unknownExcept(selector, "vendor", "product", "serial")
		group.USB = append(group.USB, usbDevice(selector))
	}
	k.addOffered(v, k.im.addPaths(v, v1alpha1.PathResource{Name: v.at("resourceName").text(), Groups: []v1alpha1.PathGroup{group}}))
}

// usbDevice reads the IDs of a USB device.
func usbDevice(v value) v1alpha1.USBDevice {
	id := func(name string) string { return strings.TrimPrefix(strings.ToLower(v.at(name).text()), "0x") }
	return v1alpha1.USBDevice{Vendor: id("vendor"), Product: id("product"), Serial: v.at("serial").text()}
}

// sorted returns the sorted keys of a map.
func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
