package hostdevices

import (
	"cmp"
	"maps"
	"regexp"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/expression"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/importer/yamlnode"
)

// kubevirt reads the host devices that KubeVirt permits
// (docs/devel/host-devices-and-device-plugins.md in kubevirt/kubevirt, and the HyperConverged
// object of kubevirt/hyperconverged-cluster-operator).
type kubevirt struct {
	im    *plugin.Import
	leave []source.Value // the resources that KubeVirt must leave to the agent
	kind  string         // of the object with these resources
	first source.Value   // the first value that was read
}

// NewKubeVirt returns the format of KubeVirt.
func NewKubeVirt(im *plugin.Import) *plugin.Format {
	k := &kubevirt{im: im}
	return &plugin.Format{
		Name:         "KubeVirt",
		Forms:        "permittedHostDevices, alone or in a KubeVirt or HyperConverged object",
		Families:     []string{"hypervisor", "paths", "vfio"},
		IsDocument:   func(v source.Value) bool { return k.permittedDevices(v).IsPresent() },
		ReadDocument: k.read,
		IsContainer:  func(c plugin.Container) bool { return c.HasName("virt-handler") },
		ReadContainer: func(c plugin.Container) {
			k.rememberFirst(c.Value)
		},
		Finish: k.finishSettings,
	}
}

// rememberFirst stores the first value that is read.
func (k *kubevirt) rememberFirst(v source.Value) {
	if !k.first.IsPresent() {
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
	if k.first.IsPresent() {
		at := k.first.WithText("")
		at.Path, at.Nodes = "", ownNodes
		k.im.Config.AddExclude(at, expression.OneOf(expression.Family, []string{"hypervisor"}))
	}
	var names []string
	for _, v := range k.leave {
		names = append(names, v.Text())
	}
	if len(names) > 0 {
		at := k.leave[0]
		at.Path, at.Node = "permittedHostDevices", yamlnode.NewScalar("", at.Node.Line)
		k.im.Notes.AddRemark(at, "set externalResourceProvider: true in the %s object, so that KubeVirt leaves these to the agent: %s", k.kind, strings.Join(names, ", "))
	}
}

// permittedDevices returns the object with the permitted devices.
func (k *kubevirt) permittedDevices(v source.Value) source.Value {
	for _, at := range [][]string{
		{"permittedHostDevices"},
		{"configuration", "permittedHostDevices"},
		{"spec", "configuration", "permittedHostDevices"},
		{"spec", "permittedHostDevices"},
		{"spec", "virtualization", "permittedHostDevices"}, // HyperConverged v1
	} {
		if found := v.At(at...); found.IsMap() {
			return found
		}
	}
	if v.HasAny("pciHostDevices", "mediatedDevices", "usb", "usbHostDevices") && !v.HasAny("kind", "name") {
		for _, list := range []string{"pciHostDevices", "mediatedDevices", "usb", "usbHostDevices"} {
			if items := v.At(list); items.IsList() && len(items.Node.Content) > 0 && items.ListItems()[0].Has("resourceName") {
				return v
			}
		}
	}
	if kind := v.At("kind").Text(); kind == "KubeVirt" || kind == "HyperConverged" {
		return v.At("spec") // permits no device
	}
	return source.Value{}
}

func (k *kubevirt) read(v source.Value) {
	k.rememberFirst(v)
	k.kind = cmp.Or(v.At("kind").Text(), k.kind, "KubeVirt")
	list := k.permittedDevices(v)
	for _, device := range list.At("pciHostDevices").ListItems() {
		k.addPCI(device)
	}
	for _, device := range list.At("mediatedDevices").ListItems() {
		k.addMediated(device)
	}
	for _, device := range slices.Concat(list.At("usb").ListItems(), list.At("usbHostDevices").ListItems()) {
		k.addUSB(device)
	}
	if list.Path != v.At("spec").Path || list.Path == "" {
		k.im.Notes.AddUnknownExcept(list, "pciHostDevices", "mediatedDevices", "usb", "usbHostDevices", "mediatedDevicesTypes")
	}
	if v.At("kind").IsPresent() {
		k.noteRest(v, list)
	}
}

// noteRest notes the other fields of a KubeVirt or HyperConverged object.
func (k *kubevirt) noteRest(v, list source.Value) {
	var rest []source.Value
	for _, at := range []source.Value{v.At("spec"), v.At("spec", "configuration"), v.At("spec", "virtualization"), v.At("spec", "deployment")} {
		for name, field := range at.Fields() {
			switch {
			case name == "workloads":
				placement := field.At("nodePlacement")
				rest = append(rest, field.FieldsExcept("nodePlacement")...)
				rest = append(rest, placement.FieldsExcept("nodeSelector", "affinity")...)
			case name == "nodePlacements": // HyperConverged v1
				rest = append(rest, field.FieldsExcept("workload")...)
				rest = append(rest, field.At("workload").FieldsExcept("nodeSelector", "affinity")...)
			case name == "mediatedDevicesConfiguration":
				k.im.Notes.AddRemark(field, "KubeVirt makes these vGPUs as before")
			case !slices.Contains([]string{"configuration", "virtualization", "deployment"}, name) && field.Path != list.Path:
				rest = append(rest, field)
			}
		}
	}
	k.im.NoteUnread(v, rest)
}

// common reports whether an entry is imported.
func (k *kubevirt) common(v source.Value, known ...string) bool {
	k.im.Notes.AddUnknownExcept(v, append(known, "resourceName", "externalResourceProvider", "disabled")...)
	if disabled := v.At("disabled"); disabled.IsTrue() {
		k.im.Notes.AddRemark(disabled, "%s is not offered", v.At("resourceName").Text())
		return false
	}
	return true
}

// addOffered stores a resource that KubeVirt must leave to the agent.
func (k *kubevirt) addOffered(v source.Value, ok bool) {
	if ok && !v.At("externalResourceProvider").IsTrue() {
		k.leave = append(k.leave, v.At("resourceName"))
	}
}

// vendorSelector matches a vendor and device ID such as 10DE:1EB8.
var vendorSelector = regexp.MustCompile(`^([0-9a-fA-F]{4}):([0-9a-fA-F]{4})$`)

// vfio is the end of an expression for drivers that pass functions to virtual machines.
const vfio = `.contains("vfio")`

func (k *kubevirt) addPCI(v source.Value) {
	if !k.common(v, "pciVendorSelector", "pciDeviceSelector") {
		return
	}
	selector := v.At("pciVendorSelector")
	if !selector.IsPresent() {
		selector = v.At("pciDeviceSelector") // the field of the HyperConverged object
	}
	m := vendorSelector.FindStringSubmatch(selector.Text())
	if m == nil {
		k.im.Notes.AddPodChange(selector.OrPlaceOf(v), "is not a vendor and device ID, such as 10DE:1EB8")
		return
	}
	cel := []string{
		expression.OneOf(expression.Text("pciVendor"), []string{strings.ToLower(m[1])}),
		expression.OneOf(expression.Text("pciDevice"), []string{strings.ToLower(m[2])}),
		expression.Text("driver") + vfio,
	}
	name := v.At("resourceName").Text()
	if strings.HasPrefix(name, "nvidia.com/") && !v.At("externalResourceProvider").IsTrue() {
		k.im.Notes.AddRemark(v.At("resourceName"), "the IDs of its devices become PCI addresses, as in the NVIDIA KubeVirt plugin, where KubeVirt itself uses IOMMU groups; running pods keep their devices")
	}
	if strings.EqualFold(m[1], "10de") { // a virtual function with a vGPU type uses NVIDIA's own driver
		cel[2] = expression.AnyOf([]string{cel[2], expression.OneOf(expression.Family, []string{"vfio"})})
	}
	k.addOffered(v, k.im.Config.AddResource(v, name, expression.All(cel)))
}

// typeID matches the number of a vGPU type, as opposed to its name.
var typeID = regexp.MustCompile(`^nvidia-[0-9]+$`)

func (k *kubevirt) addMediated(v source.Value) {
	if !k.common(v, "mdevNameSelector") {
		return
	}
	selector := v.At("mdevNameSelector")
	name := selector.Text()
	if name == "" || typeID.MatchString(name) {
		k.im.Notes.AddPodChange(selector.OrPlaceOf(v), "is not the name of a type, such as GRID T4-1Q")
		return
	}
	// KubeVirt replaces spaces by underscores before it compares names.
	names := map[string]bool{name: true, strings.ReplaceAll(name, " ", "_"): true, strings.ReplaceAll(name, "_", " "): true}
	cel := expression.All([]string{expression.OneOf(expression.Family, []string{"vfio"}), expression.OneOf(expression.Text("profile"), slices.Sorted(maps.Keys(names)))})
	k.addOffered(v, k.im.Config.AddResource(v, v.At("resourceName").Text(), cel))
}

func (k *kubevirt) addUSB(v source.Value) {
	if !k.common(v, "selectors") {
		return
	}
	group := v1alpha1.PathGroup{Each: true} // each set has one device for each selector
	for _, selector := range v.At("selectors").ListItems() {
		k.im.Notes.AddUnknownExcept(selector, "vendor", "product", "serial")
		group.USB = append(group.USB, usbDevice(selector))
	}
	k.addOffered(v, k.im.Config.AddPaths(v, v1alpha1.PathResource{Name: v.At("resourceName").Text(), Groups: []v1alpha1.PathGroup{group}}))
}

// usbDevice reads the IDs of a USB device.
func usbDevice(v source.Value) v1alpha1.USBDevice {
	id := func(name string) string { return strings.TrimPrefix(strings.ToLower(v.At(name).Text()), "0x") }
	return v1alpha1.USBDevice{Vendor: id("vendor"), Product: id("product"), Serial: v.At("serial").Text()}
}
