package why

import (
	"cmp"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulinghelpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
)

// candidate is a node with the pod's demands on it.
type candidate struct {
	*corev1.Node
	refusedReason string                       // why the pod cannot run there, or ""
	missingReason string                       // device plugin resource with too little left on the node, or ""
	claims        []*resourceapi.ResourceClaim // claims to allocate there
}

// cordoned is the reason for a node with scheduling disabled by an administrator.
const cordoned = "cordoned"

// candidateNodes returns all nodes of the cluster. It adds nodes unsuitable for the pod to the
// answer, as far as the pod and the nodes show this.
func (a *explainer) candidateNodes() (out []candidate) {
	refusals := make(map[string]int)
	for i := range a.fleet.Nodes {
		n := candidate{Node: &a.fleet.Nodes[i]}
		n.refusedReason = cmp.Or(a.refusalOf(n.Node), a.allocatedElsewhere(n.Node))
		if n.refusedReason != "" {
			if _, found := refusals[n.refusedReason]; !found {
				refusals[n.refusedReason] = len(a.answer.Nodes)
				a.answer.Nodes = append(a.answer.Nodes, Refusal{Why: n.refusedReason})
			}
			r := &a.answer.Nodes[refusals[n.refusedReason]]
			r.Nodes = append(r.Nodes, n.Name)
			if n.refusedReason == cordoned {
				a.answer.Fix = append(a.answer.Fix, "kubectl uncordon "+n.Name+"   # if its maintenance is over")
			}
		}
		n.missingReason = a.short(n.Name)
		for _, claim := range a.claims {
			if claim.Status.Allocation == nil {
				n.claims = append(n.claims, claim)
			}
		}
		if claim := a.claimForLimits(n.Node); claim != nil {
			n.claims = append(n.claims, claim)
		}
		out = append(out, n)
	}
	return out
}

// refusalOf returns the reason why the pod cannot run on a node: the pod's selector and affinity, a
// cordon, or a taint of the node.
func (a *explainer) refusalOf(node *corev1.Node) string {
	if node.Spec.Unschedulable && !a.toleratesTaint(corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}) {
		return cordoned
	}
	if match, err := nodeaffinity.GetRequiredNodeAffinity(a.pod).Match(node); err != nil {
		return fmt.Sprintf("node affinity: %v", err)
	} else if !match {
		return "node selector or affinity of the pod"
	}
	for _, taint := range node.Spec.Taints {
		if taint.Effect != corev1.TaintEffectPreferNoSchedule && taint.Key != corev1.TaintNodeUnschedulable && !a.toleratesTaint(taint) {
			return "taint " + taint.ToString()
		}
	}
	return ""
}

func (a *explainer) toleratesTaint(taint corev1.Taint) bool {
	return schedulinghelpers.TolerationsTolerateTaint(klog.FromContext(a.ctx), a.pod.Spec.Tolerations, &taint, true)
}

// allocatedElsewhere returns the reason why a node is not possible for claims that are already
// allocated.
func (a *explainer) allocatedElsewhere(node *corev1.Node) string {
	for _, claim := range a.claims {
		if claim.Status.Allocation == nil || claim.Status.Allocation.NodeSelector == nil {
			continue
		}
		selector, err := nodeaffinity.NewNodeSelector(claim.Status.Allocation.NodeSelector)
		if err == nil && !selector.Match(node) {
			return fmt.Sprintf("claim %s is allocated elsewhere", claim.Name)
		}
	}
	return ""
}
