package simulation

import (
	"bytes"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/internal/simulation/disk"
)

// anyCard returns one of the machine's cards, and false if there are none.
func (w *World) anyCard() (c card, found bool) {
	if len(w.cards) == 0 {
		return card{}, false
	}
	return pickOne(w.random, w.cards...), true
}

func (w *World) vanishCard() bool {
	c, found := w.anyCard()
	if !found {
		return false
	}
	if !w.host.VanishFunction(c.address, c.nodes...) {
		return false
	}
	w.recordDisturbed(c)
	w.log("card %s vanishes", c.address)
	w.recordParted(c)
	w.sendUevent()
	w.countFault("deviceVanishes")
	return true
}

// recordParted records the silicon that loses one of its functions.
func (w *World) recordParted(c card) {
	for _, d := range w.machine.devices {
		if d.PartOf != nil && len(d.PartOf.Counters) == 0 && strings.Contains(d.Source, c.address) {
			w.parted[d.Silicon()] = true
		}
	}
}

func (w *World) comeBack() bool {
	for _, c := range w.cards {
		if w.host.HasVanished(c.address) {
			w.log("card %s returns", c.address)
			w.pullOut(c)
			w.host.ReturnFunction(c.address, nil)
			w.sendUevent()
			w.countFault("deviceReturns")
			return true
		}
	}
	return false
}

// swap replaces a card by another of its kind.
func (w *World) swap() bool {
	c, found := w.anyCard()
	if !found {
		return false
	}
	if w.host.HasVanished(c.address) {
		return false
	}
	w.host.VanishFunction(c.address, c.nodes...)
	w.recordDisturbed(c)
	w.recordParted(c)
	w.sendUevent()
	time.Sleep(time.Duration(w.random.IntN(3000)) * time.Millisecond)
	digit, another := byte('0'+w.random.IntN(10)), false
	w.host.ReturnFunction(c.address, func(_ string, data []byte) []byte {
		if i := strings.Index(string(data), "GPU-"); i >= 0 {
			another = another || data[i+4] != digit
			data[i+4] = digit
		}
		return data
	})
	for _, container := range w.kubelet.Containers() {
		uses, _ := container.Note.([]*use)
		for _, u := range uses {
			u.replaced = u.replaced || another && u.address == c.address
		}
	}
	w.pullOut(c)
	w.log("card %s is another now", c.address)
	w.sendUevent()
	w.swapped = true
	w.countFault("deviceSwapped")
	return true
}

// pullOut removes a returned card from the uses of processes that had the card open before: the
// kernel has invalidated their open files.
func (w *World) pullOut(c card) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.processes {
		p.uses = slices.DeleteFunc(slices.Clone(p.uses), func(u *use) bool {
			return u.address == c.address || strings.Contains(w.machine.devices[u.device].Source, c.address) && !w.machine.reassigns
		})
	}
}

// renumberCards exchanges the nodes of two cards, as a reset of the bus may.
func (w *World) renumberCards() bool {
	if !w.machine.renumbers {
		return false
	}
	a, b := w.random.IntN(len(w.cards)), w.random.IntN(len(w.cards))
	one, other := &w.cards[a], &w.cards[b]
	if a == b || w.host.HasVanished(one.address) || w.host.HasVanished(other.address) {
		return false
	}
	minor := func(c *card) string { return "Device Minor: \t " + strings.TrimPrefix(c.nodes[0], "dev/nvidia") + "\n" }
	w.host.ChangeFiles("gpus", func(name string, data []byte) []byte {
		switch {
		case strings.Contains(name, one.address):
			return []byte(strings.Replace(string(data), minor(one), minor(other), 1))
		case strings.Contains(name, other.address):
			return []byte(strings.Replace(string(data), minor(other), minor(one), 1))
		}
		return data
	})
	one.nodes, other.nodes = other.nodes, one.nodes
	w.log("cards %s and %s have each other's nodes", one.address, other.address)
	w.sendUevent()
	w.countFault("nodesRenumbered")
	return true
}

// movable is the disk that may move to the slot of another IOMMU group.
const movable = "0000:02:00.0"

// moveGroup moves a disk to another IOMMU group: the group of two other disks, or back to its own.
func (w *World) moveGroup() bool {
	if len(w.machine.allowed.rebind) == 0 || w.host.HasVanished(movable) {
		return false
	}
	joins := len(w.host.Group(movable)) == 1
	if joins {
		w.moveTo(4)
		time.Sleep(time.Second) // an agent scans the host
	}
	if !joins || w.random.IntN(2) == 0 {
		w.leaveGroup()
	}
	w.countFault("groupChanges")
	return true
}

// leaveGroup moves the disk back to its own group, if possible while an agent prepares a claim for
// another disk of the group. The agent has planned the work with the earlier group and is writing
// the claim's record, which takes longer than the move.
func (w *World) leaveGroup() {
	if w.pluginOnly() || w.isDown() || w.goesOn(diskFault) {
		w.moveTo(2)
		return
	}
	w.makeRoom()
	var writes atomic.Bool
	w.disk.SetFault(func(op disk.Op, file string) error {
		if op == disk.Create && strings.HasPrefix(file, stateDir+"/claims/") && !writes.Swap(true) {
			time.Sleep(5 * time.Second)
		}
		return nil
	})
	p := w.newPod("pod")
	p.Claims = []string{p.Name + "-claim"}
	claim := newClaim(p.Claims[0], 1)
	device := w.machine.devices[deviceName(pickOne(w.random, "0000:04:00.0", "0000:04:00.1"))]
	w.specifyFunction(claim, &device)
	w.server.Put(claim)
	w.submitPod(p)
	for range 20 {
		if writes.Load() {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	w.moveTo(2)
	w.disk.SetFault(nil)
}

func (w *World) moveTo(group int) {
	c := card{address: movable}
	w.host.VanishFunction(c.address)
	w.recordDisturbed(c)
	w.pullOut(c)
	w.sendUevent()
	time.Sleep(time.Duration(w.random.IntN(3000)) * time.Millisecond)
	w.host.MoveGroup(c.address, group)
	for _, container := range w.kubelet.Containers() { // containers with these functions no longer share a group with the disk
		uses, _ := container.Note.([]*use)
		for _, u := range uses {
			if u.group = slices.DeleteFunc(slices.Clone(u.group), func(address string) bool { return address == c.address }); u.address == c.address {
				u.group = nil
			}
		}
	}
	w.host.ReturnFunction(c.address, nil)
	w.setApart(group == 2 && w.isApart())
	w.log("disk %s is in IOMMU group %d", c.address, group)
	w.sendUevent()
}

// isApart reports whether an agent has no reason to bind the disk, which has left the group, to vfio:
// the device plugin API does not offer the disk, no claim has it, and no agent has begun to bind the
// functions of the group.
func (w *World) isApart() bool {
	for _, name := range w.disk.Files(runDir + "/journal/rebind") {
		if data, _ := w.disk.FileContent(name); bytes.Contains(data, []byte(movable)) {
			return false
		}
	}
	claimed := slices.ContainsFunc(w.server.Claims(), func(claim *resourceapi.ResourceClaim) bool {
		return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results, isMovable)
	})
	return !claimed && w.mode == discovery.ModeDRA && w.kubelet.AllocatableDevices()["example.com/disk"] == 0 && !w.goesOn(diskFault)
}

func (w *World) setApart(apart bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.apart = apart
}

func isMovable(r resourceapi.DeviceRequestAllocationResult) bool {
	return r.Device == deviceName(movable)
}

// reassignCards lets a driver find two cards in the other order: the cards return with each other's
// names and nodes.
func (w *World) reassignCards() bool {
	if !w.machine.reassigns {
		return false
	}
	a, b := w.random.IntN(len(w.cards)), w.random.IntN(len(w.cards))
	one, other := &w.cards[a], &w.cards[b]
	if a == b || w.host.HasVanished(one.address) || w.host.HasVanished(other.address) {
		return false
	}
	for _, c := range []*card{one, other} {
		w.host.VanishFunction(c.address, c.nodes...)
		w.pullOut(*c)
	}
	w.sendUevent()
	time.Sleep(time.Duration(w.random.IntN(3000)) * time.Millisecond)
	w.host.ExchangeFunctions(one.address, other.address, "hailo_chardev", append(slices.Clone(one.nodes), other.nodes...)...)
	one.nodes, other.nodes = other.nodes, one.nodes
	w.mu.Lock()
	delete(w.handed, one.address)
	delete(w.handed, other.address)
	w.mu.Unlock()
	w.host.ReturnFunction(one.address, nil)
	w.host.ReturnFunction(other.address, nil)
	w.log("cards %s and %s have each other's names", one.address, other.address)
	w.sendUevent()
	w.countFault("numbersReassigned")
	return true
}

// cardOf returns the present address of the card with a device.
func (w *World) cardOf(device string) string {
	d := w.machine.devices[device]
	if nodes := nodesOf(&d); w.machine.reassigns {
		for _, c := range w.cards {
			if slices.Contains(nodes, c.nodes[0]) {
				return c.address
			}
		}
	}
	return addressIn(d.Source)
}

// noteRecord records that an agent has written a consumer's record, after which the device may be
// reset.
func (w *World) noteRecord(file string) {
	device, _, _ := strings.Cut(path.Base(file), ".")
	if _, there := w.disk.FileContent(file); there || path.Dir(file) != runDir+"/journal/reclaim" {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.handed[w.cardOf(device)] = true
}

func (w *World) sickenCard() bool {
	if w.goesOn("unreadable") {
		return false
	}
	c, found := w.anyCard()
	if !found {
		return false
	}
	w.log("files of card %s cannot be read", c.address)
	w.host.MakeUnreadable(pickOne(w.random, c.address, c.address+"/vendor", "/information"))
	w.startFault("unreadable", 60*time.Second, func() { w.host.MakeUnreadable(""); w.sendUevent() })
	w.sendUevent()
	w.countFault("unreadable")
	return true
}

func (w *World) hangCard() bool {
	if w.goesOn("readHangs") {
		return false
	}
	c, found := w.anyCard()
	if !found {
		return false
	}
	w.log("reads of card %s hang", c.address)
	w.host.HangReads(c.address)
	w.startFault("readHangs", 40*time.Second, w.host.Release)
	w.sendUevent()
	w.countFault("readHangs")
	return true
}
