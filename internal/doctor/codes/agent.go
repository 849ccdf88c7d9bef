package codes

var agentCodes = []Code{
	{
		ID: "CH0701", Says: "the agent does not run, or is not ready", Result: Failed, Symptoms: []Symptom{AgentDown, DeviceMissing, Creating, Terminating},
		Looks: "Doctor checks the agent's pod, its process, and its /readyz and /healthz endpoints. If an update leaves a second agent on the node for more than a minute, doctor checks that agent too.",
		Comes: "An option is invalid, the DaemonSet does not tolerate a taint, pod security rejects the pod, or the kubelet has not responded yet.",
		Why:   "Without an agent, no claim is prepared or unprepared. Pods that have devices continue.",
		Fixes: []Fix{{"kubectl -n chandler describe daemonset chandler", "Shows why the pod does not exist."}, {"kubectl -n chandler logs daemonset/chandler --tail=50", "Shows the agent's log."}},
	},
	{
		ID: "CH0702", Says: "a record is set aside", Result: Warning, Symptoms: []Symptom{Terminating, DeviceMissing, AfterARestart},
		Looks: "Doctor looks for files in the agent's directory that end in .bad and a number, or in .unreadable.",
		Comes: "The file was damaged by a failing disk, a loss of power or a manual change.",
		Why:   "The devices in the file are not allocated until the kubelet has unprepared the claim, because a container may still use them.",
		Fixes: []Fix{{"kubectl -n NAMESPACE delete pod POD", "Ends the pods of the claim. The kubelet then unprepares the claim."}},
	},
	{
		ID: "CH0703", Says: "the configuration is invalid", Result: Failed, Symptoms: []Symptom{NoEffect, AgentDown},
		Looks: "Doctor reads the agent's configuration file or ConfigMap, and the configuration error that the agent reports.",
		Comes: "The configuration has an unknown field or an expression that does not compile, or a label of the node is invalid.",
		Why:   "The last valid configuration remains in effect. An agent that starts with an invalid configuration does not become ready, so an upgrade stops. The previous agent continues and starts new pods.",
		Fixes: []Fix{{"kubectl chandler validate config.yaml", "Shows the error before you apply the configuration."}, {GetValues, "Writes the values of the chart to a file. Correct its section `config`."}, {SetValues, "Applies the file."}, {EditConfig, "Opens the configuration of an installation by the plain manifests. The agent reads a change within about a minute."}},
	},
	{
		ID: "CH0704", Says: "the agent is older than its records", Result: Failed, Symptoms: []Symptom{AfterARestart, Terminating, Creating},
		Looks: "Doctor compares the version that each record requires with the version of this program.",
		Comes: "The agent was rolled back to a version that does not support the records of the newer one.",
		Why:   "The agent does not allocate the devices in the record, and does not act on the claim.",
		Fixes: []Fix{
			{"helm rollback chandler --namespace chandler", "If you installed the chart, returns to the previous release with the newer version."},
			{"kubectl -n chandler rollout undo daemonset chandler", "Does the same with the plain manifests. Do not use it with the chart: Helm would undo it at the next upgrade."},
		},
	},
	{
		ID: "CH0705", Says: "this program and the agent have different versions", Result: Warning, Symptoms: []Symptom{AfterARestart},
		Looks: "Doctor compares the version of the running agent with its own.",
		Comes: "You run chandler doctor of another release than the agent's.",
		Why:   "Doctor may misread the agent's files.",
		Fixes: []Fix{{"kubectl -n chandler exec daemonset/chandler -- /chandler doctor --host-root=/host", "Runs doctor of the agent's version."}},
	},
	{
		ID: "CH0706", Says: "the agent restarts repeatedly", Result: Warning, Symptoms: []Symptom{AgentDown, AfterARestart},
		Looks: "Doctor checks whether the container of the agent's pod was restarted five times or more.",
		Comes: "The agent runs out of memory, its sockets do not respond, or an option is invalid.",
		Why:   "While the agent is down, no claim is prepared. Pods that have devices continue.",
		Fixes: []Fix{{"kubectl -n chandler logs POD --previous --tail=50", "Shows the end of the previous log."}},
	},
	{
		ID: "CH0707", Says: "a record cannot be read", Result: Failed, Symptoms: []Symptom{Creating, AfterARestart, WrongEverybody},
		Looks: "Doctor reads all files of claims and grants in the agent's directory.",
		Comes: "The disk fails, or the file is damaged and no agent has set it aside yet.",
		Why:   "Devices that the record may name are not allocated.",
		Fixes: []Fix{{"sudo dmesg | tail -n 50", "Shows whether the disk has failed."}},
	},
	{
		ID: "CH0708", Says: "agents of several installations run on the node", Result: Warning, Symptoms: []Symptom{NoEffect, AfterARestart, DeviceMissing},
		Looks: "Doctor checks that the agents' pods on the node belong to one DaemonSet. Without the API server, it compares the namespaces and names of pods in the environment of the agents' processes.",
		Comes: "Chandler was installed by two releases of the chart, or by the chart and the plain manifests, and both select the node. Or an installation remains after another replaced it.",
		Why:   "The agents share one directory, so only one is active at a time, and no device is allocated twice. The others wait, and are ready. When the active agent restarts, another may become active with another configuration. A change of the configuration of a waiting agent has no effect.",
		Fixes: []Fix{
			{"kubectl get daemonsets -A -l app.kubernetes.io/name=chandler", "Shows the installations. Keep one, or give each its own node selector."},
			{"kubectl -n NAMESPACE delete daemonset chandler", "Removes the agents of one installation. Pods keep their devices, and the agents of the other installation continue. With Helm, set `nodeSelector` in the values of one release instead."},
		},
	},
	{
		ID: "CH0709", Says: "the agent cannot determine which devices are open", Result: Warning, Symptoms: []Symptom{GivenTwice, NoEffect, Creating},
		Looks: "If the configuration has `reclaim`, `passthrough` or `onDemand.virtualFunctions`, doctor checks whether the host service, or an agent without one, can read the open files of the host's processes, and whether its /proc is the host's. On the node, it checks the capabilities of an agent without a host service.",
		Comes: "No host service runs: `reclaim`, `passthrough` or `onDemand` is in the configuration, but `reclaim.enabled`, `passthrough.enabled` or `onDemand.enabled` is not set in the chart, or the plain manifests are without host-service.yaml. Or the volume of its pod is not the host's /proc. Or the node is a container, as in kind: there it sees the processes of pods, which is enough for `reclaim`, but not the processes of the machine, which `passthrough` and `onDemand.virtualFunctions` need.",
		Why:   "If the agent cannot tell whether a device is in use, reclaim (`reclaim`) withholds the device only for as long as containers of the previous pods may run. In the device plugin API, the next pod gets the device at once. VFIO passthrough (`passthrough`) and on-demand virtual functions (`onDemand`) leave the device unchanged, so pods that request such a device do not start.",
		Fixes: []Fix{
			{HelmSet + " --set reclaim.enabled=true", "Runs the host service, if you installed the chart. For the other features, set `passthrough.enabled` or `onDemand.enabled`."},
			{ApplyHostService, "Runs the host service with the plain manifests."},
			{UseHostService, "Makes the agents use it."},
		},
	},
	{
		ID: "CH0710", Says: "a configuration change requires a restart of the agent", Result: Warning, Symptoms: []Symptom{NoEffect},
		Looks: "Doctor reads the agent's metric `chandler_config_restart_needed`.",
		Comes: "You changed `driverRoots`, `paths`, `hooks`, `passthrough`, or a field of `onDemand` other than `keepSeconds`, or added the first entry of `resources` with `sriov`. The agent's log and web UI name the fields.",
		Why:   "The agent uses the values that these fields had when it started. All other changes are in effect.",
		Fixes: []Fix{{"kubectl -n chandler rollout restart daemonset chandler", "Restarts the agents, one node after the other. Pods keep their devices."}},
	},
}
