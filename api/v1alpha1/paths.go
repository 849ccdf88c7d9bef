package v1alpha1

import (
	"maps"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"chandler.dev/internal/pattern"
)

// kinds are the values of the attribute "kind".
var kinds = []string{"gpu", "npu", "fpga", "crypto", "dma", "nic", "virtualization", "enclave", "other"}

// Limits for the count of a group, the limit of a path, and the units of a group. Each unit is a
// device.
const (
	maxShares = 4096
	maxUnits  = 1024
)

func (r *PathResource) validate(at *field.Path) field.ErrorList {
	errs := append(r.Nodes.validate(at.Child("nodes")), validateResourceName(r.Name, at.Child("name"))...)
	if len(r.Name) > 64 {
		errs = append(errs, InvalidField(at.Child("name"), "is %q; an attribute has at most 64 characters", r.Name)...)
	}
	if name := RenamedKinds[r.Kind]; name != "" {
		errs = append(errs, InvalidField(at.Child("kind"), "%q was renamed to %q", r.Kind, name)...)
	} else {
		errs = append(errs, validateEnum(r.Kind, at.Child("kind"), kinds...)...)
	}
	errs = append(errs, validateEnv(r.Env, at.Child("env"))...)
	groups := at.Child("groups")
	if len(r.Groups) == 0 {
		errs = append(errs, InvalidField(groups, "must not be empty")...)
	}
	counted := -1
	for i := range r.Groups {
		errs = append(errs, r.Groups[i].validate(groups.Index(i))...)
		switch {
		case r.Groups[i].Units > 0 && counted >= 0:
			errs = append(errs, InvalidField(groups.Index(i).Child("units"), "groups[%d] has units, which have the same numbers", counted)...)
		case r.Groups[i].Units > 0:
			counted = i
		}
	}
	return errs
}

func (g *PathGroup) validate(at *field.Path) (errs field.ErrorList) {
	if len(g.Paths) > 0 && len(g.USB) > 0 || len(g.Paths) == 0 && len(g.USB) == 0 && g.Units == 0 {
		errs = append(errs, InvalidField(at, "want either paths or usb")...)
	}
	errs = append(errs, validateCount(g.Units, maxUnits, at.Child("units"))...)
	if g.Units > 0 && (g.Each || g.Count > 1) {
		errs = append(errs, InvalidField(at.Child("units"), "is in place of count and each")...)
	}
	if g.UnitEnv != "" && (g.Units == 0 || len(validation.IsCIdentifier(g.UnitEnv)) > 0) {
		errs = append(errs, InvalidField(at.Child("unitEnv"), "is %q; want a name such as ACCELERATOR_UNITS, with units", g.UnitEnv)...)
	}
	if g.Each && len(g.USB) == 0 {
		errs = append(errs, InvalidField(at.Child("each"), "is for usb")...)
	}
	return slices.Concat(
		errs,
		validateCount(g.Count, maxShares, at.Child("count")),
		validateEntries(g.Paths, at.Child("paths"), (*Path).validate),
		validateEntries(g.USB, at.Child("usb"), (*USBDevice).validate),
	)
}

var (
	usbID       = pattern.Lazy(`^[0-9A-Fa-f]{1,4}$`)
	permissions = pattern.Lazy(`^[rwm]{0,3}$`)
)

func (d *USBDevice) validate(at *field.Path) field.ErrorList {
	if usbID().MatchString(d.Vendor) && usbID().MatchString(d.Product) {
		return nil
	}
	return InvalidField(at, "is vendor %q, product %q; want up to four hexadecimal digits each", d.Vendor, d.Product)
}

func (p *Path) validate(at *field.Path) (errs field.ErrorList) {
	if !path.IsAbs(p.Path) || path.Clean(p.Path) != p.Path || p.Path == "/" {
		errs = append(errs, InvalidField(at.Child("path"), "is %q; want a clean absolute path, such as /dev/ttyUSB*", p.Path)...)
	}
	if _, err := path.Match(p.Path, ""); err != nil {
		errs = append(errs, InvalidField(at.Child("path"), "is %q: %v", p.Path, err)...)
	}
	if inside := strings.TrimSuffix(p.MountPath, "/"); p.MountPath != "" && (!path.IsAbs(p.MountPath) || inside != "" && path.Clean(inside) != inside) {
		errs = append(errs, InvalidField(at.Child("mountPath"), "is %q; want a clean absolute path", p.MountPath)...)
	}
	errs = slices.Concat(errs, validateCount(p.Limit, maxShares, at.Child("limit")), validateEnum(p.Type, at.Child("type"), PathTypeDevice, PathTypeMount))
	switch {
	case !permissions().MatchString(p.Permissions):
		errs = append(errs, InvalidField(at.Child("permissions"), "is %q; want some of m, r and w", p.Permissions)...)
	case p.Type == PathTypeMount && p.Permissions != "":
		errs = append(errs, InvalidField(at.Child("permissions"), "is for type Device")...)
	case p.Type != PathTypeMount && p.ReadOnly:
		errs = append(errs, InvalidField(at.Child("readOnly"), "is for type Mount")...)
	}
	return errs
}

// validateEnv checks environment variables for containers.
func validateEnv(env map[string]string, at *field.Path) (errs field.ErrorList) {
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if len(validation.IsCIdentifier(name)) > 0 || strings.ContainsRune(env[name], 0) {
			errs = append(errs, InvalidField(at, "%q=%q: want a name such as SERIAL_PORT, and a text", name, env[name])...)
		}
	}
	return errs
}
