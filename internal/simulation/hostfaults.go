package simulation

import (
	"strings"
	"time"

	"chandler.dev/internal/simulation/kernel"
)

// killChanging lets an agent be killed before one of its next changes of the host.
func (w *World) killChanging() bool {
	w.clean()
	if len(w.living) == 0 || len(w.machine.functions) == 0 {
		return false
	}
	one := pickOne(w.random, w.living...)
	after := int64(1 + w.random.IntN(6))
	w.log("%s is to be killed at its change %d of the host", one.name, after)
	one.hostLimit.Store(after)
	return true
}

// hostUses makes the host use a function: a process opens a disk, or an interface is set up.
func (w *World) hostUses() bool {
	const fault = "the host uses a function"
	if len(w.machine.functions) == 0 || w.goesOn(fault) {
		return false
	}
	f := pickOne(w.random, w.machine.functions...)
	if f.Driver == "nvme" {
		node := w.host.DiskNode(f.Address)
		if node == "" {
			return false
		}
		w.log("a process of the host has /%s open", node)
		pid := w.host.StartProcess("mkfs", "/system.slice/mkfs.service", node)
		w.startFault(fault, 40*time.Second, func() { w.host.Exit(pid) })
		w.countFault("hostUses")
		return true
	}
	virtual := w.host.VirtualFunctions(f.Address)
	if len(virtual) == 0 {
		return false
	}
	address := pickOne(w.random, virtual...)
	if !w.host.SetUp(address, true) {
		return false
	}
	w.log("the interface of %s is set up", address)
	w.startFault(fault, 40*time.Second, func() { w.host.SetUp(address, false) })
	w.countFault("hostUses")
	return true
}

// driverRefuses makes drivers fail for a while.
func (w *World) driverRefuses() bool {
	const fault = "drivers fail"
	if !w.machine.resets || w.goesOn(fault) {
		return false
	}
	trouble := pickOne(w.random, kernel.Trouble{Refuses: kernel.VFIO}, kernel.Trouble{Refuses: "nvme"}, kernel.Trouble{Refuses: "igbvf"}, kernel.Trouble{Fewer: true}, kernel.Trouble{Full: true}, kernel.Trouble{Resets: true})
	w.log("drivers fail: %+v", trouble)
	w.host.SetTrouble(trouble)
	w.startFault(fault, time.Minute, func() { w.host.SetTrouble(kernel.Trouble{}) })
	w.countFault("driverRefuses")
	return true
}

// writesHang makes writes of attributes hang for a while.
func (w *World) writesHang() bool {
	if !w.machine.resets || w.goesOn("writesHang") {
		return false
	}
	w.host.HangWrites()
	w.startFault("writesHang", 90*time.Second, w.host.ReleaseWrites)
	w.countFault("writesHang")
	return true
}

// recordDisturbed records that the kernel has lost the drivers of a card's functions.
func (w *World) recordDisturbed(c card) {
	w.disturbed[c.address] = true
	if bus, zero := strings.CutSuffix(c.address, ":00.0"); zero {
		for i := range count {
			w.disturbed[bus+":10."+string(rune('0'+2*i))] = true
		}
	}
}

// rebootHost restarts the kernel.
func (w *World) rebootHost() {
	w.host.Reboot()
	w.supervisor.reboot()
	w.lock.reboot()
	clear(w.disturbed)
	for _, c := range w.cards {
		if w.host.HasVanished(c.address) {
			w.recordDisturbed(c)
		}
	}
	w.mu.Lock()
	w.processes = nil
	clear(w.touched)
	w.mu.Unlock()
}
