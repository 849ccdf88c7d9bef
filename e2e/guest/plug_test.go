package guest_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"chandler.dev/e2e/guest"
)

// plugConfig offers one kind of device by each API.
const plugConfig = `apiVersion: chandler.dev/v1alpha1
kind: DriverConfig
mode: DRA
resources:
- name: example.com/edu
  mode: DevicePlugin
  cel: device.attributes["chandler.dev"].pciVendor == "1234"
`

const eduResource = "example.com/edu"

// A slot is a port for a device that is plugged, removed and unbound.
type slot struct {
	address, port, qemu string
	where, device       string // where and under which name the device is offered; in lists by its IOMMU group
	held                bool   // the device is allocated
}

// TestPlug removes devices under an agent in each possible way, and brings them back: free devices,
// a device of a container, and a device of a claim. It reports the delay between the kernel's
// events and the updates of the kubelet and the API server. The delay depends on the machine and is
// not asserted.
func TestPlug(t *testing.T) {
	guest.Long(t)
	slots := []slot{
		{"0000:01:00.0", "rp0", "edu", inList(eduResource), "", false},
		{"0000:02:00.0", "rp1", "edu", inList(eduResource), "", true},
		{"0000:03:00.0", "rp2", "nvme", inSlices, "pci-0000-03-00-0", false},
		{"0000:04:00.0", "rp3", "nvme", inSlices, "pci-0000-04-00-0", true},
	}
	config := guest.Config{
		IOMMU: "intel", CPUs: 2, Carry: []string{"vfio-pci"}, Modules: []string{"vfio_iommu_type1"}, Programs: programs(t),
	}
	for i, s := range slots {
		config.Args = append(config.Args, "-device", fmt.Sprintf("pcie-root-port,id=%s,chassis=%d,addr=0x%x", s.port, i+1, 8+i), "-device", s.model("")+",bus="+s.port)
	}
	n := newNode(t, guest.Boot(t, config), plugConfig)
	n.Load(t, "vfio-pci", "ids=1234:11e8,1b36:0010") // binds devices as they are plugged in
	for i, s := range slots {
		if s.where != inSlices {
			slots[i].device = n.group(t, s.address)
		}
	}
	agent := n.agent(t)
	for _, s := range slots {
		n.offers(t, s.where, s.device, "Healthy")
	}
	n.granted(t, "allocate", eduResource, slots[1].device)
	n.granted(t, "prepare", slots[3].device+".first")

	for _, s := range slots {
		t.Run(s.qemu+map[bool]string{true: " with a consumer", false: " without a consumer"}[s.held], func(t *testing.T) { n.plug(t, s) })
	}

	t.Run("gone while it was had", func(t *testing.T) {
		s := slots[3]
		deleted := n.Events("DEVICE_DELETED")
		n.QMP(t, "device_del", map[string]any{"id": s.port + "-device"})
		<-deleted
		n.granted(t, "unprepare", s.device+".first")
		n.QMP(t, "device_add", s.plugged("other"))
		n.granted(t, "prepare", s.device+".second")
		n.granted(t, "unprepare", s.device+".second")
	})
	agent.Stop(t)
}

// group returns the IOMMU group of a function.
func (n *node) group(t testing.TB, address string) string {
	t.Helper()
	return strings.TrimSpace(n.Sh(t, "basename $(readlink /sys/bus/pci/devices/"+address+"/iommu_group)"))
}

// model returns the slot's device in the syntax of QEMU's arguments.
func (s slot) model(serial string) string {
	text := s.qemu + ",id=" + s.port + "-device"
	if s.qemu == "nvme" {
		text += ",serial=" + s.port + serial
	}
	return text
}

// plugged returns the slot's device in the syntax of QMP.
func (s slot) plugged(serial string) map[string]any {
	device := map[string]any{"bus": s.port}
	for i, part := range strings.Split(s.model(serial), ",") {
		name, value, found := strings.Cut(part, "=")
		if i == 0 && !found {
			name, value = "driver", part
		}
		device[name] = value
	}
	return device
}

// plug removes the device and brings it back.
func (n *node) plug(t *testing.T, s slot) {
	dir := "/sys/bus/pci/devices/" + s.address
	deleted := n.Events("DEVICE_DELETED")
	var took []time.Duration
	change := func(what, state string, do func()) {
		t.Helper()
		time.Sleep(2500 * time.Millisecond) // so that each is the first event after a while
		n.step()
		do()
		at := n.offers(t, s.where, s.device, state)
		first, last := eventsBefore(n.events.Output()[n.began:], at)
		took = append(took, at.Sub(last))
		t.Logf("%s: %q %v after the kernel's first event, %v after the last one before", what, state, at.Sub(first).Round(time.Millisecond), at.Sub(last).Round(time.Millisecond))
	}
	gone, unbound, back := "Unhealthy", "Unhealthy", "Healthy" // IDs leave lists only later
	if s.where == inSlices {
		gone, unbound = "", "driver-unbound"
		if s.held {
			gone = "gone"
		}
	}
	again := func(why string) { // an allocated device is not allocated again
		if s.held {
			n.refused(t, why, "prepare", "pci-"+strings.NewReplacer(":", "-", ".", "-").Replace(s.address)+".again")
		}
	}
	change("unbound", unbound, func() { n.Sh(t, "echo "+s.address+" > "+dir+"/driver/unbind") })
	again("is missing")
	change("bound", back, func() { n.Sh(t, "echo "+s.address+" > /sys/bus/pci/drivers/vfio-pci/bind") })
	change("removed", gone, func() { n.Sh(t, "echo 1 > "+dir+"/remove") })
	again("is gone")
	change("found by a rescan", back, func() { n.Sh(t, "echo 1 > /sys/bus/pci/rescan") })
	again("in use by")
	change("unplugged", gone, func() {
		n.QMP(t, "device_del", map[string]any{"id": s.port + "-device"})
		<-deleted
	})
	n.never(t, s.where, s.device)
	again("is gone")
	change("plugged in", back, func() { n.QMP(t, "device_add", s.plugged("")) })
	again("in use by")
	slices.Sort(took)
	t.Logf("of %d steps: median %v, most %v", len(took), took[len(took)/2].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
}
