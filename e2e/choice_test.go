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

// TestIMEXChannels allocates the IMEX channels of a node.
func TestIMEXChannels(t *testing.T) {
	testChoice(t, choice{
		dir: imexDir, host: imexHost, device: "nvidia-imex-channels", class: "nvidia-imex.chandler.dev", count: 3, prefix: " /dev/nvidia-caps-imex-channels/",
	})
}

// choice is a host with interchangeable devices.
type choice struct {
	dir, host string
	device    string // the common name in ResourceSlices
	class     string
	count     int
	prefix    string // of the line that a container prints, before the name of its device
}

// testChoice allocates interchangeable devices, which are one device with a capacity. Each pod must get
// another device, and the device of a pod that has ended must go to the pod that waits.
func testChoice(t *testing.T, c choice) {
	t.Helper()
	if !has(t, "DRAConsumableCapacity") {
		t.Skip("the API server drops the capacity of shared devices, so that each device is published")
	}
	layOutMachine(t, c.dir, c.host)
	t.Cleanup(func() {
		if err := project.Stand(within(t), kube, chandler.HostDir); err != nil {
			t.Error(err)
		}
		offers(t)
	})
	if err := project.Stand(within(t), kube, c.dir); err != nil {
		t.Fatal(err)
	}
	until(t, c.device+" to be one device", func(ctx context.Context) error {
		devices, err := chandler.Devices(ctx, kube)
		if err != nil {
			return err
		}
		if capacity := devices[c.device].Capacity["shares"]; capacity.Value.Value() != int64(c.count) {
			return fmt.Errorf("there are %+v", devices)
		}
		return nil
	})
	var pods []string
	byDevice := make(map[string]string)
	for i := range c.count {
		name := fmt.Sprintf("choice-%d", i)
		pods = append(pods, name)
		apply(t, c.pod(name))
		running(t, name)
		device := c.chosen(t, name)
		if other := byDevice[device]; other != "" {
			t.Fatalf("pods %s and %s have %s", name, other, device)
		}
		byDevice[device] = name
	}
	apply(t, c.pod("choice-more"))
	waits(t, "choice-more")
	freed := c.chosen(t, pods[1])
	remove(t, c.pod(pods[1]))
	running(t, "choice-more")
	if got := c.chosen(t, "choice-more"); got != freed {
		t.Errorf("it has %s, and %s was free", got, freed)
	}
	for _, name := range slices.Concat(pods, []string{"choice-more"}) {
		remove(t, c.pod(name))
	}
	nothingHeld(t)
}

// pod returns a pod and its claim for one of the devices. The pod runs until it is deleted.
func (c choice) pod(name string) string {
	return fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %[1]s}
spec:
  devices:
    requests:
    - name: device
      exactly: {deviceClassName: %[2]s}
---
%[3]s
  resourceClaims: [{name: device, resourceClaimName: %[1]s}]
`, name, c.class, strings.TrimSpace(probePod(name, "[env, devices, wait]", "claims: [{name: device}]")))
}

// chosen returns the device in a running pod.
func (c choice) chosen(t *testing.T, pod string) (device string) {
	t.Helper()
	until(t, "a device in pod "+pod, func(ctx context.Context) error {
		log, err := kube.Logs(ctx, metav1.NamespaceDefault, pod, "")
		if err != nil {
			return err
		}
		device = ""
		for line := range strings.Lines(log) {
			if _, name, found := strings.Cut(line, c.prefix); found {
				if device != "" {
					return errors.New("it has several")
				}
				device = strings.TrimSpace(name)
			}
		}
		if device == "" {
			return fmt.Errorf("it printed:\n%s", log)
		}
		return nil
	})
	return device
}

// functionsDir is the node's directory of the host with virtual functions.
const functionsDir = "/var/lib/chandler/functions"

// functionsHost returns a host with a network adapter that has a number of virtual functions, each with
// an interface.
func functionsHost(count int) string {
	var b strings.Builder
	b.WriteString("An adapter with virtual functions.\n\n-- proc/devices --\nCharacter devices:\n  1 mem\n\nBlock devices:\n-- proc/driver/snd-page-alloc --\n")
	add := func(address, id, driver, iface string) {
		dir := "sys/devices/pci0000:00/" + address
		fmt.Fprintf(&b, "-- sys/bus/pci/devices/%s -> ../../../devices/pci0000:00/%[1]s --\n", address)
		fmt.Fprintf(&b, "-- %s/vendor --\n0x8086\n-- %[1]s/device --\n0x%s\n-- %[1]s/class --\n0x020000\n", dir, id)
		fmt.Fprintf(&b, "-- %s/driver -> ../../../bus/pci/drivers/%s --\n", dir, driver)
		fmt.Fprintf(&b, "-- sys/class/net/%s -> ../../devices/pci0000:00/%s/net/%[1]s --\n", iface, address)
		fmt.Fprintf(&b, "-- %s/net/%s/type --\n1\n-- %[1]s/net/%[2]s/device -> ../../../%[3]s --\n", dir, iface, address)
	}
	add("0000:00:10.0", "1592", "ice", "ens1f0")
	for i := range count {
		address := fmt.Sprintf("0000:00:11.%d", i)
		add(address, "1889", "iavf", fmt.Sprintf("ens1f0v%d", i))
		fmt.Fprintf(&b, "-- sys/devices/pci0000:00/%s/physfn -> ../0000:00:10.0 --\n", address)
		fmt.Fprintf(&b, "-- sys/devices/pci0000:00/0000:00:10.0/virtfn%d -> ../%s --\n", i, address)
	}
	b.WriteString("-- sys/bus/pci/drivers/iavf/bind --\n-- dev/null c 1:3 --\n-- end --\n")
	return b.String()
}

// TestVirtualFunctions allocates the virtual functions of a network adapter.
func TestVirtualFunctions(t *testing.T) {
	const count = 3
	testChoice(t, choice{
		dir: functionsDir, host: functionsHost(count), device: "pci-0000-00-10-0-vfs-iavf", class: "sriovnet.chandler.dev", count: count, prefix: "env PCIDEVICE=",
	})
}
