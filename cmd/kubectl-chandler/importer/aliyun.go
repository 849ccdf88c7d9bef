package importer

import (
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// aliyun reads configurations of Aliyun GPU sharing (cmd/nvidia in
// AliyunContainerService/gpushare-device-plugin).
type aliyun struct {
	im       *importer
	settings *settings
}

func newAliyun(im *importer) *format {
	a := &aliyun{im: im}
	const elsewhere = "the agent finds the kubelet and the API server by itself"
	table := []option{
		{name: "memory-unit", in: "memoryUnit", fate: fateCarried},
		{name: "health-check", alone: true, why: "the agent always watches the health of devices"},
		{name: "mps", alone: true, fate: fatePodChange, fine: []string{"false"}, why: "write driverRoots: {nvidia-mps: …}, and run an MPS daemon"},
	}
	for _, name := range []string{"query-kubelet", "query-from-kubelet"} {
		table = append(table, option{name: name, alone: true, why: elsewhere})
	}
	for _, name := range []string{"kubelet-address", "kubelet-port", "client-cert", "client-key", "token", "timeout"} {
		table = append(table, option{name: name, why: elsewhere})
	}
	a.settings = newSettings(im, table)
	return &format{
		name:     "Aliyun's gpushare device plugin",
		forms:    "flags, DaemonSet",
		families: []string{"nvidia"},
		runs: func(c container) bool {
			return c.names("gpushare-device-plugin", "gpushare-plugin", "k8s-gpushare") && !c.names("extender", "schd") || c.image == "" && c.hasFlag("memory-unit", "query-kubelet")
		},
		container: func(c container) { a.settings.flags(c) },
		finish:    a.finishSettings,
	}
}

func (a *aliyun) finishSettings() {
	a.settings.finishOptions()
	unit := a.settings.get("memory-unit")
	size := "1Gi"
	switch strings.ToLower(unit.Text()) {
	case "", "gib", "g", "gi":
	case "mib", "m", "mi":
		size = "1Mi"
		a.im.noteRemark(unit, "the kubelet takes about 55,000 units on a node; where the GPUs have more MiB, which Aliyun's plugin cannot offer either, the agent's log names the smallest unit that fits")
	default:
		a.im.notePodChange(unit, "is an unknown unit; 1Gi is used")
	}
	a.im.shareMemory(unit, "aliyun.com/gpu-mem", size)
	a.im.noteRemark(unit, "the memory of GPUs is known where chandler-host runs")
	a.im.noteRemark(source.Value{File: unit.File}, "the scheduler extender and its annotations are no longer needed: the agent selects a GPU with enough memory left, and the kubelet rejects a pod if no GPU has enough")
}

// shareMemory shares the memory of NVIDIA GPUs in units.
func (im *importer) shareMemory(from source.Value, name, unit string) {
	size := resource.MustParse(unit)
	im.addSharing(from, nvidiaFull, v1alpha1.Sharing{Resource: name, Unit: &size})
}
