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

// deviceClass makes the kind of the spec of devices that containers have by the
// device-plugin API. The kubelet remembers their names, so that a container which
// starts again after a reboot has the same ones.
const deviceClass = "device"

// DeviceID returns the fully qualified name of a device by its own name:
// "chandler.dev/device=<name>".
func DeviceID(name string) string { return parser.QualifiedName(Vendor, deviceClass, name) }

// DevicesSpecs returns the texts of the specs of devices that are given by their names, by the
// names of the files.
//
// Devices that have hooks are in a spec of their family. The hooks that all of them have are those
// of the spec, so that they run once for a container, however many of the devices it has: a runtime
// applies the edits of a spec once for all devices that a container gets of it, and those of devices
// for each (Cache.InjectDevices in pkg/cdi/cache.go of tags.cncf.io/container-device-interface v1.1.0 and
// v1.1.1, the latter of which containerd 2.4 has). It does not tell equal hooks apart.
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
		text, err := d.render(deviceClass, hooks, devices)
		if err != nil {
			return nil, fmt.Errorf("CDI spec of devices: %w", err)
		}
		texts[name] = text
	}
	return texts, nil
}

// hasMore reports whether a device has anything but hooks. A device must have something.
func hasMore(d Device) bool {
	d.Edits.Hooks = nil
	return Check(d) == nil
}

// hookedPrefix begins the names of the specs of families.
const hookedPrefix = Vendor + "-" + deviceClass + "_"

// shareHooks returns the hooks that all devices have, and the devices without them.
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

// KeepDevicesSpecs makes the specs of devices say these texts, by the names of files, and writes
// nothing if they do. There are no other specs of devices then.
func (d Dir) KeepDevicesSpecs(texts map[string][]byte) error {
	var errs []error
	for name, text := range texts {
		if err := d.Files.Keep(filepath.Join(d.Path, name), text, 0o644); err != nil {
			errs = append(errs, fmt.Errorf("keep CDI spec %s: %w", filepath.Join(d.Path, name), err))
		}
	}
	entries, err := d.Files.List(d.Path)
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

// Check reports why a container runtime would not take a device.
func Check(d Device) error {
	e := &d.Edits
	if len(e.DeviceNodes)+len(e.NetDevices)+len(e.Mounts)+len(e.Env)+len(e.Hooks)+len(e.AdditionalGIDs) == 0 && e.IntelRdt == nil {
		return fmt.Errorf("device %s: containers need nothing for it, and CDI has no such device", d.Name)
	}
	return validate(&specs.Spec{Devices: []specs.Device{{Name: d.Name, ContainerEdits: d.Edits}}})
}
