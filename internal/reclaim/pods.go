package reclaim

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
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

// claimPods are the pods of present claims.
type claimPods struct {
	config         *Config
	requestPending atomic.Bool // a request to the API server is in progress

	mu     sync.Mutex
	claims map[types.UID]*claimUsers
}

// note records the pods of a claim that is about to be prepared.
func (p *claimPods) note(claim types.UID, pods []types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	of := p.usersOf(claim)
	of.reserved = union(of.reserved, pods)
}

// addTo adds the pods of a claim to users.
func (p *claimPods) addTo(u users, claim types.UID) users {
	p.mu.Lock()
	defer p.mu.Unlock()
	return u.with(p.claims[claim])
}

// forget removes the pods of a claim that has ended.
func (p *claimPods) forget(claim types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.claims, claim)
}

// askAll determines the pods of claims in the background. The kubelet lists by name a pod that
// joins a prepared claim, and the pods of a PodGroup in a claim's reservation.
func (p *claimPods) askAll(ctx context.Context, claims []*allocation.Claim) {
	if p.config.Users == nil || p.config.PodsOf == nil {
		return
	}
	due := false
	for _, claim := range claims {
		due = p.recordListed(claim, p.config.Users(claim.Owner())) || due
	}
	if !due || !p.requestPending.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer p.requestPending.Store(false)
		pods, err := p.config.PodsOf(ctx)
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, claim := range claims {
			if of := p.claims[claim.UID]; of != nil {
				of.recordPods(claim.Namespace, pods, err)
			}
		}
	}()
}

// recordListed records the pods that the kubelet lists with a claim, and reports whether the API
// server must be queried for them.
func (p *claimPods) recordListed(claim *allocation.Claim, names []string) (due bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, state := p.config.Ledger.Claim(claim.UID); state == allocation.None || state == allocation.Ending {
		return false // the claim has ended since it was listed
	}
	of := p.usersOf(claim.UID)
	for _, name := range names {
		if _, known := of.listedPods[name]; !known {
			of.listedPods[name], of.lastRequest = Pod{}, time.Time{}
		}
	}
	unknown := slices.ContainsFunc(slices.Collect(maps.Values(of.listedPods)), func(pod Pod) bool { return pod.UID == "" })
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
func (p *claimPods) usersOf(claim types.UID) *claimUsers {
	if p.claims[claim] == nil {
		p.claims[claim] = &claimUsers{listedPods: make(map[string]Pod)}
	}
	return p.claims[claim]
}
