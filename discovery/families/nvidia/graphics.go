package nvidia

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// drm is the fact that lists the DRM nodes of a whole GPU: "card1=226:1 renderD128=226:128".
const drm = "drm"

// setDRM records a GPU's DRM nodes in the drm fact, for claims that request graphics.
func (d *driver) setDRM(gpu *discovery.Device, function sysfs.Device) {
	nodes, err := discovery.DRMNodes(function)
	if err != nil {
		return // only graphics depends on the nodes
	}
	var known []string
	for _, node := range nodes {
		if d.host.FileExists(node.HostPath) {
			known = append(known, fmt.Sprintf("%s=%d:%d", path.Base(node.HostPath), node.Major, node.Minor))
		}
	}
	if len(known) > 0 {
		gpu.Facts = maps.Clone(gpu.Facts) // partitions of the GPU may share the map
		gpu.Facts[drm] = strings.Join(known, " ")
	}
}

// drawing lists the capabilities that require DRM nodes in a container, the same as in the NVIDIA
// container runtime (nvidia-container-toolkit v1.20.1, internal/modifier/graphicsEdits.go).
var drawing = []string{"all", "graphics", "display"}

// graphicsEdits returns the nodes of GPUs below /dev/dri, and the by-path links by the GPU's PCI
// address, if the claim requests graphics in NVIDIA_DRIVER_CAPABILITIES. A GPU whose driver files
// come from the NVIDIA runtime is skipped, because that runtime also adds these nodes.
func graphicsEdits(given []discovery.Device, to discovery.Grant) (edits specs.ContainerEdits) {
	asked := strings.Split(to.Parameters[discovery.EnvironmentParameter("NVIDIA_DRIVER_CAPABILITIES")], ",")
	if !slices.ContainsFunc(asked, func(capability string) bool { return slices.Contains(drawing, capability) }) {
		return edits
	}
	var links []string
	var hook *specs.Hook
	for _, d := range given {
		if d.Facts[drm] == "" || !slices.ContainsFunc(d.Edits.Mounts, ofDriver) {
			continue
		}
		for fact := range strings.FieldsSeq(d.Facts[drm]) {
			name, numbers, _ := strings.Cut(fact, "=")
			major, minor, _ := strings.Cut(numbers, ":")
			node := &specs.DeviceNode{Path: "/dev/dri/" + name, HostPath: "/dev/dri/" + name, Type: "c", Permissions: "rw"}
			node.Major, _ = strconv.ParseInt(major, 10, 64) // cannot fail: setDRM wrote the number
			node.Minor, _ = strconv.ParseInt(minor, 10, 64)
			edits.DeviceNodes = append(edits.DeviceNodes, node)
			kind := strings.TrimSuffix(strings.TrimRight(name, "0123456789"), "D") // "card" or "render"
			links = append(links, fmt.Sprintf("--link=../%s::/dev/dri/by-path/pci-%s-%s", name, path.Base(d.Source), kind))
		}
		if len(d.Edits.Hooks) > 0 {
			hook = d.Edits.Hooks[0]
		}
	}
	if len(links) > 0 && hook != nil {
		args := append([]string{hook.Args[0], "hook", "create-symlinks"}, links...)
		edits.Hooks = []*specs.Hook{{HookName: hook.HookName, Path: hook.Path, Args: args}}
	}
	return edits
}
