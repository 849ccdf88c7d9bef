package doctor

var agentCodes = []Code{
	{
		ID: "CH0701", Says: "the agent does not run, or is not ready", Result: Failed, Symptoms: []Symptom{AgentDown, DeviceMissing, Creating, Terminating},
		Looks: "The agent's pod, its process, and its answers at /readyz and /healthz. If an update has a second agent on the node for more than a minute, also that one's.",
		Comes: "A wrong option, a taint that the DaemonSet does not tolerate, pod security that rejects it, or the kubelet that has not answered yet.",
		Why:   "Without an agent no claim is prepared or unprepared. Pods that have devices go on.",
		Fixes: []Fix{{"kubectl -n chandler describe daemonset chandler", "Shows why there is no pod."}, {"kubectl -n chandler logs daemonset/chandler --tail=50", "Shows what it says."}},
	},
	{
		ID: "CH0702", Says: "a record is set aside", Result: Warning, Symptoms: []Symptom{Terminating, DeviceMissing, AfterARestart},
		Looks: "Files in the agent's directory that end in .bad and a number, or in .unreadable.",
		Comes: "The file was damaged, by a failing disk or a loss of power, or by hand.",
		Why:   "The devices that it names are kept from everybody until the kubelet has unprepared the claim, since a container may still have them.",
		Fixes: []Fix{{"kubectl -n NAMESPACE delete pod POD", "Ends the pods of the claim, after which the kubelet has it unprepared."}},
	},
	{
		ID: "CH0703", Says: "the configuration has an error", Result: Failed, Symptoms: []Symptom{NoEffect, AgentDown},
		Looks: "The agent's configuration file, or the ConfigMap, and what the agent says of it.",
		Comes: "An unknown field, an expression that does not compile, or a label of the node that is wrong.",
		Why:   "The configuration that was right last stays in force. An agent that starts with a wrong one is not ready, so that an upgrade stops. The agent beside it goes on and starts new pods.",
		Fixes: []Fix{{"chandler validate config.yaml", "Says what is wrong, before you apply it."}, {"kubectl -n chandler edit configmap chandler", "Mends it. The agent reads it again within a minute or so. With Helm, mend your values as well: the next upgrade refuses to overwrite what was edited, unless you write --force-conflicts."}},
	},
	{
		ID: "CH0704", Says: "the agent is older than its records", Result: Failed, Symptoms: []Symptom{AfterARestart, Terminating, Creating},
		Looks: "The version that each record says may act on it, against that of this program.",
		Comes: "The agent was rolled back to a version that does not know what the newer one wrote.",
		Why:   "It keeps what the record names from everybody, and does not act on the claim.",
		Fixes: []Fix{
			{"helm rollback chandler --namespace chandler", "Goes back to the release before, with the newer version, if you installed the chart."},
			{"kubectl -n chandler rollout undo daemonset chandler", "Does the same with the plain manifests. With the chart, Helm would not know of it, and undo it at the next upgrade."},
		},
	},
	{
		ID: "CH0705", Says: "this program is of another version than the agent", Result: Warning, Symptoms: []Symptom{AfterARestart},
		Looks: "The version of the agent that runs, and that of this program.",
		Comes: "You run doctor from another release than the cluster has.",
		Why:   "Doctor may misread the agent's files.",
		Fixes: []Fix{{"kubectl -n chandler exec daemonset/chandler -- /chandler doctor --host-root=/host", "Runs the doctor of the agent's own version."}},
	},
	{
		ID: "CH0706", Says: "the agent is restarted again and again", Result: Warning, Symptoms: []Symptom{AgentDown, AfterARestart},
		Looks: "How often the container of the agent's pod was restarted: five times or more.",
		Comes: "It runs out of memory, its sockets do not answer, or an option is wrong.",
		Why:   "While it is down no claim is prepared. Pods that have devices go on.",
		Fixes: []Fix{{"kubectl -n chandler logs POD --previous --tail=50", "Shows its last words."}},
	},
	{
		ID: "CH0707", Says: "a record cannot be read", Result: Failed, Symptoms: []Symptom{Creating, AfterARestart, WrongEverybody},
		Looks: "All files of claims and grants in the agent's directory.",
		Comes: "The disk fails, or the file is damaged and no agent has set it aside yet.",
		Why:   "The devices that it may name are kept from everybody.",
		Fixes: []Fix{{"sudo dmesg | tail -n 50", "Shows whether the disk has failed."}},
	},
	{
		ID: "CH0708", Says: "the node has agents of different installations", Result: Warning, Symptoms: []Symptom{NoEffect, AfterARestart, DeviceMissing},
		Looks: "Whether the agents' pods on the node are of one DaemonSet. Without the API server: the namespaces and names of pods that the agents' processes have in their environment.",
		Comes: "Chandler was installed by two releases of the chart, or by the chart and the plain manifests, and both select the node. Or an installation was left behind when another replaced it.",
		Why:   "The agents share one directory, so only one works at a time, and no device is given out twice. The others wait and are ready all the same. Whenever the one that works is restarted, another may take over, with another configuration. A change of the others' configurations has no effect.",
		Fixes: []Fix{
			{"kubectl get daemonsets -A -l app.kubernetes.io/name=chandler", "Shows the installations. Keep one, or give each a node selector of its own."},
			{"kubectl -n NAMESPACE delete daemonset chandler", "Takes the agents of one away. Pods keep their devices, and the agents of the other go on. With Helm, set `nodeSelector` in the values of one release instead."},
		},
	},
	{
		ID: "CH0709", Says: "the agent does not see who has devices open", Result: Warning, Symptoms: []Symptom{GivenTwice, NoEffect, Creating},
		Looks: "Where the configuration has `handover`, `rebinding` or `onRequest.virtualFunctions`: whether the agent may look at the open files of the host's processes, and whether its /proc is the host's. On the node it counts which capabilities the agent's process has.",
		Comes: "The agent is not privileged: `handover`, `rebinding` or `onRequest` was written into the configuration without `handover.enabled`, `rebinding.enabled` or `onRequest.enabled`, or without the patch. Or the volume of the agent's pod is not the host's /proc. Or the node is a container, as with kind: the agent sees the processes of pods there, which is enough for `handover`, and not those of the machine around it, which `rebinding` and `onRequest.virtualFunctions` need.",
		Why:   "With `handover`, it is unknown whether a process of the last pod still has the device open, and the unknown keeps nothing. So the next pod gets the device at once, as without `handover`. With the other two, the agent changes no device of which it does not know that nobody uses it. So pods that ask for such a device do not start.",
		Fixes: []Fix{
			{"helm upgrade chandler deployments/helm/chandler --namespace chandler --reset-then-reuse-values --set handover.enabled=true", "Makes the agent privileged, if you installed the chart. For the others it is `rebinding.enabled` and `onRequest.enabled`."},
			{"kubectl -n chandler patch daemonset chandler --patch-file deployments/examples/handover-patch.yaml", "Does the same with the plain manifests. For the others it is rebinding-patch.yaml."},
		},
	},
	{
		ID: "CH0710", Says: "a change of the configuration waits for a restart", Result: Warning, Symptoms: []Symptom{NoEffect},
		Looks: "Whether the agent says, in its metric `chandler_config_restart_needed`, that the configuration has changed in something that it reads only when it starts.",
		Comes: "You changed `roots`, `paths`, `hooks`, `rebinding`, or anything below `onRequest` but `keepSeconds`, or added the first of `pools`. The agent's log and its page name the fields.",
		Why:   "The agent goes on by what these fields said when it started. All else that you changed is in force.",
		Fixes: []Fix{{"kubectl -n chandler rollout restart daemonset chandler", "Starts the agents again, one node after the other. Pods keep their devices."}},
	},
}
