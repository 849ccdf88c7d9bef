package importer

import (
	"cmp"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// gke reads the GPU sharing settings of GKE nodes (cmd/nvidia_gpu in
// GoogleCloudPlatform/container-engine-accelerators).
type gke struct {
	im       *importer
	settings *settings
}

func newGKE(im *importer) *format {
	const ours = "the agent has flags and metrics of its own"
	g := &gke{im: im}
	g.settings = newSettings(im, []option{
		{name: "host-path", fate: fateCarried},
		{name: "container-path", fine: []string{"/usr/local/nvidia"}, fate: fatePodChange, why: "not carried over: the files of the driver keep their paths"},
		{name: "host-vulkan-icd-path", why: "is below the directory of the driver"},
		{name: "container-vulkan-icd-path", why: "is below the directory of the driver"},
		{name: "plugin-directory", why: ours},
		{name: "gpu-config", fine: []string{"/etc/nvidia/gpu_config.json"}, why: "import that file too, if it is not among the files"},
		{name: "enable-container-gpu-metrics", alone: true, why: ours},
		{name: "enable-health-monitoring", alone: true, why: "the agent always watches the health of devices"},
		{name: "gpu-metrics-port", why: ours},
		{name: "gpu-metrics-collection-interval", why: ours},
	})
	return &format{
		name:     "GKE's GPU device plugin",
		forms:    "gpu_config.json, DaemonSet",
		families: []string{"nvidia"},
		is: func(v source.Value) bool {
			return v.HasAny("GPUSharingConfig", "GPUPartitionSize", "MaxTimeSharedClientsPerGPU")
		},
		read:      g.read,
		runs:      func(c container) bool { return c.names("nvidia-gpu-device-plugin") },
		container: func(c container) { g.settings.flags(c) },
		finish:    g.finishSettings,
	}
}

// finishSettings sets the directory of the driver, which GKE installs outside of the host's library
// directories.
func (g *gke) finishSettings() {
	g.settings.finishOptions()
	root := g.settings.get("host-path")
	g.im.setRoot(root, "nvidia", cmp.Or(root.Text(), "/home/kubernetes/bin/nvidia"))
}

func (g *gke) read(v source.Value) {
	g.im.unknownExcept(v, "GPUSharingConfig", "GPUPartitionSize", "MaxTimeSharedClientsPerGPU", "HealthCriticalXid")
	count := v.At("MaxTimeSharedClientsPerGPU")
	sharing := v.At("GPUSharingConfig")
	g.im.unknownExcept(sharing, "GPUSharingStrategy", "MaxSharedClientsPerGPU")
	if max := sharing.At("MaxSharedClientsPerGPU"); max.IsPresent() {
		count = max
	}
	if strategy := sharing.At("GPUSharingStrategy"); strategy.Text() == "mps" {
		g.im.setRoot(strategy, "nvidia-mps", "/tmp/nvidia-mps")
		g.im.noteRemark(strategy, "an MPS daemon has to run as before, with /tmp/nvidia-mps shown to the agent")
	}
	if n, ok := count.AsInteger(); ok && n > 1 {
		g.im.addSharing(count, nvidiaGPU, v1alpha1.Sharing{Replicas: n})
		if sharing.At("GPUSharingStrategy").Text() == "mps" {
			g.im.notePodChange(count, "not carried over: a container that asks for more than one share gets them, also where the node has several GPUs")
		} else {
			g.im.onlyOne(count, nvidiaOne)
		}
	}
	if size := v.At("GPUPartitionSize"); size.Text() != "" {
		g.im.noteRemark(size, "MIG instances are offered as they are found; making them is not the agent's")
	}
	if xids := v.At("HealthCriticalXid"); !xids.IsNull() {
		g.im.notePodChange(xids, "not carried over: a GPU whose driver says that it must be reset is not given to new pods")
	}
}
