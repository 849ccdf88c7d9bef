package doctor

var apiCodes = []Code{
	{
		ID: "CH0501", Says: "a name is offered by both APIs", Result: Failed, Symptoms: []Symptom{LimitsPending},
		Looks: "Which API offers the devices of each classic resource name, as the agent has decided.",
		Comes: "Entries of resources give some devices of one name the mode DRA, and others DevicePlugin.",
		Why:   "Where a node has any of a resource by a device plugin, the scheduler never takes what DRA has of it there. Pods that ask by limits wait, although devices are free.",
		Fixes: []Fix{{"kubectl -n chandler edit configmap chandler", "Give all of them one mode, or names of their own."}},
	},
	{
		ID: "CH0502", Says: "a device waits to move to the other API", Result: Warning, Symptoms: []Symptom{DeviceMissing, NoEffect, Terminating},
		Looks: "Which API offers each device, which one is to, and who has the device.",
		Comes: "The mode was changed while a pod has the device. It moves once it is free.",
		Why:   "Nobody new gets the device meanwhile.",
		Fixes: []Fix{{"kubectl -n NAMESPACE delete pod POD", "Lets go of the device, when the pod may end."}, {"chandler migrate status", "Shows what waits for whom."}},
	},
	{
		ID: "CH0503", Says: "another DRA driver publishes the same device", Result: Failed, Symptoms: []Symptom{GivenTwice},
		Looks: "The ResourceSlices of all drivers for this node, by PCI address.",
		Comes: "The vendor's DRA driver still runs, or its slices were left behind.",
		Why:   "The scheduler takes them for different devices, and may give one to two claims.",
		Fixes: []Fix{{"kubectl get daemonsets -A", "Shows the other driver. Delete it."}, {"kubectl delete resourceslices --field-selector spec.driver=DRIVER,spec.nodeName=NODE", "Removes slices that it has left."}},
	},
	{
		ID: "CH0504", Says: "the node's label for the mode has a wrong value", Result: Failed, Symptoms: []Symptom{NoEffect, AgentDown},
		Looks: "The label chandler.dev/mode of the Node.",
		Comes: "A typing error. The values are Auto, DRA and DevicePlugin.",
		Why:   "The label counts as a wrong configuration: the last one that was right stays in force.",
		Fixes: []Fix{{"kubectl label node NODE chandler.dev/mode=Auto --overwrite", "Sets a right value."}, {"kubectl label node NODE chandler.dev/mode-", "Removes the label."}},
	},
}
