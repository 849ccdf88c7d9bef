package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// InterfaceName is what the network interface of a function is called in the
// container.
const InterfaceName discovery.Parameter = "interfaceName"

// Grant names functions and says what they have, in the variables of the SR-IOV
// network device plugin: PCIDEVICE_<PREFIX>_<NAME> and …_INFO for the resource
// that they are offered as. In DRA it says so besides, or where there is no
// such resource only, in PCIDEVICE and PCIDEVICE_INFO, and moves the interface
// of a function where the claim gives it a name. In pools that need them it gives
// the nodes of vhost-net.
func Grant(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
	ids := make([]string, len(given))
	info := make(map[string]map[string]map[string]string)
	var edits specs.ContainerEdits
	for i, d := range given {
		d.Edits.DeviceNodes = slices.Concat(d.Edits.DeviceNodes, vhostNet(d.SRIOV))
		ids[i] = path.Base(d.Source)
		info[ids[i]] = infoOf(d, ids[i])
		if len(edits.DeviceNodes) == 0 {
			edits.DeviceNodes = vhostNet(d.SRIOV)
		}
	}
	text, _ := json.Marshal(info) // of strings only
	for _, variable := range variables(grant) {
		edits.Env = append(edits.Env, variable+"="+strings.Join(ids, ","), variable+"_INFO="+string(text))
	}
	if name := grant.Parameters[InterfaceName]; grant.API == discovery.ModeDRA && name != "" {
		for _, d := range given {
			edits.NetDevices = append(edits.NetDevices, &specs.LinuxNetDevice{HostInterfaceName: d.Attributes.String("ifName"), Name: name})
		}
	}
	return edits
}

// vhostNet returns the nodes by which a virtual machine uses the network of the
// kernel, if the pool needs them.
func vhostNet(pool *discovery.SRIOVPool) []*specs.DeviceNode {
	if pool == nil || !pool.NeedVhostNet {
		return nil
	}
	return []*specs.DeviceNode{
		{Path: "/dev/vhost-net", HostPath: "/dev/vhost-net", Permissions: "rw"},
		{Path: "/dev/net/tun", HostPath: "/dev/net/tun", Permissions: "rw"},
	}
}

// variables returns the names under which the functions are told of.
func variables(grant discovery.Grant) []string {
	const prefix = "PCIDEVICE"
	var names []string
	if grant.API == discovery.ModeDRA {
		names = append(names, prefix)
	}
	if grant.Resource != "" {
		names = append(names, prefix+"_"+discovery.ResourceVariable(grant.Resource))
	}
	return names
}

// providers are by what the names of device nodes begin, and under which
// provider and key the plugin tells of them.
var providers = []struct{ prefix, provider, key string }{
	{"/dev/vfio/vfio", "vfio", "mount"},
	{"/dev/vfio/", "vfio", "dev-mount"},
	{"/dev/uio", "uio", "mount"},
	{"/dev/vhost-vdpa", "vdpa", "mount"},
	{"/dev/infiniband/uverbs", "rdma", "uverbs"},
	{"/dev/infiniband/umad", "rdma", "umad"},
	{"/dev/infiniband/issm", "rdma", "issm"},
	{"/dev/infiniband/rdma_cm", "rdma", "rdma_cm"},
	{"/dev/vhost-net", "vhost", "net-mount"},
	{"/dev/net/tun", "vhost", "tun-mount"},
}

// infoOf returns what a container is told of a function: by provider and key,
// where in the container things are.
func infoOf(d discovery.Device, id string) map[string]map[string]string {
	info := map[string]map[string]string{"generic": {"deviceID": id}}
	set := func(provider, key, value string) {
		if info[provider] == nil {
			info[provider] = make(map[string]string)
		}
		info[provider][key] = value
	}
	for _, node := range d.Edits.DeviceNodes {
		for _, p := range providers {
			if strings.HasPrefix(node.Path, p.prefix) {
				if info[p.provider][p.key] == "" { // of vfio's nodes the group's, if there is one
					set(p.provider, p.key, node.Path)
				}
				break
			}
		}
	}
	if name := d.Attributes.String("rdmaDevice"); name != "" {
		set("rdma", "rdma_dev", name)
	}
	if d.SRIOV != nil && len(d.SRIOV.AdditionalInfo) > 0 {
		info["extra"] = make(map[string]string)
		maps.Copy(info["extra"], d.SRIOV.AdditionalInfo["*"])
		maps.Copy(info["extra"], d.SRIOV.AdditionalInfo[id])
	}
	return info
}

// Accept reports why the interface of a function cannot be moved into a
// container under the name that is asked for.
func Accept(given []discovery.Device, parameters discovery.Parameters) error {
	if parameters[InterfaceName] == "" {
		return nil
	}
	if len(given) > 1 {
		return fmt.Errorf("%s: %d interfaces cannot have one name; ask for each in a request of its own", InterfaceName, len(given))
	}
	var errs []error
	for _, d := range given {
		if reason := whyImmovable(d); reason != "" {
			errs = append(errs, fmt.Errorf("%s: device %s: %s", InterfaceName, d.Name, reason))
		}
	}
	return errors.Join(errs...)
}

func whyImmovable(d discovery.Device) string {
	route := d.Attributes["defaultRoute"].BoolValue
	_, shared := d.Capacity[discovery.Shares]
	switch {
	case shared || d.Open:
		return "it is shared, and an interface is in one pod only"
	case d.Attributes.String("ifName") == "":
		return "it has no one network interface in the host's network namespace: its driver makes none, or the interface is in a pod still"
	case route == nil:
		return "it is not known whether a default route of the host leads through its interface"
	case *route:
		return "a default route of the host leads through its interface"
	}
	return ""
}
