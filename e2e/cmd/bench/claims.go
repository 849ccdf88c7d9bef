package main

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// namespace is the namespace of the benchmark's claims and pods.
const namespace = "default"

// atOnce is the number of requests that the benchmark makes concurrently while preparing a
// measurement.
const atOnce = 8

// newClaims creates n claims and allocates devices to them as the scheduler would. Each claim gets
// the given number of devices, counted from device number first. After the agent's last device,
// numbering starts again at 0.
func (b *bench) newClaims(ctx context.Context, a *agent, set string, first, n, devices int) ([]*drapb.Claim, error) {
	claims := make([]*drapb.Claim, n)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for i := range n {
		group.Go(func() error {
			var results []resourceapi.DeviceRequestAllocationResult
			for j := range devices {
				results = append(results, resourceapi.DeviceRequestAllocationResult{
					Request: "gpu", Driver: a.driver, Pool: b.cluster.NodeName(), Device: a.device((first + i*devices + j) % a.devices),
				})
			}
			claim, err := b.newClaim(ctx, fmt.Sprintf("%s-%s-%d", a.driver, set, i), results)
			if err != nil {
				return fmt.Errorf("make claim %d of %s: %w", i, set, err)
			}
			claims[i] = &drapb.Claim{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}
			return nil
		})
	}
	return claims, group.Wait()
}

func (b *bench) newClaim(ctx context.Context, name string, results []resourceapi.DeviceRequestAllocationResult) (*resourceapi.ResourceClaim, error) {
	api := b.kube.ResourceV1().ResourceClaims(namespace)
	claim, err := api.Create(ctx, &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name:    "gpu",
			Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: int64(len(results))},
		}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
	return api.UpdateStatus(ctx, claim, metav1.UpdateOptions{})
}

// deleteClaims deletes claims that no agent has prepared any more.
func (b *bench) deleteClaims(ctx context.Context, claims []*drapb.Claim) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for _, claim := range claims {
		group.Go(func() error {
			return b.kube.ResourceV1().ResourceClaims(claim.Namespace).Delete(ctx, claim.Name, metav1.DeleteOptions{})
		})
	}
	return group.Wait()
}
