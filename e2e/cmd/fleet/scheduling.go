package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
)

// The scheduler is measured with so many nodes, each with eight GPUs of each driver, in so many
// rounds.
const (
	schedulerNodes  = 50
	schedulerRounds = 3
)

// exampleDriver is the name of the example driver. Its ResourceSlices are written by this program, with
// the attributes of that driver.
const exampleDriver = "gpu.example.com"

// measureScheduler measures how many pods with a claim each the scheduler binds in a second.
func (f *fleet) measureScheduler(ctx context.Context, pods int) error {
	if err := f.addNodes(ctx, schedulerNodes); err != nil {
		return err
	}
	if err := f.start(ctx); err != nil {
		return err
	}
	for _, n := range f.nodes {
		if _, err := f.kube.ResourceV1().ResourceSlices().Create(ctx, exampleSlice(n.name), metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	for _, of := range []struct{ name, driver string }{{"fleet-chandler", chandler.Driver}, {"fleet-example", exampleDriver}} {
		if err := f.kube.Apply(ctx, fmt.Sprintf(classAndTemplate, of.name, of.driver)); err != nil {
			return err
		}
	}
	kinds := []struct{ name, template string }{
		{"without claims", ""}, {"a claim of Chandler", "fleet-chandler"}, {"a claim of the example driver", "fleet-example"},
	}
	took := make([][]time.Duration, len(kinds))
	for round := range schedulerRounds {
		for i, kind := range kinds {
			f.say("scheduler, round %d of %d: %s", round+1, schedulerRounds, kind.name)
			d, err := f.timeBinding(ctx, pods, kind.template)
			if err != nil {
				return fmt.Errorf("%s: %w", kind.name, err)
			}
			took[i] = append(took[i], d)
		}
	}
	var rows [][]string
	for i, kind := range kinds {
		slices.Sort(took[i])
		rate := func(d time.Duration) string { return fmt.Sprintf("%.1f", float64(pods)/d.Seconds()) }
		middle, last := took[i][len(took[i])/2], len(took[i])-1
		rows = append(rows, []string{kind.name, rate(middle), rate(took[i][last]) + " to " + rate(took[i][0])})
	}
	table(fmt.Sprintf("%d pods created at once, %d nodes, until all are bound:", pods, schedulerNodes), []string{"", "pods per second", "of all rounds"}, rows)
	return f.removeNodes(ctx)
}

const classAndTemplate = `
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: %[1]s}
spec:
  selectors:
  - cel: {expression: device.driver == %[2]q}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: %[1]s, namespace: default}
spec:
  spec:
    devices:
      requests:
      - {name: gpu, exactly: {deviceClassName: %[1]s}}
`

// exampleSlice returns the ResourceSlice of the example driver with eight devices.
func exampleSlice(node string) *resourceapi.ResourceSlice {
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "example-" + node}}
	slice.Spec = resourceapi.ResourceSliceSpec{Driver: exampleDriver, NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, ResourceSliceCount: 1}}
	for i := range gpusOfNode {
		slice.Spec.Devices = append(slice.Spec.Devices, resourceapi.Device{
			Name: fmt.Sprintf("gpu-%d", i),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"index": {IntValue: new(int64(i))}, "uuid": {StringValue: new(fmt.Sprintf("gpu-18db0e85-99e9-c746-8531-ffeb86328b%02x", i))},
				"model": {StringValue: new("LATEST-GPU-MODEL")}, "driverVersion": {VersionValue: new("1.0.0")},
			},
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}},
		})
	}
	return slice
}

// timeBinding creates pods at once, and returns the time until all are bound to nodes. Before it
// returns, the pods and their claims are deleted.
func (f *fleet) timeBinding(ctx context.Context, count int, template string) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	pods := f.kube.CoreV1().Pods(metav1.NamespaceDefault)
	w, err := pods.Watch(ctx, metav1.ListOptions{LabelSelector: fleetLabel})
	if err != nil {
		return 0, err
	}
	defer w.Stop()
	begin := time.Now()
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for i := range count {
		pod := newPod(fmt.Sprintf("bound-%d", i))
		if template != "" {
			pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}}
			pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
		}
		group.Go(func() error {
			_, err := pods.Create(groupCtx, pod, metav1.CreateOptions{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	if err := untilBound(ctx, w, count); err != nil {
		return 0, err
	}
	took = time.Since(begin)
	return took, f.removePods(ctx)
}

func untilBound(ctx context.Context, w watch.Interface, count int) error {
	bound := make(map[string]bool)
	for len(bound) < count {
		select {
		case event, open := <-w.ResultChan():
			pod, ok := event.Object.(*corev1.Pod)
			if !open || !ok {
				return fmt.Errorf("watch of pods ended: %v", event.Object)
			}
			if pod.Spec.NodeName != "" {
				bound[pod.Name] = true
			}
		case <-ctx.Done():
			return fmt.Errorf("%d of %d pods are bound: %w", len(bound), count, context.Cause(ctx))
		}
	}
	return nil
}

// removePods deletes all pods of the fleet, and waits until they and their claims are gone. No
// kubelet has them.
func (f *fleet) removePods(ctx context.Context) error {
	pods := f.kube.CoreV1().Pods(metav1.NamespaceDefault)
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64)}
	if err := pods.DeleteCollection(ctx, now, metav1.ListOptions{LabelSelector: fleetLabel}); err != nil {
		return err
	}
	return f.kube.Until(ctx, "pods and their claims to be gone", func(ctx context.Context) error {
		left, err := pods.List(ctx, metav1.ListOptions{LabelSelector: fleetLabel})
		if err != nil {
			return err
		}
		claims, err := f.kube.ResourceV1().ResourceClaims(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{})
		if err == nil && len(left.Items)+len(claims.Items) > 0 {
			err = fmt.Errorf("there are %d pods and %d claims", len(left.Items), len(claims.Items))
		}
		return err
	})
}

// newPod returns a pod that only pauses.
func newPod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{fleetLabel: ""}},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: new(int64(1)),
			Containers:                    []corev1.Container{{Name: "pause", Image: cluster.PauseImage, ImagePullPolicy: corev1.PullNever}},
		},
	}
}
