package simulation

import (
	"time"

	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/kernel"
)

// killChanging lets an agent be killed before one of its next changes of the host.
func killChanging(w *World) bool {
	w.agents.DropDead()
	if len(w.agents.LivingAgents()) == 0 || len(w.machine.Functions) == 0 {
		return false
	}
	one := chance.PickOne(w.random, w.agents.LivingAgents()...)
	after := int64(1 + w.random.IntN(6))
	w.history.Log("%s is to be killed at its change %d of the host", one.Name, after)
	one.KillChanging(after)
	return true
}

// hostUses makes the host use a function: a process opens a disk, or an interface is set up.
func hostUses(w *World) bool {
	const fault = "the host uses a function"
	if len(w.machine.Functions) == 0 || w.lasting.goesOn(fault) {
		return false
	}
	f := chance.PickOne(w.random, w.machine.Functions...)
	if f.Driver == "nvme" {
		node := w.host.DiskNode(f.Address)
		if node == "" {
			return false
		}
		w.history.Log("a process of the host has /%s open", node)
		pid := w.host.StartProcess("mkfs", "/system.slice/mkfs.service", node)
		w.lasting.startFault(fault, 40*time.Second, func() { w.host.Exit(pid) })
		w.history.CountFault("hostUses")
		return true
	}
	virtual := w.host.VirtualFunctions(f.Address)
	if len(virtual) == 0 {
		return false
	}
	address := chance.PickOne(w.random, virtual...)
	if !w.host.SetUp(address, true) {
		return false
	}
	w.history.Log("the interface of %s is set up", address)
	w.lasting.startFault(fault, 40*time.Second, func() { w.host.SetUp(address, false) })
	w.history.CountFault("hostUses")
	return true
}

// driverRefuses makes drivers fail for a while.
func driverRefuses(w *World) bool {
	const fault = "drivers fail"
	if !w.machine.Resets || w.lasting.goesOn(fault) {
		return false
	}
	trouble := chance.PickOne(w.random, kernel.Trouble{Refuses: kernel.VFIO}, kernel.Trouble{Refuses: "nvme"}, kernel.Trouble{Refuses: "igbvf"}, kernel.Trouble{Fewer: true}, kernel.Trouble{Full: true}, kernel.Trouble{Resets: true})
	w.history.Log("drivers fail: %+v", trouble)
	w.host.SetTrouble(trouble)
	w.lasting.startFault(fault, time.Minute, func() { w.host.SetTrouble(kernel.Trouble{}) })
	w.history.CountFault("driverRefuses")
	return true
}

// writesHang makes writes of attributes hang for a while.
func writesHang(w *World) bool {
	if !w.machine.Resets || w.lasting.goesOn("writesHang") {
		return false
	}
	w.host.HangWrites()
	w.lasting.startFault("writesHang", 90*time.Second, w.host.ReleaseWrites)
	w.history.CountFault("writesHang")
	return true
}

// rebootHost restarts the kernel.
func (w *World) rebootHost() {
	w.host.Reboot()
	w.supervisor.RebootHost()
	w.agents.Lock.DropAll()
	w.damage.RebootHost()
	for _, c := range w.cards {
		if w.host.HasVanished(c.Address) {
			w.damage.LoseDrivers(c)
		}
	}
	w.usage.Processes.RebootHost()
	w.usage.Writes.RebootHost()
}
