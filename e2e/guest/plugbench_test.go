package guest_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"chandler.dev/e2e/guest"
)

// BenchmarkPlug says how long after the kernel's first event of a change the kubelet has a new list, and the API server new
// slices, in which the device is said to be so. In turns a function in each of the two loses its driver and gets it back;
// each change is the first after some silence. It also says when the agent itself knew, so that one sees what the outlets
// add. For a hundred changes of each kind:
//
//	go test ./guest -run '^$' -bench Plug -benchtime 100x -timeout 60m
func BenchmarkPlug(b *testing.B) {
	slots := []slot{
		{address: "0000:01:00.0", port: "rp0", qemu: "edu", where: inList(eduResource)},
		{address: "0000:02:00.0", port: "rp1", qemu: "nvme", where: inSlices, device: "pci-0000-02-00-0"},
	}
	config := guest.Config{
		IOMMU: "intel", CPUs: 2, Carry: []string{"vfio-pci"}, Modules: []string{"vfio_iommu_type1"}, Programs: programs(b),
	}
	for i, s := range slots {
		config.Args = append(config.Args, "-device", fmt.Sprintf("pcie-root-port,id=%s,chassis=%d,addr=0x%x", s.port, i+1, 8+i), "-device", s.model("")+",bus="+s.port)
	}
	n := newNode(b, guest.Boot(b, config), plugConfig)
	n.Load(b, "vfio-pci", "ids=1234:11e8,1b36:0010")
	slots[0].device = n.group(b, slots[0].address)
	agent := n.agent(b)
	for _, s := range slots {
		n.offers(b, s.where, s.device, "Healthy")
	}

	outlets := map[string]string{inList(eduResource): "list", inSlices: "slices"}
	told, knew := make(map[string][]time.Duration), make(map[string][]time.Duration)
	change := func(s slot, state, script string) {
		b.Helper()
		time.Sleep(2500 * time.Millisecond)
		n.step()
		heard := len(agent.Output())
		n.Sh(b, script)
		at := n.offers(b, s.where, s.device, state)
		first, _ := eventsBefore(n.events.Output()[n.began:], at)
		told[s.where] = append(told[s.where], at.Sub(first))
		if all := saidChanged(b, agent.Output()[heard:]); len(all) > 0 {
			knew[s.where] = append(knew[s.where], lastBefore(all, at).Sub(first))
		}
	}
	for b.Loop() {
		for _, s := range slots {
			unhealthy := map[string]string{inSlices: "driver-unbound"}[s.where]
			if unhealthy == "" {
				unhealthy = "Unhealthy"
			}
			change(s, unhealthy, "echo "+s.address+" > /sys/bus/pci/drivers/vfio-pci/unbind")
			change(s, "Healthy", "echo "+s.address+" > /sys/bus/pci/drivers/vfio-pci/bind")
		}
	}
	b.ReportMetric(0, "ns/op")
	for where, outlet := range outlets {
		report(b, outlet, told[where])
		report(b, "known-before-"+outlet, knew[where])
	}
	agent.Stop(b)
}

// report reports the median, the 99th percentile and the longest of durations, in milliseconds.
func report(b *testing.B, what string, took []time.Duration) {
	b.Helper()
	if len(took) == 0 {
		return
	}
	slices.Sort(took)
	for name, at := range map[string]int{"p50": len(took) / 2, "p99": len(took) * 99 / 100, "max": len(took) - 1} {
		b.ReportMetric(float64(took[at].Milliseconds()), "ms-"+what+"-"+name)
	}
}

// lastBefore returns the last of some times, which are in order, that is not after another; the first if all are.
func lastBefore(all []time.Time, at time.Time) time.Time {
	i, _ := slices.BinarySearchFunc(all, at, func(a, b time.Time) int { return a.Compare(b) })
	return all[max(0, i-1)]
}
