package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/chandler"
)

// oneClassicGPU is an entry of resources that offers one GPU by the device plugin API.
const oneClassicGPU = `
- name: amd.com/gpu
  mode: DevicePlugin
  cel: device.attributes["resource.kubernetes.io"].?pciBusID.orValue("") == "0000:23:00.0"
`

// classicGPUs offers all GPUs by the device plugin API.
var classicGPUs = strings.Replace(oneClassicGPU, ` == "0000:23:00.0"`, ` != ""`, 1)

// TestModeMovesFreeDevices changes the API of an allocated GPU in the configuration. The GPU must
// move when it is released. Until then, neither API may offer it.
func TestModeMovesFreeDevices(t *testing.T) {
	const name = "pci-0000-23-00-0"
	offers(t)
	usualAgain(t)

	holder := gpuPod("dra-holder", "0000:23:00.0")
	apply(t, holder)
	running(t, "dra-holder")
	reconfigure(t, besides(t, "", oneClassicGPU))
	offeredNowhere(t, name)
	running(t, "dra-holder")

	remove(t, holder)
	until(t, "the GPU to be allocatable by its classic name", func(ctx context.Context) error {
		return allocatableIs(ctx, "amd.com/gpu", 1)
	})
	classic := probePod("classic-holder", "[wait]", "limits: {amd.com/gpu: 1}")
	apply(t, classic)
	pod := running(t, "classic-holder")
	if pod.Status.ExtendedResourceClaimStatus != nil {
		t.Error("the pod got its GPU through DRA")
	}

	reconfigure(t, usual(t))
	offeredNowhere(t, name)
	running(t, "classic-holder")

	remove(t, classic)
	until(t, "the GPU to be back in the slices", func(ctx context.Context) error {
		return offersGPUs(ctx, 8)
	})
	nothingHeld(t)
}

// TestNodeLabelMovesDevices moves a node from one API to the other by a label. Free devices must
// move about a minute after their withdrawal from DRA, and allocated devices when their pod ends. An invalid label must change nothing,
// and must cause an Event of the agent's pod.
func TestNodeLabelMovesDevices(t *testing.T) {
	offers(t)
	t.Cleanup(func() {
		moveTo(t, node.NodeName(), "")
		offers(t)
	})
	holder := gpuPod("dra-holder", "0000:23:00.0")
	apply(t, holder)
	running(t, "dra-holder")
	const moving = "pci-0000-23-00-0"
	planned := migration(t, "plan", "--to=DevicePlugin")
	if d := planned[moving]; d.Fate != "waits" || d.From != "DRA" || d.To != "DevicePlugin" || !slices.Equal(d.WaitsFor, []string{"pod default/dra-holder, claim default/dra-holder"}) {
		t.Errorf("planned of the GPU that the pod has: %+v", d)
	}
	begun := time.Now()
	moveTo(t, node.NodeName(), "DevicePlugin")
	until(t, "the free GPUs to be allocatable by their classic name", func(ctx context.Context) error {
		return allocatableIs(ctx, "amd.com/gpu", 7)
	})
	t.Logf("7 GPUs moved within %s of the label", time.Since(begun).Round(10*time.Millisecond))
	running(t, "dra-holder")
	for device, now := range migration(t, "status") {
		plan := planned[device]
		if now.To != plan.To || plan.Fate == "moves" && (now.Fate != "stays" || now.From != plan.To) || plan.Fate == "waits" && !slices.Equal(now.WaitsFor, plan.WaitsFor) {
			t.Errorf("%s: %+v, and the plan was %+v", device, now, plan)
		}
	}
	remove(t, holder)
	until(t, "all GPUs to be allocatable", func(ctx context.Context) error {
		return allocatableIs(ctx, "amd.com/gpu", 8)
	})

	moveTo(t, node.NodeName(), "dra")
	until(t, "the agent's pod to be told of the label", func(ctx context.Context) error {
		events, err := kube.EventsV1().Events(chandler.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=ConfigurationInvalid"})
		if err == nil && !slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
			return strings.Contains(e.Note, `is "dra"; want Auto, DRA, DevicePlugin or ReportOnly`)
		}) {
			err = fmt.Errorf("the events are %v", events.Items)
		}
		return err
	})
	if err := allocatableIs(within(t), "amd.com/gpu", 8); err != nil {
		t.Error(err)
	}
	moveTo(t, node.NodeName(), "DRA")
	until(t, "the GPUs to be back in the slices", func(ctx context.Context) error {
		return offersGPUs(ctx, 8)
	})
	nothingHeld(t)
}

// migrating is an entry of the output of "chandler migrate".
type migrating struct {
	Device, From, To, Fate string
	WaitsFor               []string
}

// migration returns the output of "chandler migrate" on the node, by device.
func migration(t *testing.T, args ...string) map[string]migrating {
	t.Helper()
	args = append([]string{"migrate", args[0], "-o", "json", "--host-root", chandler.HostDir, "--node-name", node.NodeName()}, args[1:]...)
	out, err := node.Command(within(t), project.Agent, args...).Output()
	if err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	var said struct{ Devices []migrating }
	if err := json.Unmarshal(out, &said); err != nil {
		t.Fatal(err)
	}
	devices := make(map[string]migrating)
	for _, d := range said.Devices {
		devices[d.Device] = d
	}
	return devices
}

// offeredNowhere waits until a GPU is in no slice, and checks that it is not allocatable by the
// device plugin API either.
func offeredNowhere(t *testing.T, name string) {
	t.Helper()
	until(t, "the GPU to be offered by neither API", func(ctx context.Context) error {
		devices, err := chandler.Devices(ctx, kube)
		if err != nil {
			return err
		}
		if _, there := devices[name]; there || countGPUs(devices) != 7 {
			return fmt.Errorf("it is in a slice, with %d GPUs", countGPUs(devices))
		}
		return allocatableIs(ctx, "amd.com/gpu", 0)
	})
}

func allocatableIs(ctx context.Context, resource corev1.ResourceName, want int64) error {
	n, err := allocatable(ctx, resource)
	if err == nil && n != want {
		err = fmt.Errorf("%d are", n)
	}
	return err
}
