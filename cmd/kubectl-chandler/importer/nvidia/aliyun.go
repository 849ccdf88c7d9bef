package nvidia

import (
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/kubectl-chandler/importer/plugin"
	"chandler.dev/cmd/kubectl-chandler/importer/source"
)

// aliyun reads configurations of Aliyun GPU sharing (cmd/nvidia in
// AliyunContainerService/gpushare-device-plugin).
type aliyun struct {
	im       *plugin.Import
	settings *plugin.Settings
}

func newAliyun(im *plugin.Import) *plugin.Format {
	a := &aliyun{im: im}
	const elsewhere = "the agent finds the kubelet and the API server by itself"
	table := []plugin.Option{
		{Name: "memory-unit", HelmField: "memoryUnit", Fate: plugin.FateCarried},
		{Name: "health-check", NoValue: true, Reason: "the agent always watches the health of devices"},
		{Name: "mps", NoValue: true, Fate: plugin.FatePodChange, Harmless: []string{"false"}, Reason: "write driverRoots: {nvidia-mps: …}, and run an MPS daemon"},
	}
	for _, name := range []string{"query-kubelet", "query-from-kubelet"} {
		table = append(table, plugin.Option{Name: name, NoValue: true, Reason: elsewhere})
	}
	for _, name := range []string{"kubelet-address", "kubelet-port", "client-cert", "client-key", "token", "timeout"} {
		table = append(table, plugin.Option{Name: name, Reason: elsewhere})
	}
	a.settings = plugin.NewSettings(im, table)
	return &plugin.Format{
		Name:     "Aliyun's gpushare device plugin",
		Forms:    "flags, DaemonSet",
		Families: []string{"nvidia"},
		IsContainer: func(c plugin.Container) bool {
			return c.HasName("gpushare-device-plugin", "gpushare-plugin", "k8s-gpushare") && !c.HasName("extender", "schd") || c.Image == "" && c.HasFlag("memory-unit", "query-kubelet")
		},
		ReadContainer: func(c plugin.Container) { a.settings.ReadFlags(c) },
		Finish:        a.finishSettings,
	}
}

func (a *aliyun) finishSettings() {
	a.settings.FinishOptions()
	unit := a.settings.Get("memory-unit")
	size := "1Gi"
	switch strings.ToLower(unit.Text()) {
	case "", "gib", "g", "gi":
	case "mib", "m", "mi":
		size = "1Mi"
		a.im.Notes.AddRemark(unit, "the kubelet takes about 55,000 units on a node; where the GPUs have more MiB, which Aliyun's plugin cannot offer either, the agent's log names the smallest unit that fits")
	default:
		a.im.Notes.AddPodChange(unit, "is an unknown unit; 1Gi is used")
	}
	quantity := resource.MustParse(size)
	a.im.Config.AddSharing(unit, nvidiaFull, v1alpha1.Sharing{Resource: "aliyun.com/gpu-mem", Unit: &quantity})
	a.im.Notes.AddRemark(unit, "the memory of GPUs is known where chandler-host runs")
	a.im.Notes.AddRemark(source.Value{File: unit.File}, "the scheduler extender and its annotations are no longer needed: the agent selects a GPU with enough memory left, and the kubelet rejects a pod if no GPU has enough")
}
