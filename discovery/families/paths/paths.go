// Package paths describes the devices that the administrator names: device nodes, files for mounts,
// and USB devices, with the resource names and IDs of squat's generic-device-plugin. It describes
// no other devices, and reads only the generic attributes of kernel devices.
package paths

import (
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

const family = "paths"

// Family describes the devices that the administrator named.
var Family = &discovery.Family{
	Name:       family,
	Doc:        "device nodes, files and USB devices that the administrator named",
	FromConfig: true,
	Describe:   describe,
	Grant:      grant,
}

func describe(host *discovery.Host, _ []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	r := &reader{host: host}
	owners := make(map[string]string) // of nodes that belong to one device alone
	for i := range host.Paths {
		resource := &host.Paths[i]
		for j := range resource.Groups {
			group := &resource.Groups[j]
			sets, err := r.partSets(group)
			// A path whose search failed may exist, so the problem concerns all devices.
			problems = append(problems, discovery.Problems(family, err)...)
			for _, set := range sets {
				d, err := describeSet(host, resource, group, set)
				problems = append(problems, discovery.Problems(d.Name, err)...)
				if err := claimNodes(owners, &d, group, set); err != nil {
					problems = append(problems, discovery.Problem{Device: d.Name, Err: err})
					continue
				}
				devices = append(devices, splitUnits(d, group)...)
			}
		}
	}
	return devices, problems
}

// part is a part of a device.
type part struct {
	key    string // identifies the part across scans: "/dev/serial/by-id/usb-…", "usb 1-4"
	id     string // identifies the part in the device plugin ID: its path on the host, "" while unknown
	nodes  []*specs.DeviceNode
	mount  *specs.Mount
	source string         // see discovery.Device
	kernel []sysfs.Device // the kernel devices of the nodes, as far as known
	shared bool           // several devices may contain the part
	err    error
}

// splitUnits returns the devices of a found device: as many units as the administrator configured,
// or the device itself if the group has no units. The IDs of units are their numbers.
func splitUnits(d discovery.Device, group *discovery.PathGroup) []discovery.Device {
	if group.Units == 0 {
		return []discovery.Device{d}
	}
	devices := make([]discovery.Device, group.Units)
	for i := range devices {
		unit, number := d, strconv.Itoa(i)
		unit.Name = d.Name + "-" + number
		unit.Identity = "" // all units would have the same Identity
		unit.Attributes = maps.Clone(d.Attributes)
		unit.PluginOffers = []discovery.Offer{{Resource: d.Attributes.String("resource"), IDs: []string{number}}}
		if group.UnitEnv != "" {
			unit.Edits.Env = append(slices.Clone(d.Edits.Env), group.UnitEnv+"="+number)
		}
		devices[i] = unit
	}
	return devices
}

// partSets returns the parts of each device of the group. A group with units has one set with all
// matches, or with no parts if the group names none.
func (r *reader) partSets(group *discovery.PathGroup) ([][]*part, error) {
	if group.Units > 0 && len(group.Paths) == 0 && len(group.USB) == 0 {
		return [][]*part{nil}, nil
	}
	if len(group.USB) > 0 {
		return r.usbSets(group)
	}
	var errs []error
	var columns [][]*part
	var limits []int
	for _, p := range group.Paths {
		parts, err := r.matchPath(p)
		errs = append(errs, err)
		if len(parts) == 0 && p.Optional {
			continue
		}
		columns, limits = append(columns, parts), append(limits, max(p.Limit, 1))
	}
	if group.Units > 0 {
		return joinColumns(columns), errors.Join(errs...)
	}
	return combineColumns(columns, limits), errors.Join(errs...)
}

// joinColumns returns one set with all parts of all columns, without duplicates. It returns no set
// if a column is empty.
func joinColumns(columns [][]*part) [][]*part {
	var set []*part
	for _, column := range columns {
		if len(column) == 0 {
			return nil
		}
		for _, p := range column {
			if !slices.ContainsFunc(set, func(other *part) bool { return other.key == p.key }) {
				set = append(set, p)
			}
		}
	}
	if len(set) == 0 {
		return nil
	}
	return [][]*part{set}
}

// combineColumns returns sets with one part of each column. The number of sets is the length of the
// longest column, unless a column has too few parts: each part is used at most as often as the
// column's limit.
func combineColumns(columns [][]*part, limits []int) (sets [][]*part) {
	if len(columns) == 0 {
		return nil
	}
	longest, scarcest := 0, len(columns[0])*limits[0]
	for i, column := range columns {
		longest = max(longest, len(column))
		scarcest = min(scarcest, len(column)*limits[i])
	}
	for i := range min(longest, scarcest) {
		var set []*part
		for _, column := range columns {
			set = append(set, column[i%len(column)])
		}
		sets = append(sets, set)
	}
	return sets
}

func describeSet(host *discovery.Host, resource *discovery.PathResource, group *discovery.PathGroup, set []*part) (discovery.Device, error) {
	d := discovery.Device{
		Name:       name(resource.Name, keys(group, set)),
		Source:     discovery.Unseen,
		Attributes: discovery.Attributes{},
	}
	if len(set) > 0 {
		d.Source = set[0].source
	}
	if ids := pluginIDs(set, group.Count); len(ids) > 0 {
		d.PluginOffers = []discovery.Offer{{Resource: resource.Name, IDs: ids}}
	}
	for _, variable := range slices.Sorted(maps.Keys(resource.Env)) {
		d.Edits.Env = append(d.Edits.Env, variable+"="+resource.Env[variable])
	}
	var errs []error
	var kernel []sysfs.Device
	for _, p := range set {
		d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, p.nodes...)
		if p.shared || group.Count > 1 || group.Units > 0 {
			for _, n := range p.nodes {
				d.CommonNodes = append(d.CommonNodes, n.HostPath)
			}
		}
		if p.mount != nil {
			d.Edits.Mounts = append(d.Edits.Mounts, p.mount)
		}
		d.Includes = append(d.Includes, p.source)
		for _, device := range p.kernel {
			d.Includes = append(d.Includes, device.Path)
		}
		kernel = append(kernel, p.kernel...)
		errs = append(errs, p.err)
	}
	slices.Sort(d.Includes)
	d.Includes = slices.DeleteFunc(slices.Compact(d.Includes), func(dir string) bool { return dir == d.Source })
	errs = append(errs, setAttributes(d.Attributes, kernel))
	d.Identity = d.Attributes.String("serial")
	d.Attributes.SetString("kind", resource.Kind)
	if resource.Kind == "" {
		d.Attributes.SetString("kind", "other")
	}
	d.Attributes.SetString("resource", resource.Name)
	if group.Count > 1 {
		d.Capacity = discovery.Capacity{}
		d.Capacity.Set(discovery.Shares, int64(group.Count))
	}
	d.Health = health(host, &d, kernel)
	return d, errors.Join(errs...)
}

// keys returns the keys that distinguish the devices of a resource: the keys of the parts. All
// units of a group have the same parts, so their keys come from the configuration.
func keys(group *discovery.PathGroup, set []*part) (keys []string) {
	if group.Units == 0 {
		for _, p := range set {
			keys = append(keys, p.key)
		}
		return keys
	}
	for _, p := range group.Paths {
		keys = append(keys, p.Path)
	}
	for _, id := range group.USB {
		keys = append(keys, fmt.Sprintf("usb %s:%s %s", id.Vendor, id.Product, id.Serial))
	}
	return keys
}

// name returns the name of a device of a resource. It depends only on the resource and the keys, so
// other devices do not affect the name.
func name(resource string, keys []string) string {
	hash := sha1.New()
	hash.Write([]byte(resource))
	for _, key := range keys {
		hash.Write([]byte("\x00" + key))
	}
	_, short, _ := strings.Cut(strings.ToLower(resource), "/")
	short = strings.Map(func(r rune) rune {
		if 'a' <= r && r <= 'z' || '0' <= r && r <= '9' {
			return r
		}
		return '-'
	}, short)
	return fmt.Sprintf("paths-%s-%s", short[:min(len(short), 30)], hex.EncodeToString(hash.Sum(nil))[:8])
}

// pluginIDs returns the device plugin IDs in the form of the generic-device-plugin: the SHA-1 of
// the number of the share and the paths on the host. If a path is unknown, there are no IDs.
func pluginIDs(set []*part, count int) []string {
	if slices.ContainsFunc(set, func(p *part) bool { return p.id == "" }) {
		return nil
	}
	ids := make([]string, max(count, 1))
	for i := range ids {
		hash := sha1.New()
		hash.Write([]byte(strconv.Itoa(i)))
		for _, p := range set {
			hash.Write([]byte(p.id))
		}
		ids[i] = hex.EncodeToString(hash.Sum(nil))
	}
	return ids
}

// claimNodes records the nodes that belong to the device or its units alone. A node that already
// belongs to another device is an error, because two containers would get the node.
func claimNodes(owners map[string]string, d *discovery.Device, group *discovery.PathGroup, set []*part) error {
	if group.Count > 1 {
		return nil
	}
	var own []string
	for _, p := range set {
		if p.shared {
			continue
		}
		for _, node := range p.nodes {
			if owner := owners[node.HostPath]; owner != "" {
				return fmt.Errorf("%s is in %s already; several devices have it only with a count or a limit above 1", node.HostPath, owner)
			}
			own = append(own, node.HostPath)
		}
	}
	for _, node := range own {
		owners[node] = d.Name
	}
	return nil
}
