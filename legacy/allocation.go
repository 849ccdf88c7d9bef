package legacy

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// lookUp returns the units that IDs of a resource stand for, each once, in
// name order, and why they cannot be handed out.
func (l *list) lookUp(resource string, ids []string) ([]*unit, error) {
	var units []*unit
	var errs []error
	for _, id := range ids {
		r, listed := l.rows[id]
		switch {
		case !listed:
			errs = append(errs, fmt.Errorf("%s: device %q: unknown", resource, id))
		case r.refusal() != "":
			errs = append(errs, fmt.Errorf("%s: device %q: %s", resource, id, r.refusal()))
		default:
			units = append(units, r.unit)
		}
	}
	slices.SortFunc(units, byName)
	return slices.Compact(units), errors.Join(errs...)
}

// devicesOf returns the devices of units, each once, in the units' order.
func devicesOf(units []*unit) []discovery.Device {
	var devices []discovery.Device
	seen := make(map[string]bool)
	for _, u := range units {
		for _, d := range u.devices {
			if !seen[d.Name] {
				seen[d.Name] = true
				devices = append(devices, d)
			}
		}
	}
	return devices
}

// editsOf returns what a container needs for a set of devices: their own
// edits and, since a later variable replaces an earlier one, the set's last.
func editsOf(devices []discovery.Device, resource string, consumed discovery.Consumed, granter discovery.Granter) specs.ContainerEdits {
	var edits specs.ContainerEdits
	for _, d := range devices {
		edits = discovery.Join(edits, d.Edits)
	}
	if granter != nil {
		edits = discovery.Join(edits, granter(devices, discovery.Grant{API: discovery.ModeDevicePlugin, Resource: resource, Consumed: consumed}))
	}
	return edits
}

// consumedBy returns how much IDs are of the devices that are shared: each is a
// unit of what they are shared by.
func (l *list) consumedBy(ids []string) discovery.Consumed {
	consumed := make(discovery.Consumed)
	for _, id := range ids {
		for _, d := range l.rows[id].unit.devices {
			if s := d.Sharing; s != nil {
				consumed.Add(d.Name, map[resourceapi.QualifiedName]resource.Quantity{s.Capacity: s.Unit})
			}
		}
	}
	return consumed
}

// response says edits in the words of the device-plugin API, which has fewer
// of them than CDI.
func response(edits specs.ContainerEdits) (*pluginapi.ContainerAllocateResponse, error) {
	r := &pluginapi.ContainerAllocateResponse{}
	var errs []error
	for _, part := range []struct {
		what  string
		there bool
	}{
		{"hooks", len(edits.Hooks) > 0},
		{"net devices", len(edits.NetDevices) > 0},
		{"additional GIDs", len(edits.AdditionalGIDs) > 0},
		{"Intel RDT", edits.IntelRdt != nil},
	} {
		if part.there {
			errs = append(errs, fmt.Errorf("needs CDI: %s cannot be given through the device-plugin API", part.what))
		}
	}
	for _, node := range edits.DeviceNodes {
		errs = append(errs, addDevice(r, node))
	}
	for _, mount := range edits.Mounts {
		errs = append(errs, addMount(r, mount))
	}
	for _, variable := range edits.Env {
		name, value, _ := strings.Cut(variable, "=")
		if r.Envs == nil {
			r.Envs = make(map[string]string)
		}
		r.Envs[name] = value
	}
	return r, errors.Join(errs...)
}

// addDevice adds a device node, or what of its permissions another of the same
// path has not.
func addDevice(r *pluginapi.ContainerAllocateResponse, node *specs.DeviceNode) error {
	added := &pluginapi.DeviceSpec{
		ContainerPath: node.Path,
		HostPath:      cmp.Or(node.HostPath, node.Path),
		Permissions:   cmp.Or(node.Permissions, "rw"), // none needs to make nodes
	}
	for _, d := range r.Devices {
		if d.ContainerPath != added.ContainerPath {
			continue
		}
		if d.HostPath != added.HostPath {
			return fmt.Errorf("device node %s: both %s and %s are to be it", d.ContainerPath, d.HostPath, added.HostPath)
		}
		for _, permission := range added.Permissions {
			if !strings.ContainsRune(d.Permissions, permission) {
				d.Permissions += string(permission)
			}
		}
		return nil
	}
	r.Devices = append(r.Devices, added)
	return nil
}

// addMount adds a mount. The kubelet's are recursive binds; of the options it
// only takes whether it is read-only.
func addMount(r *pluginapi.ContainerAllocateResponse, mount *specs.Mount) error {
	if !slices.Contains([]string{"", "none", "bind"}, mount.Type) {
		return fmt.Errorf("needs CDI: mount %s of type %s cannot be given through the device-plugin API", mount.ContainerPath, mount.Type)
	}
	added := &pluginapi.Mount{
		ContainerPath: mount.ContainerPath,
		HostPath:      mount.HostPath,
		ReadOnly:      slices.Contains(mount.Options, "ro"),
	}
	for _, m := range r.Mounts {
		if m.ContainerPath != added.ContainerPath {
			continue
		}
		if m.HostPath != added.HostPath {
			return fmt.Errorf("mount %s: both %s and %s are to be it", m.ContainerPath, m.HostPath, added.HostPath)
		}
		m.ReadOnly = m.ReadOnly && added.ReadOnly
		return nil
	}
	r.Mounts = append(r.Mounts, added)
	return nil
}
