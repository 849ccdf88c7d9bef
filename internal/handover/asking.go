package handover

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/ledger"
)

// users are the pods that may use the devices of an owner, as far as they are known.
type users struct {
	Pods  []types.UID   `json:"pods,omitempty"`
	Grace time.Duration `json:"grace,omitempty"` // the longest time for which containers of the pods may go on after their deletion

	// Unknown means that the owner has, or had, a pod whose UID is not known.
	Unknown bool `json:"unknownPods,omitempty"`
}

func (u users) same(other users) bool {
	return slices.Equal(u.Pods, other.Pods) && u.Grace == other.Grace && u.Unknown == other.Unknown
}

// with adds the pods of a claim, which may be nil.
func (u users) with(claim *claimUsers) users {
	if claim == nil {
		return u
	}
	all := users{Pods: union(u.Pods, claim.reserved), Grace: u.Grace, Unknown: u.Unknown && len(claim.named) == 0}
	for _, pod := range claim.named {
		if pod.UID == "" {
			all.Unknown = true
			continue
		}
		all.Pods, all.Grace = union(all.Pods, []types.UID{pod.UID}), max(all.Grace, pod.Grace)
	}
	return all
}

// unknown reports whether a pod may use the devices that nothing is known of.
func (u users) unknown() bool { return u.Unknown || len(u.Pods) == 0 }

// terminates returns for how long processes of the pods may go on after the owner has ended.
func (u users) terminates() time.Duration {
	if u.unknown() || u.Grace == 0 {
		return max(u.Grace, ledger.Termination) + terminationMargin
	}
	return u.Grace + terminationMargin
}

// terminationMargin is how long the kubelet and the container runtime take at most to end a container once its grace
// period is over.
const terminationMargin = 10 * time.Second

// Pod is a pod of the node.
type Pod struct {
	UID   types.UID
	Grace time.Duration // for how long its containers may go on after its deletion
}

// claimUsers are the pods of one claim.
type claimUsers struct {
	reserved []types.UID    // that the claim was reserved for when it was prepared
	named    map[string]Pod // that the kubelet has listed with the claim, by name; of UID "" if the API server did not have it
	asked    time.Time      // when the API server was asked last
}

// askAll finds out which pods have claims, without waiting for the API server. The kubelet lists a pod that joins a claim
// while it is prepared, and the pods of a PodGroup that a claim is reserved for, by their names.
func (c *Custodian) askAll(ctx context.Context, claims []*ledger.Claim) {
	if c.config.Users == nil || c.config.PodsOf == nil {
		return
	}
	due := false
	for _, claim := range claims {
		due = c.listed(claim, c.config.Users(claim.Owner())) || due
	}
	if !due || !c.asking.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer c.asking.Store(false)
		pods, err := c.config.PodsOf(ctx)
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, claim := range claims {
			if of := c.claims[claim.UID]; of != nil {
				of.found(claim.Namespace, pods, err)
			}
		}
	}()
}

// listed notes which pods the kubelet lists with a claim, and reports whether it is time to ask which these are.
func (c *Custodian) listed(claim *ledger.Claim, names []string) (due bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := c.usersOf(claim.UID)
	for _, name := range names {
		if _, known := of.named[name]; !known {
			of.named[name], of.asked = Pod{}, time.Time{}
		}
	}
	unknown := slices.ContainsFunc(slices.Collect(maps.Values(of.named)), func(p Pod) bool { return p.UID == "" })
	return unknown && time.Since(of.asked) >= askInterval
}

// found notes what the API server has of pods that the kubelet listed.
func (u *claimUsers) found(namespace string, pods map[types.NamespacedName]Pod, err error) {
	u.asked = time.Now()
	if err != nil {
		return
	}
	for name, known := range u.named {
		if pod, there := pods[types.NamespacedName{Namespace: namespace, Name: name}]; there && known.UID == "" {
			u.named[name] = pod
		}
	}
}

// usersOf returns the pods of a claim. The caller has the mutex.
func (c *Custodian) usersOf(claim types.UID) *claimUsers {
	if c.claims[claim] == nil {
		c.claims[claim] = &claimUsers{named: make(map[string]Pod)}
	}
	return c.claims[claim]
}
