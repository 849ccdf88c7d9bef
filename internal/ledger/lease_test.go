package ledger

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/ledger/stocktest"
	"chandler.dev/internal/overdue"
)

func all(silicon string) allocation.Change {
	return allocation.Change{Name: silicon, API: classic, Devices: []allocation.Hold{allocation.SiliconHold(silicon)}}
}

// A lease is refused until the devices of containers are known, and while a consumer of either API
// has the device. No consumer gets the device before the lease ends.
func TestLease(t *testing.T) {
	k := newKubelet(t, Config{}, "a", "b")
	if _, b := k.Leases.LeaseDevices(all("a"), k.stock); b == nil {
		t.Error("leased before it is known what containers have")
	}
	k.says(podsSay(true, map[string][]string{"pod main": {"other/gpu", "none"}}))
	k.mustGive("b")
	if _, b := k.Leases.LeaseDevices(all("b"), k.stock); b == nil {
		t.Error("leased while a container has it")
	}
	lease, b := k.Leases.LeaseDevices(all("a"), k.stock)
	if b != nil {
		t.Fatal(b)
	}
	if err := k.ReconcileFiles(t.Context()); err != nil {
		t.Error(err)
	}
	if err := k.give("a"); err == nil || !strings.Contains(err.Error(), "the agent, which is changing it") {
		t.Errorf("a container gets it: %v", err)
	}
	if err := k.AllocateClaim(stocktest.Claim("c", stocktest.NewGPU("a", 128)), allocation.Allocated, k.stock); err == nil || !strings.Contains(err.Error(), "the agent, which is changing it") {
		t.Errorf("a claim gets it: %v", err)
	}
	for _, api := range []discovery.Mode{dra, classic} {
		if who := k.View(k.stock).OwnerOf(api, "a"); (who != "") != (api == classic) {
			t.Errorf("by API %s it is in use by %q", api, who)
		}
	}
	lease.Release()
	k.mustGive("a")
}

// A lease on a device blocks the parts of its physical device that compete with the device, such as
// the other functions of its IOMMU group, but no other parts, such as other virtual functions.
func TestLeaseOfDevice(t *testing.T) {
	for _, classicHas := range []bool{false, true} {
		k := newKubelet(t, Config{}, "vf1", "vf2", "vf3")
		for name, d := range k.stock {
			d.PartOf = &discovery.Silicon{Name: "pf"}
			k.stock[name] = d
		}
		k.stock["one"], k.stock["two"] = stocktest.NewPart("iommu-group-7", "one", 8), stocktest.NewPart("iommu-group-7", "two", 8)
		k.says(podsSay(true, nil))
		has := func(device string) error {
			if classicHas {
				return k.give(device)
			}
			return k.AllocateClaim(stocktest.Claim(device, k.stock[device]), allocation.Allocated, k.stock)
		}
		if err := has("vf2"); err != nil {
			t.Fatal(err)
		}
		of := func(device string) allocation.Change {
			return allocation.Change{Name: device, API: dra, Devices: []allocation.Hold{allocation.DeviceHold(device, k.stock[device].PartOf.Name)}}
		}
		if _, blocked := k.Leases.LeaseDevices(of("vf2"), k.stock); blocked == nil {
			t.Error("leased while a consumer has it")
		}
		lease, blocked := k.Leases.LeaseDevices(of("vf1"), k.stock)
		if blocked != nil {
			t.Fatal(blocked)
		}
		if err := has("vf1"); err == nil || !strings.Contains(err.Error(), "the agent, which is changing it") {
			t.Errorf("a consumer gets it: %v", err)
		}
		if err := has("vf3"); err != nil {
			t.Errorf("its sibling: %v", err)
		}
		lease.Release()
		if _, blocked := k.Leases.LeaseDevices(of("one"), k.stock); blocked != nil {
			t.Fatal(blocked)
		}
		if err := has("two"); err == nil {
			t.Error("a consumer gets another function of its group")
		}
	}
}

// A container may have got a device just before the configuration excluded it. A change of its
// function is refused although the device is no longer among the present devices.
func TestLeaseOfExcludedDevice(t *testing.T) {
	const name, function = "pci-0000-02-00-0", "sys/devices/pci0000:00/0000:02:00.0"
	k := newKubelet(t, Config{}, name)
	k.says(podsSay(true, nil))
	change := allocation.Change{Name: "driver", API: dra, Devices: exclusion.HoldsOn(stocktest.Stock{}, function)}
	lease, b := k.Leases.LeaseDevices(change, stocktest.Stock{})
	if b != nil {
		t.Fatal(b)
	}
	if err := k.give(name); err == nil || !strings.Contains(err.Error(), "the agent, which is changing it") {
		t.Errorf("a container gets it: %v", err)
	}
	lease.Release()
	k.mustGive(name)
	if _, b := k.Leases.LeaseDevices(change, stocktest.Stock{}); b == nil {
		t.Error("leased while a container has it")
	}
}

// A lease on all devices of a change is refused while a claim has one of them, whatever physical
// device the claim recorded. So the virtual functions of an adapter are not removed while they are
// parts of an IOMMU group.
func TestLeaseOfRecordedSilicon(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(inGroup("vf0"), inGroup("vf1"))
	pod := stocktest.Claim("pod", s["vf0"])
	b.mustGive(pod, s)
	removal := allocation.Change{Name: "pf", Devices: []allocation.Hold{allocation.SiliconHold("pf"), allocation.DeviceHold("vf0", "pf"), allocation.DeviceHold("vf1", "pf")}}
	if _, blocked := b.Leases.LeaseDevices(removal, s); blocked == nil {
		t.Error("all virtual functions of pf can be removed, and claim pod has vf0")
	}
	if err := b.End(pod.UID, s); err != nil {
		t.Fatal(err)
	}
	if _, blocked := b.Leases.LeaseDevices(removal, s); blocked != nil {
		t.Error(blocked)
	}
}

// A consumer does not block the change of a device on its behalf, and no other consumer may have
// the device.
func TestLeaseForConsumer(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(inGroup("f0"), inGroup("f1"))
	vm := stocktest.Claim("vm", s["f0"])
	b.mustGive(vm, s)
	group := allocation.Change{Name: "f0", Devices: []allocation.Hold{allocation.DeviceHold("f0", ""), allocation.DeviceHold("f1", "")}}
	if _, blocked := b.Leases.LeaseDevices(group, s); blocked == nil {
		t.Error("leased for no consumer")
	}
	group.Consumer, group.Previous = vm.Key(), allocation.Owner{API: dra, Namespace: "default", Name: "another", UID: vm.UID}
	if _, blocked := b.Leases.LeaseDevices(group, s); blocked == nil {
		t.Error("leased for another owner")
	}
	group.Previous = allocation.Owner{}
	outer, blocked := b.Leases.LeaseDevices(group, s)
	if blocked != nil {
		t.Fatal(blocked)
	}
	if err := b.AllocateClaim(stocktest.Claim("other", s["f1"]), allocation.Allocated, s); err == nil {
		t.Error("another claim gets a function that is being changed")
	}
	inner, blocked := b.Leases.LeaseDevices(allocation.Change{Name: "inner", Consumer: vm.Key(), Devices: group.Devices, Functions: []discovery.DeviceKey{{Function: "0000:03:00.0"}}}, s)
	if blocked != nil {
		t.Fatalf("leased by the same consumer once more: %v", blocked)
	}
	inner.Release()
	outer.Release()
}

// A function has at most one lease at a time, and AwaitLease waits for the previous lease to end.
func TestLeaseOfFunction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		s := stocktest.New(stocktest.NewGPU("gpu-0", 128))
		function := discovery.DeviceKey{Function: "0000:03:00.0", Inode: 7}
		of := func(name string) allocation.Change {
			return allocation.Change{Name: name, Functions: []discovery.DeviceKey{function}}
		}
		first, blocked := b.Leases.LeaseDevices(of("first"), s)
		if blocked != nil || b.Leases.LeaseOn(function) == "" || b.Leases.LeaseOn(discovery.DeviceKey{Function: "0000:04:00.0"}) != "" {
			t.Fatal(blocked)
		}
		if _, blocked := b.Leases.LeaseDevices(of("second"), s); blocked == nil || blocked.Kind != exclusion.Changing {
			t.Errorf("leased twice: %v", blocked)
		}
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := b.Leases.AwaitLease(short, of("second"), always(s)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("waited for: %v", err)
		}
		time.AfterFunc(time.Minute, first.Release)
		began := time.Now()
		second, err := b.Leases.AwaitLease(t.Context(), of("second"), always(s))
		if err != nil || time.Since(began) != time.Minute {
			t.Fatalf("after %s: %v", time.Since(began), err)
		}
		second.Release()
		if b.Leases.LeaseOn(function) != "" {
			t.Error("leased after the end")
		}
	})
}

// A function has at most one lease at a time, also for the same consumer: a delayed write outlasts the
// attempt that began it, and the next attempt may have another name or other functions.
func TestLeaseOfFunctionForSameConsumer(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(inGroup("f0"), inGroup("f1"))
	vm := stocktest.Claim("vm", s["f0"])
	b.mustGive(vm, s)
	function, sibling := discovery.DeviceKey{Function: "0000:03:00.0", Inode: 7}, discovery.DeviceKey{Function: "0000:03:00.1", Inode: 8}
	change := allocation.Change{Name: "driver of 0000:03:00.0", Consumer: vm.Key(), Devices: []allocation.Hold{allocation.DeviceHold("f0", "")}, Functions: []discovery.DeviceKey{function}}
	first, blocked := b.Leases.LeaseDevices(change, s)
	if blocked != nil {
		t.Fatal(blocked)
	}
	change.Functions = append(change.Functions, sibling) // plugged into the group
	if _, blocked := b.Leases.LeaseDevices(change, s); blocked == nil || blocked.Kind != exclusion.Changing {
		t.Errorf("leased twice: %v", blocked)
	}
	reset := allocation.Change{Name: "reset of f0", Consumer: vm.Key(), Previous: vm.Owner(), Functions: []discovery.DeviceKey{function}}
	if _, blocked := b.Leases.LeaseDevices(reset, s); blocked == nil {
		t.Error("leased for a reset while another change lasts")
	}
	first.Release()
	second, blocked := b.Leases.LeaseDevices(change, s)
	if blocked != nil {
		t.Fatal(blocked)
	}
	second.Release()
}

// A function that the kernel has registered again under the same address is a different function:
// an earlier lease does not cover the new function, and does not block others.
func TestLeaseOfFunctionRegisteredAgain(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("gpu-0", 128))
	change := allocation.Change{Name: "driver of 0000:03:00.0", Functions: []discovery.DeviceKey{{Function: "0000:03:00.0", Inode: 7}}}
	before, blocked := b.Leases.LeaseDevices(change, s)
	if blocked != nil {
		t.Fatal(blocked)
	}
	again := change
	again.Functions = []discovery.DeviceKey{{Function: "0000:03:00.0", Inode: 8}}
	if b.Leases.LeaseOn(again.Functions[0]) != "" {
		t.Error("the lease is on the function that has the address now")
	}
	after, blocked := b.Leases.LeaseDevices(again, s)
	if blocked != nil {
		t.Fatal(blocked)
	}
	before.Release()
	if b.Leases.LeaseOn(again.Functions[0]) == "" || b.Leases.LeaseOn(change.Functions[0]) != "" {
		t.Error("the end of the first lease is not that of the first lease alone")
	}
	after.Release()
	unknown := discovery.DeviceKey{Function: "0000:03:00.0"} // as on a host without inodes
	change.Functions = append(change.Functions, unknown)
	if _, blocked := b.Leases.LeaseDevices(change, s); blocked != nil || b.Leases.LeaseOn(again.Functions[0]) == "" {
		t.Errorf("%v; a function of which only the address is known is not leased", blocked)
	}
}

// A lease lasts until its blocked call has ended, even if it was released before.
func TestLeaseOutlastsCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		s := stocktest.New(stocktest.NewGPU("gpu-0", 128))
		ended := 0
		change := all("gpu-0")
		change.OnEnd = func() { ended++ }
		lease, blocked := b.Leases.LeaseDevices(change, s)
		if blocked != nil {
			t.Fatal(blocked)
		}
		hangs, failed := make(chan struct{}), errors.New("input/output error")
		if err := lease.Do(time.Second, "a write", func() error { return failed }); !errors.Is(err, failed) {
			t.Error(err)
		}
		if err := lease.Do(time.Second, "a write", func() error { <-hangs; return nil }); !errors.Is(err, overdue.Err) || lease.OverdueCall() == nil {
			t.Error(err)
		}
		lease.Release()
		if _, blocked := b.Leases.LeaseDevices(all("gpu-0"), s); blocked == nil || blocked.Kind != exclusion.Overdue {
			t.Errorf("leased while the write continues: %v", blocked)
		}
		close(hangs)
		synctest.Wait()
		again, blocked := b.Leases.LeaseDevices(all("gpu-0"), s)
		if blocked != nil || ended != 1 {
			t.Fatal(blocked, ended)
		}
		lease.Release() // a second Release does not end another lease of the same name
		if _, blocked := b.Leases.LeaseDevices(all("gpu-0"), s); blocked == nil {
			t.Error("leased twice")
		}
		again.Release()
	})
}

// A call that reports the overdue call of something else has ended, such as a check for the users
// of a function that hangs at a process.
func TestLeaseEndsAfterAnotherOverdueCall(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("gpu-0", 128))
	lease, blocked := b.Leases.LeaseDevices(all("gpu-0"), s)
	if blocked != nil {
		t.Fatal(blocked)
	}
	other := fmt.Errorf("the check for users %w", overdue.Err)
	if err := lease.Do(time.Minute, "a scan", func() error { return other }); !errors.Is(err, other) {
		t.Error(err)
	}
	lease.Release()
	if _, blocked := b.Leases.LeaseDevices(all("gpu-0"), s); blocked != nil {
		t.Error(blocked)
	}
}

// A ledger that ends its leases refuses new leases, and reports whether a change that cannot be
// cancelled is still running.
func TestEndLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		s := stocktest.New(stocktest.NewGPU("gpu-0", 128), stocktest.NewGPU("gpu-1", 129))
		b.Leases.KeepDevice(&KeptDevice{Name: "kept", Hold: allocation.Hold{Device: "gpu-1", Silicon: "gpu-1"}, Reason: "process 47 has it open"})
		lease, blocked := b.Leases.LeaseDevices(all("gpu-0"), s)
		if blocked != nil {
			t.Fatal(blocked)
		}
		hangs := make(chan struct{})
		if err := lease.Do(time.Second, "a write", func() error { <-hangs; return nil }); err == nil {
			t.Error("the write has ended")
		}
		lease.Release()
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if b.Leases.EndLeases(short) {
			t.Error("ended while a write goes on")
		}
		if _, blocked := b.Leases.LeaseDevices(allocation.Change{Name: "other"}, s); blocked == nil {
			t.Error("leased afterwards")
		}
		time.AfterFunc(time.Minute, func() { close(hangs) })
		if !b.Leases.EndLeases(t.Context()) {
			t.Error("not ended after the write")
		}
	})
}
