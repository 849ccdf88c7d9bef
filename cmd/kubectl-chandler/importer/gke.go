package importer

import "chandler.dev/api/v1alpha1"

// gke reads the GPU sharing settings of GKE nodes (cmd/nvidia_gpu in
// GoogleCloudPlatform/container-engine-accelerators).
type gke struct{ im *importer }

func newGKE(im *importer) *format {
	g := &gke{im}
	return &format{
		name:     "GKE's GPU device plugin",
		forms:    "gpu_config.json",
		families: []string{"nvidia"},
		is: func(v value) bool {
			return v.hasAny("GPUSharingConfig", "GPUPartitionSize", "MaxTimeSharedClientsPerGPU")
		},
		read: g.read,
	}
}

func (g *gke) read(v value) {
	g.im.unknownExcept(v, "GPUSharingConfig", "GPUPartitionSize", "MaxTimeSharedClientsPerGPU", "HealthCriticalXid")
	g.im.setRoot(v, "nvidia", "/home/kubernetes/bin/nvidia")
	count := v.at("MaxTimeSharedClientsPerGPU")
	sharing := v.at("GPUSharingConfig")
	g.im.unknownExcept(sharing, "GPUSharingStrategy", "MaxSharedClientsPerGPU")
	if max := sharing.at("MaxSharedClientsPerGPU"); max.isPresent() {
		count = max
	}
	if strategy := sharing.at("GPUSharingStrategy"); strategy.text() == "mps" {
		g.im.setRoot(strategy, "nvidia-mps", "/tmp/nvidia-mps")
		g.im.noteRemark(strategy, "an MPS daemon has to run as before, with /tmp/nvidia-mps shown to the agent")
	}
	if n, ok := count.number(); ok && n > 1 {
		g.im.addSharing(count, nvidiaGPU, v1alpha1.Sharing{Replicas: n})
		if sharing.at("GPUSharingStrategy").text() == "mps" {
			g.im.notePodChange(count, "not carried over: a container that asks for more than one share gets them, also where the node has several GPUs")
		} else {
			g.im.onlyOne(count, nvidiaOne)
		}
	}
	if size := v.at("GPUPartitionSize"); size.text() != "" {
		g.im.noteRemark(size, "MIG instances are offered as they are found; making them is not the agent's")
	}
	if xids := v.at("HealthCriticalXid"); !xids.isNull() {
		g.im.notePodChange(xids, "not carried over: a GPU whose driver says that it must be reset is not given to new pods")
	}
}
