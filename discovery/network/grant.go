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

// InterfaceName is the name of a function's network interface in the container.
const InterfaceName discovery.Parameter = "interfaceName"

// GrantEdits lists functions and their information in the environment variables of the SR-IOV
// network device plugin: PCIDEVICE_<PREFIX>_<NAME> and …_INFO for the extended resource of the
// functions. In DRA it also sets PCIDEVICE and PCIDEVICE_INFO, which are the only variables if
// there is no extended resource, and moves the interface of a function to the container if the
// claim sets a name. Pools that need the vhost-net nodes get them.
func GrantEdits(given []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
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
	text, _ := json.Marshal(info) // cannot fail: only strings
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

// vhostNet returns the nodes for virtual machines that use the kernel's network, if the pool needs
// them.
func vhostNet(pool *discovery.SRIOVPool) []*specs.DeviceNode {
	if pool == nil || !pool.NeedVhostNet {
		return nil
	}
	return []*specs.DeviceNode{
		{Path: "/dev/vhost-net", HostPath: "/dev/vhost-net", Permissions: "rw"},
		{Path: "/dev/net/tun", HostPath: "/dev/net/tun", Permissions: "rw"},
	}
}

// variables returns the names of the environment variables with the functions.
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

// providers maps prefixes of device nodes to the plugin's providers and keys in the information.
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

// infoOf returns the information about a function for a container: by provider and key, the paths
// and names in the container.
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
				if info[p.provider][p.key] == "" { // the first node wins: for vfio the node of the group
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

// Accept returns an error if the interface of a function cannot be moved into a container under the
// requested name.
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
	case shared || d.Shareable:
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
