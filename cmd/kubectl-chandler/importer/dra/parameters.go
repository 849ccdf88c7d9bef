package dra

import (
	"cmp"
	"reflect"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
	"chandler.dev/cmd/kubectl-chandler/replaced"
)

// newParameters returns claim parameters without any setting.
func newParameters() *v1alpha1.ClaimParameters {
	return &v1alpha1.ClaimParameters{TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.APIVersion, Kind: v1alpha1.KindClaimParameters}}
}

// parameters translates the parameters of an entry of config. The result is nil if nothing of them
// has a counterpart.
func (t *objectTranslation) parameters(d *replaced.Driver, config source.Value) *v1alpha1.ClaimParameters {
	v := config.At("opaque", "parameters")
	out := newParameters()
	switch kind := v.At("kind").Text(); {
	case d.Unserved != "":
		t.lose(v, "%s", d.Unserved)
	case d.Name == "dra.net":
		t.network(v, out)
	case kind == "GpuConfig":
		t.im.Notes.AddUnknownExcept(v, "apiVersion", "kind", "sharing")
		t.sharing(v.At("sharing"), out, config)
	case kind == "MigDeviceConfig":
		t.im.Notes.AddUnknownExcept(v, "apiVersion", "kind", "sharing")
		t.migSharing(v.At("sharing"))
	case kind == "VfioDeviceConfig":
		t.im.Notes.AddUnknownExcept(v, "apiVersion", "kind", "iommu")
		if iommu := v.At("iommu"); !iommu.IsNull() {
			t.im.Notes.AddPodChange(iommu, "has no counterpart: the VFIO nodes of the device are those of the host's kernel")
		}
		t.im.Notes.AddRemark(v, "the administrator must allow passthrough of these devices, as the page on VFIO passthrough describes")
		out.Driver = v1alpha1.DriverVFIO
	case kind == "NeuronConfig":
		t.im.Notes.AddPodChange(v, "has no counterpart: set the environment variable NEURON_LOGICAL_NC_CONFIG in the pod")
	default:
		t.im.Notes.AddPodChange(v, "has no counterpart: the parameters of %s are unknown", d.Name)
	}
	if reflect.DeepEqual(out, newParameters()) {
		return nil
	}
	return out
}

// timeSlices are the intervals of the NVIDIA driver.
var timeSlices = []string{"Default", "Short", "Medium", "Long"}

// sharing translates the sharing of whole NVIDIA GPUs among the containers of a claim.
func (t *objectTranslation) sharing(v source.Value, out *v1alpha1.ClaimParameters, config source.Value) {
	strategy := v.At("strategy")
	if v.IsNull() {
		return
	}
	t.im.Notes.AddUnknownExcept(v, "strategy", "timeSlicingConfig", "mpsConfig")
	requests := len(config.At("requests").ListItems())
	if requests == 0 {
		requests = t.total
	}
	if requests > 1 {
		t.im.Notes.AddPodChange(strategy, "is not carried over: only one request of a claim can have this parameter")
		return
	}
	const allow = "the administrator must allow this parameter, as the page on NVIDIA describes"
	switch strategy.Text() {
	case "TimeSlicing":
		t.im.Notes.AddUnknownExcept(v.At("timeSlicingConfig"), "interval")
		interval := cmp.Or(v.At("timeSlicingConfig", "interval").Text(), "Default")
		if !slices.Contains(timeSlices, interval) {
			t.im.Notes.AddPodChange(v.At("timeSlicingConfig", "interval"), "is not a time slice")
			return
		}
		out.TimeSlice = v1alpha1.TimeSlice(interval)
		t.im.Notes.AddRemark(strategy, allow)
	case "MPS":
		out.MPS = &v1alpha1.MPSParameters{}
		t.mps(v.At("mpsConfig"), out)
		t.im.Notes.AddRemark(strategy, allow)
	default:
		t.im.Notes.AddPodChange(strategy, "has no counterpart")
	}
}

// mps translates the limits of an MPS daemon.
func (t *objectTranslation) mps(v source.Value, out *v1alpha1.ClaimParameters) {
	for name, field := range v.Fields() {
		switch name {
		case "defaultActiveThreadPercentage":
			n, ok := field.AsInteger()
			if !ok || n < 1 || n > 100 {
				t.im.Notes.AddPodChange(field, "is not a percentage from 1 to 100, and is not carried over")
				continue
			}
			out.ComputePercentage = &n
		case "defaultPinnedDeviceMemoryLimit":
			quantity, err := resource.ParseQuantity(field.Text())
			mebibytes := int(quantity.Value() >> 20)
			if err != nil || mebibytes < 1 {
				t.im.Notes.AddPodChange(field, "is not an amount of at least 1Mi, and is not carried over")
				continue
			}
			if quantity.Value()&(1<<20-1) != 0 {
				t.im.Notes.AddPodChange(field, "is rounded down to %dMi", mebibytes)
			}
			out.MPS.MemoryMiB = &mebibytes
		case "defaultPerDevicePinnedMemoryLimit":
			t.im.Notes.AddPodChange(field, "has no counterpart: the memory limit is the same for all GPUs of a claim")
		case "multiUser":
			if field.IsTrue() {
				t.im.Notes.AddPodChange(field, "has no counterpart")
			}
		default:
			t.im.Notes.AddUnknownField(field)
		}
	}
}

// migSharing notes the sharing of MIG devices. The containers of a claim use a MIG device in turns
// without any parameter.
func (t *objectTranslation) migSharing(v source.Value) {
	t.im.Notes.AddUnknownExcept(v, "strategy", "mpsConfig")
	switch strategy := v.At("strategy"); strategy.Text() {
	case "":
	case "TimeSlicing":
		t.im.Notes.AddRemark(strategy, "needs no parameter: the containers of a claim use its MIG device in turns")
	default:
		t.im.Notes.AddPodChange(strategy, "has no counterpart for MIG devices: an MPS daemon needs whole GPUs")
	}
}

// network translates the network configuration of dra.net.
func (t *objectTranslation) network(v source.Value, out *v1alpha1.ClaimParameters) {
	for name, field := range v.Fields() {
		if name != "interface" {
			t.im.Notes.AddPodChange(field, "has no counterpart: Chandler moves the interface into the pod and sets its name only")
			continue
		}
		for name, field := range field.Fields() {
			if name == "name" {
				out.InterfaceName = field.Text()
				continue
			}
			t.im.Notes.AddPodChange(field, "has no counterpart: Chandler moves the interface into the pod and sets its name only")
		}
	}
}
