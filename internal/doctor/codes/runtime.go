package codes

var runtimeCodes = []Code{
	{
		ID: "CH0201", Says: "the container runtime does not support CDI", Result: Failed, Symptoms: []Symptom{WithoutDevice},
		Looks: "Doctor checks the runtime version in the Node's status. CDI requires containerd 1.7 or CRI-O 1.23.",
		Comes: "The node has an older runtime than Kubernetes requires for DRA.",
		Why:   "Containers get the devices of claims through CDI specs. A runtime without CDI starts the container without devices.",
		Fixes: []Fix{{"kubectl label node NODE chandler.dev/mode=DevicePlugin --overwrite", "Offers the devices by the device plugin API, which does not need CDI, until the runtime is upgraded."}},
	},
	{
		ID: "CH0202", Says: "CDI is off in the container runtime", Result: Failed, Symptoms: []Symptom{WithoutDevice},
		Looks: "Doctor reads enable_cdi in containerd's configuration and in imported files. The default is off in containerd 1.7 and on from 2.0. From 2.4, CDI is always on, whatever the line contains.",
		Comes: "CDI was not turned on, or the configuration file was created with containerd config default of an older version.",
		Why:   "Pods with a claim start without their devices.",
		Fixes: []Fix{{"sudo sed -i 's/enable_cdi = false/enable_cdi = true/' /etc/containerd/config.toml", "Turns CDI on, if the line exists. Otherwise, add it to the section of the CRI plugin."}, {"sudo systemctl restart containerd", "Applies the change. Running containers continue."}},
	},
	{
		ID: "CH0203", Says: "the container runtime does not read the directory of Chandler's CDI specs", Result: Failed, Symptoms: []Symptom{WithoutDevice},
		Looks: "Doctor compares cdi_spec_dirs in the runtime's configuration with the agent's directory (--cdi-root).",
		Comes: "cdi_spec_dirs is set to other directories.",
		Why:   "Pods with a claim do not start. The runtime reports an unresolvable CDI device.",
		Fixes: []Fix{{`sudo sed -i 's|cdi_spec_dirs = .*|cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]|' /etc/containerd/config.toml`, "Makes containerd read both standard directories."}, {"sudo systemctl restart containerd", "Applies the change. Running containers continue."}},
	},
	{
		ID: "CH0204", Says: "a CDI spec remains for a claim that has ended", Result: Warning, Symptoms: []Symptom{Terminating, DeviceMissing},
		Looks: "Doctor compares the specs chandler.dev-claim_UID.json with the agent's records.",
		Comes: "The records were removed while the agent was down, a backup restored the spec, or an agent was killed and none has started since.",
		Why:   "An agent that starts and finds the spec does not allocate its devices until the kubelet has unprepared the claim. If neither the API server nor the kubelet has the claim, the agent releases the devices after about five minutes. A running agent removes such a spec within 30 seconds.",
		Fixes: []Fix{{"kubectl get resourceclaims -A -o yaml | grep UID", "Shows whether the claim exists."}, {"sudo rm /var/run/cdi/chandler.dev-claim_UID.json", "Removes the spec. Do this only if the claim does not exist."}},
	},
	{
		ID: "CH0205", Says: "the directory for CDI specs is not writable", Result: Failed, Symptoms: []Symptom{Creating, AgentDown},
		Looks: "Doctor checks the directory that --cdi-root names, by default /var/run/cdi.",
		Comes: "The directory is missing, or its file system is mounted read-only.",
		Why:   "No claim is prepared. The device plugin API is not affected.",
		Fixes: []Fix{{"sudo mkdir -p /var/run/cdi", "Creates the directory."}},
	},
	{
		ID: "CH0206", Says: "the CDI spec of a claim is missing", Result: Failed, Symptoms: []Symptom{WithoutDevice, Creating, AfterARestart},
		Looks: "Doctor checks that each prepared claim has a CDI spec.",
		Comes: "/var/run/cdi was cleared, and no agent runs that would write the spec again. Or the disk is full (CH0406).",
		Why:   "A container that starts or restarts fails with an unresolvable CDI device.",
		Fixes: []Fix{{"kubectl -n chandler rollout restart daemonset chandler", "Restarts the agent, which writes the missing specs."}},
	},
	{
		ID: "CH0207", Says: "a file in a CDI directory is not a valid CDI spec", Result: Warning, Symptoms: []Symptom{WithoutDevice},
		Looks: "Doctor reads all specs of all vendors in the runtime's directories, with the CDI library that runtimes use.",
		Comes: "The file is incomplete or requires a newer CDI version than the runtime supports, or two files define the same device.",
		Why:   "Runtimes ignore specs that they cannot read, and devices that two specs define differently.",
		Fixes: []Fix{{"sudo cat FILE", "Shows the file."}, {"sudo mv FILE /root/", "Moves the file to a directory that the runtime does not read."}},
	},
	{
		ID: "CH0208", Says: "the container runtime still uses an older configuration", Result: Warning, Symptoms: []Symptom{WithoutDevice, NoEffect},
		Looks: "Doctor compares the time of the last change of the configuration files with the start time of the runtime's process.",
		Comes: "The configuration was changed, but the runtime was not restarted.",
		Why:   "The runtime uses the previous settings.",
		Fixes: []Fix{{"sudo systemctl restart containerd", "Applies the change. Running containers continue."}},
	},
}
