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
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
)

var clusterChecks = []check{
	{codes.Cluster, []string{"CH0606"}, checkServer},
	{codes.Cluster, []string{"CH0601"}, checkServed},
	{codes.Cluster, []string{"CH0607"}, checkNodeThere},
	{codes.Cluster, []string{"CH0602"}, checkFeatures},
	{codes.Cluster, []string{"CH0615"}, checkTaken},
	{codes.Cluster, []string{"CH0608"}, checkPublished},
	{codes.Cluster, []string{"CH0617"}, checkMemory},
	{codes.Cluster, []string{"CH0603", "CH0604", "CH0616"}, checkClasses},
	{codes.Cluster, []string{"CH0609", "CH0610", "CH0613", "CH0614"}, checkClaims},
	{codes.Cluster, []string{"CH0611"}, checkPrepared},
	{codes.Cluster, []string{"CH0605"}, checkRights},
	{codes.Cluster, []string{"CH0612"}, checkPolicies},
}

func checkServer(f *Facts, say *report.List) {
	if _, known := f.Cluster.Server.get(); !known {
		say.AddFault("CH0606", "the API server does not respond", asSentence(f.Cluster.Server.unknownReason())+" Running pods continue, but no new pod is scheduled to this node, and no claim is prepared.",
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

func checkServed(f *Facts, say *report.List) {
	version, known := f.Cluster.DRA.get()
	switch {
	case !known:
	case version == "v1":
		say.AddOK("resource.k8s.io/v1 is served")
	case version != "":
		say.AddOK("resource.k8s.io/%s is served, but not v1: the status of claims does not contain the state of devices", version)
	case f.usesDRA():
		say.AddFault("CH0601", "the API server does not serve resource.k8s.io", "The mode is DRA, so no device is offered. Kubernetes serves this API from 1.34 on, and in 1.32 and 1.33 if it is turned on.",
			codes.HelmSet+" --set config.mode=Auto   # or DevicePlugin", codes.EditConfig+"   # with the plain manifests: mode: Auto", "kubectl api-versions | grep resource.k8s.io")
	default:
		say.AddOK("resource.k8s.io is not served, and the device plugin API does not need it")
	}
}

func checkNodeThere(f *Facts, say *report.List) {
	if node, known := f.Cluster.Node.get(); known && node == nil {
		say.AddFault("CH0607", "the Node "+f.Node+" does not exist", "The API server has no Node with this name, so slices and pods of the node cannot be checked.", "kubectl get nodes", "chandler doctor --node-name=NAME")
	}
}

// without lists, by feature of the API server, the effect if the feature is missing, and
// whether the effect concerns the devices of this node.
var without = []struct {
	feature, effect string
	concerns        func(f *Facts) bool
}{
	{"DRADeviceTaints", "unhealthy devices are left out of the slices instead of getting a taint", func(f *Facts) bool { return true }},
	{"DRAPartitionableDevices", "only devices and partitions that do not compete with each other are published", hasCompetition},
	{"DRAConsumableCapacity", "a device that is shared by amount can be allocated to one claim at a time only", hasShared},
}

// hasCompetition reports whether a device of the node shares a physical device with others.
func hasCompetition(f *Facts) bool {
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

func hasShared(f *Facts) bool {
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

func checkFeatures(f *Facts, say *report.List) {
	features, known := f.Agent.Features.get()
	if !f.usesDRA() {
		return
	}
	if !known || len(features) == 0 {
		say.AddSkipped("which features the API server keeps: %s", cmp.Or(f.Agent.Features.unknownReason(), "the agent does not report them"))
		return
	}
	before := len(say.Findings)
	for _, w := range without {
		if kept, told := features[w.feature]; told && !kept && w.concerns(f) {
			say.AddFault("CH0602", "the feature gate "+w.feature+" of the API server is off", "The API server drops these fields of ResourceSlices, so "+w.effect+".",
				fmt.Sprintf("ps -o args= -C kube-apiserver | tr ' ' '\\n' | grep feature-gates   # add %s=true, also to the scheduler and the kubelets", w.feature))
		}
	}
	if say.NoFaultSince(before) {
		say.AddOK("the API server keeps all fields that the devices of this node need")
	}
}

// checkTaken reports a rejection of the node's ResourceSlices by the API server.
func checkTaken(f *Facts, say *report.List) {
	if f.Agent.ModeUnwanted {
		say.AddFault("CH0615", "the API server rejects the ResourceSlices of this node", "The scheduler uses the previous slices, or has no device of this node. The agent's web UI and its log contain the API server's message.",
			"kubectl -n chandler logs daemonset/chandler --tail=100 | grep ResourceSlices   # shows the reason",
			"kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations,validatingadmissionpolicies   # a webhook must also accept dry runs")
	}
}

// checkPublished compares the ResourceSlices of the node with the devices offered by DRA.
func checkPublished(f *Facts, say *report.List) {
	all, known := f.Cluster.Slices.get()
	snapshot, found := f.Devices.Snapshot.get()
	places, _ := f.Devices.API.get()
	if !known || !found || len(places) == 0 || f.Agent.ReportOnly {
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
	for _, w := range f.waitingDevices() {
		waiting[w.Device] = true
	}
	var missing []string
	var accessories []string
	wanted := 0
	for i := range snapshot.Devices {
		d := &snapshot.Devices[i]
		if d.ModeReason != "" {
			accessories = append(accessories, d.Name)
		}
		if places[d.Silicon()] != discovery.ModeDRA || waiting[d.Name] || d.PartOf != nil || d.Sharing != nil || !d.Health.IsUsable() {
			continue // partitions and shares may have other names, or may be unpublished
		}
		wanted++
		if !published[d.Name] {
			missing = append(missing, f.title(&d.Device))
		}
	}
	switch {
	case len(missing) > 0:
		say.AddFault("CH0608", report.CountNoun(len(missing), "DRA device")+" "+isAre(len(missing))+" missing from the ResourceSlices", report.JoinNames(missing)+" should be published. Until then, the scheduler cannot allocate it. An agent that has just started publishes within seconds.",
			"kubectl get resourceslices --field-selector spec.driver=chandler.dev,spec.nodeName="+f.Node, "kubectl -n chandler rollout restart daemonset chandler")
	case wanted > 0:
		say.AddOK("the ResourceSlices contain every DRA device")
	}
	if len(accessories) > 0 {
		say.AddOK("%s: %s", report.JoinNames(accessories), rules.NoAccelerators)
	}
}

// checkMemory reports NVIDIA GPUs that are published without their memory.
func checkMemory(f *Facts, say *report.List) {
	all, known := f.Cluster.Slices.get()
	snapshot, found := f.Devices.Snapshot.get()
	if !known || !found {
		return
	}
	var without []string
	for i := range all {
		s := &all[i].Spec
		if s.Driver != discovery.Domain || s.NodeName == nil || *s.NodeName != f.Node {
			continue
		}
		for _, published := range s.Devices {
			d, found := snapshot.Lookup(published.Name)
			if _, has := published.Capacity["memory"]; found && !has && d.Family == "nvidia" && d.PartOf == nil &&
				d.Attributes.String("kind") == "gpu" && d.Attributes.String("driver") == "nvidia" {
				without = append(without, d.Name)
			}
		}
	}
	if len(without) > 0 {
		say.AddFault("CH0617", fmt.Sprintf("the memory of %s is unknown", report.CountNoun(len(without), "NVIDIA GPU")),
			"Without NVML, ResourceSlices do not contain the memory, the architecture and the MIG profiles of "+report.JoinNames(without)+", and the agent does not report XID errors.",
			codes.HelmSet+" --set nvml.enabled=true   # requires the image with chandler-host")
	}
}

func isAre(n int) string {
	if n == 1 {
		return "is"
	}
	return "are"
}

// checkClasses reports extended resources offered by DRA that have no DeviceClass, or several.
func checkClasses(f *Facts, say *report.List) {
	if f.Agent.ReportOnly {
		return
	}
	classes, known := f.Cluster.Classes.get()
	snapshot, found := f.Devices.Snapshot.get()
	places, _ := f.Devices.API.get()
	if !known {
		if served, _ := f.Cluster.DRA.get(); served != "" {
			say.AddSkipped("DeviceClasses: %s", f.Cluster.Classes.unknownReason())
		}
		return
	}
	byName := make(map[string][]resourceapi.DeviceClass)
	for _, class := range classes {
		if name := class.Spec.ExtendedResourceName; name != nil {
			byName[*name] = append(byName[*name], class)
		}
	}
	before := len(say.Findings)
	offered := make(map[string]bool)
	if found {
		for i := range snapshot.Devices {
			d := &snapshot.Devices[i]
			for _, offer := range d.Offers {
				if places[d.Silicon()] == discovery.ModeDRA && !offer.IsUnnamed() {
					offered[offer.Resource] = true
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(offered)) {
		if len(byName[name]) == 0 {
			say.AddFault("CH0603", fmt.Sprintf("DRA offers %s, but no DeviceClass has that name", name),
				"Pods with this name in limits wait. Either no class has the name as its extendedResourceName, or the API server dropped that field: before 1.36, the feature gate DRAExtendedResource is off by default.",
				codes.HelmSet+" --set deviceClasses.enabled=true", "kubectl label node "+f.Node+" chandler.dev/mode=DevicePlugin --overwrite   # if the feature gate is off")
		}
	}
	if found {
		ofDRA := slices.DeleteFunc(slices.Clone(snapshot.Devices), func(d rules.Offered) bool { return places[d.Silicon()] != discovery.ModeDRA })
		if families := rules.FamiliesWithoutClass(classes, ofDRA); len(families) > 0 {
			say.AddFault("CH0616", "no DeviceClass selects devices of "+report.JoinNames(families), "DRA offers the devices, but a claim can request a device only through a DeviceClass.",
				codes.HelmSet+" --set 'deviceClasses.families={all}'   # or list your families", "kubectl apply -f deployments/examples/deviceclasses-all.yaml   # with the plain manifests")
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
		say.AddFault("CH0604", fmt.Sprintf("%d DeviceClasses have the extendedResourceName %s", len(same), name),
			fmt.Sprintf("Pods with this name in limits get devices of %s, which is the newest class, and never those of %s.", same[0].Name, report.JoinNames(names)), fix...)
	}
	if say.NoFaultSince(before) {
		say.AddOK("every extended resource offered by DRA has one DeviceClass, and a DeviceClass selects each device")
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
func checkPrepared(f *Facts, say *report.List) {
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
			if d.Driver != discovery.Domain || !discovery.IsPoolOf(f.Node, d.Pool) {
				continue
			}
			for _, c := range d.Conditions {
				if c.Type == "Ready" && c.Status != "True" {
					say.AddFault("CH0611", fmt.Sprintf("claim %s/%s has no usable device: %s%s", claim.Namespace, claim.Name, d.Device, lastingText(c.LastTransitionTime.Time, f.Time)),
						asSentence(c.Message)+" The pod does not start, or has lost the device.",
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
		return r.Driver == discovery.Domain && discovery.IsPoolOf(f.Node, r.Pool)
	})
}

func checkRights(f *Facts, say *report.List) {
	missing, known := f.Cluster.Rights.get()
	switch {
	case !known:
		say.AddSkipped("the permissions of the agent: %s", f.Cluster.Rights.unknownReason())
	case len(missing) > 0:
		say.AddFault("CH0605", "the agent lacks "+report.CountNoun(len(missing), "permission"), "It is not permitted to "+strings.Join(missing, ", or to ")+".", codes.HelmSet+"   # updates the roles to this version", "kubectl auth can-i --list --as=system:serviceaccount:chandler:chandler")
	default:
		say.AddOK("the agent has all permissions that it needs")
	}
}

func checkPolicies(f *Facts, say *report.List) {
	missing, known := f.Cluster.Policies.get()
	var sets []string
	for _, name := range missing {
		value, _, _ := strings.Cut(name, ".")
		sets = append(sets, " --set admissionPolicies."+value+"=true")
	}
	switch {
	case !known:
		say.AddSkipped("the admission policies: %s", f.Cluster.Policies.unknownReason())
	case len(missing) > 0:
		say.AddFault("CH0612", report.CountNoun(len(missing), "admission policy")+" "+isAre(len(missing))+" missing", fmt.Sprintf("The ValidatingAdmissionPolicy %s is missing. Without it, errors in claims are found only when a pod starts, and an agent could write objects of other nodes.", report.JoinNames(missing)),
			codes.HelmSet+strings.Join(sets, ""))
	default:
		say.AddOK("the admission policies are in effect")
	}
}
