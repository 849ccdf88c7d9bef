package v1alpha1

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

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

func (r *PathResource) validate() error {
	var errs []error
	check := func(path string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
	}
	check("name", validateResourceName(r.Name))
	if len(r.Name) > 64 {
		check("name", fmt.Errorf("is %q; an attribute has at most 64 characters", r.Name))
	}
	if name := RenamedKinds[r.Kind]; name != "" {
		check("kind", fmt.Errorf("%q was renamed to %q", r.Kind, name))
	} else if r.Kind != "" && !slices.Contains(kinds, r.Kind) {
		check("kind", fmt.Errorf("is %q; want one of %s", r.Kind, strings.Join(kinds, ", ")))
	}
	check("env", validateEnv(r.Env))
	if len(r.Groups) == 0 {
		check("groups", errors.New("must not be empty"))
	}
	counted := -1
	for i := range r.Groups {
		check(fmt.Sprintf("groups[%d]", i), r.Groups[i].validate())
		switch {
		case r.Groups[i].Units > 0 && counted >= 0:
			check(fmt.Sprintf("groups[%d].units", i), fmt.Errorf("groups[%d] has units, which have the same numbers", counted))
		case r.Groups[i].Units > 0:
			counted = i
		}
	}
	return errors.Join(errs...)
}

func (g *PathGroup) validate() error {
	var errs []error
	if len(g.Paths) > 0 && len(g.USB) > 0 || len(g.Paths) == 0 && len(g.USB) == 0 && g.Units == 0 {
		errs = append(errs, errors.New("want either paths or usb"))
	}
	if g.Units < 0 || g.Units > maxUnits {
		errs = append(errs, fmt.Errorf("units: is %d; want 1 to %d", g.Units, maxUnits))
	}
	if g.Units > 0 && (g.Each || g.Count > 1) {
		errs = append(errs, errors.New("units: is in place of count and each"))
	}
	if g.UnitEnv != "" && (g.Units == 0 || len(validation.IsCIdentifier(g.UnitEnv)) > 0) {
		errs = append(errs, fmt.Errorf("unitEnv: is %q; want a name such as ACCELERATOR_UNITS, with units", g.UnitEnv))
	}
	if g.Each && len(g.USB) == 0 {
		errs = append(errs, errors.New("each: is for usb"))
	}
	if g.Count < 0 || g.Count > maxShares {
		errs = append(errs, fmt.Errorf("count: is %d; want 1 to %d", g.Count, maxShares))
	}
	for i := range g.Paths {
		if err := g.Paths[i].validate(); err != nil {
			errs = append(errs, fmt.Errorf("paths[%d]: %w", i, err))
		}
	}
	for i, device := range g.USB {
		if !usbID().MatchString(device.Vendor) || !usbID().MatchString(device.Product) {
			errs = append(errs, fmt.Errorf("usb[%d]: is vendor %q, product %q; want up to four hexadecimal digits each", i, device.Vendor, device.Product))
		}
	}
	return errors.Join(errs...)
}

var (
	usbID       = pattern.Lazy(`^[0-9A-Fa-f]{1,4}$`)
	permissions = pattern.Lazy(`^[rwm]{0,3}$`)
)

func (p *Path) validate() error {
	var errs []error
	if !path.IsAbs(p.Path) || path.Clean(p.Path) != p.Path || p.Path == "/" {
		errs = append(errs, fmt.Errorf("path: is %q; want a clean absolute path, such as /dev/ttyUSB*", p.Path))
	}
	if _, err := path.Match(p.Path, ""); err != nil {
		errs = append(errs, fmt.Errorf("path: is %q: %w", p.Path, err))
	}
	if inside := strings.TrimSuffix(p.MountPath, "/"); p.MountPath != "" && (!path.IsAbs(p.MountPath) || inside != "" && path.Clean(inside) != inside) {
		errs = append(errs, fmt.Errorf("mountPath: is %q; want a clean absolute path", p.MountPath))
	}
	if p.Limit < 0 || p.Limit > maxShares {
		errs = append(errs, fmt.Errorf("limit: is %d; want 1 to %d", p.Limit, maxShares))
	}
	switch {
	case p.Type != "" && p.Type != PathTypeDevice && p.Type != PathTypeMount:
		errs = append(errs, fmt.Errorf("type: is %q; want %s or %s", string(p.Type), PathTypeDevice, PathTypeMount))
	case !permissions().MatchString(p.Permissions):
		errs = append(errs, fmt.Errorf("permissions: is %q; want some of m, r and w", p.Permissions))
	case p.Type == PathTypeMount && p.Permissions != "":
		errs = append(errs, errors.New("permissions: is for type Device"))
	case p.Type != PathTypeMount && p.ReadOnly:
		errs = append(errs, errors.New("readOnly: is for type Mount"))
	}
	return errors.Join(errs...)
}

// validateEnv checks environment variables for containers.
func validateEnv(env map[string]string) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if len(validation.IsCIdentifier(name)) > 0 || strings.ContainsRune(env[name], 0) {
			errs = append(errs, fmt.Errorf("%q=%q: want a name such as SERIAL_PORT, and a text", name, env[name]))
		}
	}
	return errors.Join(errs...)
}
