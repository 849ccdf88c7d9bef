package simulation

import (
	"bytes"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/disk"
	"chandler.dev/internal/simulation/machine"
)

// pickCard returns one of the machine's cards, and false if there are none.
func pickCard(w *World) (c machine.Card, found bool) {
	if len(w.cards) == 0 {
		return machine.Card{}, false
	}
	return chance.PickOne(w.random, w.cards...), true
}

func vanishCard(w *World) bool {
	c, found := pickCard(w)
	if !found {
		return false
	}
	if !w.host.VanishFunction(c.Address, c.Nodes...) {
		return false
	}
	w.damage.LoseDrivers(c)
	w.history.Log("card %s vanishes", c.Address)
	w.damage.PartSilicon(c)
	w.sendUevent()
	w.history.CountFault("deviceVanishes")
	return true
}

func returnCard(w *World) bool {
	for _, c := range w.cards {
		if w.host.HasVanished(c.Address) {
			w.history.Log("card %s returns", c.Address)
			w.usage.Processes.PullOut(c)
			w.host.ReturnFunction(c.Address, nil)
			w.sendUevent()
			w.history.CountFault("deviceReturns")
			return true
		}
	}
	return false
}

// swapCard replaces a card by another of its kind.
func swapCard(w *World) bool {
	c, found := pickCard(w)
	if !found {
		return false
	}
	if w.host.HasVanished(c.Address) {
		return false
	}
	w.host.VanishFunction(c.Address, c.Nodes...)
	w.damage.LoseDrivers(c)
	w.damage.PartSilicon(c)
	w.sendUevent()
	time.Sleep(time.Duration(w.random.IntN(3000)) * time.Millisecond)
	digit, another := byte('0'+w.random.IntN(10)), false
	w.host.ReturnFunction(c.Address, func(_ string, data []byte) []byte {
		if i := strings.Index(string(data), "GPU-"); i >= 0 {
			another = another || data[i+4] != digit
			data[i+4] = digit
		}
		return data
	})
	if another {
		w.usage.ReplaceCard(c.Address)
	}
	w.usage.Processes.PullOut(c)
	w.history.Log("card %s is another now", c.Address)
	w.sendUevent()
	w.damage.ReplaceCard()
	w.history.CountFault("deviceSwapped")
	return true
}

// renumberCards exchanges the nodes of two cards, as a reset of the bus may.
func renumberCards(w *World) bool {
	if !w.machine.Renumbers {
		return false
	}
	a, b := w.random.IntN(len(w.cards)), w.random.IntN(len(w.cards))
	one, other := &w.cards[a], &w.cards[b]
	if a == b || w.host.HasVanished(one.Address) || w.host.HasVanished(other.Address) {
		return false
	}
	minor := func(c *machine.Card) string {
		return "Device Minor: \t " + strings.TrimPrefix(c.Nodes[0], "dev/nvidia") + "\n"
	}
	w.host.ChangeFiles("gpus", func(name string, data []byte) []byte {
		switch {
		case strings.Contains(name, one.Address):
			return []byte(strings.Replace(string(data), minor(one), minor(other), 1))
		case strings.Contains(name, other.Address):
			return []byte(strings.Replace(string(data), minor(other), minor(one), 1))
		}
		return data
	})
	one.Nodes, other.Nodes = other.Nodes, one.Nodes
	w.history.Log("cards %s and %s have each other's nodes", one.Address, other.Address)
	w.sendUevent()
	w.history.CountFault("nodesRenumbered")
	return true
}

// moveGroup moves a disk to another IOMMU group: the group of two other disks, or back to its own.
func moveGroup(w *World) bool {
	if len(w.machine.Allowed.Rebind) == 0 || w.host.HasVanished(machine.Movable) {
		return false
	}
	joins := len(w.host.Group(machine.Movable)) == 1
	if joins {
		moveDisk(w, 4)
		time.Sleep(time.Second) // an agent scans the host
	}
	if !joins || w.random.IntN(2) == 0 {
		leaveGroup(w)
	}
	w.history.CountFault("groupChanges")
	return true
}

// leaveGroup moves the disk back to its own group, if possible while an agent prepares a claim for
// another disk of the group. The agent has planned the work with the earlier group and is writing
// the claim's record, which takes longer than the move.
func leaveGroup(w *World) {
	if w.pluginOnly() || w.isDown() || w.lasting.goesOn("kubeletDown") || w.lasting.goesOn(diskFault) {
		moveDisk(w, 2)
		return
	}
	makeRoom(w)
	var writes atomic.Bool
	w.disk.SetFault(func(op disk.Op, file string) error {
		if op == disk.Create && strings.HasPrefix(file, agents.StateDir+"/claims/") && !writes.Swap(true) {
			time.Sleep(5 * time.Second)
		}
		return nil
	})
	w.submitPod(func(claim *resourceapi.ResourceClaim) {
		device := w.machine.Devices[machine.DeviceName(chance.PickOne(w.random, "0000:04:00.0", "0000:04:00.1"))]
		w.specifyFunction(claim, &device)
		claim.Spec.Devices.Config = machine.ConfigWith(machine.AsVFIO)
	})
	for range 300 { // 30 seconds, since the agent first publishes the present group
		if writes.Load() {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	moveDisk(w, 2)
	w.disk.SetFault(nil)
}

func moveDisk(w *World, group int) {
	c := machine.Card{Address: machine.Movable}
	w.host.VanishFunction(c.Address)
	w.damage.LoseDrivers(c)
	w.usage.Processes.PullOut(c)
	w.sendUevent()
	time.Sleep(time.Duration(w.random.IntN(3000)) * time.Millisecond)
	w.host.MoveGroup(c.Address, group)
	w.usage.LeaveGroup(c.Address)
	w.host.ReturnFunction(c.Address, nil)
	w.usage.Writes.SetApart(group == 2 && isApart(w))
	w.history.Log("disk %s is in IOMMU group %d", c.Address, group)
	w.sendUevent()
}

// isApart reports whether an agent has no reason to bind the disk, which has left the group, to vfio:
// the device plugin API does not offer the disk, no claim has it, and no agent has begun to bind the
// functions of the group.
func isApart(w *World) bool {
	for _, name := range w.disk.Files(agents.RunDir + "/journal/rebind") {
		if data, _ := w.disk.FileContent(name); bytes.Contains(data, []byte(machine.Movable)) {
			return false
		}
	}
	claimed := slices.ContainsFunc(w.server.Claims(), func(claim *resourceapi.ResourceClaim) bool {
		return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results, machine.IsMovable)
	})
	return !claimed && w.settings.Rules.Mode == discovery.ModeDRA && w.kubelet.AllocatableDevices()["example.com/disk"] == 0 && !w.lasting.goesOn(diskFault)
}

// reassignCards lets a driver find two cards in the other order: the cards return with each other's
// names and nodes.
func reassignCards(w *World) bool {
	if !w.machine.Reassigns {
		return false
	}
	a, b := w.random.IntN(len(w.cards)), w.random.IntN(len(w.cards))
	one, other := &w.cards[a], &w.cards[b]
	if a == b || w.host.HasVanished(one.Address) || w.host.HasVanished(other.Address) {
		return false
	}
	for _, c := range []*machine.Card{one, other} {
		w.host.VanishFunction(c.Address, c.Nodes...)
		w.usage.Processes.PullOut(*c)
	}
	w.sendUevent()
	time.Sleep(time.Duration(w.random.IntN(3000)) * time.Millisecond)
	w.host.ExchangeFunctions(one.Address, other.Address, "hailo_chardev", append(slices.Clone(one.Nodes), other.Nodes...)...)
	one.Nodes, other.Nodes = other.Nodes, one.Nodes
	w.usage.Writes.RenameFunctions(one.Address, other.Address)
	w.host.ReturnFunction(one.Address, nil)
	w.host.ReturnFunction(other.Address, nil)
	w.history.Log("cards %s and %s have each other's names", one.Address, other.Address)
	w.sendUevent()
	w.history.CountFault("numbersReassigned")
	return true
}

// cardOf returns the present address of the card with a device.
func (w *World) cardOf(device string) string {
	d := w.machine.Devices[device]
	if nodes := machine.NodesOf(&d); w.machine.Reassigns {
		for _, c := range w.cards {
			if slices.Contains(nodes, c.Nodes[0]) {
				return c.Address
			}
		}
	}
	return machine.AddressIn(d.Source)
}

func sickenCard(w *World) bool {
	if w.lasting.goesOn("unreadable") {
		return false
	}
	c, found := pickCard(w)
	if !found {
		return false
	}
	w.history.Log("files of card %s cannot be read", c.Address)
	w.host.MakeUnreadable(chance.PickOne(w.random, c.Address, c.Address+"/vendor", "/information"))
	w.lasting.startFault("unreadable", 60*time.Second, func() { w.host.MakeUnreadable(""); w.sendUevent() })
	w.sendUevent()
	w.history.CountFault("unreadable")
	return true
}

func hangCard(w *World) bool {
	if w.lasting.goesOn("readHangs") {
		return false
	}
	c, found := pickCard(w)
	if !found {
		return false
	}
	w.history.Log("reads of card %s hang", c.Address)
	w.host.HangReads(c.Address)
	w.lasting.startFault("readHangs", 40*time.Second, w.host.Release)
	w.sendUevent()
	w.history.CountFault("readHangs")
	return true
}
