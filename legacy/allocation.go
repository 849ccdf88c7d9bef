package legacy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/legacy/list"
)

// devicesOf returns the devices that units are given as, each once, in the units'
// order.
func devicesOf(units []*list.Unit) []rules.Offered {
	var devices []rules.Offered
	seen := make(map[string]bool)
	for _, u := range units {
		for _, d := range u.Given() {
			if !seen[d.Name] {
				seen[d.Name] = true
				devices = append(devices, d)
			}
		}
	}
	return devices
}

// respond returns what the kubelet is to do for a container that gets devices.
func (p *Plugin) respond(ctx context.Context, allocation rules.Allocation, devices []rules.Offered, grant discovery.Grant, variables []string) (*pluginapi.ContainerAllocateResponse, error) {
	lists, err := p.listsOf(ctx, allocation.Lists, devices)
	if err != nil {
		return nil, err
	}
	grant.API, grant.Naming = discovery.ModeDevicePlugin, allocation.Naming
	grant.Naming.None = lists.CDI() && !lists.Plain
	edits := specs.ContainerEdits{Env: slices.Clone(allocation.Env)}
	if lists.Plain {
		for _, d := range devices {
			edits = discovery.Join(edits, d.Edits)
		}
	}
	if p.config.Grant != nil {
		// Later variables replace earlier ones, so those of the set come last.
		edits = discovery.Join(edits, p.config.Grant(rules.Devices(devices), grant))
	}
	edits.Env = append(edits.Env, variables...)
	r, err := response(cdi.Rebase(edits, p.config.CDI.RuntimeRoot))
	if err != nil || !lists.CDI() {
		return r, err
	}
	return r, p.name(r, lists, devices)
}

// response says edits in the words of the device-plugin API, which has fewer
// of them than CDI.
func response(edits specs.ContainerEdits) (*pluginapi.ContainerAllocateResponse, error) {
	r := &pluginapi.ContainerAllocateResponse{}
	errs := []error{needsCDI(edits)}
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

// needsCDI says what of edits the device-plugin API has no word for, nil if nothing.
// Hooks are left out there: they make a device easier to use, and containers of old had
// none.
func needsCDI(edits specs.ContainerEdits) error {
	var errs []error
	for _, part := range []struct {
		what  string
		there bool
	}{
		{"net devices", len(edits.NetDevices) > 0},
		{"additional GIDs", len(edits.AdditionalGIDs) > 0},
		{"Intel RDT", edits.IntelRdt != nil},
	} {
		if part.there {
			errs = append(errs, fmt.Errorf("needs CDI: %s cannot be given through the device-plugin API", part.what))
		}
	}
	for _, mount := range edits.Mounts {
		if !slices.Contains([]string{"", "none", "bind"}, mount.Type) {
			errs = append(errs, fmt.Errorf("needs CDI: mount %s of type %s cannot be given through the device-plugin API", mount.ContainerPath, mount.Type))
		}
	}
	return errors.Join(errs...)
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
