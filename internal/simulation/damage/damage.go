// Package damage records the effects of faults on a node: files that agents have lost, cards that were
// replaced, and drivers that the kernel has lost. Some states that would be errors are valid after such
// faults. The package causes no faults.
package damage

import (
	"strings"
	"sync"
	"time"

	"chandler.dev/internal/simulation/history"
	"chandler.dev/internal/simulation/machine"
)

// HealTime is the time limit for an agent to write missing files again.
const HealTime = time.Minute

// Damage is the damage to a node. Any goroutine may call its methods.
type Damage struct {
	machine   *machine.Machine
	history   *history.History
	diskFails func() bool // reports whether the disk fails now

	mu       sync.Mutex
	records  bool            // records of agents were removed or damaged
	specs    bool            // specs may be missing that no record remains for
	unhealed bool            // an agent died before it could write missing files
	healed   time.Time       // the time when agents have written missing files again
	replaced bool            // another card has replaced a card
	parted   map[string]bool // silicon with several functions that lost one of them
	drivers  map[string]bool // functions that vanished in this boot, so that the kernel has lost their drivers
}

// New returns the damage to an undamaged node.
func New(m *machine.Machine, h *history.History, diskFails func() bool) *Damage {
	return &Damage{machine: m, history: h, diskFails: diskFails, parted: make(map[string]bool), drivers: make(map[string]bool)}
}

// LoseRecords records the loss of some of the agents' files.
func (d *Damage) LoseRecords() {
	lacking := d.MayLackSpecs()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.specs = d.specs || lacking
	d.records = true
}

// HasLostRecords reports whether records of agents were removed or damaged.
func (d *Damage) HasLostRecords() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.records
}

// LoseSpecs records the loss of all specs.
func (d *Damage) LoseSpecs() {
	d.mu.Lock()
	d.specs = d.specs || d.records
	d.mu.Unlock()
	d.StartHealing()
}

// MayLackFiles reports whether files of claims may be missing for good.
func (d *Damage) MayLackFiles() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.specs || d.records
}

// MayLackSpecs reports whether specs may be missing: they were removed, or the disk failed, a
// moment ago, or no record of them remains.
func (d *Damage) MayLackSpecs() bool {
	hurt := d.isHurt()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.specs || d.unhealed || hurt
}

// isHurt reports whether the disk fails now or failed a moment ago.
func (d *Damage) isHurt() bool {
	fails := d.diskFails()
	d.mu.Lock()
	defer d.mu.Unlock()
	return fails || time.Now().Before(d.healed)
}

// HasFailedDisk reports whether the disk has ever failed.
func (d *Damage) HasFailedDisk() bool {
	return d.history.FaultCount("diskFull", "readsFail", "writesFail", "syncsFail", "readOnly") > 0
}

// StartHealing gives agents time to write missing files again.
func (d *Damage) StartHealing() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.healed, d.unhealed = time.Now().Add(HealTime), false
}

// AgentStarts gives a new agent time to write the files that an earlier agent could not write.
func (d *Damage) AgentStarts() {
	d.mu.Lock()
	unhealed := d.unhealed
	d.mu.Unlock()
	if unhealed {
		d.StartHealing()
	}
}

// AgentDies records that an agent dies that may have had files to write again.
func (d *Damage) AgentDies() {
	hurt := d.isHurt()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.unhealed = d.unhealed || hurt
}

// ReplaceCard records that another card has replaced a card.
func (d *Damage) ReplaceCard() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.replaced = true
}

// HasReplacedCard reports whether a card was replaced by another.
func (d *Damage) HasReplacedCard() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.replaced
}

// PartSilicon records the silicon that loses one of its functions.
func (d *Damage) PartSilicon(c machine.Card) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, o := range d.machine.Devices {
		if o.PartOf != nil && len(o.PartOf.Counters) == 0 && strings.Contains(o.Source, c.Address) {
			d.parted[o.Silicon()] = true
		}
	}
}

// IsParted reports whether silicon has ever lost one of its functions.
func (d *Damage) IsParted(silicon string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.parted[silicon]
}

// LoseDrivers records that the kernel has lost the drivers of a card's functions.
func (d *Damage) LoseDrivers(c machine.Card) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.drivers[c.Address] = true
	if bus, zero := strings.CutSuffix(c.Address, ":00.0"); zero {
		for i := range machine.VirtualFunctions {
			d.drivers[bus+":10."+string(rune('0'+2*i))] = true
		}
	}
}

// HasLostDriver reports whether the kernel has lost the driver of a function in this boot.
func (d *Damage) HasLostDriver(address string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.drivers[address]
}

// RebootHost records a reboot: the kernel binds all drivers again, and all claims are prepared again.
func (d *Damage) RebootHost() {
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.drivers)
	d.specs = false
}
