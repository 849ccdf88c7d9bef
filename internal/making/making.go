// Package making makes devices that are not there until somebody gets them, by what their
// families know, and undoes that when nobody has them any more. It writes down what it
// makes before it does, and goes on from whatever a killed agent has left. It knows no
// vendor and no Kubernetes. Who may have a device, and since when nobody has it, is not its
// to decide.
package making

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
)

// Config is what a Maker works with.
type Config struct {
	Host     *discovery.Host
	Families []*discovery.Family

	// Tools change the host; see [discovery.Tools]. Those that are nil mean that the agent
	// may not change it.
	Tools discovery.Tools

	// Programs run the programs of families, by their names; see [discovery.Tools].
	Programs map[string]func(ctx context.Context, args ...string) ([]byte, error)

	Journal journal.Config // where it is written down what was made
	Earlier string         // the directory in which earlier versions wrote that down

	// Device returns a device as those who give it out know it.
	Device func(name string) (discovery.Device, bool)

	// Changed is called when a device may be other than the last scan has it. It must not
	// block.
	Changed func()

	// Ledger is asked for a lease before the host changes, and Stock for the devices of the host as both APIs offer
	// them.
	Ledger *ledger.Ledger
	Stock  func() ledger.Stock

	Limit time.Duration // how long a write may take before nobody waits for it any more; 60 s if 0
	Wait  time.Duration // how long until what was made must be seen; 30 s if 0
}

// Maker makes devices and undoes that.
type Maker struct {
	config Config
	made   *journal.Journal[creation] // by unit

	mu      sync.Mutex
	working map[string]bool               // by unit, while a call changes it
	awaited map[string]bool               // likewise, while the unit is being made
	failed  map[string]failure            // likewise, why it could not be made or undone
	seen    map[string][]discovery.Device // likewise, the devices as they were scanned last before they were made
}

// record is on disk before anything is made, and is removed when that is undone.
type record = journal.Record[creation]

// creation is how the devices of a unit are made.
type creation struct {
	Family string           `json:"family"`
	Making discovery.Making `json:"making"`

	// Function is the function on which the devices are created. What is on one that the kernel has registered again is
	// not the agent's. It is zero in a record of an earlier version.
	Function discovery.DeviceKey `json:"function,omitzero"`
}

// failure is why a unit is not made, or not undone.
type failure struct {
	err  error
	how  map[string]string // as it was to be made
	made bool              // it is there, and is not undone
	at   time.Time
}

// remember is how long it is said of devices that they could not be made.
const remember = 5 * time.Minute

// New returns a Maker. It is ready once it was opened.
func New(config Config) *Maker {
	config.Limit, config.Wait = cmp.Or(config.Limit, time.Minute), cmp.Or(config.Wait, 30*time.Second)
	if config.Changed == nil {
		config.Changed = func() {}
	}
	return &Maker{
		config: config, made: journal.New(config.Journal, "create", journal.Earlier[creation]{Dir: config.Earlier, Convert: convert}),
		working: make(map[string]bool), awaited: make(map[string]bool), failed: make(map[string]failure), seen: make(map[string][]discovery.Device),
	}
}

// Open reads what an earlier agent of this boot has made; see [journal.Journal.Open]. The unit of a record that is not
// understood stays as it is.
func (m *Maker) Open() (problems []error) { return m.made.Open() }

// ReadAgain reads records that the disk did not list or read when they were opened, and reports whether
// there are such still. It has one caller at a time.
func (m *Maker) ReadAgain() (problems []error, unread bool) {
	found, problems, unread := m.made.ReadAgain()
	if len(found) > 0 {
		m.config.Changed()
	}
	return problems, unread
}

// convert returns the record that a file of an earlier version becomes.
func convert(unit string, data []byte) (*journal.Record[creation], error) {
	var r struct {
		Boot    string           `json:"boot"`
		Family  string           `json:"family"`
		Making  discovery.Making `json:"making"`
		Silicon string           `json:"silicon"`
		Devices []string         `json:"devices"`
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("unit %s stays as it is: %w", unit, err)
	}
	if r.Making.Unit != unit || r.Family == "" {
		return nil, fmt.Errorf("unit %s stays as it is: the record is for another unit", unit)
	}
	return &journal.Record[creation]{Boot: r.Boot, Group: unit, Silicon: r.Silicon, Devices: r.Devices, Body: creation{Family: r.Family, Making: r.Making}}, nil
}

// note writes down what is to be made, unless that is written down already. Of an earlier attempt in
// another way nothing is there, or the family would have refused.
func (m *Maker) note(d *discovery.Device) error {
	unit := d.Making.Unit
	m.mu.Lock()
	var names []string
	for _, other := range m.seen[unit] {
		names = append(names, other.Name)
	}
	m.mu.Unlock()
	if r := m.made.Get(unit); r != nil {
		if maps.Equal(r.Body.Making.How, d.Making.How) && m.isCurrent(r) {
			return nil
		}
		names = union(names, r.Devices)
	}
	if !slices.Contains(names, d.Name) {
		names = append(names, d.Name)
	}
	return m.made.Put(&record{Group: unit, Silicon: d.Silicon(), Devices: names, Body: creation{Family: d.Family, Making: *d.Making, Function: m.functionOf(d.Making)}})
}

// functionOf returns the function on which devices are created, as it is registered now.
func (m *Maker) functionOf(making *discovery.Making) discovery.DeviceKey {
	return discovery.FunctionKey(m.config.Host, making.Of)
}

// isCurrent reports whether the function of a record is still the one on which the devices were created.
func (m *Maker) isCurrent(r *record) bool {
	return r.Body.Function.Same(m.functionOf(&r.Body.Making))
}

// amend writes down what has come of a unit. Where that fails, it is known for as long as this
// agent runs, and is written later.
func (m *Maker) amend(unit string, how map[string]string) error {
	r := m.made.Get(unit)
	if r == nil {
		return nil
	}
	now := *r
	now.Body.Making.How = make(map[string]string)
	maps.Copy(now.Body.Making.How, r.Body.Making.How)
	maps.Copy(now.Body.Making.How, how)
	return m.made.Amend(&now)
}

// Restore writes records that were removed or could not be written; see [journal.Journal.Restore].
func (m *Maker) Restore() error { return m.made.Restore() }

func union(names, more []string) []string {
	all := slices.Concat(names, more)
	slices.Sort(all)
	return slices.Compact(all)
}

// forget removes the record of a unit of which nothing is left to undo.
func (m *Maker) forget(unit string) error {
	if err := m.made.Remove(unit); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.failed, unit)
	return nil
}

// Has reports whether a unit was made, or was about to be, with what was written down of it.
func (m *Maker) Has(unit string) (how map[string]string, has bool) {
	r := m.made.Get(unit)
	if r == nil || !m.isCurrent(r) {
		return nil, false
	}
	return maps.Clone(r.Body.Making.How), true
}

// Made is a unit that was made, or that an agent was about to make.
type Made struct {
	Unit    string
	Family  string
	Silicon string   // of which its devices are
	Devices []string // their names
	Failed  error    // why it could not be undone at the last attempt, nil if that was not tried
}

// Made returns all units that are to be undone sometime, in order.
func (m *Maker) Made() (made []Made) {
	all := m.made.All()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range all {
		one := Made{Unit: r.Group, Family: r.Body.Family, Silicon: r.Silicon, Devices: slices.Clone(r.Devices)}
		if failed := m.failed[r.Group]; failed.made {
			one.Failed = failed.err
		}
		made = append(made, one)
	}
	return made
}

// family returns the family of that name, if it makes devices.
func (m *Maker) family(name string) (*discovery.Family, error) {
	for _, f := range m.config.Families {
		if f.Name == name && f.Makes() {
			return f, nil
		}
	}
	return nil, fmt.Errorf("family %q makes no devices", name)
}
