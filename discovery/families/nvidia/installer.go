package nvidia

import (
	"path"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// On Google's Container-Optimized OS an installer puts the driver's libraries and programs into a
// directory of their own, usually /home/kubernetes/bin/nvidia, and images expect that directory at
// /usr/local/nvidia. The GKE device plugin mounts the whole directory, names GPUs by their minor
// numbers, and needs no NVIDIA container runtime.
const (
	installerTarget = "/usr/local/nvidia"
	vulkanDir       = "vulkan/icd.d" // directly below the root; identifies the layout
	vulkanTarget    = "/etc/vulkan/icd.d"
)

// installerRoot reports whether a root has the layout of Google's installer. A root that is laid
// out as a file system has vulkanDir below usr/share instead.
func installerRoot(host *discovery.Host, root string) bool {
	return host.FileExists(path.Join("/", root, vulkanDir)) && !host.FileExists(path.Join("/", root, "usr"))
}

// installerMounts returns the mounts that the GKE device plugin makes.
func installerMounts(root string) []*specs.Mount {
	root = path.Clean("/" + root)
	return []*specs.Mount{mount(root, installerTarget), mount(path.Join(root, vulkanDir), vulkanTarget)}
}

// isInstalled reports whether the mounts are those of installerMounts.
func isInstalled(mounts []*specs.Mount) bool {
	return len(mounts) > 0 && mounts[0].ContainerPath == installerTarget
}

// installerOffers returns the offer of the GKE device plugin for an ID.
func installerOffers(id string) []discovery.Offer {
	return []discovery.Offer{{Resource: "nvidia.com/gpu", IDs: []string{id}, Dialect: discovery.Dialect{Infix: "/vgpu"}}}
}
