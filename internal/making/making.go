// Package making makes devices that are not there until somebody gets them, by what their
// families know, and undoes that when nobody has them any more. It writes down what it
// makes before it does, and goes on from whatever a killed agent has left. It knows no
// vendor and no Kubernetes. Who may have a device, and since when nobody has it, is not its
// to decide.
package making

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
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

	Files disk.Files
	Dir   string // where it is written down what was made
	Boot  string // the kernel's boot ID: nothing that was made outlives a boot

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
	filing chan struct{} // has one while a call writes or removes records

	mu       sync.Mutex
	made     map[string]*record            // by unit
	working  map[string]bool               // likewise, while a call changes it
	awaited  map[string]bool               // likewise, while the unit is being made
	failed   map[string]failure            // likewise, why it could not be made or undone
	unread   map[string]bool               // likewise, while the disk does not read its record
	unlisted bool                          // the disk does not list what an earlier agent has made
	seen     map[string][]discovery.Device // likewise, the devices as they were scanned last before they were made
}

// record says what is made. It is on disk before anything is made, and is removed when
// that is undone.
type record struct {
	Boot    string           `json:"boot"`
	Family  string           `json:"family"`
	Making  discovery.Making `json:"making"`
	Silicon string           `json:"silicon"`
	Devices []string         `json:"devices"` // the names of those that are made in one step
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
		config: config, filing: make(chan struct{}, 1), made: make(map[string]*record), working: make(map[string]bool), awaited: make(map[string]bool),
		failed: make(map[string]failure), unread: make(map[string]bool), seen: make(map[string][]discovery.Device),
	}
}

// Open reads what an earlier agent of this boot has made. A record of an earlier boot is
// removed, since the kernel has forgotten the unit. A record that is not understood is kept
// for people to look at, and its unit stays as it is. If the disk does not list or read a
// record, [Maker.ReadAgain] reads it later.
func (m *Maker) Open() (problems []error) {
	units, err := m.list()
	if err != nil {
		return []error{fmt.Errorf("list what was made: %w", err)}
	}
	for _, unit := range units {
		r, err := m.read(unit)
		switch {
		case err != nil:
			problems = append(problems, fmt.Errorf("what was made as %s cannot be read, so that it stays: %w", unit, err))
			m.setUnread(unit, errors.Is(err, disk.ErrUnread))
		case r.Boot != m.config.Boot:
			if err := m.records().Remove(unit); err != nil {
				problems = append(problems, err)
			}
		default:
			m.keep(r)
		}
	}
	return problems
}

// list returns the units of which there are records.
func (m *Maker) list() (units []string, err error) {
	units, err = m.records().Names()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unlisted = err != nil
	return units, err
}

// ReadAgain reads records that the disk did not list or read when they were opened, and reports whether
// there are such still. It has one caller at a time.
func (m *Maker) ReadAgain() (unread bool) {
	m.mu.Lock()
	unlisted := m.unlisted
	m.mu.Unlock()
	if unlisted {
		units, err := m.list()
		if err != nil {
			return true
		}
		for _, unit := range units {
			m.setUnread(unit, true)
		}
	}
	m.mu.Lock()
	units := slices.Sorted(maps.Keys(m.unread))
	m.mu.Unlock()
	for _, unit := range units {
		r, err := m.read(unit)
		if errors.Is(err, disk.ErrUnread) {
			unread = true
			continue
		}
		m.setUnread(unit, false)
		if _, anew := m.Has(unit); err == nil && r.Boot == m.config.Boot && !anew {
			m.keep(r)
			m.config.Changed()
		}
	}
	return unread
}

func (m *Maker) setUnread(unit string, unread bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if unread {
		m.unread[unit] = true
	} else {
		delete(m.unread, unit)
	}
}

func (m *Maker) records() disk.Records[record] {
	return disk.Records[record]{Files: m.config.Files, Dir: m.config.Dir}
}

func (m *Maker) read(unit string) (*record, error) {
	r, err := m.records().Read(unit)
	if err != nil {
		return nil, err
	}
	if r.Making.Unit != unit || r.Family == "" {
		return nil, errors.New("it says nothing of that name")
	}
	return r, nil
}

func (m *Maker) keep(r *record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.made[r.Making.Unit] = r
}

// note writes down what is to be made, unless that is written down already. Of an earlier attempt in
// another way nothing is there, or the family would have refused.
func (m *Maker) note(d *discovery.Device) error {
	unit := d.Making.Unit
	m.mu.Lock()
	r := m.made[unit]
	var names []string
	for _, other := range m.seen[unit] {
		names = append(names, other.Name)
	}
	m.mu.Unlock()
	if r != nil {
		if maps.Equal(r.Making.How, d.Making.How) {
			return nil
		}
		names = union(names, r.Devices)
	}
	if !slices.Contains(names, d.Name) {
		names = append(names, d.Name)
	}
	r = &record{Boot: m.config.Boot, Family: d.Family, Making: *d.Making, Silicon: d.Silicon(), Devices: names}
	return m.save(r)
}

// amend writes down what has come of a unit. Where that fails, it is known for as long as this
// agent runs.
func (m *Maker) amend(unit string, how map[string]string) error {
	m.mu.Lock()
	r := m.made[unit]
	m.mu.Unlock()
	if r == nil {
		return nil
	}
	now := *r
	now.Making.How = make(map[string]string)
	maps.Copy(now.Making.How, r.Making.How)
	maps.Copy(now.Making.How, how)
	err := m.save(&now)
	m.keep(&now)
	return err
}

func (m *Maker) save(r *record) error {
	defer m.takeTurn()()
	return m.write(r)
}

// takeTurn returns once no other call writes or removes records.
func (m *Maker) takeTurn() (done func()) {
	m.filing <- struct{}{}
	return func() { <-m.filing }
}

// write writes a record. The caller has the turn.
func (m *Maker) write(r *record) error {
	there, err := m.records().Write(r.Making.Unit, r)
	if there != disk.Old {
		m.keep(r) // perhaps
	}
	if err != nil {
		return fmt.Errorf("write down that it is made: %w", err)
	}
	return nil
}

// Restore writes records again that somebody has removed: an agent that starts would not know that it is to undo those
// units.
func (m *Maker) Restore() error {
	m.mu.Lock()
	units := slices.Sorted(maps.Keys(m.made))
	m.mu.Unlock()
	var errs []error
	for _, unit := range units {
		if m.records().Lacks(unit) {
			errs = append(errs, m.restore(unit))
		}
	}
	return errors.Join(errs...)
}

func (m *Maker) restore(unit string) error {
	defer m.takeTurn()()
	m.mu.Lock()
	r := m.made[unit]
	m.mu.Unlock()
	if r == nil || !m.records().Lacks(unit) {
		return nil // it was undone meanwhile, or written anew
	}
	return m.write(r)
}

func union(names, more []string) []string {
	all := slices.Concat(names, more)
	slices.Sort(all)
	return slices.Compact(all)
}

// forget says that nothing is left to undo.
func (m *Maker) forget(unit string) error {
	defer m.takeTurn()()
	if err := m.records().Remove(unit); err != nil {
		return fmt.Errorf("remove what %s was made as: %w", unit, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.made, unit)
	delete(m.failed, unit)
	return nil
}

// Has reports whether a unit was made, or was about to be, with what was written down of it.
func (m *Maker) Has(unit string) (how map[string]string, has bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.made[unit]
	if r == nil {
		return nil, false
	}
	return maps.Clone(r.Making.How), true
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
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, unit := range slices.Sorted(maps.Keys(m.made)) {
		r := m.made[unit]
		one := Made{Unit: unit, Family: r.Family, Silicon: r.Silicon, Devices: slices.Clone(r.Devices)}
		if failed := m.failed[unit]; failed.made {
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
