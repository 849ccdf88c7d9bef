package nvidia

import (
	"path"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// On Google's Container-Optimized OS an installer puts the driver's libraries
// and programs into a directory of their own, usually
// /home/kubernetes/bin/nvidia, and images expect that directory at
// /usr/local/nvidia. GKE's device plugin mounts it as a whole, names GPUs by
// their minor numbers, and needs no NVIDIA container runtime.
const (
	installerTarget = "/usr/local/nvidia"
	vulkanDir       = "vulkan/icd.d" // directly below the root, by which it is recognised
	vulkanTarget    = "/etc/vulkan/icd.d"
)

// installerRoot reports whether a root is as Google's installer leaves it. A
// root that is laid out as a file system has the directory below usr/share.
func installerRoot(host *discovery.Host, root string) bool {
	return host.Exists(path.Join("/", root, vulkanDir)) && !host.Exists(path.Join("/", root, "usr"))
}

// installerMounts returns the mounts of GKE's device plugin.
func installerMounts(root string) []*specs.Mount {
	root = path.Clean("/" + root)
	return []*specs.Mount{mount(root, installerTarget), mount(path.Join(root, vulkanDir), vulkanTarget)}
}

// installed reports whether mounts are those of such a root.
func installed(mounts []*specs.Mount) bool {
	return len(mounts) > 0 && mounts[0].ContainerPath == installerTarget
}

// installerOffers returns what GKE's device plugin offers under an ID.
func installerOffers(id string) []discovery.Offer {
	return []discovery.Offer{{Resource: "nvidia.com/gpu", IDs: []string{id}, Dialect: discovery.Dialect{Infix: "/vgpu"}}}
}
