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
)

// LabelMode is the label of a node that takes the place of the configuration's mode
// on that node: Auto, DRA or DevicePlugin. Resources with a mode of their own keep it.
const LabelMode = "chandler.dev/mode"

// WrongMode reports whether a node has the label LabelMode with a value that is no mode.
func WrongMode(labels map[string]string) bool {
	mode, labelled := labels[LabelMode]
	return labelled && (mode == "" || Mode(mode).validate() != nil)
}

// Nodes are the nodes on which an entry counts. All that is said must hold of a node:
//
//	nodes: {matchLabels: {pool: training}}
//	nodes: {names: [worker-1, worker-2]}
type Nodes struct {
	// Names are the names of the nodes in Kubernetes.
	Names []string `json:"names,omitempty"`

	// MatchLabels and MatchExpressions select nodes by their labels, as a label
	// selector of Kubernetes does.
	MatchLabels      map[string]string                 `json:"matchLabels,omitempty"`
	MatchExpressions []metav1.LabelSelectorRequirement `json:"matchExpressions,omitempty"`
}

// Node is the node on which a configuration is read.
type Node struct {
	Name   string
	Labels map[string]string // nil if they are not known
}

// ErrNoLabels says that it depends on the node's labels which entries count, and that
// the labels are not known.
var ErrNoLabels = errors.New("which entries count depends on labels of the node, which are not known")

// selector returns the selector of labels.
func (n *Nodes) selector() (labels.Selector, error) {
	return metav1.LabelSelectorAsSelector(&metav1.LabelSelector{MatchLabels: n.MatchLabels, MatchExpressions: n.MatchExpressions})
}

func (n *Nodes) validate() error {
	if n == nil {
		return nil
	}
	if len(n.Names) == 0 && len(n.MatchLabels) == 0 && len(n.MatchExpressions) == 0 {
		return errors.New("nodes: must say which: names, matchLabels or matchExpressions")
	}
	for i, name := range n.Names {
		if messages := validation.IsDNS1123Subdomain(name); len(messages) > 0 {
			return fmt.Errorf("nodes.names[%d]: is %q; %s", i, name, strings.Join(messages, "; "))
		}
	}
	if _, err := n.selector(); err != nil {
		return fmt.Errorf("nodes: %w", err)
	}
	return nil
}

// include reports whether an entry counts on a node. An entry without nodes counts on
// all of them.
func (n *Nodes) include(node Node) (bool, error) {
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

// On returns what of a valid configuration counts on a node, with the mode that the
// node's label says. Several entries for one name are for different nodes: where more
// than one of these counts, the first does. An error says that the label is wrong, or
// that entries contradict each other on this node; or it is [ErrNoLabels], and the
// configuration is without the entries that go by labels.
func (c *DriverConfig) On(node Node) (*DriverConfig, error) {
	var unknown error
	here := func(n *Nodes) bool {
		is, err := n.include(node)
		if err != nil {
			unknown = err
		}
		return is
	}
	on := *c
	on.Exclude = keep(c.Exclude, func(s Selector) bool { return here(s.Nodes) })
	on.Sharing = keep(c.Sharing, func(s Sharing) bool { return here(s.Nodes) })
	on.Resources = keep(c.Resources, func(r Resource) bool { return here(r.Nodes) })
	on.Rebinding = keep(c.Rebinding, func(r Rebinding) bool { return here(r.Nodes) })
	on.Handover = keep(c.Handover, func(h Handover) bool { return here(h.Nodes) })
	on.OnRequest.VirtualFunctions = keep(c.OnRequest.VirtualFunctions, func(v OnRequestVirtualFunctions) bool { return here(v.Nodes) })
	on.OnRequest.Partitions = keep(c.OnRequest.Partitions, func(s Selector) bool { return here(s.Nodes) })
	on.OnRequest.MPS = keep(c.OnRequest.MPS, func(s Selector) bool { return here(s.Nodes) })
	on.OnRequest.TimeSlices = keep(c.OnRequest.TimeSlices, func(s Selector) bool { return here(s.Nodes) })
	on.Overhead = keep(c.Overhead, func(o Overhead) bool { return here(o.Nodes) })
	resources, names := make(map[string]bool), make(map[string]bool)
	on.Allocation = keep(c.Allocation, func(a Allocation) bool { return here(a.Nodes) && first(resources, a.Resource) })
	on.Paths = keep(c.Paths, func(p PathResource) bool { return here(p.Nodes) && first(names, p.Name) })

	errs := c.validateNames(func(a, b *Nodes) bool { return here(a) && here(b) })
	if mode, labelled := node.Labels[LabelMode]; labelled {
		on.Mode = Mode(mode)
	}
	if WrongMode(node.Labels) {
		errs = append(errs, fmt.Errorf("label %s of node %s: is %q; want %s, %s or %s", LabelMode, node.Name, node.Labels[LabelMode], ModeAuto, ModeDRA, ModeDevicePlugin))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("%s: %w", KindDriverConfig, err)
	}
	return &on, unknown
}

// keep returns the entries for which a function holds.
func keep[T any](entries []T, holds func(T) bool) (kept []T) {
	for _, entry := range entries {
		if holds(entry) {
			kept = append(kept, entry)
		}
	}
	return kept
}

// first reports whether a name is new, and remembers it.
func first(seen map[string]bool, name string) bool {
	if seen[name] {
		return false
	}
	seen[name] = true
	return true
}

// surelyTogether reports whether two entries count on one node, whatever nodes there
// are. Of two different selections of nodes that cannot be said.
func surelyTogether(a, b *Nodes) bool { return a == nil || b == nil || sameNodes(a, b) }

func sameNodes(a, b *Nodes) bool { return reflect.DeepEqual(a, b) }

// named remembers for which nodes names have entries, and reports whether another
// entry of a name can never count: one before it counts wherever it does.
type named map[string][]*Nodes

func (n named) hidden(name string, by *Nodes) bool {
	hidden := slices.ContainsFunc(n[name], func(before *Nodes) bool { return before == nil || sameNodes(before, by) })
	n[name] = append(n[name], by)
	return hidden
}
