package nvidia

import (
	"cmp"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// gke reads the GPU sharing settings of GKE nodes (cmd/nvidia_gpu in
// GoogleCloudPlatform/container-engine-accelerators).
type gke struct {
	im       *plugin.Import
	settings *plugin.Settings
}

func newGKE(im *plugin.Import) *plugin.Format {
	const ours = "the agent has flags and metrics of its own"
	g := &gke{im: im}
	g.settings = plugin.NewSettings(im, []plugin.Option{
		{Name: "host-path", Fate: plugin.FateCarried},
		{Name: "container-path", Harmless: []string{"/usr/local/nvidia"}, Fate: plugin.FatePodChange, Reason: "not carried over: the files of the driver keep their paths"},
		{Name: "host-vulkan-icd-path", Reason: "is below the directory of the driver"},
		{Name: "container-vulkan-icd-path", Reason: "is below the directory of the driver"},
		{Name: "plugin-directory", Reason: ours},
		{Name: "gpu-config", Harmless: []string{"/etc/nvidia/gpu_config.json"}, Reason: "import that file too, if it is not among the files"},
		{Name: "enable-container-gpu-metrics", NoValue: true, Reason: ours},
		{Name: "enable-health-monitoring", NoValue: true, Reason: "the agent always watches the health of devices"},
		{Name: "gpu-metrics-port", Reason: ours},
		{Name: "gpu-metrics-collection-interval", Reason: ours},
	})
	return &plugin.Format{
		Name:     "GKE's GPU device plugin",
		Forms:    "gpu_config.json, DaemonSet",
		Families: []string{"nvidia"},
		IsDocument: func(v source.Value) bool {
			return v.HasAny("GPUSharingConfig", "GPUPartitionSize", "MaxTimeSharedClientsPerGPU")
		},
		ReadDocument:  g.read,
		IsContainer:   func(c plugin.Container) bool { return c.HasName("nvidia-gpu-device-plugin") },
		ReadContainer: func(c plugin.Container) { g.settings.ReadFlags(c) },
		Finish:        g.finishSettings,
	}
}

// finishSettings sets the directory of the driver, which GKE installs outside of the host's library
// directories.
func (g *gke) finishSettings() {
	g.settings.FinishOptions()
	root := g.settings.Get("host-path")
	g.im.Config.SetRoot(root, "nvidia", cmp.Or(root.Text(), "/home/kubernetes/bin/nvidia"))
}

func (g *gke) read(v source.Value) {
	g.im.Notes.AddUnknownExcept(v, "GPUSharingConfig", "GPUPartitionSize", "MaxTimeSharedClientsPerGPU", "HealthCriticalXid")
	count := v.At("MaxTimeSharedClientsPerGPU")
	sharing := v.At("GPUSharingConfig")
	g.im.Notes.AddUnknownExcept(sharing, "GPUSharingStrategy", "MaxSharedClientsPerGPU")
	if max := sharing.At("MaxSharedClientsPerGPU"); max.IsPresent() {
		count = max
	}
	if strategy := sharing.At("GPUSharingStrategy"); strategy.Text() == "mps" {
		g.im.Config.SetRoot(strategy, "nvidia-mps", "/tmp/nvidia-mps")
		g.im.Notes.AddRemark(strategy, "an MPS daemon has to run as before, with /tmp/nvidia-mps shown to the agent")
	}
	if n, ok := count.AsInteger(); ok && n > 1 {
		g.im.Config.AddSharing(count, nvidiaGPU, v1alpha1.Sharing{Replicas: n})
		if sharing.At("GPUSharingStrategy").Text() == "mps" {
			g.im.Notes.AddPodChange(count, "not carried over: a container that asks for more than one share gets them, also where the node has several GPUs")
		} else {
			allowOnlyOne(g.im, count, nvidiaOne)
		}
	}
	if size := v.At("GPUPartitionSize"); size.Text() != "" {
		g.im.Notes.AddRemark(size, "MIG instances are offered as they are found; making them is not the agent's")
	}
	if xids := v.At("HealthCriticalXid"); !xids.IsNull() {
		g.im.Notes.AddPodChange(xids, "not carried over: a GPU whose driver says that it must be reset is not given to new pods")
	}
}
