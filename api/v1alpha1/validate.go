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
	"k8s.io/apimachinery/pkg/util/validation/field"

	"chandler.dev/internal/jsonerror"
	"chandler.dev/internal/pattern"
)

// JoinErrors joins errors of fields into one error, with a line for each: its path and its detail. It
// returns nil for an empty list.
func JoinErrors(list field.ErrorList) error {
	var errs []error
	for _, err := range list {
		errs = append(errs, jsonerror.FieldError{Path: err.Field, Text: err.Detail})
	}
	return errors.Join(errs...)
}

// InvalidField returns a list with the error of one field.
func InvalidField(at *field.Path, format string, args ...any) field.ErrorList {
	return field.ErrorList{field.Invalid(at, field.OmitValueType{}, fmt.Sprintf(format, args...))}
}

// Validate returns all errors of the configuration, for all nodes. It does not compile expressions.
func (c *DriverConfig) Validate() field.ErrorList {
	allocated, offered := make(named), make(named)
	return slices.Concat(
		validateEnum(c.Mode, field.NewPath("mode"), modes...),
		validateEnum(c.Hooks, field.NewPath("hooks"), HooksAuto, HooksNone),
		validateEntries(c.Exclude, field.NewPath("exclude"), (*Selector).validate),
		validateEntries(c.Sharing, field.NewPath("sharing"), (*Sharing).validate),
		validateEntries(c.Resources, field.NewPath("resources"), (*Resource).validate),
		validateEntries(c.Passthrough, field.NewPath("passthrough"), (*Passthrough).validate),
		validateEntries(c.Reclaim, field.NewPath("reclaim"), (*Reclaim).validate),
		c.OnDemand.validate(field.NewPath("onDemand")),
		validateEntries(c.Allocation, field.NewPath("allocation"), func(a *Allocation, at *field.Path) field.ErrorList {
			return append(allocated.validateName(a.Resource, a.Nodes, at.Child("resource")), a.validate(at)...)
		}),
		validateEntries(c.Overhead, field.NewPath("overhead"), (*Overhead).validate),
		validateValues(c.DriverRoots, field.NewPath("driverRoots"), validateRoot),
		validateValues(c.Health.Severity, field.NewPath("health", "severity"), Effect.validate),
		validateEntries(c.Paths, field.NewPath("paths"), func(r *PathResource, at *field.Path) field.ErrorList {
			return append(offered.validateName(r.Name, r.Nodes, at.Child("name")), r.validate(at)...)
		}),
		c.validateNames(surelyTogether),
	)
}

// Validate returns all errors of the parameters.
func (p *ClaimParameters) Validate() field.ErrorList {
	errs := slices.Concat(
		validateInterfaceName(p.InterfaceName, field.NewPath("interfaceName")),
		validateAcceleratorFunction(p.AcceleratorFunction, field.NewPath("acceleratorFunction")),
		validateEnum(p.Driver, field.NewPath("driver"), DriverVFIO),
		validateEnvironment(p.Environment, field.NewPath("environment")),
		validateRange(p.ComputePercentage, 1, 100, field.NewPath("computePercentage")),
		validateEnum(p.TimeSlice, field.NewPath("timeSlice"), TimeSliceDefault, TimeSliceShort, TimeSliceMedium, TimeSliceLong),
	)
	if p.MPS == nil {
		return errs
	}
	if p.TimeSlice != "" {
		errs = append(errs, InvalidField(field.NewPath("timeSlice"), "cannot be combined with mps")...)
	}
	return append(errs, validateRange(p.MPS.MemoryMiB, 1, 1<<30, field.NewPath("mps", "memoryMiB"))...)
}

// validateEntries returns the errors of the entries of a list.
func validateEntries[T any](entries []T, at *field.Path, validate func(*T, *field.Path) field.ErrorList) (errs field.ErrorList) {
	for i := range entries {
		errs = append(errs, validate(&entries[i], at.Index(i))...)
	}
	return errs
}

// validateValues returns the errors of the values of a map.
func validateValues[T any](values map[string]T, at *field.Path, validate func(T, *field.Path) field.ErrorList) (errs field.ErrorList) {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		errs = append(errs, validate(values[key], at.Key(key))...)
	}
	return errs
}

// validateEnum checks a value that is unset or one of the known values.
func validateEnum[T ~string](value T, at *field.Path, known ...T) field.ErrorList {
	if value == "" {
		return nil
	}
	return validateSetEnum(value, at, known...)
}

// validateSetEnum checks a value that is one of the known values.
func validateSetEnum[T ~string](value T, at *field.Path, known ...T) field.ErrorList {
	if slices.Contains(known, value) {
		return nil
	}
	return InvalidField(at, "%s", describeUnknown(value, known))
}

// describeUnknown returns the message for a value that is not one of the known values.
func describeUnknown[T ~string](value T, known []T) string {
	names := make([]string, len(known))
	for i, k := range known {
		names[i] = string(k)
	}
	last := len(names) - 1
	want := names[last]
	if last > 0 {
		want = strings.Join(names[:last], ", ") + " or " + want
	}
	return fmt.Sprintf("is %q; want %s", string(value), want)
}

// validateRange checks a number, if it is set.
func validateRange(value *int, least, most int, at *field.Path) field.ErrorList {
	if value == nil || least <= *value && *value <= most {
		return nil
	}
	return InvalidField(at, "is %d; want %d to %d", *value, least, most)
}

// validateCount checks a number that is 0 if it is unset.
func validateCount(count, most int, at *field.Path) field.ErrorList {
	if count == 0 {
		return nil
	}
	return validateRange(&count, 1, most, at)
}

// modes are the modes of a configuration or a node. The mode of single devices is an API.
var modes = []Mode{ModeAuto, ModeDRA, ModeDevicePlugin, ModeReportOnly}

func (e Effect) validate(at *field.Path) field.ErrorList {
	return validateSetEnum(e, at, EffectNone, EffectNoSchedule, EffectNoExecute)
}

func (s *Selector) validate(at *field.Path) field.ErrorList {
	return append(validateCEL(s.CEL, at.Child("cel")), s.Nodes.validate(at.Child("nodes"))...)
}

func validateCEL(expression string, at *field.Path) field.ErrorList {
	if strings.TrimSpace(expression) == "" {
		return InvalidField(at, "must not be empty")
	}
	return validateKinds(expression, at)
}

func (s *Sharing) validate(at *field.Path) field.ErrorList {
	return append(s.Selector.validate(at), s.validateShares(at)...)
}

// validateShares returns the errors of all fields except the selector.
func (s *Sharing) validateShares(at *field.Path) field.ErrorList {
	byNumber, byUnit := s.Replicas != 0, s.Unit != nil
	switch {
	case byNumber == byUnit:
		return InvalidField(at, "want either replicas or unit")
	case byUnit && (s.Unit.Sign() <= 0 || s.Unit.CmpInt64(math.MaxInt64) > 0 || s.Unit.Cmp(*resource.NewQuantity(s.Unit.Value(), s.Unit.Format)) != 0):
		return InvalidField(at.Child("unit"), "is %s; want a whole number above 0, such as 1Gi", s.Unit)
	case byUnit && s.Resource == "":
		return InvalidField(at.Child("resource"), "must be set with unit, such as aliyun.com/gpu-mem")
	case s.Pool && (byUnit || s.Resource == ""):
		return InvalidField(at.Child("pool"), "wants replicas and a resource, such as rdma/hca_shared")
	case byNumber && s.Capacity != "":
		return InvalidField(at.Child("capacity"), "is for unit, not for replicas")
	}
	errs := validateCount(s.Replicas, maxShares, at.Child("replicas"))
	if messages := validation.IsCIdentifier(s.Capacity); s.Capacity != "" && len(messages) > 0 {
		errs = append(errs, InvalidField(at.Child("capacity"), "is %q; %s", s.Capacity, strings.Join(messages, "; "))...)
	}
	if s.Resource != "" {
		errs = append(errs, validateResourceName(s.Resource, at.Child("resource"))...)
	}
	return errs
}

func (r *Resource) validate(at *field.Path) field.ErrorList {
	errs := slices.Concat(
		r.Selector.validate(at),
		validateResourceName(r.Name, at.Child("name")),
		validateEnum(r.Mode, at.Child("mode"), ModeAuto, ModeDRA, ModeDevicePlugin),
		validateAcceleratorFunction(r.AcceleratorFunction, at.Child("acceleratorFunction")),
		validateEnum(r.Driver, at.Child("driver"), DriverVFIO),
	)
	if r.Driver != "" && r.AcceleratorFunction != "" {
		errs = append(errs, InvalidField(at.Child("driver"), "cannot be combined with acceleratorFunction")...)
	}
	return errs
}

func (a *Allocation) validate(at *field.Path) field.ErrorList {
	return slices.Concat(
		a.Nodes.validate(at.Child("nodes")),
		validateResourceName(a.Resource, at.Child("resource")),
		validateEnum(a.Policy, at.Child("policy"), PolicyAligned, PolicySpread, PolicyPacked),
		validateEnum(a.DeviceIDStrategy, at.Child("deviceIDStrategy"), DeviceIDUUID, DeviceIDIndex),
		validateEnv(a.Env, at.Child("env")),
		validateEntries(a.DeviceListStrategy, at.Child("deviceListStrategy"), func(s *DeviceListStrategy, at *field.Path) field.ErrorList {
			return validateSetEnum(*s, at, ListEnvVar, ListVolumeMounts, ListCDIAnnotations, ListCDIDevices)
		}),
		validateEntries(a.MatchAttributes, at.Child("matchAttributes"), validateAttribute),
	)
}

// attributeName matches attribute names, with a domain if it is not this driver's.
var attributeName = pattern.Lazy(`^([a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?/)?[A-Za-z_][A-Za-z0-9_]{0,31}$`)

func validateAttribute(name *string, at *field.Path) field.ErrorList {
	if attributeName().MatchString(*name) {
		return nil
	}
	return InvalidField(at, "is %q; want an attribute, such as profile or resource.kubernetes.io/numaNode", *name)
}

// vfioDriver matches the names of the kernel's vfio drivers for PCI functions (drivers/vfio/pci).
var vfioDriver = pattern.Lazy(`^([a-z0-9_]{1,32}[_-])?vfio[_-]pci$`)

func (r *Passthrough) validate(at *field.Path) field.ErrorList {
	errs := r.Selector.validate(at)
	if r.Driver != "" && !vfioDriver().MatchString(r.Driver) {
		errs = append(errs, InvalidField(at.Child("driver"), "is %q; want a vfio driver, such as vfio-pci or mlx5_vfio_pci", r.Driver)...)
	}
	return errs
}

// resetMethod matches the names of the kernel's reset methods for PCI functions
// (pci_reset_fn_methods in drivers/pci/pci.c).
var resetMethod = pattern.Lazy(`^[a-z][a-z_]{0,31}$`)

func (h *Reclaim) validate(at *field.Path) field.ErrorList {
	errs := append(h.Selector.validate(at), validateEnum(h.Reset, at.Child("reset"), ResetNone, ResetFunction)...)
	if len(h.ResetMethods) > 0 && h.Reset != ResetFunction {
		errs = append(errs, InvalidField(at.Child("resetMethods"), "go with reset: %s", ResetFunction)...)
	}
	for i, method := range h.ResetMethods {
		if !resetMethod().MatchString(method) || slices.Contains(h.ResetMethods[:i], method) {
			errs = append(errs, InvalidField(at.Child("resetMethods").Index(i), "is %q; want names of the kernel's reset_method, such as flr or bus, each once", method)...)
		}
	}
	return errs
}

func (o *OnDemand) validate(at *field.Path) (errs field.ErrorList) {
	if o.KeepSeconds != nil && *o.KeepSeconds < 0 {
		errs = InvalidField(at.Child("keepSeconds"), "is %d; want 0 or more", *o.KeepSeconds)
	}
	return slices.Concat(
		errs,
		validateEntries(o.VirtualFunctions, at.Child("virtualFunctions"), (*OnDemandVirtualFunctions).validate),
		validateEntries(o.Partitions, at.Child("partitions"), (*Selector).validate),
		validateEntries(o.MPS, at.Child("mps"), (*Selector).validate),
		validateEntries(o.TimeSlices, at.Child("timeSlices"), (*Selector).validate),
	)
}

func (v *OnDemandVirtualFunctions) validate(at *field.Path) field.ErrorList {
	return append(v.Selector.validate(at), validateCount(v.Count, 1<<16, at.Child("count"))...)
}

// validateResourceName checks a name as the API server does for an extended resource of a
// container: a domain, a slash and a name.
func validateResourceName(name string, at *field.Path) field.ErrorList {
	domain, _, qualified := strings.Cut(name, "/")
	if !qualified || domain == "" {
		return InvalidField(at, "is %q; want a domain and a name, such as example.com/gpu", name)
	}
	if domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io") {
		return InvalidField(at, "is %q; the domain kubernetes.io is Kubernetes' own", name)
	}
	if messages := validation.IsQualifiedName(name); len(messages) > 0 {
		return InvalidField(at, "is %q; %s", name, strings.Join(messages, "; "))
	}
	return nil
}

func validateRoot(root string, at *field.Path) field.ErrorList {
	if path.IsAbs(root) && path.Clean(root) == root {
		return nil
	}
	return InvalidField(at, "is %q; want a clean absolute path, such as /run/nvidia/driver", root)
}

// interfaceName is stricter than the kernel (net/core/dev.c, dev_valid_name), which accepts almost
// all bytes.
var interfaceName = pattern.Lazy(`^[A-Za-z0-9_.-]{1,15}$`)

func validateInterfaceName(name string, at *field.Path) field.ErrorList {
	switch {
	case name == "":
		return nil
	case !interfaceName().MatchString(name) || name == "." || name == "..":
		return InvalidField(at, "is %q; want 1 to 15 letters, digits, '-', '_' and '.', such as net1", name)
	case name == "lo":
		return InvalidField(at, "is %q, which every container has already", name)
	}
	return nil
}

var hexadecimal = pattern.Lazy(`^[0-9A-Fa-f]{8,40}$`)

func validateAcceleratorFunction(id string, at *field.Path) field.ErrorList {
	if id == "" || hexadecimal().MatchString(strings.ReplaceAll(id, "-", "")) {
		return nil
	}
	return InvalidField(at, "is %q; want 8 to 40 hexadecimal digits", id)
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

func validateEnvironment(environment map[string]string, at *field.Path) (errs field.ErrorList) {
	if len(environment) > maxVariables {
		return InvalidField(at, "has %d variables; want at most %d", len(environment), maxVariables)
	}
	for _, name := range slices.Sorted(maps.Keys(environment)) {
		switch {
		case !variableName().MatchString(name):
			errs = append(errs, InvalidField(at, "%.80q is not a valid environment variable; want 1 to 64 letters, digits and '_', no digit first", name)...)
		case strings.HasPrefix(name, ownVariables):
			errs = append(errs, InvalidField(at.Key(name), "variables of that prefix are not for claims to set")...)
		case !variableValue().MatchString(environment[name]):
			errs = append(errs, InvalidField(at.Key(name), "want 1 to 256 printable ASCII characters")...)
		}
	}
	return errs
}
