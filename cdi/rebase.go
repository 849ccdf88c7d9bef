package cdi

import (
	"path"

	"tags.cncf.io/container-device-interface/specs-go"
)

// Rebase returns the edits for a container runtime that sees the root of the
// scanned host at root: the host paths of nodes and mounts are prefixed with it. Paths in
// the container stay as they are, and so do hooks, whose program is the agent's and lies
// where the runtime sees it. The edits that are passed in are not modified.
func Rebase(edits specs.ContainerEdits, root string) specs.ContainerEdits {
	if root == "/" {
		root = ""
	}
	edits.DeviceNodes = copies(edits.DeviceNodes, func(node *specs.DeviceNode) {
		// CDI takes a node without a host path from the container's.
		if node.HostPath == "" && root != "" {
			node.HostPath = node.Path
		}
		node.HostPath = below(root, node.HostPath)
	})
	edits.Mounts = copies(edits.Mounts, func(mount *specs.Mount) {
		mount.HostPath = below(root, mount.HostPath)
	})
	return edits
}

// copies returns a list of changed copies.
func copies[T any](list []*T, change func(*T)) []*T {
	if list == nil {
		return nil
	}
	out := make([]*T, len(list))
	for i, item := range list {
		changed := *item
		change(&changed)
		out[i] = &changed
	}
	return out
}

// below returns an absolute path as one below root. A source that is no
// absolute path, such as that of a tmpfs, names no file of the host.
func below(root, name string) string {
	if root == "" || !path.IsAbs(name) {
		return name
	}
	return path.Join(root, name)
}
