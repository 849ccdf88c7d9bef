package doctor

var runtimeCodes = []Code{
	{
		ID: "CH0201", Says: "the container runtime is too old for CDI", Result: Failed, Symptoms: []Symptom{WithoutDevice},
		Looks: "The runtime's version, as the Node says it: containerd from 1.7 on, CRI-O from 1.23 on.",
		Comes: "The node has an older runtime than Kubernetes needs for DRA.",
		Why:   "Devices of claims reach containers by CDI specs. A runtime that knows none starts the container without them.",
		Fixes: []Fix{{"kubectl label node NODE chandler.dev/mode=DevicePlugin --overwrite", "Offers the devices by the device-plugin API, which needs no CDI, until the runtime is upgraded."}},
	},
	{
		ID: "CH0202", Says: "CDI is off", Result: Failed, Symptoms: []Symptom{WithoutDevice},
		Looks: "enable_cdi in containerd's configuration and the files that it imports. It is off by default in containerd 1.7, and on from 2.0 on. From 2.4 on it is always on, whatever the line says.",
		Comes: "Nobody switched it on, or a configuration file was made with containerd config default of an older version.",
		Why:   "Pods with a claim start without their devices.",
		Fixes: []Fix{{"sudo sed -i 's/enable_cdi = false/enable_cdi = true/' /etc/containerd/config.toml", "Switches it on, if the line is there. Else add it to the CRI plugin's section."}, {"sudo systemctl restart containerd", "Puts that in force. Containers go on."}},
	},
	{
		ID: "CH0203", Says: "the runtime does not read the directory of our specs", Result: Failed, Symptoms: []Symptom{WithoutDevice},
		Looks: "cdi_spec_dirs of the runtime's configuration, and the directory in which the agent writes (--cdi-root).",
		Comes: "cdi_spec_dirs was set to other directories.",
		Why:   "Pods with a claim do not start: the runtime says that a CDI device is unresolvable.",
		Fixes: []Fix{{`sudo sed -i 's|cdi_spec_dirs = .*|cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]|' /etc/containerd/config.toml`, "Has containerd read both usual directories."}, {"sudo systemctl restart containerd", "Puts that in force."}},
	},
	{
		ID: "CH0204", Says: "a CDI spec is left of a claim that has ended", Result: Warning, Symptoms: []Symptom{Terminating, DeviceMissing},
		Looks: "The specs chandler.dev-claim_UID.json against the agent's records.",
		Comes: "The records were removed while the agent was down, a backup brought the spec back, or an agent was killed and none has started since.",
		Why:   "An agent that starts and finds the spec keeps its devices from others until the kubelet has unprepared the claim. If nobody has the claim any more, by the API server and the kubelet, it lets go after about five minutes. An agent that has been running all the time removes the spec within 30 seconds.",
		Fixes: []Fix{{"kubectl get resourceclaims -A -o yaml | grep UID", "Shows whether there is such a claim."}, {"sudo rm /var/run/cdi/chandler.dev-claim_UID.json", "Removes the spec, if there is none."}},
	},
	{
		ID: "CH0205", Says: "the directory for CDI specs cannot be written to", Result: Failed, Symptoms: []Symptom{Creating, AgentDown},
		Looks: "The directory that --cdi-root names, /var/run/cdi by default.",
		Comes: "It is missing, or on a file system that is read-only.",
		Why:   "No claim is prepared. The device-plugin API goes on.",
		Fixes: []Fix{{"sudo mkdir -p /var/run/cdi", "Makes it."}},
	},
	{
		ID: "CH0206", Says: "the CDI spec of a claim is missing", Result: Failed, Symptoms: []Symptom{WithoutDevice, Creating, AfterARestart},
		Looks: "Whether each claim that is prepared has its spec.",
		Comes: "Somebody cleared /var/run/cdi, and no agent runs that would write the spec again. Or the disk is full (CH0406).",
		Why:   "A container that starts or restarts now fails: its CDI device is unresolvable.",
		Fixes: []Fix{{"kubectl -n chandler rollout restart daemonset chandler", "Starts the agent, which writes what is missing."}},
	},
	{
		ID: "CH0207", Says: "a file in a CDI directory is no spec that can be used", Result: Warning, Symptoms: []Symptom{WithoutDevice},
		Looks: "All specs in the directories that the runtime reads, of anybody, with the CDI library that runtimes use.",
		Comes: "A file that is cut off, of a newer CDI version than the runtime knows, or two files that name the same device.",
		Why:   "Runtimes leave out what they cannot read, and devices of which two specs disagree.",
		Fixes: []Fix{{"sudo cat FILE", "Shows it."}, {"sudo mv FILE /root/", "Takes it out of the runtime's way."}},
	},
	{
		ID: "CH0208", Says: "the runtime runs with an older configuration", Result: Warning, Symptoms: []Symptom{WithoutDevice, NoEffect},
		Looks: "When the configuration files changed, and when the runtime's process started.",
		Comes: "The configuration was changed, and the runtime was not restarted.",
		Why:   "The runtime still goes by the settings of before.",
		Fixes: []Fix{{"sudo systemctl restart containerd", "Puts it in force. Containers go on."}},
	},
}
