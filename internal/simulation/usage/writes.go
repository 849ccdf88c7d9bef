package usage

import (
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"chandler.dev/internal/simulation/agents"
	"chandler.dev/internal/simulation/kernel"
	"chandler.dev/internal/simulation/machine"
)

// Writes checks the writes of agents to attributes of the host, which must not take functions from
// their users. Any goroutine may call its methods.
type Writes struct {
	Config
	usage *Tracker

	mu      sync.Mutex
	touched map[string]time.Time // by function: the last time that an agent began to take or return the function
	handed  map[string]bool      // by function: agents have recorded a consumer since the function got its present name
	apart   bool                 // the movable disk has left its group, and no consumer has requested the disk since
	resets  bool                 // the administrator has ever enabled resets of functions
}

// AllowResets records that the administrator enables resets of functions.
func (w *Writes) AllowResets() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.resets = true
}

// AllowsResets reports whether the administrator has ever enabled resets of functions.
func (w *Writes) AllowsResets() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.resets
}

// SetApart records whether the movable disk has left its group, so that no agent has a reason to bind
// the disk to vfio.
func (w *Writes) SetApart(apart bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.apart = apart
}

// RenameFunctions records that functions have new names, under which they had no consumers.
func (w *Writes) RenameFunctions(addresses ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, address := range addresses {
		delete(w.handed, address)
	}
}

// RebootHost records that no agent has taken or returned a function since the reboot.
func (w *Writes) RebootHost() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.touched)
}

// NoteRecord records that an agent has written a consumer's record, after which the device may be
// reset.
func (w *Writes) NoteRecord(file string) {
	device, _, _ := strings.Cut(path.Base(file), ".")
	if _, there := w.Disk.FileContent(file); there || path.Dir(file) != agents.RunDir+"/journal/reclaim" {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.handed[w.CardOf(device)] = true
}

// CheckWrite fails if the administrator does not allow a write, or if the write takes a function from a
// user.
func (w *Writes) CheckWrite(name, value string) {
	a := kernel.ParseWrite(name, value)
	may, taken := false, []string{a.Function}
	switch a.Name {
	case "sriov_numvfs":
		may = a.Function == w.Machine.Allowed.Creates
		taken = nil
		if value == "0" {
			taken = w.Host.VirtualFunctions(a.Function)
		}
	case "reset", "reset_method":
		may = w.AllowsResets()
	default:
		may = slices.Contains(w.Machine.Allowed.Rebind, a.Function)
	}
	if !may {
		w.History.Fail("%q is written to %s, which the administrator does not allow", value, name)
	}
	if a.Name == "driver_override" && w.touch(a.Function) && a.Function == machine.Movable && value == kernel.VFIO {
		w.History.Fail("%s is bound to vfio for devices whose IOMMU group it has left", machine.Movable)
	}
	if a.Name == "reset" {
		if w.Machine.Reassigns && !w.Damage.HasLostRecords() && !w.wasHanded(a.Function) {
			w.History.Fail("%q is written to %s, which no consumer has had", value, name)
		}
		if who := w.usage.Processes.withOpen(a.Function); who != "" {
			w.History.Fail("%q is written to %s, and %s", value, name, who)
		}
	}
	if a.Name != "unbind" && a.Name != "sriov_numvfs" && a.Name != "reset" {
		return
	}
	for _, address := range taken {
		if who := w.userOf(address, a.Driver); who != "" {
			w.History.Fail("%q is written to %s, and %s", value, name, who)
		}
		for _, since := range w.Host.OpenSince(address) {
			if a.Name != "reset" && w.longOpen(address, since) {
				w.History.Fail("%q is written to %s, and a process has had %s open since %s", value, name, address, since.Format(time.TimeOnly))
			}
		}
	}
}

// touch records that an agent begins to take or return a function, and reports whether no agent has a
// reason to bind the movable disk to vfio.
func (w *Writes) touch(address string) (apart bool) {
	lost := w.Damage.HasLostRecords()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.touched[address] = time.Now()
	return w.apart && !lost
}

// wasHanded reports whether agents have recorded a consumer of a function.
func (w *Writes) wasHanded(address string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.handed[address]
}

// longOpen reports whether an agent that took a function must have seen the function open: the
// agent checks before its first write, and no check is possible right before the second write.
func (w *Writes) longOpen(address string, since time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	begun, now := w.touched[address], time.Now()
	return since.Before(begun) || now.Sub(begun) > 30*time.Second && since.Before(now)
}

// userOf returns the container that has a function which is being taken from a driver, "" if there
// is none. A container that got the function under vfio no longer has the function after the
// function was replaced by one under another driver. driver is "" if the driver does not matter.
func (w *Writes) userOf(address, driver string) string {
	if w.Damage.HasLostRecords() {
		return ""
	}
	for _, u := range w.usage.allUses() {
		if u.device != machine.DeviceName(address) || u.open || u.back || u.forgotten {
			continue
		}
		if driver != "" && w.Damage.HasLostDriver(address) && u.vfio != (driver == kernel.VFIO) {
			continue
		}
		return u.String()
	}
	return ""
}
