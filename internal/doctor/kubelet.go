package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/version"

	"chandler.dev/discovery"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
)

var kubeletChecks = []check{
	{codes.Kubelet, []string{"CH0101"}, checkPluginDir},
	{codes.Kubelet, []string{"CH0102"}, checkKubeletAnswers},
	{codes.Kubelet, []string{"CH0103"}, checkRegistered},
	{codes.Kubelet, []string{"CH0104"}, checkOthers},
	{codes.Kubelet, []string{"CH0105"}, checkPodResources},
	{codes.Kubelet, []string{"CH0106", "CH0107"}, checkVersions},
	{codes.Kubelet, []string{"CH0108"}, checkRoot},
	{codes.Kubelet, []string{"CH0108"}, checkRemoved},
	{codes.Kubelet, []string{"CH0109"}, checkKubeletGates},
	{codes.Kubelet, []string{"CH0110", "CH0111"}, checkNode},
	{codes.Kubelet, []string{"CH0112"}, checkTopology},
}

func checkPluginDir(f *Facts, say *report.List) {
	why, known := f.Kubelet.Dir.get()
	switch {
	case !known:
		say.AddSkipped("the device plugin directory: %s", f.Kubelet.Dir.unknownReason())
	case why != "":
		say.AddFault("CH0101", "the kubelet's device plugin directory is not usable", asSentence(why)+" No device plugin can create its socket there.",
			"sudo mkdir -p "+f.Kubelet.PluginDir, "sudo systemctl restart kubelet")
	}
}

func checkKubeletAnswers(f *Facts, say *report.List) {
	why, known := f.Kubelet.Answers.get()
	_, listed := f.Kubelet.Pods.get()
	if dir, _ := f.Kubelet.Dir.get(); dir != "" {
		why = "" // checkPluginDir has reported the missing directory of the socket
	}
	if slices.Contains(f.Agent.Removed, strings.TrimRight(f.Kubelet.PluginDir, "/")) {
		why = "" // checkRemoved has reported the directory, which hides the socket from the agent's pod
	}
	switch {
	case !known && !listed:
		say.AddSkipped("whether the kubelet responds: %s", f.Kubelet.Answers.unknownReason())
	case known && why != "":
		say.AddFault("CH0102", "the kubelet does not respond", asSentence(why), "sudo systemctl status kubelet", "sudo journalctl -u kubelet -n 50", "sudo systemctl restart kubelet")
	case !listed:
		say.AddFault("CH0102", "the kubelet's PodResources API does not respond", asSentence(f.Kubelet.Pods.unknownReason())+" Without it, the devices of pods are unknown.",
			"sudo journalctl -u kubelet -n 50", "sudo systemctl restart kubelet")
	default:
		of := ""
		if f.Kubernetes != "" && f.Kubernetes != UnknownVersion {
			of = ", v" + strings.TrimPrefix(f.Kubernetes, "v")
		}
		say.AddOK("the kubelet responds%s: device plugins v1beta1, PodResources v1", of)
	}
}

func checkRegistered(f *Facts, say *report.List) {
	if f.Agent.ReportOnly {
		say.AddSkipped("the mode is ReportOnly, so the agent offers no device and the kubelet need not register chandler.dev")
		return
	}
	if f.Agent.Mode == discovery.ModeDevicePlugin {
		say.AddSkipped("the configured mode does not use DRA, so the kubelet need not register chandler.dev")
		return
	}
	there, known := f.Kubelet.Registration.get()
	if !known {
		say.AddSkipped("whether chandler.dev is registered: %s", f.Kubelet.Registration.unknownReason())
		return
	}
	refused := f.Agent.Unready == UnreadyRegistration
	running, _ := f.Agent.Running.get()
	switch {
	case there && !refused:
		say.AddOK("the socket of chandler.dev is in the kubelet's directory for drivers")
	case there:
		say.AddFault("CH0103", "the kubelet has not registered chandler.dev", asSentence(f.Agent.Ready.Value)+" The kubelet scans its plugins_registry directory at its start and when a socket appears there.",
			"sudo systemctl restart kubelet", "sudo journalctl -u kubelet | grep -i chandler.dev")
	case running:
		say.AddFault("CH0103", "the kubelet has not registered chandler.dev", "The agent runs, but its socket is not in "+f.Kubelet.Root+"/plugins_registry. The agent may be starting, or may have another --kubelet-root.",
			"kubectl -n chandler rollout restart daemonset chandler")
	default:
		say.AddSkipped("chandler.dev is not registered, because no agent runs")
	}
}

// checkOthers reports resources of the agent that another plugin serves: the kubelet lists IDs
// that the agent does not offer, or any IDs of a resource offered by DRA alone.
func checkOthers(f *Facts, say *report.List) {
	if f.Agent.ReportOnly {
		return
	}
	listed, known := f.Kubelet.Allocatable.get()
	if !known {
		say.AddSkipped("whether another plugin serves a resource of Chandler: %s", f.Kubelet.Allocatable.unknownReason())
		return
	}
	ids := make(map[string][]string)
	for _, d := range listed {
		ids[d.ResourceName] = append(ids[d.ResourceName], d.DeviceIds...)
	}
	before := len(say.Findings)
	for _, resource := range slices.Sorted(maps.Keys(f.Kubelet.Ours)) {
		var foreign []string
		for _, id := range ids[resource] {
			if !slices.Contains(f.Kubelet.Ours[resource], id) {
				foreign = append(foreign, id)
			}
		}
		if len(foreign) == 0 {
			continue
		}
		slices.Sort(foreign)
		cause := fmt.Sprintf("The kubelet lists the IDs %s, which the agent does not offer for this resource. The kubelet uses the plugin that registered last, so one device may be allocated twice.", report.JoinNames(foreign))
		fix := []string{"kubectl get pods -A -o wide --field-selector spec.nodeName=" + f.Node + "   # delete the DaemonSet of the other plugin"}
		if len(f.Kubelet.PluginPods) > 0 {
			cause += fmt.Sprintf(" %s the device plugin directory mounted.", has(f.Kubelet.PluginPods))
			fix = nil
			for _, pod := range f.Kubelet.PluginPods {
				namespace, name, _ := strings.Cut(pod, "/")
				fix = append(fix, fmt.Sprintf("kubectl -n %s delete %s   # removes it from all nodes", namespace, ownerOf(name)))
			}
		}
		say.AddFault("CH0104", "another plugin serves "+resource, cause, fix...)
	}
	if say.NoFaultSince(before) {
		say.AddOK("no other plugin serves a resource of Chandler with other IDs")
	}
}

func has(names []string) string {
	if len(names) == 1 {
		return names[0] + " has"
	}
	return report.JoinNames(names) + " have"
}

// ownerOf returns the object to delete so that a pod does not come back: its DaemonSet, if the
// pod's name has the form of a DaemonSet's pods, or else the pod.
func ownerOf(pod string) string {
	if at := strings.LastIndex(pod, "-"); at > 0 && len(pod)-at == 6 {
		return "daemonset " + pod[:at]
	}
	return "pod " + pod
}

func checkPodResources(f *Facts, say *report.List) {
	pods, known := f.Kubelet.Pods.get()
	records, read := f.Agent.Records.get()
	if !known || !read {
		return
	}
	claims := 0
	for _, pod := range pods {
		for _, c := range pod.Containers {
			claims += len(c.DynamicResources)
		}
	}
	given := 0
	for _, c := range records.Claims {
		if !c.Past {
			given++
		}
	}
	switch {
	case given > 0 && claims == 0 && f.gateOff("KubeletPodResourcesDynamicResources", 34):
		say.AddFault("CH0105", "the kubelet's PodResources API does not report claims", fmt.Sprintf("The agent has prepared %s, but the kubelet reports none. Its feature gate KubeletPodResourcesDynamicResources is off, which is the default before 1.34. The claim of a device is known, but not the pod.", report.CountNoun(given, "claim")),
			"sudo sed -i '/^featureGates:/a\\  KubeletPodResourcesDynamicResources: true' /var/lib/kubelet/config.yaml", "sudo systemctl restart kubelet")
	case claims > 0:
		say.AddOK("the PodResources API reports %s", report.CountNoun(claims, "claim"))
	}
}

// gateOff reports whether a feature gate of the kubelet is off, either by configuration or by
// default. The gate is on by default since minor version since of Kubernetes 1.
func (f *Facts) gateOff(gate string, since uint) bool {
	if config, known := f.Kubelet.Config.get(); known {
		if on, set := config.FeatureGates[gate]; set {
			return !on
		}
	}
	v, err := version.ParseGeneric(f.Kubernetes)
	return err == nil && v.LessThan(version.MajorMinor(1, since))
}

// oldestDRA is the first kubelet to use v1beta1 of the DRA driver API, the oldest version that
// the driver serves (NodeV1beta1 in kubeletplugin/draplugin.go of
// k8s.io/dynamic-resource-allocation 0.37; pkg/kubelet/cm/dra/plugin/plugin.go of 1.32).
var oldestDRA = version.MajorMinor(1, 32)

// oldestPlugin is the oldest kubelet that Chandler supports.
var oldestPlugin = version.MajorMinor(1, 25)

func checkVersions(f *Facts, say *report.List) {
	kubelet, err := version.ParseGeneric(f.kubeletVersion())
	if err != nil {
		return
	}
	switch {
	case f.Agent.Mode == discovery.ModeDRA && kubelet.LessThan(oldestDRA):
		say.AddFault("CH0106", fmt.Sprintf("kubelet %s is too old for DRA", f.kubeletVersion()), "Kubelets can call this driver from 1.32 on, and the mode DRA does not allow the device plugin API.",
			"kubectl label node "+f.Node+" chandler.dev/mode=DevicePlugin --overwrite   # until the kubelet is upgraded")
	case kubelet.LessThan(oldestPlugin):
		say.AddFault("CH0106", fmt.Sprintf("kubelet %s is older than the oldest that Chandler supports", f.kubeletVersion()), "Chandler needs Kubernetes 1.25 or later.",
			"kubectl get node "+f.Node+" -o wide   # upgrade this node's kubelet")
	}
	server, known := f.Cluster.Server.get()
	of, err := version.ParseGeneric(server)
	if !known || err != nil {
		return
	}
	switch behind := int(of.Minor()) - int(kubelet.Minor()); {
	case behind < 0:
		say.AddFault("CH0107", "the kubelet is newer than the API server", fmt.Sprintf("The kubelet has version %s and the API server %s. A kubelet must not be newer than the API server.", f.kubeletVersion(), server), "kubectl version   # upgrade the control plane first")
	case behind > 3:
		say.AddFault("CH0107", "the kubelet is too old for the API server", fmt.Sprintf("The kubelet has version %s and the API server %s. Kubernetes supports a difference of three minor versions.", f.kubeletVersion(), server), "kubectl drain "+f.Node+" --ignore-daemonsets   # then upgrade its kubelet")
	}
}

// kubeletVersion returns the kubelet's version according to its Node object, if available.
func (f *Facts) kubeletVersion() string {
	if node, known := f.Cluster.Node.get(); known && node != nil {
		return node.Status.NodeInfo.KubeletVersion
	}
	return f.Kubernetes
}

func checkRoot(f *Facts, say *report.List) {
	flags, known := f.Kubelet.Flags.get()
	if root := flags["root-dir"]; known && root != "" && strings.TrimRight(root, "/") != strings.TrimRight(f.Kubelet.Root, "/") {
		say.AddFault("CH0108", "the kubelet's directory is "+root, fmt.Sprintf("The agent uses %s, and registers in a directory that the kubelet does not watch.", f.Kubelet.Root),
			codes.HelmSet+" --set kubelet.root="+root, fmt.Sprintf("kubectl -n chandler edit daemonset chandler   # with the plain manifests: --kubelet-root=%s, and the same directory in the volumes", root))
	}
}

// checkRemoved reports directories that were removed while the agent has them mounted.
func checkRemoved(f *Facts, say *report.List) {
	if len(f.Agent.Removed) == 0 {
		return
	}
	fix := "kubectl -n chandler rollout restart daemonset chandler"
	if pod := f.Agent.Pod.Value; pod != nil {
		fix = fmt.Sprintf("kubectl -n %s delete pod %s   # the next pod mounts the current directories", pod.Namespace, pod.Name)
	}
	say.AddFault("CH0108", "the agent has a removed directory mounted: "+report.JoinNames(f.Agent.Removed), "The directory was removed while the agent runs. The agent does not see new files in the current directory, and files that the agent writes are invisible to others.",
		"sudo systemctl restart kubelet   # creates its directories and sockets again", fix)
}

func checkKubeletGates(f *Facts, say *report.List) {
	config, known := f.Kubelet.Config.get()
	on, set := config.FeatureGates["DynamicResourceAllocation"]
	switch {
	case !known || on || f.Agent.Mode == discovery.ModeDevicePlugin:
		return
	case !set:
		// The gate is off by default before 1.34 (pkg/features/kube_features.go, read in 1.32 and
		// 1.34). Outside DRA mode, doctor assumes that this is intended.
		if f.Agent.Mode == discovery.ModeDRA && f.gateOff("DynamicResourceAllocation", 34) {
			say.AddFault("CH0109", "DRA is off in the kubelet", "Its feature gate DynamicResourceAllocation is off by default before Kubernetes 1.34, so it registers no DRA driver and prepares no claim.",
				"sudoedit /var/lib/kubelet/config.yaml   # featureGates: {DynamicResourceAllocation: true}", "sudo systemctl restart kubelet")
		}
		return
	}
	say.AddFault("CH0109", "DRA is off in the kubelet", "Its feature gate DynamicResourceAllocation is false, so it registers no DRA driver and prepares no claim.",
		"sudo sed -i '/DynamicResourceAllocation: *false/d' /var/lib/kubelet/config.yaml", "sudo systemctl restart kubelet")
}

func checkNode(f *Facts, say *report.List) {
	node, known := f.Cluster.Node.get()
	if !known || node == nil {
		return
	}
	before := len(say.Findings)
	for _, c := range node.Status.Conditions {
		switch {
		case c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue:
			say.AddFault("CH0110", fmt.Sprintf("the node is not Ready%s", lastingText(c.LastTransitionTime.Time, f.Time)), asSentence(c.Message)+" No new pod is scheduled to the node.",
				"kubectl describe node "+f.Node, "sudo journalctl -u kubelet -n 50")
		case c.Type != corev1.NodeReady && c.Status == corev1.ConditionTrue && strings.HasSuffix(string(c.Type), "Pressure"):
			say.AddFault("CH0111", fmt.Sprintf("the node has %s%s", c.Type, lastingText(c.LastTransitionTime.Time, f.Time)), asSentence(c.Message)+" The kubelet evicts pods, and no new pods are scheduled to the node.",
				"kubectl describe node "+f.Node, "df -h "+f.Kubelet.Root, "free -m")
		}
	}
	if node.Spec.Unschedulable {
		say.AddFault("CH0111", "the node is cordoned", "The node is marked as unschedulable. Its devices are published, but no new pod is scheduled to it.", "kubectl uncordon "+f.Node)
	}
	if say.NoFaultSince(before) {
		say.AddOK("the node is Ready and accepts pods")
	}
}

// checkTopology reports a topology policy that ignores DRA devices. DRA is not among the hint
// providers of the topology manager (pkg/kubelet/cm/container_manager_linux.go,
// AddHintProvider, read in 1.34 to 1.37).
func checkTopology(f *Facts, say *report.List) {
	config, known := f.Kubelet.Config.get()
	if !known || config.TopologyPolicy != "single-numa-node" && config.TopologyPolicy != "restricted" {
		return
	}
	places, _ := f.Devices.API.get()
	for _, mode := range places {
		if mode == discovery.ModeDRA {
			say.AddFault("CH0112", "the topology policy "+config.TopologyPolicy+" ignores DRA devices",
				"The kubelet's topology manager consults the CPU, memory and device managers, but not DRA drivers. A pod may get CPUs of one NUMA node and a device of another.",
				"kubectl explain resourceclaim.spec.devices.constraints.matchAttribute   # use resource.kubernetes.io/numaNode in the claim")
			return
		}
	}
}
