package kubectl

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/internal/fleet"
)

// findUnlisted finds a device that is in no ResourceSlice, such as a device of a device plugin:
// only the agents know its name. found is nil if no agent has the device. unasked gives the reason
// for missing answers, "" if all agents answered.
func (v *view) findUnlisted(ctx context.Context, word string) (found *whoView, unasked string) {
	if strings.HasPrefix(word, "node/") || strings.HasPrefix(word, "pod/") {
		return nil, ""
	}
	word = strings.TrimPrefix(word, "device/")
	nodes := fleet.BuildFleet(v.Input, driverName).NodeNames()
	for i := range v.Nodes {
		nodes = append(nodes, v.Nodes[i].Name)
	}
	slices.Sort(nodes)
	said, why := v.askAgents(ctx, slices.Compact(nodes))
	found = &whoView{}
	for _, node := range slices.Sorted(maps.Keys(said)) {
		for labels := range metricSamples(said[node]["chandler_device_info"]) {
			if isDevice(labels, word) {
				found.Devices = append(found.Devices, v.describeDevice(node, labels, said[node]))
			}
		}
	}
	if len(found.Devices) == 0 {
		found = nil
	}
	if silent := slices.Sorted(maps.Keys(why)); len(silent) > 0 {
		unasked = fmt.Sprintf("the agent of %s did not report it, because %s", silent[0], why[silent[0]])
	}
	return found, unasked
}

// isDevice reports whether word is a name of a device, like [fleet.Device.Is].
func isDevice(labels map[string]string, word string) bool {
	address := labels["pci_address"]
	is := func(text string) bool { return text != "" && strings.EqualFold(text, word) }
	return slices.ContainsFunc([]string{labels["device"], describeByLabels(labels).label, labels["uuid"], labels["serial"], address, fleet.ShortAddress(address)}, is)
}

// describeDevice returns a device from its agent's metrics.
func (v *view) describeDevice(node string, info map[string]string, families map[string]*dto.MetricFamily) fleet.Device {
	name, of := info["device"], describeByLabels(info)
	d := fleet.Device{
		ID:   fleet.ID{Driver: driverName, Pool: node, Device: name},
		Node: node, Label: of.label, Model: of.model, Kind: cmp.Or(info["kind"], "other"), State: fleet.Free,
	}
	for labels := range metricSamples(families["chandler_device_condition"]) {
		if labels["device"] != name {
			continue
		}
		taint := fleet.Taint{Condition: labels["condition"], Effect: resourceapi.DeviceTaintEffect(labels["effect"])}
		if d.Taints = append(d.Taints, taint); fleet.BlocksPods(taint.Effect) {
			d.State = fleet.Out
		}
	}
	for labels := range metricSamples(families["chandler_device_allocated"]) {
		if labels["device"] != name {
			continue
		}
		h := fleet.Holder{Namespace: labels["namespace"], Pod: labels["pod"], Claim: labels["claim"], Request: labels["request"], Resource: labels["resource"]}
		if h.Pod == "" && labels["api"] == string(discovery.ModeDevicePlugin) {
			h.Namespace, h.Pod = "?", "?" // the kubelet has not named the pod yet
		}
		h.Since = v.PodStart(h.Namespace, h.Pod)
		if d.State = fleet.Held; !slices.ContainsFunc(d.Holders, func(other fleet.Holder) bool {
			return other.Name() == h.Name() && other.ResourceOrClaim() == h.ResourceOrClaim()
		}) {
			d.Holders = append(d.Holders, h)
		}
	}
	return d
}
