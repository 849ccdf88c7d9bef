package reclaim

import (
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/ledger"
)

// users are the known pods of an owner's devices.
type users struct {
	Pods  []types.UID   `json:"pods,omitempty"`
	Grace time.Duration `json:"grace,omitempty"` // longest grace period of the pods

	// Unknown means that the owner has, or had, a pod with an unknown UID.
	Unknown bool `json:"unknownPods,omitempty"`
}

func (u users) sameUsers(other users) bool {
	return slices.Equal(u.Pods, other.Pods) && u.Grace == other.Grace && u.Unknown == other.Unknown
}

// with adds the pods of a claim, which may be nil.
func (u users) with(claim *claimUsers) users {
	if claim == nil {
		return u
	}
	all := users{Pods: union(u.Pods, claim.reserved), Grace: u.Grace, Unknown: u.Unknown && len(claim.listedPods) == 0}
	for _, pod := range claim.listedPods {
		if pod.UID == "" {
			all.Unknown = true
			continue
		}
		all.Pods, all.Grace = union(all.Pods, []types.UID{pod.UID}), max(all.Grace, pod.Grace)
	}
	return all
}

// isUnknown reports whether an unknown pod may use the devices.
func (u users) isUnknown() bool { return u.Unknown || len(u.Pods) == 0 }

// maxLifetime returns the longest lifetime of the pods' processes after the end of the owner.
func (u users) maxLifetime() time.Duration {
	if u.isUnknown() || u.Grace == 0 {
		return max(u.Grace, ledger.DefaultTermination) + terminationMargin
	}
	return u.Grace + terminationMargin
}

// terminationMargin is the maximum time of the kubelet and the container runtime to end a container
// after its grace period.
const terminationMargin = 10 * time.Second

// Pod is a pod of the node.
type Pod struct {
	UID       types.UID     // as the kubelet names it in control groups
	Grace     time.Duration // grace period of its containers after its deletion
	Claims    []string      // names of its claims
	Resources []string      // names of the resources in its containers' limits
}

// claimUsers are the pods of one claim.
type claimUsers struct {
	reserved    []types.UID    // pods in the claim's reservation at preparation
	listedPods  map[string]Pod // pods that the kubelet has listed with the claim, by name; without UID if the API server did not have the pod
	lastRequest time.Time      // time of the last request to the API server
}

// askAll determines the pods of claims in the background. The kubelet lists by name a pod that
// joins a prepared claim, and the pods of a PodGroup in a claim's reservation.
func (c *Manager) askAll(ctx context.Context, claims []*ledger.Claim) {
	if c.config.Users == nil || c.config.PodsOf == nil {
		return
	}
	due := false
	for _, claim := range claims {
		due = c.recordListed(claim, c.config.Users(claim.Owner())) || due
	}
	if !due || !c.requestPending.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer c.requestPending.Store(false)
		pods, err := c.config.PodsOf(ctx)
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, claim := range claims {
			if of := c.claims[claim.UID]; of != nil {
				of.recordPods(claim.Namespace, pods, err)
			}
		}
	}()
}

// recordListed records the pods that the kubelet lists with a claim, and reports whether the API
// server must be queried for them.
func (c *Manager) recordListed(claim *ledger.Claim, names []string) (due bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	of := c.usersOf(claim.UID)
	for _, name := range names {
		if _, known := of.listedPods[name]; !known {
			of.listedPods[name], of.lastRequest = Pod{}, time.Time{}
		}
	}
	unknown := slices.ContainsFunc(slices.Collect(maps.Values(of.listedPods)), func(p Pod) bool { return p.UID == "" })
	return unknown && time.Since(of.lastRequest) >= askInterval
}

// recordPods records the API server's answer about pods that the kubelet listed.
func (u *claimUsers) recordPods(namespace string, pods map[types.NamespacedName]Pod, err error) {
	u.lastRequest = time.Now()
	if err != nil {
		return
	}
	for name, known := range u.listedPods {
		if pod, there := pods[types.NamespacedName{Namespace: namespace, Name: name}]; there && known.UID == "" {
			u.listedPods[name] = pod
		}
	}
}

// usersOf returns the pods of a claim. The caller holds the mutex.
func (c *Manager) usersOf(claim types.UID) *claimUsers {
	if c.claims[claim] == nil {
		c.claims[claim] = &claimUsers{listedPods: make(map[string]Pod)}
	}
	return c.claims[claim]
}
