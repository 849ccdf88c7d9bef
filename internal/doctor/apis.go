package doctor

import (
	"fmt"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/discovery"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
)

var apiChecks = []check{
	{codes.APIs, []string{"CH0501"}, checkBoth},
	{codes.APIs, []string{"CH0502"}, checkWaits},
	{codes.APIs, []string{"CH0503"}, checkOtherDrivers},
	{codes.APIs, []string{"CH0504"}, checkModeLabel},
}

// checkBoth reports resources offered by both APIs. If a device plugin offers any device of a
// resource on a node, the scheduler never uses DRA devices of that resource on the node
// (pkg/scheduler/framework/plugins/noderesources/fit.go, shouldDelegateResourceToDRA, read in
// 1.35 to 1.37).
func checkBoth(f *Facts, say *report.List) {
	snapshot, known := f.Devices.Snapshot.get()
	places, placed := f.Devices.API.get()
	if !known || !placed || len(places) == 0 {
		say.AddSkipped("the agent has not yet decided which API offers which device")
		return
	}
	byAPI := make(map[string]map[discovery.Mode]int)
	for i := range snapshot.Devices {
		d := &snapshot.Devices[i]
		for _, offer := range d.Offers {
			if byAPI[offer.Resource] == nil {
				byAPI[offer.Resource] = make(map[discovery.Mode]int)
			}
			byAPI[offer.Resource][places[d.Silicon()]]++
		}
	}
	before := len(say.Findings)
	for _, resource := range slices.Sorted(maps.Keys(byAPI)) {
		dra, plugin := byAPI[resource][discovery.ModeDRA], byAPI[resource][discovery.ModeDevicePlugin]
		if dra == 0 || plugin == 0 || len(f.waitingDevices()) > 0 {
			continue
		}
		say.AddFault("CH0501", resource+" is offered by both APIs", fmt.Sprintf("DRA offers %s of that name, and the device plugin API %s. On this node, pods with limits get only devices of the device plugin API.", report.CountNoun(dra, "device"), report.CountNoun(plugin, "device")),
			codes.ConfigFixes("set the same mode for all entries of "+resource+", or use different names")...)
	}
	if say.NoFaultSince(before) {
		say.AddOK("no extended resource is offered by both APIs")
	}
}

func (f *Facts) waitingDevices() []Wait {
	waits, _ := f.Devices.Waits.get()
	return waits
}

func checkWaits(f *Facts, say *report.List) {
	snapshot, known := f.Devices.Snapshot.get()
	if !known || f.Agent.ReportOnly {
		return
	}
	for _, w := range f.waitingDevices() {
		name := w.Device
		if d, found := snapshot.Lookup(w.Device); found {
			name = f.title(&d.Device)
		}
		var names, fix []string
		for _, h := range f.Devices.Holders[w.Device] {
			names = append(names, h.String())
			if h.Pod != "" {
				fix = append(fix, fmt.Sprintf("kubectl -n %s delete pod %s   # once the pod may end", h.Namespace, h.Pod))
			}
		}
		cause := asSentence(w.Reason)
		if len(names) > 0 {
			cause = "In use by " + report.JoinNames(names) + "."
		}
		if len(fix) == 0 {
			fix = []string{"chandler migrate status   # shows which pod it waits for"}
		}
		text := fmt.Sprintf("%s waits to move from %s to %s", name, apiName(w.From), apiName(w.To))
		if w.From == discovery.ModeAuto {
			text = fmt.Sprintf("%s waits to be offered by %s", name, apiName(w.To))
		}
		say.AddFault("CH0502", text, cause+" No new pod gets the device until it has moved.", fix...)
	}
}

// busID is the standard attribute with the address of a PCI function.
const busID resourceapi.QualifiedName = "resource.kubernetes.io/pciBusID"

// checkOtherDrivers reports devices of this node that another DRA driver publishes as well.
func checkOtherDrivers(f *Facts, say *report.List) {
	if f.Agent.ReportOnly {
		return
	}
	all, known := f.Cluster.Slices.get()
	if !known {
		say.AddSkipped("whether another DRA driver publishes the same devices: %s", f.Cluster.Slices.unknownReason())
		return
	}
	ours := make(map[string]bool)
	theirs := make(map[string]map[string]bool) // PCI addresses, by driver
	for i := range all {
		s := &all[i].Spec
		if s.NodeName == nil || *s.NodeName != f.Node {
			continue
		}
		for _, d := range s.Devices {
			at := d.Attributes[busID].StringValue
			switch {
			case at == nil:
			case s.Driver == discovery.Domain:
				ours[*at] = true
			default:
				if theirs[s.Driver] == nil {
					theirs[s.Driver] = make(map[string]bool)
				}
				theirs[s.Driver][*at] = true
			}
		}
	}
	before := len(say.Findings)
	for _, driver := range slices.Sorted(maps.Keys(theirs)) {
		var both []string
		for _, at := range slices.Sorted(maps.Keys(theirs[driver])) {
			if ours[at] {
				both = append(both, at)
			}
		}
		if len(both) > 0 {
			say.AddFault("CH0503", fmt.Sprintf("the DRA driver %s also publishes %s of this node", driver, report.CountNoun(len(both), "device")),
				fmt.Sprintf("Both drivers publish %s. The scheduler treats the entries as different devices, and may allocate one device to two claims.", report.JoinNames(both)),
				"kubectl get daemonsets -A   # delete the DaemonSet of the other driver", "kubectl delete resourceslices --field-selector spec.driver="+driver+",spec.nodeName="+f.Node)
		}
	}
	if say.NoFaultSince(before) {
		say.AddOK("no other DRA driver publishes the same devices")
	}
}

func checkModeLabel(f *Facts, say *report.List) {
	node, known := f.Cluster.Node.get()
	if !known || node == nil {
		return
	}
	value, set := node.Labels[v1alpha1.LabelMode]
	if !set {
		return
	}
	if !v1alpha1.WrongMode(node.Labels) {
		say.AddOK("the node's label %s=%s is in effect", v1alpha1.LabelMode, value)
		return
	}
	say.AddFault("CH0504", fmt.Sprintf("the node's label %s has the value %q", v1alpha1.LabelMode, value), "Valid values are Auto, DRA, DevicePlugin and ReportOnly. The last valid configuration remains in effect.",
		fmt.Sprintf("kubectl label node %s %s=Auto --overwrite", f.Node, v1alpha1.LabelMode))
}
