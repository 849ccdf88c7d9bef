package paths

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// ofUSB lists the attributes that distinguish USB devices.
var ofUSB = []resourceapi.QualifiedName{"usbVendor", "usbProduct", "model", "serial"}

// setAttributes sets the attributes that all kernel devices of a device agree on. An attribute with
// different values is left out.
func setAttributes(a discovery.Attributes, kernel []sysfs.Device) error {
	var errs []error
	differs := make(map[resourceapi.QualifiedName]bool)
	var usb discovery.Attributes // of the previous USB device
	for _, device := range kernel {
		own := discovery.Attributes{}
		if err := setKernel(own, device); err != nil {
			errs = append(errs, err)
		}
		for name, value := range own {
			if had, known := a[name]; known && !equality.Semantic.DeepEqual(had, value) {
				differs[name] = true
			}
			a[name] = value
		}
		if _, ok := usbOf(device); !ok {
			continue
		}
		for _, name := range ofUSB {
			if usb != nil && usb.String(name) != own.String(name) {
				differs[name] = true
			}
		}
		usb = own
	}
	maps.DeleteFunc(a, func(name resourceapi.QualifiedName, _ discovery.Attribute) bool { return differs[name] })
	return errors.Join(errs...)
}

// setKernel sets the attributes of one kernel device.
func setKernel(a discovery.Attributes, device sysfs.Device) error {
	driver := device.Driver()
	if behind, ok := device.LinkTo("device"); ok && driver == "" {
		driver = behind.Driver() // the class device has no driver; the device behind it has
	}
	a.SetString("driver", driver)
	errs := []error{pci.SetPlace(a, device)}
	if usb, ok := usbOf(device); ok {
		attrs := usb.Attrs()
		vendor, _ := attrs.Hex("idVendor", 4)
		product, _ := attrs.Hex("idProduct", 4)
		model, _ := attrs.Text("product")
		serial, _ := attrs.Text("serial")
		a.SetString("usbVendor", vendor)
		a.SetString("usbProduct", product)
		a.SetString("model", model)
		a.SetString("serial", serial)
		if err := attrs.Err(); err != nil {
			errs = append(errs, fmt.Errorf("USB device %s: %w", usb.Name(), err))
		}
	}
	return errors.Join(errs...)
}

// health returns the health of the parts of a device: its nodes must exist, its mounts must be
// accessible, and its USB devices must be authorized. Units without parts are healthy.
func health(host *discovery.Host, d *discovery.Device, kernel []sysfs.Device) discovery.Health {
	for _, device := range kernel {
		if usb, ok := usbOf(device); ok {
			if text, err := usb.Text("authorized"); err == nil && text == "0" {
				return discovery.Health{Status: discovery.Unhealthy, Reason: fmt.Sprintf("USB device %s is not authorized", usb.Name())}
			}
		}
	}
	for _, mount := range d.Edits.Mounts {
		if _, err := fs.Stat(host.FS, strings.TrimPrefix(mount.HostPath, "/")); err != nil {
			return discovery.Health{Status: discovery.Unknown, Reason: fmt.Sprintf("%s cannot be looked at: %v", mount.HostPath, err)}
		}
	}
	if len(d.Edits.DeviceNodes) == 0 && (len(d.Edits.Mounts) > 0 || d.Source == discovery.Unseen) {
		return discovery.Health{Status: discovery.Healthy}
	}
	return discovery.NodeHealth(host, d.Edits.DeviceNodes)
}
