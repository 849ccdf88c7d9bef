package agent

import (
	"cmp"
	"context"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/driver"
	"chandler.dev/internal/podevents"
)

// tellPods tells pods about the health of their devices, once this is the active
// instance.
func (a *agent) tellPods(ctx context.Context) {
	if !a.waitActive(ctx) {
		return
	}
	teller := podevents.Teller{
		Client: a.StatusClient,
		Node:   a.NodeName,
		File:   filepath.Join(a.StateDir, "events.json"),
		Files:  a.files(),
		InUse: func() ([]podevents.Device, bool) {
			settled := a.settled.Load()
			if settled == nil || !a.ready() {
				return nil, false
			}
			return devicesInUse(settled, a.gone(), a.driver.InUse(settled), a.classic.InUse()), true
		},
		Pods: a.podsWithClaims,
	}
	teller.Run(ctx, a.resaid)
}

// devicesInUse returns the devices that claims or pods have, in the order of their
// names, with their health. If a device is gone for one claim and there for another,
// the gone one comes first. The model is that of the device that is there.
func devicesInUse(settled *discovery.Snapshot, gone resourceapi.DeviceTaintEffect, claims []driver.Use, pods map[string][]types.NamespacedName) []podevents.Device {
	var devices []podevents.Device
	for _, use := range claims {
		devices = append(devices, podevents.Device{Name: use.Device, Health: use.Health, Claims: use.Claims})
	}
	for name, who := range pods {
		of := podevents.Device{Name: name, Health: settled.Gone.Health(name, gone), Pods: who}
		if d, found := settled.Lookup(name); found {
			of.Health = d.Health
		}
		devices = append(devices, of)
	}
	slices.SortStableFunc(devices, func(a, b podevents.Device) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(order(a.Health), order(b.Health)))
	})
	for i := range devices {
		of := &devices[i]
		if d, found := settled.Lookup(of.Name); found && of.Health.Key() != discovery.ConditionGone {
			of.Model = d.Attributes.String("model")
		}
	}
	return devices
}

// order says what a pod is told first of a device that it has twice.
func order(h discovery.Health) int {
	if h.Key() == discovery.ConditionGone {
		return 0
	}
	return 1
}

// podsWithClaims asks the API server for the node's pods that have not ended, and
// for the claims that they refer to.
func (a *agent) podsWithClaims(ctx context.Context) ([]podevents.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	listed, err := podsOf(ctx, a.Client, a.NodeName)
	if err != nil {
		return nil, err
	}
	var pods []podevents.Pod
	for i := range listed {
		pod := &listed[i]
		if ended(pod) {
			continue
		}
		pods = append(pods, podevents.Pod{
			NamespacedName: types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name},
			UID:            pod.UID,
			Claims:         claimsOf(pod),
		})
	}
	return pods, nil
}

// ended reports whether all containers of the pod have ended for good.
func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}
