package why

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"chandler.dev/internal/fleet"
	"chandler.dev/internal/selectors"
)

// removalReason is the reason why a device does not satisfy a request. Reasons are checked in their
// order.
type removalReason struct {
	order      int // of the condition
	condition  string
	consumer   string // detail for one device
	byConsumer bool   // by is a consumer's name, to be counted
}

// Orders of conditions. Each selector has a number of its own from bySelector on.
const (
	byNode      = 1
	byPool      = 2
	bySelector  = 100
	byTaint     = 1000
	byHolder    = 2000
	bySilicon   = 3000
	byCapacity  = 4000
	byOtherwise = 5000
)

// judgedDevice is a device of the requested class.
type judgedDevice struct {
	*fleet.Device
	node    *candidate
	removal *removalReason // nil if the device satisfies the request
}

// count computes, for each request, how many devices each condition removes.
func (a *explainer) count(nodes []candidate) {
	alts := a.alternativesOf(nodes)
	for i := range a.answer.Asked {
		r := &a.answer.Asked[i]
		if r.Class == "" {
			a.countPlugged(r, nodes)
			continue
		}
		if alt := alts[r.Claim+"\x00"+r.Name+"\x00"+r.Resource]; alt != nil {
			a.countDevices(i, alt, nodes)
		}
	}
}

// alternativesOf returns the requests for classes, by claim, request and resource.
func (a *explainer) alternativesOf(nodes []candidate) map[string]*alternative {
	out := make(map[string]*alternative)
	for _, claim := range a.claims {
		for _, alt := range alternativesOf(claim) {
			out[claim.Name+"\x00"+alt.name()+"\x00"] = &alt
		}
	}
	wants := wantedResources(a.pod)
	for _, name := range slices.Sorted(maps.Keys(wants)) {
		if class := a.classOf(name); class != nil {
			claim := &resourceapi.ResourceClaim{}
			claim.Name = "<limits>"
			out["\x00limits\x00"+string(name)] = &alternative{claim: claim, request: "limits", exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: class.Name, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: wants[name],
			}}
		}
	}
	return out
}

// countDevices counts the devices of a class.
func (a *explainer) countDevices(i int, alt *alternative, nodes []candidate) {
	r := &a.answer.Asked[i]
	class, err := a.library.Get(alt.exactly.DeviceClassName)
	if err != nil {
		r.Steps = []Step{{0, "devices of the class", err.Error()}}
		a.addFixes(append(selectors.RepairMissingClass(alt.exactly.DeviceClassName, slices.Collect(maps.Keys(a.library.classes))), "kubectl chandler explain "+missingClass)...)
		return
	}
	devices, all, failed := a.judgeDevices(class, alt, nodes)
	if r.Resource != "" {
		devices = slices.DeleteFunc(devices, func(d judgedDevice) bool {
			return d.node != nil && !a.byDRA(d.node.Name, corev1.ResourceName(r.Resource))
		})
	}
	on := make(map[string]bool)
	for _, d := range devices {
		on[d.Node] = true
	}
	r.Steps = append(r.Steps, Step{int64(len(devices)), "devices of the class", onNodes(len(on))})
	if failed != nil {
		a.addFixes(append(selectors.RepairClass(class, failed, a.deviceSpecs()), "kubectl chandler explain "+failingClass)...)
	}
	switch {
	case len(devices) > 0:
	case failed != nil:
		r.Steps[0].Detail = failed.Error()
	default:
		r.Steps[0].Detail = fmt.Sprintf("none of %d devices passes %s", all, joinExpressions(class.Spec.Selectors))
	}
	groups := make(map[[2]any][]judgedDevice)
	for _, d := range devices {
		if d.removal != nil {
			key := [2]any{d.removal.order, d.removal.condition}
			groups[key] = append(groups[key], d)
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(groups), func(x, y [2]any) int {
		return cmp.Or(cmp.Compare(x[0].(int), y[0].(int)), strings.Compare(x[1].(string), y[1].(string)))
	}) {
		r.addStep(int64(len(groups[key])), key[1].(string), groupDetail(groups[key]))
	}
	a.judgedByClass[i] = grouped{devices: devices, attribute: a.setEnough(r, alt, nodes, devices)}
}

// groupDetail returns the devices of a group, or their consumers.
func groupDetail(group []judgedDevice) string {
	if group[0].removal.byConsumer {
		counts := make(map[string]int64)
		for _, d := range group {
			counts[d.removal.consumer]++
		}
		return topConsumer(counts)
	}
	if by := group[0].removal.consumer; by != "" {
		return by
	}
	var names []string
	for _, d := range group {
		names = append(names, strings.TrimSpace(d.Node+" "+bareLabel(d.Device)))
	}
	return someNames(names, 2)
}

// bareLabel returns a device's label without its kind.
func bareLabel(d *fleet.Device) string { return strings.TrimPrefix(d.Label, d.Kind+" ") }

// topConsumer returns the consumer with the highest count and the number of the others.
func topConsumer(counts map[string]int64) string {
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int { return cmp.Or(cmp.Compare(counts[b], counts[a]), strings.Compare(a, b)) })
	if len(names) == 0 {
		return ""
	}
	first := names[0]
	if counts[first] > 1 {
		first += fmt.Sprintf(" (%d)", counts[first])
	}
	switch n := len(names) - 1; n {
	case 0:
		return first
	case 1:
		return first + " and one more"
	default:
		return fmt.Sprintf("%s and %d more", first, n)
	}
}

func joinExpressions(selectors []resourceapi.DeviceSelector) string {
	var out []string
	for _, s := range selectors {
		if s.CEL != nil {
			out = append(out, strings.Join(strings.Fields(s.CEL.Expression), " "))
		}
	}
	return strings.Join(out, " and ")
}

// judgeDevices returns the devices of a class, each with the reason why it does not satisfy the
// request, and the number of all devices. The error is that of an expression that fails for a
// device.
func (a *explainer) judgeDevices(class *resourceapi.DeviceClass, alt *alternative, nodes []candidate) (out []judgedDevice, all int, failed error) {
	at := make(map[string]*candidate)
	for i := range nodes {
		at[nodes[i].Name] = &nodes[i]
	}
	incomplete := a.library.incompletePools()
	for i := range a.fleet.Devices {
		d := &a.fleet.Devices[i]
		all++
		is, err := a.passesSelectors(d, class.Spec.Selectors)
		if err != nil {
			failed = fmt.Errorf("its selector fails for %s: %w", d.Device, err)
		}
		if !is {
			continue
		}
		j := judgedDevice{Device: d, node: at[d.Node]}
		j.removal = a.judgeOne(&j, alt, incomplete)
		out = append(out, j)
	}
	return out, all, failed
}

func (a *explainer) passesSelectors(d *fleet.Device, selectors []resourceapi.DeviceSelector) (bool, error) {
	for i := range selectors {
		if is, err := a.library.matchesSelector(a.ctx, d, &selectors[i]); err != nil || !is {
			return false, err
		}
	}
	return true, nil
}

// judgeOne returns the first condition that removes a device of the class, or nil.
func (a *explainer) judgeOne(j *judgedDevice, alt *alternative, incomplete map[fleet.ID]bool) *removalReason {
	d := j.Device
	switch {
	case d.Node != "" && j.node == nil:
		return &removalReason{order: byNode, condition: "on nodes that are not there"}
	case j.node != nil && j.node.refusedReason != "":
		return &removalReason{order: byNode, condition: "on nodes where the pod may not run", consumer: ""}
	case incomplete[fleet.ID{Driver: d.Driver, Pool: d.Pool}]:
		return &removalReason{order: byPool, condition: "of pools that are being updated"}
	}
	for i := range alt.exactly.Selectors {
		selector := &alt.exactly.Selectors[i]
		is, err := a.library.matchesSelector(a.ctx, d, selector)
		if err != nil {
			a.repairClaim(alt, err)
			return &removalReason{order: bySelector + i, condition: "the selector fails for them", consumer: err.Error()}
		}
		if !is {
			condition := "do not pass " + joinExpressions(alt.exactly.Selectors[i:i+1])
			if name := selectors.NameFromNVML(selector.CEL.Expression); name != "" && lacksNVML(&d.Spec, name) {
				condition += ": their " + name + " is not known without NVML"
				a.addFixes(selectors.InstallNVML)
			}
			return &removalReason{order: bySelector + i, condition: condition, consumer: " "}
		}
	}
	for i := range d.Spec.Taints {
		if taint := &d.Spec.Taints[i]; fleet.BlocksPods(taint.Effect) && !isTolerated(taint, alt.exactly.Tolerations) {
			return &removalReason{order: byTaint, condition: conditionOf(d, taint)}
		}
	}
	admin := ptr.Deref(alt.exactly.AdminAccess, false)
	shared := ptr.Deref(d.Spec.AllowMultipleAllocations, false)
	if keepers := d.BlockingHolders(); len(keepers) > 0 && !shared && !admin {
		return &removalReason{order: byHolder, condition: "allocated", consumer: keepers[0].Name(), byConsumer: true}
	}
	if !needsAllocator(d, alt) || j.node == nil || a.library.canAllocate(a.ctx, d, j.node.Node, alt) {
		return nil
	}
	switch {
	case shared && len(d.BlockingHolders()) > 0:
		return &removalReason{order: byCapacity, condition: "shared, with too little left", consumer: d.BlockingHolders()[0].Name(), byConsumer: true}
	case shared:
		return &removalReason{order: byCapacity, condition: "smaller than what is asked of each"}
	case len(d.Spec.ConsumesCounters) > 0:
		return &removalReason{order: bySilicon, condition: "of silicon that others have parts of", consumer: cmp.Or(a.onSilicon(d), " "), byConsumer: a.onSilicon(d) != ""}
	}
	return &removalReason{order: byOtherwise, condition: "smaller than what is asked, or need what the cluster lacks"}
}

// lacksNVML reports whether a device is an NVIDIA GPU without an attribute or a capacity that NVML
// supplies.
func lacksNVML(d *resourceapi.Device, name string) bool {
	family := d.Attributes["family"].StringValue
	kind := d.Attributes["kind"].StringValue
	_, hasAttribute := d.Attributes[resourceapi.QualifiedName(name)]
	_, hasCapacity := d.Capacity[resourceapi.QualifiedName(name)]
	return family != nil && *family == "nvidia" && kind != nil && *kind == "gpu" && !hasAttribute && !hasCapacity
}

// needsAllocator reports whether the availability of a device depends on more than its consumers
// and taints.
func needsAllocator(d *fleet.Device, alt *alternative) bool {
	return ptr.Deref(d.Spec.AllowMultipleAllocations, false) || len(d.Spec.ConsumesCounters) > 0 || alt.exactly.Capacity != nil
}

// onSilicon returns a consumer of another partition of the same physical device.
func (a *explainer) onSilicon(d *fleet.Device) string {
	for i := range a.fleet.Devices {
		other := &a.fleet.Devices[i]
		if other.Driver == d.Driver && other.Pool == d.Pool && other.Silicon == d.Silicon && len(other.BlockingHolders()) > 0 {
			return other.BlockingHolders()[0].Name()
		}
	}
	return ""
}

func isTolerated(taint *resourceapi.DeviceTaint, tolerations []resourceapi.DeviceToleration) bool {
	return slices.ContainsFunc(tolerations, func(t resourceapi.DeviceToleration) bool { return resourceclaim.ToleratesTaint(t, *taint) })
}

// conditionOf returns the short name of a taint.
func conditionOf(d *fleet.Device, taint *resourceapi.DeviceTaint) string {
	for i := range d.Spec.Taints {
		if &d.Spec.Taints[i] == taint {
			return d.Taints[i].Condition
		}
	}
	return taint.Key
}

// setEnough sets whether the remaining devices are enough, or otherwise the reason. If the reason
// is a differing attribute, it returns the attribute.
func (a *explainer) setEnough(r *Request, alt *alternative, nodes []candidate, devices []judgedDevice) (attribute resourceapi.FullyQualifiedName) {
	for _, d := range devices {
		if d.removal == nil {
			r.Left++
		}
	}
	reaches := false
	for i := range nodes {
		n := &nodes[i]
		if n.refusedReason != "" {
			continue
		}
		r.Enough = r.Enough || a.fitsAlone(alt, n, true)
		reaches = reaches || a.fitsAlone(alt, n, false)
	}
	switch {
	case r.Enough && len(a.answer.Fits) == 0:
		r.But = "enough for this request alone"
	case r.Enough:
	case reaches:
		r.But, attribute = a.blockingConstraint(alt, nodes)
		r.But = "and nowhere " + r.totalText() + " " + r.But
	case r.All:
		r.But = "and it asks for all of a node's devices"
	case r.Left >= r.Count:
		r.But = fmt.Sprintf("and nowhere %d on one node", r.Count)
	}
	return attribute
}

// fitsAlone reports whether a node satisfies the request alone, with or without its constraints.
func (a *explainer) fitsAlone(alt *alternative, n *candidate, constrained bool) bool {
	claim := alt.claimAlone(func(*resourceapi.DeviceConstraint) bool { return constrained })
	fits, err := a.library.fitsNode(a.ctx, n.Node, []*resourceapi.ResourceClaim{claim})
	return err == nil && fits
}

// blockingConstraint returns the constraint that prevents the allocation: without this constraint,
// all others are satisfied.
func (a *explainer) blockingConstraint(alt *alternative, nodes []candidate) (text string, attribute resourceapi.FullyQualifiedName) {
	var all []string
	for i := range alt.claim.Spec.Devices.Constraints {
		c := &alt.claim.Spec.Devices.Constraints[i]
		if !alt.isConcerned(c) {
			continue
		}
		without := alt.claimAlone(func(other *resourceapi.DeviceConstraint) bool { return !sameConstraint(other, c) })
		all = append(all, constraintPlace(c))
		for j := range nodes {
			if nodes[j].refusedReason == "" {
				if fits, err := a.library.fitsNode(a.ctx, nodes[j].Node, []*resourceapi.ResourceClaim{without}); err == nil && fits {
					return constraintPlace(c), ptr.Deref(c.MatchAttribute, "")
				}
			}
		}
	}
	return strings.Join(all, " and "), ""
}

func sameConstraint(a, b *resourceapi.DeviceConstraint) bool {
	return ptr.Deref(a.MatchAttribute, "") == ptr.Deref(b.MatchAttribute, "") && ptr.Deref(a.DistinctAttribute, "") == ptr.Deref(b.DistinctAttribute, "")
}

func constraintPlace(c *resourceapi.DeviceConstraint) string {
	if c.MatchAttribute != nil {
		return "on one " + placeName(*c.MatchAttribute)
	}
	return "each on another " + placeName(ptr.Deref(c.DistinctAttribute, ""))
}
