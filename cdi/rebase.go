package cdi

import (
	"path"

	"tags.cncf.io/container-device-interface/specs-go"
)

// RebasePaths returns the edits for a container runtime that sees the root of the scanned host at
// root: it adds root to the host paths of nodes and mounts. Paths in the container remain, and so
// do hooks, because their program is the agent's and has the runtime's path. The given edits are
// not modified.
func RebasePaths(edits specs.ContainerEdits, root string) specs.ContainerEdits {
	if root == "/" {
		root = ""
	}
	edits.DeviceNodes = copyChanged(edits.DeviceNodes, func(node *specs.DeviceNode) {
		// Without a host path, CDI uses the node's path in the container.
		if node.HostPath == "" && root != "" {
			node.HostPath = node.Path
		}
		node.HostPath = joinRoot(root, node.HostPath)
	})
	edits.Mounts = copyChanged(edits.Mounts, func(mount *specs.Mount) {
		mount.HostPath = joinRoot(root, mount.HostPath)
	})
	return edits
}

// copyChanged returns a list of changed copies.
func copyChanged[T any](list []*T, change func(*T)) []*T {
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

// joinRoot returns an absolute path below root. A relative source, such as tmpfs, is not a file of
// the host and stays unchanged.
func joinRoot(root, name string) string {
	if root == "" || !path.IsAbs(name) {
		return name
	}
	return path.Join(root, name)
}
