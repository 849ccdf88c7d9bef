package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"chandler.dev/e2e/chandler"
)

// oneClassicGPU gives one GPU to the device-plugin API, as an entry of resources.
const oneClassicGPU = `
- name: amd.com/gpu
  mode: DevicePlugin
  cel: device.attributes["resource.kubernetes.io"].?pciBusID.orValue("") == "0000:23:00.0"
`

// classicGPUs gives all GPUs to the device-plugin API.
var classicGPUs = strings.Replace(oneClassicGPU, ` == "0000:23:00.0"`, ` != ""`, 1)

// A GPU that the configuration moves from one API to the other moves when it
// is free, and is offered by neither until then.
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

// offeredNowhere waits until a GPU is in no slice, and checks that it is not
// allocatable by its classic name either.
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
