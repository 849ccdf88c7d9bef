package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/chandler"
)

// imexDir is the node's directory of the host with IMEX channels.
const imexDir = "/var/lib/chandler/imex"

// imexHost is a host with a GPU and three IMEX channels.
const imexHost = `An H100 with IMEX channels.

-- proc/devices --
Character devices:
  1 mem
195 nvidia
503 nvidia-caps-imex-channels

Block devices:
-- proc/driver/nvidia/gpus/0000:00:00.0/information --
Model: 		 NVIDIA H100 80GB HBM3
GPU UUID: 	 GPU-5d2c1f1b-8a41-4e0b-9c37-0b6f3d9a0000
Device Minor: 	 0
GPU Excluded:	 No
-- sys/module/nvidia/version --
570.86.15
-- sys/bus/pci/devices/0000:00:00.0 -> ../../../devices/pci0000:00/0000:00:00.0 --
-- sys/devices/pci0000:00/0000:00:00.0/vendor --
0x10de
-- sys/devices/pci0000:00/0000:00:00.0/device --
0x2330
-- sys/devices/pci0000:00/0000:00:00.0/class --
0x030200
-- sys/devices/pci0000:00/0000:00:00.0/driver -> ../../../bus/pci/drivers/nvidia --
-- sys/bus/pci/drivers/nvidia/bind --
-- dev/nvidiactl c 195:255 --
-- dev/nvidia0 c 195:0 --
-- dev/nvidia-caps-imex-channels/channel0 c 503:0 --
-- dev/nvidia-caps-imex-channels/channel1 c 503:1 --
-- dev/nvidia-caps-imex-channels/channel2 c 503:2 --
-- dev/null c 1:3 --
-- end --
`

// TestIMEXChannels allocates the IMEX channels of a node, which are one device with a capacity. Each
// pod must get another channel, and the channel of a pod that has ended must go to the pod that waits.
func TestIMEXChannels(t *testing.T) {
	if !has(t, "DRAConsumableCapacity") {
		t.Skip("the API server drops the capacity of shared devices, so that each channel is a device")
	}
	const channels = 3
	layOutMachine(t, imexDir, imexHost)
	t.Cleanup(func() {
		if err := project.Stand(within(t), kube, chandler.HostDir); err != nil {
			t.Error(err)
		}
		offers(t)
	})
	if err := project.Stand(within(t), kube, imexDir); err != nil {
		t.Fatal(err)
	}
	until(t, "the channels to be one device", func(ctx context.Context) error {
		devices, err := chandler.Devices(ctx, kube)
		if err != nil {
			return err
		}
		for name, device := range devices {
			if capacity, found := device.Capacity["shares"]; strings.Contains(name, "imex") && found && capacity.Value.Value() == channels {
				return nil
			}
		}
		return fmt.Errorf("there are %+v", devices)
	})
	var pods []string
	byChannel := make(map[string]string)
	for i := range channels {
		name := fmt.Sprintf("imex-%d", i)
		pods = append(pods, name)
		apply(t, imexPod(name))
		running(t, name)
		channel := channelOf(t, name)
		if other := byChannel[channel]; other != "" {
			t.Fatalf("pods %s and %s have %s", name, other, channel)
		}
		byChannel[channel] = name
	}
	apply(t, imexPod("imex-more"))
	waits(t, "imex-more")
	freed := channelOf(t, pods[1])
	remove(t, imexPod(pods[1]))
	running(t, "imex-more")
	if got := channelOf(t, "imex-more"); got != freed {
		t.Errorf("it has %s, and %s was free", got, freed)
	}
	for _, name := range slices.Concat(pods, []string{"imex-more"}) {
		remove(t, imexPod(name))
	}
	nothingHeld(t)
}

// imexPod returns a pod and its claim for a channel. The pod runs until it is deleted.
func imexPod(name string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %[1]s}
spec:
  devices:
    requests:
    - name: imex
      exactly: {deviceClassName: nvidia-imex.chandler.dev}
---
%[2]s
  resourceClaims: [{name: imex, resourceClaimName: %[1]s}]
`, name, strings.TrimSpace(probePod(name, "[devices, wait]", "claims: [{name: imex}]")))
}

// channelOf returns the device node of the channel in a running pod.
func channelOf(t *testing.T, pod string) (channel string) {
	t.Helper()
	until(t, "a channel in pod "+pod, func(ctx context.Context) error {
		log, err := kube.Logs(ctx, metav1.NamespaceDefault, pod, "")
		if err != nil {
			return err
		}
		channel = ""
		for line := range strings.Lines(log) {
			if _, node, found := strings.Cut(line, " /dev/nvidia-caps-imex-channels/"); found {
				if channel != "" {
					return errors.New("it has several")
				}
				channel = strings.TrimSpace(node)
			}
		}
		if channel == "" {
			return fmt.Errorf("it printed:\n%s", log)
		}
		return nil
	})
	return channel
}
