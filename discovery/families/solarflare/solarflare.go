// Package solarflare describes Onload, the user-space network stack of Solarflare adapters. A
// container gets the devices of the stack and, from the directory that the administrator names, its
// libraries. The adapters and their interfaces remain on the host: Onload accelerates the
// interfaces that a network plugin configures on the adapters.
package solarflare

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// Family recognises Onload on Solarflare adapters.
var Family = &discovery.Family{
	Name: "solarflare",
	Doc:  "Onload on Solarflare network adapters",
	Match: []discovery.Match{
		{Class: "onload", Name: "onload"},
		{Class: "onload_epoll", Name: "onload_epoll"},
		{Class: "sfc_char", Name: "sfc_char"},
		{Class: "onload_cplane", Name: "onload_cplane"},
		{Class: "sfc_affinity", Name: "sfc_affinity"},
		{Bus: "pci", Driver: "sfc"},
		{Bus: "pci", Driver: "sfc_ef100"},
		{Bus: "pci", Driver: "xilinx_efct"}, // X3 series
	},
	Describe:  describe,
	Grant:     grant,
	Variables: variables,
	Roots:     []string{"solarflare"},
}

// variables tune the libraries of Onload, according to its user guide.
var variables = []string{
	"EF_INT_DRIVEN", "EF_MAX_PACKETS", "EF_PACKET_BUFFER_MODE", "EF_POLL_USEC", "EF_RXQ_SIZE", "EF_SPIN_USEC",
	"EF_STACK_PER_THREAD", "EF_TCP_CLIENT_LOOPBACK", "EF_TCP_SERVER_LOOPBACK", "EF_TXQ_SIZE",
}

// characters lists the devices that a program with Onload opens. formerly lists devices of earlier
// versions, which are added if the kernel has them.
var (
	characters = []string{"onload", "onload_epoll", "sfc_char"}
	formerly   = []string{"onload_cplane", "sfc_affinity"}
)

// modules lists the required kernel modules, in addition to the driver of the adapters.
var modules = []string{"onload", "sfc_char", "sfc_resource"}

// vendors maps PCI vendor IDs to the vendors of adapters.
var vendors = map[string]string{"1924": "solarflare", "10ee": "xilinx"}

// count is the number of containers of a node that may use Onload in the device plugin API: the
// default of the Onload operator's maxPodsPerNode.
const count = 100

func describe(host *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
	var adapters []sysfs.Device
	byName := make(map[string]sysfs.Device)
	for _, d := range found {
		if sysfs.IsPCIAddress(d.Name()) {
			adapters = append(adapters, d)
		}
		byName[d.Name()] = d
	}
	onload, ok := byName["onload"]
	if !ok {
		return nil, nil // an adapter without Onload needs no special handling
	}
	name := discovery.DeviceName(onload)
	if len(adapters) == 0 {
		return nil, []discovery.Problem{{Device: name, Err: errors.New("no adapter is bound to a driver that Onload knows")}}
	}
	d := discovery.Device{
		Name:       name,
		Source:     onload.Path,
		Attributes: discovery.Attributes{},
		Shareable:  true,
		// As in the Onload operator's device plugin.
		PluginOffers: []discovery.Offer{{Resource: "amd.com/onload", IDs: discovery.CountedIDs("sfc-", count), Dialect: discovery.Dialect{Stem: "sfc-"}}},
	}
	d.Attributes.SetString("kind", "nic")
	errs := []error{setMaker(d.Attributes, adapters[0]), setDriver(d.Attributes, host)}
	for _, name := range slices.Concat(characters, formerly) {
		character, known := byName[name]
		if !known && slices.Contains(formerly, name) {
			continue
		}
		if !known {
			character = sysfs.At(host.FS, path.Join("sys/class", name, name))
		}
		node, err := discovery.Node(character, "/dev")
		d.Edits.DeviceNodes, errs = append(d.Edits.DeviceNodes, node), append(errs, err)
	}
	discovery.PermitMknod(d.Edits.DeviceNodes) // as in the Onload operator's plugin
	d.Health = health(host, d.Edits.DeviceNodes)
	if root := host.Roots["solarflare"]; root != "" {
		mounts, err := libraries(host, root)
		d.Edits.Mounts, errs = mounts, append(errs, err)
	}
	for _, adapter := range adapters {
		d.Includes = append(d.Includes, adapter.Path)
	}
	devices, problems := []discovery.Device{d}, discovery.Problems(d.Name, errors.Join(errs...))
	for _, adapter := range adapters {
		port, ok, err := describePort(host, adapter, d)
		problems = append(problems, discovery.Problems(port.Name, err)...)
		if ok {
			devices = append(devices, port)
		}
	}
	return devices, problems
}

// describePort describes Onload once more for an interface of an adapter, as in two earlier
// plugins, which allow one container for each interface. The device is for clusters that still use
// the resource names of these plugins. If a pod has the interface, the interface has no name here.
func describePort(host *discovery.Host, adapter sysfs.Device, onload discovery.Device) (discovery.Device, bool, error) {
	d, err := pci.DescribeFunction(host, adapter)
	d.Name, d.Includes = onload.Name+"-"+d.Name, []string{onload.Source}
	interfaces := adapter.Children("net")
	if len(interfaces) == 0 {
		return d, false, err
	}
	name := interfaces[0].Name()
	d.Attributes.SetString("kind", "nic")
	d.Attributes.SetString("vendor", vendors[d.Attributes.String("pciVendor")])
	d.Attributes.SetString("profile", "interface")
	d.Attributes.SetString("ifName", name)
	d.Shareable, d.OptIn = true, true
	d.PluginOffers = []discovery.Offer{
		{Resource: "solarflare.com/sfc", IDs: []string{name}},
		{Resource: "solarflare/smartNIC", IDs: []string{name}},
	}
	d.Edits, d.Health = onload.Edits, onload.Health
	return d, true, err
}

// setMaker sets the vendor of the adapters. All adapters of a machine have the same vendor.
func setMaker(a discovery.Attributes, adapter sysfs.Device) error {
	id, err := adapter.PCIID()
	a.SetString("pciVendor", id.Vendor)
	a.SetString("vendor", vendors[id.Vendor])
	if id.Vendor == "" && err != nil {
		return fmt.Errorf("adapter %s: %w", adapter.Name(), err)
	}
	return nil
}

func setDriver(a discovery.Attributes, host *discovery.Host) error {
	module := sysfs.At(host.FS, "sys/module/onload")
	a.SetString("driver", module.Name())
	attrs := module.Attrs()
	version, _ := attrs.Text("version") // Onload versions have three or four numbers
	a.SetVersion("driverVersion", version)
	if err := attrs.Err(); err != nil {
		return fmt.Errorf("module onload: %w", err)
	}
	return nil
}

func health(host *discovery.Host, nodes []*specs.DeviceNode) discovery.Health {
	for _, module := range modules {
		if !host.FileExists("/sys/module/" + module) {
			return discovery.Health{Status: discovery.Unhealthy, Reason: "kernel module " + module + " is not loaded", Fix: "sudo modprobe " + module}
		}
	}
	return discovery.NodeHealth(host, nodes)
}

// libraryDir is the directory of the libraries below the administrator's root. The Onload operator
// uses the root "/opt/onload".
const libraryDir = "usr/lib64"

// containerDir is the operator's directory of the libraries in a container.
const containerDir = "/opt/onload/usr/lib64"

// preloaded is the library that replaces the socket functions of the C library.
const preloaded = "libonload.so"

// libraries returns read-only mounts of the Onload libraries, under all of their names:
// libonload.so, libonload_ext.so and libonload_ext.so.2.
func libraries(host *discovery.Host, root string) (mounts []*specs.Mount, err error) {
	dir := path.Join("/", root, libraryDir)
	entries, err := fs.ReadDir(host.FS, strings.TrimPrefix(dir, "/"))
	if err != nil {
		return nil, fmt.Errorf("list libraries: %w", err)
	}
	for _, entry := range entries {
		name := entry.Name()
		if entry.IsDir() || !strings.HasPrefix(name, preloaded) && !strings.HasPrefix(name, "libonload_ext.so") {
			continue
		}
		mounts = append(mounts, &specs.Mount{
			HostPath:      path.Join(dir, name),
			ContainerPath: path.Join(containerDir, name),
			Options:       []string{"ro", "nosuid", "nodev", "rbind", "rprivate"},
		})
	}
	if !slices.ContainsFunc(mounts, isPreloaded) {
		return nil, fmt.Errorf("no %s in %s", preloaded, dir)
	}
	return mounts, nil
}

func isPreloaded(m *specs.Mount) bool { return path.Base(m.ContainerPath) == preloaded }

// grant makes all programs of the container load Onload if the library is mounted. Otherwise the
// image must bring the library and set LD_PRELOAD itself. If interfaces are allocated, grant also
// lists them for the hook of the earlier plugins.
func grant(given []discovery.Device, _ discovery.Grant) (edits specs.ContainerEdits) {
	var preload string
	var interfaces []string
	for _, d := range given {
		if i := slices.IndexFunc(d.Edits.Mounts, isPreloaded); i >= 0 {
			preload = d.Edits.Mounts[i].ContainerPath
		}
		if name := d.Attributes.String("ifName"); name != "" {
			interfaces = append(interfaces, name)
		}
	}
	if preload != "" {
		edits.Env = append(edits.Env, "LD_PRELOAD="+preload)
	}
	if len(interfaces) > 0 {
		edits.Env = append(edits.Env, "SOLARFLARE_VISIBLE_DEVICES="+strings.Join(interfaces, ","))
	}
	return edits
}
