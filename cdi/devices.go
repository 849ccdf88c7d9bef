package cdi

import (
	"fmt"
	"path/filepath"

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

// DevicesSpec returns the text of the spec of devices that are given by their names, nil
// for none.
func (d Dir) DevicesSpec(devices []Device) ([]byte, error) {
	if len(devices) == 0 {
		return nil, nil
	}
	text, err := d.render(deviceClass, devices)
	if err != nil {
		return nil, fmt.Errorf("CDI spec of devices: %w", err)
	}
	return text, nil
}

// KeepDevicesSpec makes the spec of devices say a text, and writes nothing if it does. If
// the text is nil, there is no spec.
func (d Dir) KeepDevicesSpec(text []byte) error {
	file := filepath.Join(d.Path, Vendor+"-"+deviceClass+extension)
	if err := d.Files.Keep(file, text, 0o644); err != nil {
		return fmt.Errorf("keep CDI spec %s: %w", file, err)
	}
	return nil
}

// Check reports why a container runtime would not take a device.
func Check(d Device) error {
	e := &d.Edits
	if len(e.DeviceNodes)+len(e.NetDevices)+len(e.Mounts)+len(e.Env)+len(e.Hooks)+len(e.AdditionalGIDs) == 0 && e.IntelRdt == nil {
		return fmt.Errorf("device %s: containers need nothing for it, and CDI has no such device", d.Name)
	}
	return validate(&specs.Spec{Devices: []specs.Device{{Name: d.Name, ContainerEdits: d.Edits}}})
}
