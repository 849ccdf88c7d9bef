package v1alpha1

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// LabelMode is the label of a node that overrides the configuration's mode on the node: Auto, DRA,
// DevicePlugin or ReportOnly. Resources with their own mode are affected by ReportOnly only.
const LabelMode = "chandler.dev/mode"

// LabelAgent is the label of a node that gets no agent if the value is AgentOff.
const (
	LabelAgent = "chandler.dev/agent"
	AgentOff   = "off"
)

// LeftAlone reports whether the labels of a node exclude it from the agents' DaemonSets.
func LeftAlone(labels map[string]string) bool { return labels[LabelAgent] == AgentOff }

// WrongMode reports whether a node has the label LabelMode with an invalid value.
func WrongMode(labels map[string]string) bool {
	mode, labelled := labels[LabelMode]
	return labelled && !slices.Contains(modes, Mode(mode))
}

// Nodes limits an entry to some nodes. A node must match all fields:
//
//	nodes: {matchLabels: {pool: training}}
//	nodes: {names: [worker-1, worker-2]}
type Nodes struct {
	// Names are the names of the nodes in Kubernetes.
	Names []string `json:"names,omitempty"`

	// MatchLabels and MatchExpressions select nodes by their labels, as in a Kubernetes label
	// selector.
	MatchLabels      map[string]string                 `json:"matchLabels,omitempty"`
	MatchExpressions []metav1.LabelSelectorRequirement `json:"matchExpressions,omitempty"`
}

// Node is a node that reads a configuration.
type Node struct {
	Name   string
	Labels map[string]string // nil if unknown
}

// ErrNoLabels is the error for entries that depend on the node's labels while the labels are
// unknown.
var ErrNoLabels = errors.New("the applicable entries depend on the node's labels, which are unknown")

// selector returns the label selector.
func (n *Nodes) selector() (labels.Selector, error) {
	return metav1.LabelSelectorAsSelector(&metav1.LabelSelector{MatchLabels: n.MatchLabels, MatchExpressions: n.MatchExpressions})
}

func (n *Nodes) validate(at *field.Path) (errs field.ErrorList) {
	if n == nil {
		return nil
	}
	if len(n.Names) == 0 && len(n.MatchLabels) == 0 && len(n.MatchExpressions) == 0 {
		return InvalidField(at, "must have names, matchLabels or matchExpressions")
	}
	for i, name := range n.Names {
		if messages := validation.IsDNS1123Subdomain(name); len(messages) > 0 {
			errs = append(errs, InvalidField(at.Child("names").Index(i), "is %q; %s", name, strings.Join(messages, "; "))...)
		}
	}
	if _, err := n.selector(); err != nil {
		errs = append(errs, InvalidField(at, "%v", err)...)
	}
	return errs
}

// appliesTo reports whether an entry applies to a node. An entry without nodes applies to all
// nodes.
func (n *Nodes) appliesTo(node Node) (bool, error) {
	switch {
	case n == nil:
		return true, nil
	case len(n.Names) > 0 && !slices.Contains(n.Names, node.Name):
		return false, nil
	case len(n.MatchLabels) == 0 && len(n.MatchExpressions) == 0:
		return true, nil
	case node.Labels == nil:
		return false, ErrNoLabels
	}
	selector, err := n.selector()
	return err == nil && selector.Matches(labels.Set(node.Labels)), err
}

// ForNode returns the part of a valid configuration that applies to a node, with the mode of the
// node's label. Several entries for one name are for different nodes: if more than one of them
// applies, the first one wins. The error is for an invalid label, or for entries that contradict
// each other on this node. With the error [ErrNoLabels], the configuration lacks the entries that
// depend on labels.
func (c *DriverConfig) ForNode(node Node) (*DriverConfig, error) {
	var unknown error
	here := func(n *Nodes) bool {
		is, err := n.appliesTo(node)
		if err != nil {
			unknown = err
		}
		return is
	}
	on := *c
	on.Exclude = filterEntries(c.Exclude, func(s Selector) bool { return here(s.Nodes) })
	on.Sharing = filterEntries(c.Sharing, func(s Sharing) bool { return here(s.Nodes) })
	on.Resources = filterEntries(c.Resources, func(r Resource) bool { return here(r.Nodes) })
	on.Passthrough = filterEntries(c.Passthrough, func(r Passthrough) bool { return here(r.Nodes) })
	on.Reclaim = filterEntries(c.Reclaim, func(h Reclaim) bool { return here(h.Nodes) })
	on.OnDemand.VirtualFunctions = filterEntries(c.OnDemand.VirtualFunctions, func(v OnDemandVirtualFunctions) bool { return here(v.Nodes) })
	on.OnDemand.Partitions = filterEntries(c.OnDemand.Partitions, func(s Selector) bool { return here(s.Nodes) })
	on.OnDemand.MPS = filterEntries(c.OnDemand.MPS, func(s Selector) bool { return here(s.Nodes) })
	on.OnDemand.TimeSlices = filterEntries(c.OnDemand.TimeSlices, func(s Selector) bool { return here(s.Nodes) })
	on.Overhead = filterEntries(c.Overhead, func(o Overhead) bool { return here(o.Nodes) })
	resources, names := make(map[string]bool), make(map[string]bool)
	on.Allocation = filterEntries(c.Allocation, func(a Allocation) bool { return here(a.Nodes) && markSeen(resources, a.Resource) })
	on.Paths = filterEntries(c.Paths, func(p PathResource) bool { return here(p.Nodes) && markSeen(names, p.Name) })

	err := JoinErrors(c.validateNames(func(a, b *Nodes) bool { return here(a) && here(b) }))
	if mode, labelled := node.Labels[LabelMode]; labelled {
		on.Mode = Mode(mode)
	}
	if WrongMode(node.Labels) {
		err = errors.Join(err, fmt.Errorf("label %s of node %s: %s", LabelMode, node.Name, describeUnknown(on.Mode, modes)))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", KindDriverConfig, err)
	}
	return &on, unknown
}

// filterEntries returns the entries that satisfy holds.
func filterEntries[T any](entries []T, holds func(T) bool) (kept []T) {
	for _, entry := range entries {
		if holds(entry) {
			kept = append(kept, entry)
		}
	}
	return kept
}

// markSeen reports whether a name is new, and stores it.
func markSeen(seen map[string]bool, name string) bool {
	if seen[name] {
		return false
	}
	seen[name] = true
	return true
}

// surelyTogether reports whether two entries apply to a common node, whatever nodes exist. For two
// different node selections, the answer is unknown, and so false.
func surelyTogether(a, b *Nodes) bool { return a == nil || b == nil || sameNodes(a, b) }

func sameNodes(a, b *Nodes) bool { return reflect.DeepEqual(a, b) }

// named stores the nodes of each name's entries.
type named map[string][]*Nodes

// validateName stores the nodes of an entry. It returns an error if the entry can never apply, because
// an earlier entry of the name always takes precedence.
func (n named) validateName(name string, by *Nodes, at *field.Path) (errs field.ErrorList) {
	if slices.ContainsFunc(n[name], func(before *Nodes) bool { return before == nil || sameNodes(before, by) }) {
		errs = InvalidField(at, "is %q, as another's is", name)
	}
	n[name] = append(n[name], by)
	return errs
}
