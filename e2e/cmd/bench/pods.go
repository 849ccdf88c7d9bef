package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"chandler.dev/e2e/cluster"
)

// somePods is the number of pods that are created at once.
const somePods = 30

// podsLabel marks the benchmark's pods.
const podsLabel = "bench.chandler.dev/pod"

// measurePods measures the time until all pods that are created at once run, without claims and
// with one claim each.
func (b *bench) measurePods(ctx context.Context) error {
	if err := b.simulate(comparedDevices, 0); err != nil {
		return err
	}
	agents := []*agent{
		b.chandlerAgent("a claim each of Chandler", comparedDevices),
		b.exampleAgent("of the example driver, limit lifted", comparedDevices, liftedLimit...),
		b.exampleAgent("of the example driver", comparedDevices),
	}
	for _, a := range agents[:2] {
		if err := b.makeTemplate(ctx, a.driver); err != nil {
			return err
		}
	}
	if _, err := b.timePods(ctx, ""); err != nil { // The first pods start slowly.
		return err
	}
	var none timings
	took := make(map[*agent]timings)
	for round := range b.rounds {
		b.say("round %d of %d", round+1, b.rounds)
		t, err := b.timePods(ctx, "")
		if err != nil {
			return err
		}
		none = append(none, t)
		for _, a := range agents {
			if t, err = b.timePodsOf(ctx, a); err != nil {
				return err
			}
			took[a] = append(took[a], t)
		}
	}
	rows := [][]string{{"without claims", seconds(none.p50()), seconds(none.percentile(0)) + " to " + seconds(none.percentile(100)), ""}}
	for _, a := range agents {
		t := took[a]
		more := 100 * (float64(t.p50())/float64(none.p50()) - 1)
		rows = append(rows, []string{a.name, seconds(t.p50()), seconds(t.percentile(0)) + " to " + seconds(t.percentile(100)), fmt.Sprintf("%.0f %%", more)})
	}
	b.table(fmt.Sprintf("%d pods created at once, until all run, in seconds:", somePods), []string{"", "p50", "of all rounds", "longer"}, rows)
	return nil
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f", d.Seconds()) }

// makeTemplate creates a DeviceClass and a ResourceClaimTemplate for one device of a driver.
func (b *bench) makeTemplate(ctx context.Context, driver string) error {
	return b.kube.Apply(ctx, fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: bench.%[1]s}
spec:
  selectors:
  - cel: {expression: device.driver == %[1]q}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: bench.%[1]s, namespace: %[2]s}
spec:
  spec:
    devices:
      requests:
      - {name: gpu, exactly: {deviceClassName: bench.%[1]s}}
`, driver, namespace))
}

// timePodsOf starts an agent, times pods with claims of its driver, and stops the agent.
func (b *bench) timePodsOf(ctx context.Context, a *agent) (took time.Duration, err error) {
	r, err := b.start(ctx, a)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, r.stop(), b.forget(ctx, a)) }()
	return b.timePods(ctx, "bench."+a.driver)
}

// timePods creates pods at once and returns the time until all pods ran. Before it returns, the
// pods and their claims are deleted.
func (b *bench) timePods(ctx context.Context, template string) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	pods := b.kube.CoreV1().Pods(namespace)
	w, err := pods.Watch(ctx, metav1.ListOptions{LabelSelector: podsLabel})
	if err != nil {
		return 0, err
	}
	defer w.Stop()
	began := time.Now()
	group, create := errgroup.WithContext(ctx)
	for i := range somePods {
		group.Go(func() error {
			_, err := pods.Create(create, newPod(i, template), metav1.CreateOptions{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	if err := untilAllRun(ctx, w); err != nil {
		return 0, err
	}
	took = time.Since(began)
	return took, b.removePods(ctx)
}

// untilAllRun returns when all pods are ready.
func untilAllRun(ctx context.Context, w watch.Interface) error {
	running := make(map[string]bool)
	for len(running) < somePods {
		select {
		case event, open := <-w.ResultChan():
			pod, ok := event.Object.(*corev1.Pod)
			if !open || !ok {
				return fmt.Errorf("watch of pods ended: %v", event.Object)
			}
			for _, condition := range pod.Status.Conditions {
				if condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue {
					running[pod.Name] = true
				}
			}
		case <-ctx.Done():
			return fmt.Errorf("%d of %d pods run: %w", len(running), somePods, context.Cause(ctx))
		}
	}
	return nil
}

// newPod returns a pod that only pauses, with a claim from the template, or without a claim if the
// template is "".
func newPod(i int, template string) *corev1.Pod {
	second := int64(1)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("bench-", i), Labels: map[string]string{podsLabel: ""}},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &second,
			Containers:                    []corev1.Container{{Name: "pause", Image: cluster.PauseImage, ImagePullPolicy: corev1.PullNever}},
		},
	}
	if template != "" {
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}}
		pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	}
	return pod
}

// removePods deletes the pods and waits until they and their claims are gone.
func (b *bench) removePods(ctx context.Context) error {
	pods := b.kube.CoreV1().Pods(namespace)
	if err := pods.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: podsLabel}); err != nil {
		return err
	}
	return b.kube.Until(ctx, "pods and their claims to be gone", func(ctx context.Context) error {
		left, err := pods.List(ctx, metav1.ListOptions{LabelSelector: podsLabel})
		if err != nil {
			return err
		}
		var claims *resourceapi.ResourceClaimList
		if claims, err = b.kube.ResourceV1().ResourceClaims(namespace).List(ctx, metav1.ListOptions{}); err != nil {
			return err
		}
		if len(left.Items)+len(claims.Items) > 0 {
			return fmt.Errorf("there are %d pods and %d claims", len(left.Items), len(claims.Items))
		}
		return nil
	})
}
