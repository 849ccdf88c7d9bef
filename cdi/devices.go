package cdi

import (
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"
)

// deviceClass is the class of the specs for devices of the device plugin API. The kubelet stores
// their names, so that a container has the same devices when it restarts after a reboot.
const deviceClass = "device"

// DeviceID returns the fully qualified name of a device by its own name:
// "chandler.dev/device=<name>".
func DeviceID(name string) string { return parser.QualifiedName(Vendor, deviceClass, name) }

// DevicesSpecs returns the texts of the specs for devices with their own names, by file name.
//
// Devices with hooks are in a spec of their family. Hooks common to all of its devices are hooks of
// the spec, so that they run only once for a container with several of the devices: a runtime
// applies the edits of a spec once for all of a container's devices in the spec, but the edits of
// devices for each device (Cache.InjectDevices in pkg/cdi/cache.go of
// tags.cncf.io/container-device-interface v1.1.0 and v1.1.1; containerd 2.4 has the latter). The
// runtime does not detect equal hooks.
func (d Dir) DevicesSpecs(devices []Device) (map[string][]byte, error) {
	files := make(map[string][]Device)
	for _, device := range devices {
		name := Vendor + "-" + deviceClass + extension
		if device.Family != "" && len(device.Edits.Hooks) > 0 && hasMore(device) {
			name = hookedPrefix + device.Family + extension
		}
		files[name] = append(files[name], device)
	}
	texts := make(map[string][]byte, len(files))
	for name, devices := range files {
		hooks, devices := shareHooks(devices)
		text, err := d.renderSpec(deviceClass, hooks, devices)
		if err != nil {
			return nil, fmt.Errorf("CDI spec of devices: %w", err)
		}
		texts[name] = text
	}
	return texts, nil
}

// hasMore reports whether a device has other edits than hooks. A device must have at least one
// edit.
func hasMore(d Device) bool {
	d.Edits.Hooks = nil
	return Check(d) == nil
}

// hookedPrefix begins the names of the specs of families.
const hookedPrefix = Vendor + "-" + deviceClass + "_"

// shareHooks returns the hooks common to all devices, and the devices without these hooks.
func shareHooks(devices []Device) (shared []*specs.Hook, rest []Device) {
	has := func(hooks []*specs.Hook, hook *specs.Hook) bool {
		return slices.ContainsFunc(hooks, func(other *specs.Hook) bool { return reflect.DeepEqual(hook, other) })
	}
	for _, hook := range devices[0].Edits.Hooks {
		lacks := func(d Device) bool { return !has(d.Edits.Hooks, hook) }
		if !has(shared, hook) && !slices.ContainsFunc(devices, lacks) {
			shared = append(shared, hook)
		}
	}
	for _, device := range devices {
		device.Edits.Hooks = slices.DeleteFunc(slices.Clone(device.Edits.Hooks), func(hook *specs.Hook) bool { return has(shared, hook) })
		rest = append(rest, device)
	}
	return shared, rest
}

// KeepDevicesSpecs writes the specs of devices, by file name, unless they are up to date. It
// removes all other specs of devices.
func (d Dir) KeepDevicesSpecs(texts map[string][]byte) error {
	var errs []error
	for name, text := range texts {
		if err := d.Files.UpdateFile(filepath.Join(d.Path, name), text, 0o644); err != nil {
			errs = append(errs, fmt.Errorf("keep CDI spec %s: %w", filepath.Join(d.Path, name), err))
		}
	}
	entries, err := d.Files.ListDir(d.Path)
	if err != nil {
		return errors.Join(append(errs, fmt.Errorf("list CDI specs: %w", err))...)
	}
	for _, entry := range entries {
		ours := entry.Name() == Vendor+"-"+deviceClass+extension ||
			strings.HasPrefix(entry.Name(), hookedPrefix) && strings.HasSuffix(entry.Name(), extension)
		if _, wanted := texts[entry.Name()]; ours && !wanted {
			if err := d.Files.Remove(filepath.Join(d.Path, entry.Name())); err != nil {
				errs = append(errs, fmt.Errorf("remove CDI spec %s: %w", filepath.Join(d.Path, entry.Name()), err))
			}
		}
	}
	return errors.Join(errs...)
}

// Check returns an error if a container runtime would not accept a device.
func Check(d Device) error {
	e := &d.Edits
	if len(e.DeviceNodes)+len(e.NetDevices)+len(e.Mounts)+len(e.Env)+len(e.Hooks)+len(e.AdditionalGIDs) == 0 && e.IntelRdt == nil {
		return fmt.Errorf("device %s: containers need nothing for it, and CDI has no such device", d.Name)
	}
	return validate(&specs.Spec{Devices: []specs.Device{{Name: d.Name, ContainerEdits: d.Edits}}})
}
