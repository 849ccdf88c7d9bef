package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

var clusterChecks = []check{
	{Cluster, []string{"CH0606"}, checkServer},
	{Cluster, []string{"CH0601"}, checkServed},
	{Cluster, []string{"CH0607"}, checkNodeThere},
	{Cluster, []string{"CH0602"}, checkFeatures},
	{Cluster, []string{"CH0615"}, checkTaken},
	{Cluster, []string{"CH0608"}, checkPublished},
	{Cluster, []string{"CH0603", "CH0604"}, checkClasses},
	{Cluster, []string{"CH0609", "CH0610", "CH0613", "CH0614"}, checkClaims},
	{Cluster, []string{"CH0611"}, checkPrepared},
	{Cluster, []string{"CH0605"}, checkRights},
	{Cluster, []string{"CH0612"}, checkPolicies},
}

func checkServer(f *Facts, say *saying) {
	if _, known := f.Cluster.Server.get(); !known {
		say.found("CH0606", "the API server does not answer", sentence(f.Cluster.Server.why())+" Pods that run go on; nothing new is scheduled to this node, and no claim is prepared.",
			"kubectl get --raw /readyz?verbose", "kubectl cluster-info")
	}
}

// usesDRA reports whether devices of this node are offered by DRA, or will be.
func (f *Facts) usesDRA() bool {
	places, _ := f.Devices.API.get()
	for _, mode := range places {
		if mode == discovery.ModeDRA {
			return true
		}
	}
	return f.Agent.Mode == discovery.ModeDRA
}

func checkServed(f *Facts, say *saying) {
	version, known := f.Cluster.DRA.get()
	switch {
	case !known:
	case version == "v1":
		say.ok("resource.k8s.io/v1 is served")
	case version != "":
		say.ok("resource.k8s.io/%s is served, and not v1: claims do not say how their devices are", version)
	case f.usesDRA():
		say.found("CH0601", "the API server does not serve resource.k8s.io", "The mode is DRA, so nothing is offered. Kubernetes serves that API from 1.34 on, and 1.32 and 1.33 do where it was switched on.",
			"kubectl -n chandler edit configmap chandler   # mode: Auto, or DevicePlugin", "kubectl api-versions | grep resource.k8s.io")
	default:
		say.ok("resource.k8s.io is not served, and the device-plugin API needs none")
	}
}

func checkNodeThere(f *Facts, say *saying) {
	if node, known := f.Cluster.Node.get(); known && node == nil {
		say.found("CH0607", "there is no node "+f.Node, "The API server knows no Node of that name, so it is not known what belongs to it.", "kubectl get nodes", "chandler doctor --node-name=NAME")
	}
}

// without lists, by feature of the API server, the effect if the feature is missing, and
// whether the effect concerns the devices of this node.
var without = []struct {
	feature, effect string
	concerns        func(f *Facts) bool
}{
	{"DRADeviceTaints", "unhealthy devices are left out of the slices, instead of having a taint", func(f *Facts) bool { return true }},
	{"DRAPartitionableDevices", "of wholes and parts that compete, only such are published as can all be given out", competes},
	{"DRAConsumableCapacity", "a device that is shared by amount is for one claim at a time", shared},
}

// competes reports whether a device of the node shares a physical device with others.
func competes(f *Facts) bool {
	snapshot, _ := f.Devices.Snapshot.get()
	if snapshot == nil {
		return false
	}
	for i := range snapshot.Devices {
		if p := snapshot.Devices[i].PartOf; p != nil && len(p.Counters) > 0 {
			return true
		}
	}
	return false
}

func shared(f *Facts) bool {
	snapshot, _ := f.Devices.Snapshot.get()
	if snapshot == nil {
		return false
	}
	for i := range snapshot.Devices {
		if snapshot.Devices[i].Sharing != nil {
			return true
		}
	}
	return false
}

func checkFeatures(f *Facts, say *saying) {
	features, known := f.Agent.Features.get()
	if !f.usesDRA() {
		return
	}
	if !known || len(features) == 0 {
		say.not("which features the API server keeps: %s", cmp.Or(f.Agent.Features.why(), "the agent does not say"))
		return
	}
	before := len(say.findings)
	for _, w := range without {
		if kept, told := features[w.feature]; told && !kept && w.concerns(f) {
			say.found("CH0602", "the API server has the feature "+w.feature+" off", "It drops these fields of ResourceSlices, so "+w.effect+".",
				fmt.Sprintf("ps -o args= -C kube-apiserver | tr ' ' '\\n' | grep feature-gates   # add %s=true, and the same to scheduler and kubelets", w.feature))
		}
	}
	if say.none(before) {
		say.ok("the API server keeps all that the devices of this node need")
	}
}

// checkTaken reports a rejection of the node's ResourceSlices by the API server.
func checkTaken(f *Facts, say *saying) {
	if f.Agent.Unwanted {
		say.found("CH0615", "the API server refuses the ResourceSlices of this node", "The scheduler goes by those of before, or knows of no device. The agent's page and its log have the API server's words.",
			"kubectl -n chandler logs daemonset/chandler --tail=100 | grep ResourceSlices   # says who refuses them, and why",
			"kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations,validatingadmissionpolicies   # a webhook must take dry runs, too")
	}
}

// checkPublished compares the ResourceSlices of the node with the devices offered by DRA.
func checkPublished(f *Facts, say *saying) {
	all, known := f.Cluster.Slices.get()
	snapshot, found := f.Devices.Snapshot.get()
	places, _ := f.Devices.API.get()
	if !known || !found || len(places) == 0 {
		return
	}
	published := make(map[string]bool)
	for i := range all {
		s := &all[i].Spec
		if s.Driver == discovery.Domain && s.NodeName != nil && *s.NodeName == f.Node {
			for _, d := range s.Devices {
				published[d.Name] = true
				if device, share := rules.ShareOf(d.Name); share { // published as numbered shares, for API servers without sharing
					published[device] = true
				}
			}
		}
	}
	waiting := make(map[string]bool)
	for _, w := range f.waiting() {
		waiting[w.Device] = true
	}
	var missing []string
	wanted := 0
	for i := range snapshot.Devices {
		d := &snapshot.Devices[i]
		if places[d.Silicon()] != discovery.ModeDRA || waiting[d.Name] || d.PartOf != nil || d.Sharing != nil || !d.Health.Usable() {
			continue // partitions and shares may have other names, or may be unpublished
		}
		wanted++
		if !published[d.Name] {
			missing = append(missing, title(&d.Device))
		}
	}
	switch {
	case len(missing) > 0:
		say.found("CH0608", several(len(missing), "device")+" of DRA "+isAre(len(missing))+" in no ResourceSlice", list(missing)+" should be published, and the scheduler does not know of it. An agent that has just started publishes within seconds.",
			"kubectl get resourceslices --field-selector spec.driver=chandler.dev,spec.nodeName="+f.Node, "kubectl -n chandler rollout restart daemonset chandler")
	case wanted > 0:
		say.ok("the ResourceSlices have every device that DRA offers")
	}
}

func isAre(n int) string {
	if n == 1 {
		return "is"
	}
	return "are"
}

// checkClasses reports extended resources offered by DRA that have no DeviceClass, or several.
func checkClasses(f *Facts, say *saying) {
	classes, known := f.Cluster.Classes.get()
	snapshot, found := f.Devices.Snapshot.get()
	places, _ := f.Devices.API.get()
	if !known {
		if served, _ := f.Cluster.DRA.get(); served != "" {
			say.not("DeviceClasses: %s", f.Cluster.Classes.why())
		}
		return
	}
	byName := make(map[string][]resourceapi.DeviceClass)
	for _, class := range classes {
		if name := class.Spec.ExtendedResourceName; name != nil {
			byName[*name] = append(byName[*name], class)
		}
	}
	before := len(say.findings)
	offered := make(map[string]bool)
	if found {
		for i := range snapshot.Devices {
			d := &snapshot.Devices[i]
			for _, offer := range d.Offers {
				if places[d.Silicon()] == discovery.ModeDRA && !offer.Unnamed() {
					offered[offer.Resource] = true
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(offered)) {
		if len(byName[name]) == 0 {
			say.found("CH0603", fmt.Sprintf("DRA offers %s, and no DeviceClass has that name", name),
				"Pods that ask for it by limits wait. Either no class has it as its extendedResourceName, or the API server dropped that field: before 1.36 the feature gate DRAExtendedResource is off.",
				helmSet+" --set deviceClasses.enabled=true", "kubectl label node "+f.Node+" chandler.dev/mode=DevicePlugin --overwrite   # where the feature gate is off")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		same := byName[name]
		if len(same) < 2 || !slices.ContainsFunc(same, forThisDriver) {
			continue
		}
		// The scheduler uses the newest class, and for equal ages the first by name
		// (DeviceClassSpec.ExtendedResourceName).
		slices.SortFunc(same, func(a, b resourceapi.DeviceClass) int {
			return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
		})
		var names []string
		for _, class := range same[1:] {
			names = append(names, class.Name)
		}
		var fix []string
		if forThisDriver(same[0]) {
			for _, class := range same[1:] {
				fix = append(fix, "kubectl delete deviceclass "+class.Name)
			}
		} else {
			fix = []string{"kubectl delete deviceclass " + same[0].Name}
		}
		say.found("CH0604", fmt.Sprintf("%d DeviceClasses have the extendedResourceName %s", len(same), name),
			fmt.Sprintf("Pods that ask for it by limits get devices of %s, which is the newest, and never those of %s.", same[0].Name, list(names)), fix...)
	}
	if say.none(before) {
		say.ok("every name that DRA offers has one DeviceClass")
	}
}

// forThisDriver reports whether an expression of the class contains the driver's name or one
// of its attributes.
func forThisDriver(class resourceapi.DeviceClass) bool {
	return slices.ContainsFunc(class.Spec.Selectors, func(s resourceapi.DeviceSelector) bool {
		return s.CEL != nil && strings.Contains(s.CEL.Expression, discovery.Domain)
	})
}

// checkPrepared reports claims of this node that are not prepared, according to the statuses
// written by the driver.
func checkPrepared(f *Facts, say *saying) {
	claims, known := f.Cluster.Claims.get()
	if !known {
		return
	}
	for i := range claims {
		claim := &claims[i]
		if !f.allocatedHere(claim) {
			continue
		}
		for _, d := range claim.Status.Devices {
			if d.Driver != discovery.Domain || d.Pool != f.Node {
				continue
			}
			for _, c := range d.Conditions {
				if c.Type == "Ready" && c.Status != "True" {
					say.found("CH0611", fmt.Sprintf("claim %s/%s does not have its device %s%s", claim.Namespace, claim.Name, d.Device, lasting(c.LastTransitionTime.Time, f.Time)),
						sentence(c.Message)+" Its pod does not start, or has lost the device.",
						fmt.Sprintf("kubectl -n %s get resourceclaim %s -o yaml", claim.Namespace, claim.Name), fmt.Sprintf("kubectl -n %s delete %s", claim.Namespace, podsOf(claim)))
				}
			}
		}
	}
}

// podsOf returns the pods that a claim is reserved for, as kubectl arguments.
func podsOf(claim *resourceapi.ResourceClaim) string {
	var names []string
	for _, r := range claim.Status.ReservedFor {
		if r.Resource == "pods" {
			names = append(names, "pod/"+r.Name)
		}
	}
	if len(names) == 0 {
		return "resourceclaim/" + claim.Name
	}
	return strings.Join(names, " ")
}

// allocatedHere reports whether a device of this node is allocated to a claim.
func (f *Facts) allocatedHere(claim *resourceapi.ResourceClaim) bool {
	return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == discovery.Domain && r.Pool == f.Node
	})
}

func checkRights(f *Facts, say *saying) {
	missing, known := f.Cluster.Rights.get()
	switch {
	case !known:
		say.not("what the agent may do: %s", f.Cluster.Rights.why())
	case len(missing) > 0:
		say.found("CH0605", "the agent lacks "+several(len(missing), "right"), "It may not "+strings.Join(missing, ", nor ")+".", helmSet+"   # makes the roles what this version needs", "kubectl auth can-i --list --as=system:serviceaccount:chandler:chandler")
	default:
		say.ok("the agent may do all that it must")
	}
}

// helmSet changes values of the chart and keeps the others.
const helmSet = "helm upgrade chandler deployments/helm/chandler --namespace chandler --reset-then-reuse-values"

func checkPolicies(f *Facts, say *saying) {
	missing, known := f.Cluster.Policies.get()
	var sets []string
	for _, name := range missing {
		value, _, _ := strings.Cut(name, ".")
		sets = append(sets, " --set admissionPolicies."+value+"=true")
	}
	switch {
	case !known:
		say.not("the admission policies: %s", f.Cluster.Policies.why())
	case len(missing) > 0:
		say.found("CH0612", several(len(missing), "admission policy")+" "+isAre(len(missing))+" missing", fmt.Sprintf("There is no ValidatingAdmissionPolicy %s. Without it mistakes in claims are found only when a pod starts, and an agent could write objects of other nodes.", list(missing)),
			helmSet+strings.Join(sets, ""))
	default:
		say.ok("the admission policies are in force")
	}
}
