package reclaim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/ledger/allocation"
)

var errUnknownPod = errors.New("its previous pods are unknown")

// open returns the process that has a device open, or "". unseen is the reason why there may be an
// invisible one.
func open(uses inuse.Uses) (why string, unseen error) {
	for _, use := range uses {
		if use.ReadError == nil {
			return use.Object + ": " + use.How, nil
		}
		unseen = use.ReadError
	}
	return "", unseen
}

// unknownUse returns an error if a device is open in a pod that may be an unknown consumer of a
// record's owner. These pods exist:
//   - A pod joined a claim between two lists of the kubelet. If the pod was deleted by force since,
//     the API server does not list it either. A kubelet up to 1.36 starts a pod with a claim that is
//     being unprepared, without a call; see [ledger.Ledger.End].
//   - A pod got the device's ID, and the kubelet lost its checkpoint before PodResources listed the
//     pod with the ID. The kubelet then allocates the ID again while the pod runs (Allocate does not
//     name the pod: ContainerAllocateRequest in k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1).
//
// Other pods may have the device open as well, such as monitors.
func (c *Config) unknownUse(ctx context.Context, r *record, d discovery.Device) error {
	if c.PodsOf == nil {
		return nil
	}
	if why, unseen := open(c.Finder.UnlistedPodUses(d, nil)); why == "" {
		return unseen
	}
	ctx, cancel := context.WithTimeout(ctx, c.Limit)
	defer cancel()
	pods, err := c.PodsOf(ctx)
	if err != nil {
		return fmt.Errorf("the pods of the node are unknown: %w", err)
	}
	others := make([]types.UID, 0, len(pods))
	for name, pod := range pods {
		if !r.mayBeOf(name, pod) {
			others = append(others, pod.UID)
		}
	}
	why, unseen := open(c.Finder.UnlistedPodUses(d, others))
	if why != "" {
		return fmt.Errorf("a pod that was not known as its consumer: %s", why)
	}
	return unseen
}

// mayBeOf reports whether a pod may have been a consumer of a record's owner: the pod names the
// claim, or requests the resource.
func (r *record) mayBeOf(name types.NamespacedName, pod Pod) bool {
	if r.Owner.API == discovery.ModeDevicePlugin {
		return slices.Contains(pod.Resources, allocation.GrantResource(r.Key))
	}
	return name.Namespace == r.Owner.Namespace && slices.Contains(pod.Claims, r.Owner.Name)
}

// unseenContainers are containers of ended owners that may go on unseen although the next container
// has the device. The kubelet allocates the device of a pod that was deleted by force while the
// containers of that pod still run.
type unseenContainers struct {
	mu    sync.Mutex
	until map[string]time.Time // by device
}

// note records that containers of an earlier owner of a device may go on for a while.
func (u *unseenContainers) note(device string, left time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(u.until, func(_ string, until time.Time) bool { return now.After(until) })
	if until := now.Add(left); until.After(u.until[device]) {
		u.until[device] = until
	}
}

// remaining returns for how long containers of earlier owners of a device may go on.
func (u *unseenContainers) remaining(device string) time.Duration {
	u.mu.Lock()
	defer u.mu.Unlock()
	return time.Until(u.until[device])
}
