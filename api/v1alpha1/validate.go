package v1alpha1

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"chandler.dev/internal/pattern"
)

// validate checks the mode of a configuration or a node.
func (m Mode) validate() error {
	if m == ModeReportOnly || m.validateAPI() == nil {
		return nil
	}
	return fmt.Errorf("is %q; want %s, %s, %s or %s", string(m), ModeAuto, ModeDRA, ModeDevicePlugin, ModeReportOnly)
}

// validateAPI checks the mode of single devices, which is an API.
func (m Mode) validateAPI() error {
	switch m {
	case "", ModeAuto, ModeDRA, ModeDevicePlugin:
		return nil
	}
	return fmt.Errorf("is %q; want %s, %s or %s", string(m), ModeAuto, ModeDRA, ModeDevicePlugin)
}

func (e Effect) validate() error {
	switch e {
	case EffectNone, EffectNoSchedule, EffectNoExecute:
		return nil
	}
	return fmt.Errorf("is %q; want %s, %s or %s", string(e), EffectNone, EffectNoSchedule, EffectNoExecute)
}

func (h Hooks) validate() error {
	switch h {
	case "", HooksAuto, HooksNone:
		return nil
	}
	return fmt.Errorf("is %q; want %s or %s", string(h), HooksAuto, HooksNone)
}

func (a *Allocation) validate() error {
	if err := validateResourceName(a.Resource); err != nil {
		return fmt.Errorf("resource: %w", err)
	}
	switch a.Policy {
	case "", PolicyAligned, PolicySpread, PolicyPacked:
	default:
		return fmt.Errorf("policy: is %q; want %s, %s or %s", string(a.Policy), PolicyAligned, PolicySpread, PolicyPacked)
	}
	switch a.DeviceIDStrategy {
	case "", DeviceIDUUID, DeviceIDIndex:
	default:
		return fmt.Errorf("deviceIDStrategy: is %q; want %s or %s", string(a.DeviceIDStrategy), DeviceIDUUID, DeviceIDIndex)
	}
	if err := validateEnv(a.Env); err != nil {
		return fmt.Errorf("env: %w", err)
	}
	for i, strategy := range a.DeviceListStrategy {
		switch strategy {
		case ListEnvVar, ListVolumeMounts, ListCDIAnnotations, ListCDIDevices:
		default:
			return fmt.Errorf("deviceListStrategy[%d]: is %q; want %s, %s, %s or %s", i, string(strategy), ListEnvVar, ListVolumeMounts, ListCDIAnnotations, ListCDIDevices)
		}
	}
	for i, name := range a.MatchAttributes {
		if !attributeName().MatchString(name) {
			return fmt.Errorf("matchAttributes[%d]: is %q; want an attribute, such as profile or resource.kubernetes.io/numaNode", i, name)
		}
	}
	return nil
}

// attributeName matches attribute names, with a domain if it is not this driver's.
var attributeName = pattern.Lazy(`^([a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?/)?[A-Za-z_][A-Za-z0-9_]{0,31}$`)

func (k DriverKind) validate() error {
	if k == "" || k == DriverVFIO {
		return nil
	}
	return fmt.Errorf("driver: is %q; want %s", string(k), DriverVFIO)
}

// vfioDriver matches the names of the kernel's vfio drivers for PCI functions (drivers/vfio/pci).
var vfioDriver = pattern.Lazy(`^([a-z0-9_]{1,32}[_-])?vfio[_-]pci$`)

func (r *Passthrough) validate() error {
	if r.Driver == "" || vfioDriver().MatchString(r.Driver) {
		return nil
	}
	return fmt.Errorf("driver: is %q; want a vfio driver, such as vfio-pci or mlx5_vfio_pci", r.Driver)
}

// resetMethod matches the names of the kernel's reset methods for PCI functions
// (pci_reset_fn_methods in drivers/pci/pci.c).
var resetMethod = pattern.Lazy(`^[a-z][a-z_]{0,31}$`)

func (h *Reclaim) validate() error {
	switch {
	case h.Reset != "" && h.Reset != ResetNone && h.Reset != ResetFunction:
		return fmt.Errorf("reset: is %q; want %s or %s", string(h.Reset), ResetNone, ResetFunction)
	case len(h.ResetMethods) > 0 && h.Reset != ResetFunction:
		return fmt.Errorf("resetMethods: go with reset: %s", ResetFunction)
	}
	for i, method := range h.ResetMethods {
		if !resetMethod().MatchString(method) || slices.Contains(h.ResetMethods[:i], method) {
			return fmt.Errorf("resetMethods[%d]: is %q; want names of the kernel's reset_method, such as flr or bus, each once", i, method)
		}
	}
	return nil
}

func (v *OnDemandVirtualFunctions) validate() error {
	if v.Count < 0 || v.Count > 1<<16 {
		return fmt.Errorf("count: is %d; want 1 to 65536", v.Count)
	}
	return nil
}

func (o *OnDemand) validate() error {
	if o.KeepSeconds != nil && *o.KeepSeconds < 0 {
		return fmt.Errorf("keepSeconds: is %d; want 0 or more", *o.KeepSeconds)
	}
	return nil
}

func validateCEL(expression string) error {
	if strings.TrimSpace(expression) == "" {
		return errors.New("must not be empty")
	}
	return checkKinds(expression)
}

// validate returns the errors of all fields except the selector.
func (s *Sharing) validate() error {
	byNumber, byUnit := s.Replicas != 0, s.Unit != nil
	switch {
	case byNumber == byUnit:
		return errors.New("want either replicas or unit")
	case s.Replicas < 0 || s.Replicas > 4096:
		return fmt.Errorf("replicas: is %d; want 1 to 4096", s.Replicas)
	case byUnit && (s.Unit.Sign() <= 0 || s.Unit.CmpInt64(math.MaxInt64) > 0 || s.Unit.Cmp(*resource.NewQuantity(s.Unit.Value(), s.Unit.Format)) != 0):
		return fmt.Errorf("unit: is %s; want a whole number above 0, such as 1Gi", s.Unit)
	case byUnit && s.Resource == "":
		return errors.New("resource: must be set with unit, such as aliyun.com/gpu-mem")
	case s.Pool && (byUnit || s.Resource == ""):
		return errors.New("pool: wants replicas and a resource, such as rdma/hca_shared")
	case byNumber && s.Capacity != "":
		return errors.New("capacity: is for unit, not for replicas")
	}
	if s.Capacity != "" {
		if messages := validation.IsCIdentifier(s.Capacity); len(messages) > 0 {
			return fmt.Errorf("capacity: is %q; %s", s.Capacity, strings.Join(messages, "; "))
		}
	}
	if s.Resource == "" {
		return nil
	}
	if err := validateResourceName(s.Resource); err != nil {
		return fmt.Errorf("resource: %w", err)
	}
	return nil
}

// validateResourceName checks a name as the API server does for an extended resource of a
// container: a domain, a slash and a name.
func validateResourceName(name string) error {
	domain, _, qualified := strings.Cut(name, "/")
	if !qualified || domain == "" {
		return fmt.Errorf("is %q; want a domain and a name, such as example.com/gpu", name)
	}
	if domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io") {
		return fmt.Errorf("is %q; the domain kubernetes.io is Kubernetes' own", name)
	}
	if messages := validation.IsQualifiedName(name); len(messages) > 0 {
		return fmt.Errorf("is %q; %s", name, strings.Join(messages, "; "))
	}
	return nil
}

func validateRoot(root string) error {
	if !path.IsAbs(root) || path.Clean(root) != root {
		return fmt.Errorf("is %q; want a clean absolute path, such as /run/nvidia/driver", root)
	}
	return nil
}

// interfaceName is stricter than the kernel (net/core/dev.c, dev_valid_name), which accepts almost
// all bytes.
var interfaceName = pattern.Lazy(`^[A-Za-z0-9_.-]{1,15}$`)

func validateInterfaceName(name string) error {
	switch {
	case name == "":
		return nil
	case !interfaceName().MatchString(name) || name == "." || name == "..":
		return fmt.Errorf("interfaceName: is %q; want 1 to 15 letters, digits, '-', '_' and '.', such as net1", name)
	case name == "lo":
		return fmt.Errorf("interfaceName: is %q, which every container has already", name)
	}
	return nil
}

var hexadecimal = pattern.Lazy(`^[0-9A-Fa-f]{8,40}$`)

func validateAcceleratorFunction(id string) error {
	if id == "" || hexadecimal().MatchString(strings.ReplaceAll(id, "-", "")) {
		return nil
	}
	return fmt.Errorf("acceleratorFunction: is %q; want 8 to 40 hexadecimal digits", id)
}

// Limits for the environment variables of a claim. Names are C identifiers, which every shell and
// library can read, and a value is one line.
var (
	variableName  = pattern.Lazy(`^[A-Za-z_][A-Za-z0-9_]{0,63}$`)
	variableValue = pattern.Lazy(`^[ -~]{1,256}$`)
)

const (
	maxVariables = 32

	// ownVariables is the prefix of Chandler's own environment variables in containers.
	ownVariables = "CHANDLER_"
)

func validateEnvironment(environment map[string]string) error {
	if len(environment) > maxVariables {
		return fmt.Errorf("environment: has %d variables; want at most %d", len(environment), maxVariables)
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(environment)) {
		switch {
		case !variableName().MatchString(name):
			errs = append(errs, fmt.Errorf("environment: %.80q is not a valid environment variable; want 1 to 64 letters, digits and '_', no digit first", name))
		case strings.HasPrefix(name, ownVariables):
			errs = append(errs, fmt.Errorf("environment[%s]: variables of that prefix are not for claims to set", name))
		case !variableValue().MatchString(environment[name]):
			errs = append(errs, fmt.Errorf("environment[%s]: want 1 to 256 printable ASCII characters", name))
		}
	}
	return errors.Join(errs...)
}

func validateComputePercentage(percentage *int) error {
	if percentage == nil || 1 <= *percentage && *percentage <= 100 {
		return nil
	}
	return fmt.Errorf("computePercentage: is %d; want 1 to 100", *percentage)
}

func (m *MPSParameters) validate() error {
	if m == nil || m.MemoryMiB == nil || 1 <= *m.MemoryMiB && *m.MemoryMiB <= 1<<30 {
		return nil
	}
	return fmt.Errorf("mps.memoryMiB: is %d; want 1 to %d", *m.MemoryMiB, 1<<30)
}

func (p *ClaimParameters) validateTimeSlice() error {
	switch p.TimeSlice {
	case "":
		return nil
	case TimeSliceDefault, TimeSliceShort, TimeSliceMedium, TimeSliceLong:
	default:
		return fmt.Errorf("timeSlice: is %q; want %s, %s, %s or %s", string(p.TimeSlice), TimeSliceDefault, TimeSliceShort, TimeSliceMedium, TimeSliceLong)
	}
	if p.MPS != nil {
		return errors.New("timeSlice: cannot be combined with mps")
	}
	return nil
}
