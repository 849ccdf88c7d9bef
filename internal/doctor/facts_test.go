package doctor

import (
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/doctor/report"
)

var now = time.Date(2026, 11, 20, 9, 50, 21, 0, time.UTC)

func ago(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }

// device returns a GPU or a NIC at a PCI address.
func device(kind, at, model string) rules.Offered {
	d := rules.Offered{Device: discovery.Device{Name: "pci-" + at[:4] + "-" + at[5:7] + "-" + at[8:10] + "-" + at[11:], Family: "nvidia", Attributes: discovery.Attributes{}}}
	d.Attributes.SetString("kind", kind)
	d.Attributes.SetString("model", model)
	d.Attributes.SetString(busID, at)
	d.Health = discovery.Health{Status: discovery.Healthy, Since: ago(time.Hour)}
	if kind == "gpu" {
		d.Offers = []discovery.Offer{{Resource: "nvidia.com/gpu", IDs: []string{"GPU-" + at[5:7]}}}
		d.Edits.DeviceNodes = nil
		d.Attributes.SetString("driver", "nvidia")
		d.Capacity = discovery.Capacity{"memory": {Value: resource.MustParse("80Gi")}}
	} else {
		d.Family = "rdma"
	}
	return d
}

// healthy returns the facts of a healthy node: DRA offers two GPUs and one NIC.
func healthy() *Facts {
	snapshot := &rules.Snapshot{Devices: []rules.Offered{
		device("gpu", "0000:1a:00.0", "H100 80GB HBM3"), device("gpu", "0000:9e:00.0", "H100 80GB HBM3"), device("nic", "0000:ce:00.0", "MT4129"),
	}}
	found := &discovery.Snapshot{}
	api := make(map[string]discovery.Mode)
	slice := resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Driver: discovery.Domain, NodeName: new("gpu-node-07")}}
	for _, d := range snapshot.Devices {
		found.Devices = append(found.Devices, d.Device)
		api[d.Name] = discovery.ModeDRA
		slice.Spec.Devices = append(slice.Spec.Devices, resourceapi.Device{Name: d.Name, Attributes: d.Attributes.ForSlice(), Capacity: d.Capacity})
	}
	network := deviceClass("rdma.chandler.dev", "", `device.driver == "chandler.dev" && device.attributes["chandler.dev"].kind != "gpu"`, ago(time.Hour))
	class := deviceClass("nvidia.chandler.dev", "nvidia.com/gpu", `device.driver == "chandler.dev" && device.attributes["chandler.dev"].kind == "gpu"`, ago(time.Hour))
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "gpu-node-07", Labels: map[string]string{"chandler.dev/mode": "DRA"}},
		Status: corev1.NodeStatus{
			NodeInfo:   corev1.NodeSystemInfo{KubeletVersion: "v1.37.0"},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}, {Type: corev1.NodeDiskPressure, Status: corev1.ConditionFalse}},
		},
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "chandler", Name: "chandler-7fz2k", CreationTimestamp: ago(17 * 24 * time.Hour)},
		Status:     corev1.PodStatus{StartTime: new(ago(17 * 24 * time.Hour)), ContainerStatuses: []corev1.ContainerStatus{{}}},
	}
	return &Facts{
		Head: report.Head{Node: "gpu-node-07", Kubernetes: "v1.37.0", Version: "0.9.0", Time: now},
		Devices: DeviceFacts{
			Snapshot: KnownAnswer(snapshot), Found: found, API: KnownAnswer(api), Waits: KnownAnswer[[]Wait](nil),
			Holders: map[string][]Holder{"pci-0000-9e-00-0": {{Namespace: "ml", Pod: "llama-7b-worker-1", Owner: "claim ml/llama", API: discovery.ModeDRA}}},
		},
		Host: HostFacts{
			Functions: KnownAnswer([]Function{
				{Address: "0000:1a:00.0", Class: "030200", Vendor: "10de", Device: "2330", Driver: "nvidia", Group: "12"},
				{Address: "0000:9e:00.0", Class: "030200", Vendor: "10de", Device: "2330", Driver: "nvidia", Group: "13"},
			}),
			Modules: map[string]bool{"kvm": true, "nvidia": true}, Virtual: true,
			Proc: KnownAnswer(true), SELinux: KnownAnswer(SELinux{Enforcing: true, Agent: "system_u:system_r:container_device_plugin_t:s0"}),
			Space: KnownAnswer([]Space{{Path: "/var/lib/kubelet/plugins/chandler.dev", Size: 1 << 40, Free: 1 << 39, Inodes: 1 << 20, INFree: 1 << 19}}),
			State: KnownAnswer(""), Skew: KnownAnswer(100 * time.Millisecond),
		},
		Kubelet: KubeletFacts{
			Root: "/var/lib/kubelet", PluginDir: "/var/lib/kubelet/device-plugins", Dir: KnownAnswer(""), Answers: KnownAnswer(""),
			Pods: KnownAnswer([]*podresourcesapi.PodResources{{Namespace: "ml", Name: "llama-7b-worker-1", Containers: []*podresourcesapi.ContainerResources{{
				DynamicResources: []*podresourcesapi.DynamicResource{{ClaimNamespace: "ml", ClaimName: "llama"}},
			}}}}),
			Allocatable: KnownAnswer([]*podresourcesapi.ContainerDevices{{ResourceName: "example.com/other", DeviceIds: []string{"a"}}}),
			Ours:        map[string][]string{"nvidia.com/gpu": {}},
			Flags:       KnownAnswer(map[string]string{"root-dir": "/var/lib/kubelet"}), Config: KnownAnswer(KubeletConfig{TopologyPolicy: "none"}), Registration: KnownAnswer(true),
		},
		Runtime: RuntimeFacts{
			Name: "containerd", Version: "2.1.4", Dir: "/var/run/cdi", Writable: KnownAnswer(""),
			Config: KnownAnswer(RuntimeConfig{Files: []string{"/etc/containerd/config.toml"}, CDI: true, SpecDirs: []string{"/etc/cdi", "/run/cdi"}, Changed: now.Add(-48 * time.Hour), Started: now.Add(-24 * time.Hour)}),
			Specs:  KnownAnswer([]Spec{{File: "/var/run/cdi/chandler.dev-claim_u1.json", UID: "u1"}}),
		},
		Cluster: ClusterFacts{
			Server: KnownAnswer("v1.37.0"), DRA: KnownAnswer("v1"), Node: KnownAnswer(node), Slices: KnownAnswer([]resourceapi.ResourceSlice{slice}),
			Classes: KnownAnswer([]resourceapi.DeviceClass{class, network}), Claims: KnownAnswer([]resourceapi.ResourceClaim{claim("ok", "nvidia.chandler.dev", "", 2)}),
			Pods: KnownAnswer([]corev1.Pod{*pod}), Policies: KnownAnswer[[]string](nil), Rights: KnownAnswer[[]string](nil),
		},
		Agent: AgentFacts{
			Pod: KnownAnswer(pod), Running: KnownAnswer(true), Ready: KnownAnswer(""), Live: KnownAnswer(""), Config: KnownAnswer(""), Mode: discovery.ModeDRA,
			Features: KnownAnswer(map[string]bool{"DRADeviceTaints": true, "DRAPartitionableDevices": false}),
			Records:  KnownAnswer(Records{Claims: []Record{{UID: "u1", Namespace: "ml", Name: "llama"}, {UID: "u0", Past: true}}, Grants: 4}),
		},
	}
}

func laptop() *Facts {
	f := &Facts{Head: report.Head{Node: "mara-t14", Version: "0.9.0", Time: now}, NoKubelet: "no kubelet runs on this machine", NoCluster: "the API server is unknown: set --kubeconfig"}
	h := healthy()
	f.Devices = DeviceFacts{Snapshot: h.Devices.Snapshot, Found: h.Devices.Found}
	f.Host = HostFacts{Functions: h.Host.Functions, Modules: h.Host.Modules, Proc: KnownAnswer(true), SELinux: KnownAnswer(SELinux{})}
	return f
}

func deviceClass(name, resource, expression string, made metav1.Time) resourceapi.DeviceClass {
	c := resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: made}}
	c.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
	if resource != "" {
		c.Spec.ExtendedResourceName = &resource
	}
	return c
}

// claim returns a claim that waits for devices of a class.
func claim(name, class, expression string, count int64) resourceapi.ResourceClaim {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
	if expression != "" {
		exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
	}
	c := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: name}}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpus", Exactly: exactly}}
	return c
}

// condition makes a device of the snapshot unhealthy.
func condition(i int, c discovery.Condition, effect resourceapi.DeviceTaintEffect, reason string, since time.Duration) func(*Facts) {
	return func(f *Facts) {
		status := discovery.Unhealthy
		if c == discovery.ConditionUnknown {
			status = discovery.Unknown
		}
		f.Devices.Snapshot.Value.Devices[i].Health = discovery.Health{Status: status, Condition: c, Reason: reason, Effect: effect, Since: ago(since)}
	}
}

func problem(device string, reason error) func(*Facts) {
	return func(f *Facts) {
		s := f.Devices.Snapshot.Value
		s.Problems = append(s.Problems, discovery.Problem{Device: device, Err: reason})
	}
}

func function(functions ...Function) func(*Facts) {
	return func(f *Facts) { f.Host.Functions.Value = append(f.Host.Functions.Value, functions...) }
}

func nodeIs(change func(*corev1.Node)) func(*Facts) {
	return func(f *Facts) { change(f.Cluster.Node.Value) }
}

const noSchedule = resourceapi.DeviceTaintEffectNoSchedule

// breaks maps each code to a function that adds the fault to a healthy node.
var breaks = map[string]func(*Facts){
	"CH0101": func(f *Facts) { f.Kubelet.Dir = KnownAnswer("/var/lib/kubelet/device-plugins does not exist") },
	"CH0102": func(f *Facts) { f.Kubelet.Answers = KnownAnswer("connection refused") },
	"CH0103": func(f *Facts) { f.Kubelet.Registration = KnownAnswer(false) },
	"CH0104": func(f *Facts) {
		f.Kubelet.Allocatable = KnownAnswer([]*podresourcesapi.ContainerDevices{{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-9e", "GPU-1a"}}})
		f.Kubelet.PluginPods = []string{"kube-system/nvidia-device-plugin-daemonset-x8k2v"}
	},
	"CH0105": func(f *Facts) {
		f.Kubelet.Pods = KnownAnswer[[]*podresourcesapi.PodResources](nil)
		f.Kubelet.Config.Value.FeatureGates = map[string]bool{"KubeletPodResourcesDynamicResources": false}
	},
	"CH0106": func(f *Facts) {
		f.Cluster.Node.Value.Status.NodeInfo.KubeletVersion, f.Cluster.Server = "v1.31.9", KnownAnswer("v1.34.4")
	},
	"CH0107": nodeIs(func(n *corev1.Node) { n.Status.NodeInfo.KubeletVersion = "v1.38.0" }),
	"CH0108": func(f *Facts) { f.Kubelet.Flags = KnownAnswer(map[string]string{"root-dir": "/var/lib/k0s/kubelet"}) },
	"CH0109": func(f *Facts) {
		f.Kubelet.Config.Value.FeatureGates = map[string]bool{"DynamicResourceAllocation": false}
	},
	"CH0110": nodeIs(func(n *corev1.Node) {
		n.Status.Conditions[0] = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Message: "container runtime network not ready", LastTransitionTime: ago(time.Hour)}
	}),
	"CH0111": nodeIs(func(n *corev1.Node) { n.Spec.Unschedulable = true }),
	"CH0112": func(f *Facts) { f.Kubelet.Config.Value.TopologyPolicy = "single-numa-node" },

	"CH0201": func(f *Facts) { f.Runtime.Version = "1.6.9" },
	"CH0202": func(f *Facts) { f.Runtime.Version, f.Runtime.Config.Value.CDI = "1.7.22", false },
	"CH0203": func(f *Facts) { f.Runtime.Config.Value.SpecDirs = []string{"/etc/cdi"} },
	"CH0204": func(f *Facts) {
		f.Runtime.Specs.Value = append(f.Runtime.Specs.Value, Spec{File: "/var/run/cdi/chandler.dev-claim_u2.json", UID: "u2"})
	},
	"CH0205": func(f *Facts) { f.Runtime.Writable = KnownAnswer("/var/run/cdi: read-only file system") },
	"CH0206": func(f *Facts) { f.Runtime.Specs = KnownAnswer[[]Spec](nil) },
	"CH0207": func(f *Facts) {
		f.Runtime.Errors = map[string][]string{"/etc/cdi/vendor.json": {"unexpected end of JSON input"}}
	},
	"CH0208": func(f *Facts) { f.Runtime.Config.Value.Changed = now },

	"CH0301": condition(1, discovery.ConditionUnhealthy, noSchedule, "the driver requires gpu-reset; XID 79 at 2026-11-20T09:12:41Z", 37*time.Minute),
	"CH0302": condition(1, discovery.ConditionUnknown, noSchedule, "attribute vendor: input/output error", time.Minute),
	"CH0303": func(f *Facts) {
		f.Devices.Snapshot.Value.Gone = discovery.Missing{"pci-0000-ff-00-0": discovery.GoneHealth(noSchedule)}
		f.Devices.Holders["pci-0000-ff-00-0"] = []Holder{{Namespace: "ml", Pod: "p"}}
	},
	"CH0304": condition(1, discovery.ConditionDriverUnbound, noSchedule, "no driver is bound to it", time.Minute),
	"CH0305": condition(1, discovery.ConditionNodeMissing, noSchedule, "device node /dev/nvidia1 is missing", time.Minute),
	"CH0306": condition(1, discovery.ConditionOverTemperature, noSchedule, "as hot as its critical limit of 95 °C, or hotter", time.Minute),
	"CH0307": condition(2, discovery.ConditionLinkDegraded, resourceapi.DeviceTaintEffectNone, "its link has 8 lanes of 16", 72*time.Hour),
	"CH0308": condition(2, discovery.ConditionFatalErrors, resourceapi.DeviceTaintEffectNone, "3 fatal PCIe errors", time.Minute),
	"CH0309": problem("pci-0000-1a-00-0", errors.New("attribute serial: input/output error")),
	"CH0310": problem("pci-0000-1a-00-0", fmt.Errorf("open sys/devices/pci0000:00/0000:1a:00.0/mem: %w", discovery.ErrHangs)),
	"CH0311": problem("pci-0000-1a-00-0, pci-0000-9e-00-0", fmt.Errorf(`identity "0" is %w, so it is ignored`, discovery.ErrNotUnique)),
	"CH0312": problem("pci-0000-41-00-0", fmt.Errorf("%w: the kernel has no node for the device or for its IOMMU group", pci.ErrVFIO)),
	"CH0314": condition(1, discovery.ConditionNotResponding, noSchedule, "it does not answer: its configuration space reads all ones", time.Minute),
	"CH0315": problem("pci-0000-1a-00-0", fmt.Errorf("config: %w", &rules.ExpressionError{Entry: "exclude[0].cel", Expression: `device.attributes["chandler.dev"].vendr == "amd"`, Device: "pci-0000-1a-00-0", Err: errors.New("no such key: vendr")})),
	"CH0313": func(f *Facts) {
		f.Devices.Snapshot = KnownAnswer(&rules.Snapshot{})
		f.Cluster.Claims, f.Devices.API.Value = KnownAnswer[[]resourceapi.ResourceClaim](nil), map[string]discovery.Mode{}
	},

	"CH0401": func(f *Facts) {
		f.Host.Functions = KnownAnswer([]Function{{Address: "0000:41:00.0", Class: "030200", Driver: "vfio-pci"}})
	},
	"CH0402": function(Function{Address: "0000:41:00.0", Driver: "vfio-pci", Group: "44"}, Function{Address: "0000:41:00.1", Driver: "snd_hda_intel", Group: "44", Class: "040300"}, Function{Address: "0000:40:00.0", Driver: "pcieport", Group: "44", Class: "060400"}),
	"CH0403": function(Function{Address: "0000:41:00.0", Class: "020000", Override: "vfio-pci", Group: "44"}),
	"CH0404": func(f *Facts) {
		f.Host.SELinux = KnownAnswer(SELinux{Enforcing: true, Agent: "system_u:system_r:container_t:s0:c1,c2"})
	},
	"CH0405": func(f *Facts) { f.Host.Skew = KnownAnswer(-3 * time.Minute) },
	"CH0406": func(f *Facts) { f.Host.Space.Value[0].Free = 1 << 20 },
	"CH0407": func(f *Facts) { f.Host.Space.Value[0].INFree = 3 },
	"CH0408": func(f *Facts) {
		f.Host.State = KnownAnswer("/var/lib/kubelet/plugins/chandler.dev: read-only file system")
	},
	"CH0409": func(f *Facts) { f.Host.Proc = KnownAnswer(false) },

	"CH0501": func(f *Facts) {
		f.Devices.API.Value["pci-0000-9e-00-0"] = discovery.ModeDevicePlugin
		f.Kubelet.Ours["nvidia.com/gpu"] = []string{"GPU-9e"}
	},
	"CH0502": func(f *Facts) {
		f.Devices.API.Value["pci-0000-9e-00-0"] = discovery.ModeDevicePlugin
		f.Devices.Waits = KnownAnswer([]Wait{{Device: "pci-0000-9e-00-0", From: discovery.ModeDevicePlugin, To: discovery.ModeDRA, Reason: "somebody has it"}})
	},
	"CH0503": func(f *Facts) {
		other := *f.Cluster.Slices.Value[0].DeepCopy()
		other.Spec.Driver = "gpu.nvidia.com"
		f.Cluster.Slices.Value = append(f.Cluster.Slices.Value, other)
	},
	"CH0504": nodeIs(func(n *corev1.Node) { n.Labels["chandler.dev/mode"] = "dra" }),

	"CH0601": func(f *Facts) {
		f.Cluster.DRA = KnownAnswer("")
		none := "the server could not find the requested resource"
		f.Cluster.Slices, f.Cluster.Classes, f.Cluster.Claims = UnknownAnswer[[]resourceapi.ResourceSlice](none), UnknownAnswer[[]resourceapi.DeviceClass](none), UnknownAnswer[[]resourceapi.ResourceClaim](none)
	},
	"CH0602": func(f *Facts) {
		d := &f.Devices.Snapshot.Value.Devices[0]
		d.PartOf = &discovery.Silicon{Name: "gpu", Counters: map[string]resource.Quantity{"xcc": resource.MustParse("8")}}
		f.Devices.API.Value["gpu"] = discovery.ModeDRA
	},
	"CH0603": func(f *Facts) { f.Cluster.Classes.Value[0].Spec.ExtendedResourceName = nil },
	"CH0604": func(f *Facts) {
		f.Cluster.Classes.Value = append(f.Cluster.Classes.Value, deviceClass("gpu.nvidia.com", "nvidia.com/gpu", `device.driver == "gpu.nvidia.com"`, ago(time.Minute)))
	},
	"CH0605": func(f *Facts) { f.Cluster.Rights = KnownAnswer([]string{"patch resourceclaims/status"}) },
	"CH0606": func(f *Facts) {
		f.Cluster = ClusterFacts{Server: UnknownAnswer[string]("dial tcp 10.0.0.1:6443: connect: connection refused")}
	},
	"CH0607": func(f *Facts) { f.Cluster.Node = KnownAnswer[*corev1.Node](nil) },
	"CH0616": func(f *Facts) {
		f.Cluster.Classes.Value = f.Cluster.Classes.Value[:1]
	},
	"CH0617": func(f *Facts) {
		for i := range f.Cluster.Slices.Value[0].Spec.Devices {
			f.Cluster.Slices.Value[0].Spec.Devices[i].Capacity = nil
		}
	},
	"CH0615": func(f *Facts) { f.Agent.ModeUnwanted = true },
	"CH0608": func(f *Facts) { f.Cluster.Slices.Value[0].Spec.Devices[2].Name = "another" },
	"CH0609": func(f *Facts) {
		f.Cluster.Classes.Value = append(f.Cluster.Classes.Value, deviceClass("npu.chandler.dev", "", `device.driver == "chandler.dev" && device.attributes["chandler.dev"].kind == "npu"`, ago(time.Hour)))
		f.Cluster.Claims.Value = append(f.Cluster.Claims.Value, claim("c", "npu.chandler.dev", "", 1))
	},
	"CH0610": func(f *Facts) {
		f.Cluster.Claims.Value = append(f.Cluster.Claims.Value, claim("many", "nvidia.chandler.dev", "", 3))
	},
	"CH0611": func(f *Facts) {
		c := claim("prepared", "nvidia.chandler.dev", "", 1)
		c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{Driver: discovery.Domain, Pool: "gpu-node-07/other", Device: "pci-0000-9e-00-0"}}}}
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "llama-7b-worker-1"}}
		c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: discovery.Domain, Pool: "gpu-node-07/other", Device: "pci-0000-9e-00-0", Conditions: []metav1.Condition{{Type: "Ready", Status: "False", Message: "the device is another one now", LastTransitionTime: ago(time.Minute)}}}}
		f.Cluster.Claims.Value = append(f.Cluster.Claims.Value, c)
	},
	"CH0613": func(f *Facts) {
		f.Cluster.Claims.Value = append(f.Cluster.Claims.Value, claim("c", "no-such.chandler.dev", "", 1))
	},
	"CH0614": func(f *Facts) {
		f.Cluster.Classes.Value = append(f.Cluster.Classes.Value, deviceClass("bad.chandler.dev", "", `device.driver == "chandler.dev" && device.attributes["chandler.dev"].nothing == "x"`, ago(time.Hour)))
		f.Cluster.Claims.Value = append(f.Cluster.Claims.Value, claim("c", "bad.chandler.dev", "", 1))
	},
	"CH0612": func(f *Facts) { f.Cluster.Policies = KnownAnswer([]string{"parameters.chandler.dev"}) },

	"CH0701": func(f *Facts) { f.Agent.Ready = KnownAnswer("nothing of the host could be read since 09:00") },
	"CH0702": func(f *Facts) {
		f.Agent.Records.Value.SetAside = []string{"/var/lib/kubelet/plugins/chandler.dev/claims/u7.bad0"}
	},
	"CH0703": func(f *Facts) {
		f.Agent.Config = KnownAnswer("exclude[0].cel: compile \"devce\": undeclared reference")
	},
	"CH0704": func(f *Facts) {
		const file = "/var/lib/kubelet/plugins/chandler.dev/claims/u7.bad0"
		f.Agent.Records.Value.SetAside, f.Agent.Records.Value.Newer = []string{file}, []string{file}
	},
	"CH0705": func(f *Facts) { f.Agent.Version = "0.8.0" },
	"CH0706": func(f *Facts) {
		f.Agent.Pod.Value.Status.ContainerStatuses[0] = corev1.ContainerStatus{RestartCount: 12, LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "OOMKilled", ExitCode: 137}}}
	},
	"CH0707": func(f *Facts) {
		f.Agent.Records.Value.Unread = []string{"read claim record u3.record: input/output error"}
	},
	"CH0709": func(f *Facts) {
		f.Agent.NeedsVisibility, f.Agent.Visibility = []string{"reclaim", "onDemand.virtualFunctions"}, KnownAnswer("the agent's process lacks the capability CAP_SYS_PTRACE")
		f.Agent.VisibilityAll = f.Agent.Visibility
	},
	"CH0710": func(f *Facts) { f.Agent.Outdated = true },
	"CH0708": func(f *Facts) {
		f.Agent.OtherAgents = []OtherAgent{{Pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu", Name: "chandler-x8k2v", CreationTimestamp: ago(time.Hour)}}, Foreign: true}}
	},
}
