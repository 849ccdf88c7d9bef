package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/chandler"
)

// TestEventsOfPods unbinds the drivers of GPUs in pods, and binds them again. The pods have their
// GPUs by a claim, by a limit that DRA serves, and by the device plugin API. Each pod must get one
// Event for each change, although the agent is replaced in between.
func TestEventsOfPods(t *testing.T) {
	offers(t)
	usualAgain(t)
	apply(t, gpuPod("told-by-claim", "0000:23:00.0"))
	running(t, "told-by-claim")
	claims := map[string]string{"told-by-claim": "pci-0000-23-00-0"} // devices by claim
	devices := map[string]string{                                    // prefixes of device names by pod
		"told-by-claim":  claims["told-by-claim"],
		"told-by-plugin": "pci-0000-a",
	}
	if has(t, "DRAExtendedResource") {
		apply(t, probePod("told-by-limit", "[wait]", "limits: {amd.com/gpu: 1}"))
		t.Cleanup(func() { deleteFirst(t, "told-by-limit") })
		status := running(t, "told-by-limit").Status.ExtendedResourceClaimStatus
		if status == nil {
			t.Fatal("the pod did not get its GPU through DRA")
		}
		device := allocated(t, status.ResourceClaimName)
		claims[status.ResourceClaimName], devices["told-by-limit"] = device, device
	}

	// The scheduler counts the GPU of that pod as one of these.
	config := besides(t, "", strings.ReplaceAll(oneClassicGPU, `== "0000:23:00.0"`, `in ["0000:a3:00.0", "0000:a4:00.0"]`))
	reconfigure(t, config)
	until(t, "two GPUs to be allocatable by their classic name", func(ctx context.Context) error {
		return allocatableIs(ctx, "amd.com/gpu", 2)
	})
	apply(t, probePod("told-by-plugin", "[wait]", "limits: {amd.com/gpu: 1}"))
	if running(t, "told-by-plugin").Status.ExtendedResourceClaimStatus != nil {
		t.Fatal("the pod got its GPU through DRA")
	}

	bind := unbind(t, append(slices.Collect(maps.Values(claims)), "pci-0000-a3-00-0", "pci-0000-a4-00-0")...)
	for pod, device := range devices {
		told(t, pod, 1, "Warning DeviceUnhealthy", device, "(driver-unbound): no driver is bound to it")
	}
	for claim, device := range claims {
		ready(t, claim, device, metav1.ConditionFalse)
		if has(t, "DRADeviceTaints") {
			tainted(t, device, "chandler.dev/driver-unbound")
		}
	}
	if has(t, "ResourceHealthStatus") {
		// The kubelet reports the health of devices in the status of these pods.
		for _, pod := range []string{"told-by-claim", "told-by-plugin"} {
			sick(t, pod)
		}
	}
	reconfigure(t, config)
	for pod, device := range devices {
		told(t, pod, 1, "Warning DeviceUnhealthy", device)
	}
	bind()
	for pod, device := range devices {
		told(t, pod, 1, "Normal DeviceRecovered", device)
		told(t, pod, 1, "Warning DeviceUnhealthy", device)
	}
	for claim, device := range claims {
		ready(t, claim, device, metav1.ConditionTrue)
	}
	for pod := range devices {
		running(t, pod)
	}
}

// deleteFirst deletes a pod before the scheduler's claim for it. [remove] deletes the claim first.
// Then the controller manager of 1.34 keeps the claim while the pod exists, and ignores the end of
// pods without claims in their spec (enqueuePod in pkg/controller/resourceclaim/controller.go).
func deleteFirst(t *testing.T, pod string) {
	t.Helper()
	background := metav1.DeletePropagationBackground
	err := kube.CoreV1().Pods(metav1.NamespaceDefault).Delete(within(t), pod, metav1.DeleteOptions{PropagationPolicy: &background})
	if err != nil && !apierrors.IsNotFound(err) {
		t.Error(err)
	}
	until(t, "pod "+pod+" to be gone", func(ctx context.Context) error {
		_, err := kube.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, pod, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return cmp.Or(err, errors.New("it is still there"))
	})
}

// allocated returns the one device that is allocated to a claim.
func allocated(t *testing.T, claim string) string {
	t.Helper()
	got, err := kube.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Get(within(t), claim, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got.Status.Allocation == nil || len(got.Status.Allocation.Devices.Results) != 1 {
		t.Fatalf("claim %s has %+v", claim, got.Status.Allocation)
	}
	return got.Status.Allocation.Devices.Results[0].Device
}

// unbind removes the drivers of PCI functions of the simulated host, together with the drivers'
// directories. The function bind restores both. It also runs at the end of the test.
func unbind(t *testing.T, devices ...string) (bind func()) {
	t.Helper()
	host := node.NodePath(chandler.HostDir)
	var aside [][2]string
	bind = func() {
		t.Helper()
		for _, moved := range slices.Backward(aside) {
			rename(t, moved[1], moved[0])
		}
		aside = nil
	}
	t.Cleanup(bind)
	for _, device := range devices {
		number := strings.Split(strings.TrimPrefix(device, "pci-"), "-")
		address := strings.Join(number[:len(number)-1], ":") + "." + number[len(number)-1]
		function := functionOf(t, address)
		// In this order, no scan finds the driver without its directories.
		for _, made := range []string{"driver", "drm"} {
			from, to := filepath.Join(function, made), filepath.Join(host, "aside-"+device+"-"+made)
			rename(t, from, to)
			aside = append(aside, [2]string{from, to})
		}
	}
	return bind
}

// functionOf returns the directory of a PCI function in the simulated host.
func functionOf(t *testing.T, address string) string {
	t.Helper()
	link := filepath.Join(node.NodePath(chandler.HostDir), "sys/bus/pci/devices", address)
	target, err := os.Readlink(link)
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(filepath.Dir(link), target)
}

// told waits until the agent has created the given number of Events for a pod, of that type and
// reason, whose notes contain all words.
func told(t *testing.T, pod string, times int, what string, words ...string) {
	t.Helper()
	until(t, fmt.Sprintf("pod %s to be told %q of %q", pod, what, words), func(ctx context.Context) error {
		of, err := kube.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return err
		}
		events, err := kube.EventsV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{
			FieldSelector: fmt.Sprintf("reportingController=%s,regarding.uid=%s", chandler.Driver, of.UID),
		})
		if err != nil {
			return err
		}
		n := 0
		var all []string
		for _, e := range events.Items {
			all = append(all, fmt.Sprintf("%s %s %s (%s)", e.Type, e.Reason, e.Note, e.ReportingInstance))
			if e.Type+" "+e.Reason == what && containsAll(e.Note, words) && e.ReportingInstance == node.NodeName() {
				n++
			}
		}
		if n != times {
			return fmt.Errorf("it was told %d times; all Events: %q", n, all)
		}
		return nil
	})
}

// ready waits until the status of a claim has the wanted condition Ready for a device.
func ready(t *testing.T, claim, device string, want metav1.ConditionStatus) {
	t.Helper()
	until(t, fmt.Sprintf("claim %s to say that Ready of %s is %s", claim, device, want), func(ctx context.Context) error {
		got, err := kube.ResourceV1().ResourceClaims(metav1.NamespaceDefault).Get(ctx, claim, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, d := range got.Status.Devices {
			if d.Driver == chandler.Driver && d.Device == device && meta.IsStatusConditionPresentAndEqual(d.Conditions, "Ready", want) {
				return nil
			}
		}
		return fmt.Errorf("it says %+v", got.Status.Devices)
	})
}

// sick waits until a device is unhealthy in the status of a pod.
func sick(t *testing.T, pod string) {
	t.Helper()
	until(t, fmt.Sprintf("the status of pod %s to say that its device is unhealthy", pod), func(ctx context.Context) error {
		got, err := kube.CoreV1().Pods(metav1.NamespaceDefault).Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, container := range got.Status.ContainerStatuses {
			for _, resource := range container.AllocatedResourcesStatus {
				for _, device := range resource.Resources {
					if device.Health == corev1.ResourceHealthStatusUnhealthy {
						return nil
					}
				}
			}
		}
		return fmt.Errorf("it says %+v", got.Status.ContainerStatuses)
	})
}

// tainted waits until a device in the slices has exactly one taint, with that key.
func tainted(t *testing.T, device, key string) {
	t.Helper()
	until(t, fmt.Sprintf("%s to have the taint %s", device, key), func(ctx context.Context) error {
		devices, err := chandler.Devices(ctx, kube)
		if err != nil {
			return err
		}
		if taints := devices[device].Taints; len(taints) != 1 || taints[0].Key != key {
			return fmt.Errorf("it has %+v", taints)
		}
		return nil
	})
}
