package ondemand

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
	"chandler.dev/internal/ledger/exclusion"
)

// Config is the configuration of a [Manager].
type Config struct {
	Host     *discovery.Host
	Families []*discovery.Family

	// Tools change the host; see [discovery.Tools]. A nil function means that the agent has no
	// permission for the change.
	Tools discovery.Tools

	// Programs run the programs of families, by name; see [discovery.Tools].
	Programs map[string]func(context.Context, discovery.PartitionChange) ([]byte, error)

	Journal journal.Config // the place of the records of created units
	Earlier string         // the directory of the records of earlier versions

	// Device returns a device as the publishers of both APIs see it.
	Device func(name string) (discovery.Device, bool)

	// Changed is called when a device may differ from the last scan. It must not block.
	Changed func()

	// Ledger grants a lease before the host changes, and Stock returns the devices of the host as
	// both APIs offer them.
	Ledger *ledger.Ledger
	Stock  func() exclusion.Stock

	Limit time.Duration // how long the Manager waits for a write; 60 s if 0
	Wait  time.Duration // how long a scan may take to find a created device; 30 s if 0
}

// Manager creates devices and removes them.
type Manager struct {
	config  Config
	journal *journal.Journal[creation] // by unit

	mu           sync.Mutex
	inProgress   map[string]bool               // units that a call is changing
	awaitingScan map[string]bool               // units that are being created
	failures     map[string]failure            // by unit, why the unit could not be created or removed
	lastScan     map[string][]discovery.Device // by unit, the devices in the last scan before the unit was created
}

// record is on disk before a unit is created, until the unit is removed.
type record = journal.Record[creation]

// creation describes how the devices of a unit are created.
type creation struct {
	Family   string             `json:"family"`
	Creation discovery.Creation `json:"making"`

	// Function is the parent function of the devices. Devices on a function that the kernel has
	// registered again do not belong to the agent. Zero in a record of an earlier version.
	Function discovery.DeviceKey `json:"function,omitzero"`
}

// failure is why a unit could not be created or removed.
type failure struct {
	err           error
	parameters    map[string]string // the How of the attempt to create the unit
	afterCreation bool              // the unit exists and could not be removed
	at            time.Time
}

// failureMemory is for how long devices are unhealthy after they could not be created.
const failureMemory = 5 * time.Minute

// New returns a [Manager]. The caller must call [Manager.Open] before any other method.
func New(config Config) *Manager {
	config.Limit, config.Wait = cmp.Or(config.Limit, time.Minute), cmp.Or(config.Wait, 30*time.Second)
	if config.Changed == nil {
		config.Changed = func() {}
	}
	return &Manager{
		config: config, journal: journal.New(config.Journal, "create", journal.Earlier[creation]{Dir: config.Earlier, Convert: convert}),
		inProgress: make(map[string]bool), awaitingScan: make(map[string]bool), failures: make(map[string]failure), lastScan: make(map[string][]discovery.Device),
	}
}

// Open reads the records of earlier agents of this boot; see [journal.Journal.Open]. A unit whose
// record cannot be decoded remains unchanged.
func (m *Manager) Open() (problems []error) { return m.journal.Open() }

// ReadAgain reads records that could not be listed or read before, and reports whether some are
// still unread. It must not be called concurrently.
func (m *Manager) ReadAgain() (problems []error, unread bool) {
	found, problems, unread := m.journal.ReadAgain()
	if len(found) > 0 {
		m.config.Changed()
	}
	return problems, unread
}

// convert converts a record of an earlier version.
func convert(unit string, data []byte) (*journal.Record[creation], error) {
	var r struct {
		Boot    string             `json:"boot"`
		Family  string             `json:"family"`
		Making  discovery.Creation `json:"making"`
		Silicon string             `json:"silicon"`
		Devices []string           `json:"devices"`
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("unit %s stays as it is: %w", unit, err)
	}
	if r.Making.Unit != unit || r.Family == "" {
		return nil, fmt.Errorf("unit %s stays as it is: the record is for another unit", unit)
	}
	return &journal.Record[creation]{Boot: r.Boot, Group: unit, Silicon: r.Silicon, Devices: r.Devices, Body: creation{Family: r.Family, Creation: r.Making}}, nil
}

// recordUnit records a unit before it is created, unless the record is already on disk. Nothing
// remains of an earlier attempt in another way; otherwise the family would have refused.
func (m *Manager) recordUnit(d *discovery.Device) error {
	unit := d.Creation.Unit
	m.mu.Lock()
	var names []string
	for _, other := range m.lastScan[unit] {
		names = append(names, other.Name)
	}
	m.mu.Unlock()
	if r := m.journal.Get(unit); r != nil {
		if maps.Equal(r.Body.Creation.How, d.Creation.How) && m.isCurrent(r) {
			return m.journal.EnsureWritten(unit)
		}
		names = union(names, r.Devices)
	}
	if !slices.Contains(names, d.Name) {
		names = append(names, d.Name)
	}
	return m.journal.Put(&record{Group: unit, Silicon: d.Silicon(), Devices: names, Body: creation{Family: d.Family, Creation: *d.Creation, Function: m.functionOf(d.Creation)}})
}

// functionOf returns the present key of the parent function of the devices.
func (m *Manager) functionOf(making *discovery.Creation) discovery.DeviceKey {
	return discovery.FunctionKey(m.config.Host, making.Of)
}

// isCurrent reports whether the parent function of the recorded devices is still present and has
// not been registered again.
func (m *Manager) isCurrent(r *record) bool {
	return r.Body.Function.MayEqual(m.functionOf(&r.Body.Creation))
}

// amendRecord records the result of a change of a unit. If the disk fails, the result remains in
// memory and is written later.
func (m *Manager) amendRecord(unit string, how map[string]string) error {
	r := m.journal.Get(unit)
	if r == nil {
		return nil
	}
	now := *r
	now.Body.Creation.How = make(map[string]string)
	maps.Copy(now.Body.Creation.How, r.Body.Creation.How)
	maps.Copy(now.Body.Creation.How, how)
	return m.journal.AmendRecord(&now)
}

// RestoreRecords writes records that were removed or could not be written; see
// [journal.Journal.RestoreRecords].
func (m *Manager) RestoreRecords() error { return m.journal.RestoreRecords() }

func union(names, more []string) []string {
	all := slices.Concat(names, more)
	slices.Sort(all)
	return slices.Compact(all)
}

// removeRecord removes the record of a unit once nothing is left to remove.
func (m *Manager) removeRecord(unit string) error {
	if err := m.journal.Remove(unit); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.failures, unit)
	return nil
}

// Has reports whether a unit has a record, because it was created or about to be created, and
// returns the recorded How.
func (m *Manager) Has(unit string) (how map[string]string, has bool) {
	r := m.journal.Get(unit)
	if r == nil || !m.isCurrent(r) {
		return nil, false
	}
	return maps.Clone(r.Body.Creation.How), true
}

// CreatedUnit is a unit that was created, or that an agent was about to create.
type CreatedUnit struct {
	Unit    string
	Family  string
	Silicon string   // the physical device
	Devices []string // names of the planned devices and of the present devices
	Err     error    // why the last attempt to remove the unit failed, nil if there was none
}

// CreatedUnits returns all units with a record, in order.
func (m *Manager) CreatedUnits() (made []CreatedUnit) {
	all, stock := m.journal.All(), m.config.Stock()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range all {
		one := CreatedUnit{Unit: r.Group, Family: r.Body.Family, Silicon: r.Silicon, Devices: unitDevices(r, stock)}
		if failed := m.failures[r.Group]; failed.afterCreation {
			one.Err = failed.err
		}
		made = append(made, one)
	}
	return made
}

// unitDevices returns the devices of a unit, in order: the planned devices, and the present devices.
// The kernel may assign virtual functions other addresses than it had announced.
func unitDevices(r *record, stock exclusion.Stock) []string {
	var present []string
	for _, name := range stock.Names() {
		if d, _ := stock.Device(name); d.Creation == nil && d.Attributes.String("parent") == r.Group {
			present = append(present, name)
		}
	}
	return union(r.Devices, present)
}

// creatorFamily returns the family with a name, or an error if it cannot create devices.
func (m *Manager) creatorFamily(name string) (*discovery.Family, error) {
	for _, f := range m.config.Families {
		if f.Name == name && f.CanCreate() {
			return f, nil
		}
	}
	return nil, fmt.Errorf("family %q makes no devices", name)
}
