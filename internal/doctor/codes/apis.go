package codes

var apiCodes = []Code{
	{
		ID: "CH0501", Says: "an extended resource is offered by both APIs", Result: Failed, Symptoms: []Symptom{LimitsPending},
		Looks: "Doctor checks which API offers the devices of each extended resource, as the agent has decided.",
		Comes: "Entries of resources give some devices of one name the mode DRA, and others the mode DevicePlugin.",
		Why:   "If a node has devices of a resource by a device plugin, the scheduler never uses DRA devices of that resource on the node. Pods with limits wait although devices are free.",
		Fixes: []Fix{{GetValues, "Writes the values of the chart to a file. Correct its section `config`: give all devices of the name the same mode, or use different names."}, {SetValues, "Applies the file."}, {EditConfig, "Opens the configuration of an installation by the plain manifests."}},
	},
	{
		ID: "CH0502", Says: "a device waits to move to the other API", Result: Warning, Symptoms: []Symptom{DeviceMissing, NoEffect, Terminating},
		Looks: "Doctor checks which API offers each device, which API is configured, and which pod uses the device.",
		Comes: "The mode was changed while a pod uses the device. The device moves once it is free.",
		Why:   "Until then, no new pod gets the device.",
		Fixes: []Fix{{"kubectl -n NAMESPACE delete pod POD", "Ends the pod, which releases the device."}, {"chandler migrate status", "Shows which devices wait for which pods."}},
	},
	{
		ID: "CH0503", Says: "another DRA driver publishes the same device", Result: Failed, Symptoms: []Symptom{GivenTwice},
		Looks: "Doctor compares the ResourceSlices of all drivers for this node by PCI address.",
		Comes: "The vendor's DRA driver still runs, or its slices remain after it was removed.",
		Why:   "The scheduler treats the entries as different devices, and may allocate one device to two claims.",
		Fixes: []Fix{{"kubectl get daemonsets -A", "Shows the other driver. Delete its DaemonSet."}, {"kubectl delete resourceslices --field-selector spec.driver=DRIVER,spec.nodeName=NODE", "Removes the slices of a driver that was removed."}},
	},
	{
		ID: "CH0504", Says: "the node's mode label has an invalid value", Result: Failed, Symptoms: []Symptom{NoEffect, AgentDown},
		Looks: "Doctor reads the label chandler.dev/mode of the Node.",
		Comes: "The value has a typing error. Valid values are Auto, DRA, DevicePlugin and ReportOnly.",
		Why:   "The agent treats the label as an invalid configuration: the last valid configuration remains in effect.",
		Fixes: []Fix{{"kubectl label node NODE chandler.dev/mode=Auto --overwrite", "Sets a valid value."}, {"kubectl label node NODE chandler.dev/mode-", "Removes the label."}},
	},
}
