package simulation

import (
	"errors"
	"strings"
	"syscall"
	"time"

	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/disk"
)

// diskFault is any lasting fault of the disk.
const diskFault = "fault of the disk"

// diskFails makes some operations of the disk fail for a while, one in oneIn.
func diskFails(w *World, name string, with error, oneIn int, which func(disk.Op) bool) bool {
	if w.lasting.goesOn(diskFault) {
		return false
	}
	below := chance.PickOne(w.random, "/", "/", agents.KubeletRoot, agents.CDIRoot)
	w.disk.SetFault(func(op disk.Op, file string) error {
		if errors.Is(with, syscall.ENOSPC) && strings.HasPrefix(file, agents.RunDir) {
			return nil // another file system, on tmpfs
		}
		if !which(op) || !strings.HasPrefix(file, below) || !w.chance.OneIn(oneIn) {
			return nil
		}
		w.history.CountFault(name)
		return with
	})
	w.lasting.startFault(diskFault, 40*time.Second, func() {
		w.disk.SetFault(nil)
		w.damage.StartHealing()
	})
	return true
}

// slowDisk makes operations of the disk take time, so that other operations run in between.
func slowDisk(w *World) bool {
	if w.lasting.goesOn(diskFault) {
		return false
	}
	w.disk.SetFault(func(disk.Op, string) error {
		if w.chance.OneIn(4) {
			w.history.CountFault("diskSlow")
			time.Sleep(w.chance.UpTo(3 * time.Second))
		}
		return nil
	})
	w.lasting.startFault(diskFault, 40*time.Second, func() { w.disk.SetFault(nil) })
	return true
}

// wipeState removes the agent's directory and ends the agent's process, as an administrator may do
// who considers the directory obsolete.
func wipeState(w *World) bool {
	if len(w.disk.Files(agents.StateDir)) == 0 || w.minor < 34 {
		return false
	}
	w.history.Log("the agent's directory is wiped")
	w.damage.LoseRecords()
	w.disk.WipeDir(agents.StateDir)
	w.disk.WipeDir(agents.RunDir)
	if !w.agents.Lock.IsHeld() {
		w.usage.ForgetUses() // of the starting agent
	}
	w.history.CountFault("stateWiped")
	return true
}

func wipeSpecs(w *World) bool {
	if len(w.disk.Files(agents.CDIRoot)) == 0 {
		return false
	}
	w.history.Log("the directory of CDI specs is wiped")
	w.damage.LoseSpecs()
	w.disk.WipeDir(agents.CDIRoot)
	w.history.CountFault("specsWiped")
	return true
}

func damageRecord(w *World) bool {
	records := w.disk.Files(agents.StateDir + "/claims")
	if len(records) == 0 {
		return false
	}
	name := chance.PickOne(w.random, records...)
	w.history.Log("%s is damaged", name)
	w.damage.LoseRecords()
	w.disk.DamageFile(name, func(data []byte) []byte {
		if len(data) == 0 {
			return data
		}
		switch w.random.IntN(3) {
		case 0:
			return nil
		case 1:
			return data[:w.random.IntN(len(data))]
		}
		data[w.random.IntN(len(data))] ^= 0x20
		return data
	})
	w.history.CountFault("recordDamaged")
	return true
}
