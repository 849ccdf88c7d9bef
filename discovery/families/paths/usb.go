package paths

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// usbDevice is a device of /sys/bus/usb/devices (Documentation/ABI/testing/sysfs-bus-usb and
// sysfs-devices-usb).
type usbDevice struct {
	kernel                  sysfs.Device
	vendor, product, serial string
}

func (u *usbDevice) is(id discovery.USBID) bool {
	return u.vendor == id.Vendor && u.product == id.Product && (id.Serial == "" || u.serial == id.Serial)
}

// entry returns the index of the group's entry that a device is assigned to, -1 for none. If each
// set has one device for each entry, entry prefers an entry with a serial number, and then the
// entry with the fewest devices. So two equal entries get two devices.
func (u *usbDevice) entry(group *discovery.PathGroup, columns [][]*part) int {
	best := -1
	for i, id := range group.USB {
		switch {
		case !u.is(id):
		case best < 0:
			best = i
		case group.Each && (len(columns[i]) < len(columns[best]) || id.Serial != "" && group.USB[best].Serial == ""):
			best = i
		}
	}
	return best
}

// usbSets returns the parts of the devices of a USB group: one device of all matches, or, with
// Each, devices that have one match for each entry.
func (r *reader) usbSets(group *discovery.PathGroup) ([][]*part, error) {
	if !r.hasUSB {
		r.usb, r.usbErr = listUSB(r.host.FS)
		r.hasUSB = true
	}
	columns := make([][]*part, len(group.USB))
	limits := make([]int, len(group.USB))
	for _, u := range r.usb { // each USB device is in the sets once, even if several entries match
		if i := u.entry(group, columns); i >= 0 {
			columns[i] = append(columns[i], u.asPart())
		}
	}
	var all []*part
	for i, column := range columns {
		all = append(all, column...)
		limits[i] = 1
	}
	if group.Each {
		return combineColumns(columns, limits), r.usbErr
	}
	if len(all) == 0 {
		return nil, r.usbErr
	}
	return [][]*part{all}, r.usbErr
}

// listUSB returns the USB devices of a host, including hubs, in name order. A host may have none.
func listUSB(fsys fs.FS) ([]usbDevice, error) {
	listed, err := sysfs.BusDevices(fsys, "usb")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	errs := []error{err}
	var devices []usbDevice
	for _, device := range listed {
		if strings.Contains(device.Name(), ":") {
			continue // an interface of a device
		}
		attrs := device.Attrs()
		u := usbDevice{kernel: device}
		u.vendor, _ = attrs.Hex("idVendor", 4)
		u.product, _ = attrs.Hex("idProduct", 4)
		u.serial, _ = attrs.Text("serial")
		if err := attrs.Err(); err != nil {
			errs = append(errs, fmt.Errorf("USB device %s: %w", device.Name(), err))
		}
		devices = append(devices, u)
	}
	return devices, errors.Join(errs...)
}

// asPart describes a USB device. The key is the USB port, because the node's name changes whenever
// the device is plugged in.
func (u *usbDevice) asPart() *part {
	attrs := u.kernel.Attrs()
	bus, hasBus := attrs.Uint("busnum")
	number, hasNumber := attrs.Uint("devnum")
	out := &part{key: "usb " + u.kernel.Name(), source: u.kernel.Path, kernel: []sysfs.Device{u.kernel}}
	if !hasBus || !hasNumber {
		out.err = errors.Join(fmt.Errorf("USB device %s: its number on its bus is not known", u.kernel.Name()), attrs.Err())
		return out
	}
	out.id = fmt.Sprintf("/dev/bus/usb/%03d/%03d", bus, number)
	node, err := discovery.Node(u.kernel, "/dev/bus/usb")
	node.Path, node.HostPath = out.id, out.id
	out.nodes, out.err = []*specs.DeviceNode{node}, err
	return out
}

// usbOf returns the USB device that contains a kernel device, or is the kernel device.
func usbOf(d sysfs.Device) (sysfs.Device, bool) {
	for ; strings.Contains(d.Path, "/"); d = d.Parent() {
		if d.HasEntry("idVendor") {
			return d, true
		}
	}
	return sysfs.Device{}, false
}

// usbNode matches the node of a USB device.
var usbNode = regexp.MustCompile(`^/dev/bus/usb/([0-9]{3})/([0-9]{3})$`)

// grant joins the environment variables that differ between devices, and adds the KubeVirt variable
// of the resource with the bus and device numbers of the USB devices.
func grant(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
	edits := specs.ContainerEdits{Env: joinVariables(given)}
	var addresses []string
	for _, d := range given {
		for _, node := range d.Edits.DeviceNodes {
			if m := usbNode.FindStringSubmatch(node.HostPath); m != nil {
				bus, _ := strconv.Atoi(m[1])
				number, _ := strconv.Atoi(m[2])
				addresses = append(addresses, fmt.Sprintf("%d:%d", bus, number))
			}
		}
	}
	if grant.API == discovery.ModeDRA || len(addresses) == 0 {
		return edits
	}
	name := discovery.ResourceVariable(grant.Resource)
	edits.Env = append(edits.Env, "USB_RESOURCE_"+name+"="+strings.Join(addresses, ","))
	return edits
}

// joinVariables returns the environment variables that have several values, each with all of its
// values.
func joinVariables(given []discovery.Device) (env []string) {
	values := make(map[string][]string)
	for _, d := range given {
		for _, variable := range d.Edits.Env {
			name, value, _ := strings.Cut(variable, "=")
			if !slices.Contains(values[name], value) {
				values[name] = append(values[name], value)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if len(values[name]) > 1 {
			env = append(env, name+"="+strings.Join(values[name], ","))
		}
	}
	return env
}
