package guest_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"chandler.dev/e2e/guest"
)

// BenchmarkPlug measures the time between the kernel's first event of a change and the new list in
// the kubelet or the new slices in the API server. In turns a function of each API loses its driver
// and gets it back; each change is the first after some silence. The benchmark also reports when
// the agent itself found the change, which shows the delay of the outputs. For a hundred changes of
// each kind:
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

// report reports the median, the 99th percentile and the maximum of durations, in milliseconds.
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

// lastBefore returns the last of some sorted times that is not after at, or the first one if all
// are.
func lastBefore(all []time.Time, at time.Time) time.Time {
	i, _ := slices.BinarySearchFunc(all, at, func(a, b time.Time) int { return a.Compare(b) })
	return all[max(0, i-1)]
}
