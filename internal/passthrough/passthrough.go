package passthrough

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// Config holds the settings and dependencies of a [Manager].
type Config struct {
	Host *discovery.Host

	// Write writes an attribute of the host. The name is a path as in fs.FS. Nil means that the
	// agent may not change the host.
	Write func(name, value string) error

	// Busy returns the users of the functions as an error that begins with the name of a function,
	// nil if all are free. Busy is called before functions are unbound from their drivers. If Busy
	// is nil, no function is taken.
	Busy func(functions ...sysfs.Device) error

	Journal journal.Config // location of the records of the functions' previous drivers
	Earlier string         // directory of the records of earlier versions, one file per function

	// Family is the name of the family whose Grant serves functions under vfio.
	Family string

	// Changed is called when a device may differ from the last scan. It must not block.
	Changed func()

	// Ledger grants a lease before a function changes. Stock returns the devices of the host as
	// both APIs offer them.
	Ledger *ledger.Ledger
	Stock  func() exclusion.Stock

	Limit time.Duration // maximum wait for a write; 20 s if 0
	Wait  time.Duration // maximum wait for a driver to take a function; 10 s if 0
}

// readFunction returns a function in its present state on the host.
func (c *Config) readFunction(source string) sysfs.Device { return sysfs.At(c.Host.FS, source) }

// isCurrent reports whether a record belongs to the function that has the recorded address now or
// had it last.
func (c *Config) isCurrent(f *function) bool {
	return f.Key.MayEqual(discovery.FunctionKey(c.Host, f.Source))
}

// keysOf returns the keys of functions, given by directory.
func (c *Config) keysOf(sources ...string) (keys []discovery.DeviceKey) {
	for _, source := range sources {
		keys = append(keys, discovery.FunctionKey(c.Host, source))
	}
	return keys
}

// Manager binds functions to vfio and returns them to their previous drivers.
type Manager struct {
	config     Config
	journal    *journal.Journal[binding] // by unit
	recordLock chan struct{}             // has a value while a call changes a record

	mu        sync.Mutex
	functions map[string]*function        // of all records, by the function's address
	failures  map[string]error            // by unit, why its functions could not be returned
	lastScan  map[string]discovery.Device // by directory, the devices of the last scan that support passthrough or are under vfio
}

// record is on disk before any function of its unit changes, and is removed when all functions have
// their previous drivers again.
type record = journal.Record[binding]

// binding holds the previous state of a unit's functions.
type binding struct {
	Functions []*function `json:"functions"`
}

// function holds the state of a function before the passthrough. A function in Manager.functions is
// not modified.
type function struct {
	Address  string `json:"function"`
	Source   string `json:"source"`   // its directory as in fs.FS
	Driver   string `json:"driver"`   // "" if the function had no driver
	Override string `json:"override"` // its driver_override, "" if not set
	To       string `json:"to"`       // the vfio driver

	// Key is the key of the function. When the kernel registers a function again, as after the
	// replacement of a card or the recreation of virtual functions, the kernel has lost the old
	// binding, and the Key differs. Key is zero in a record of an earlier version.
	Key discovery.DeviceKey `json:"key,omitzero"`

	// Choose means that the previous driver is unknown, so that the kernel chooses a driver.
	Choose bool `json:"choose,omitempty"`

	// Device is the description of the function's device before the passthrough. The device keeps
	// this description until the function has its previous driver again.
	Device discovery.Device `json:"device"`

	// CommonNodes are the CommonNodes of Device, which the JSON form of a device omits. Without
	// them, a new agent would treat a node such as /dev/vfio/vfio, which other devices use too, as
	// the device's own.
	CommonNodes []string `json:"commonNodes,omitempty"`

	unit string // the unit whose record has the function
}

// New returns a [Manager]. Call Open before other methods.
func New(config Config) *Manager {
	if config.Limit == 0 {
		config.Limit = 20 * time.Second
	}
	if config.Wait == 0 {
		config.Wait = 10 * time.Second
	}
	if config.Changed == nil {
		config.Changed = func() {}
	}
	b := &Manager{
		config: config, recordLock: make(chan struct{}, 1), functions: make(map[string]*function), failures: make(map[string]error),
		lastScan: make(map[string]discovery.Device),
	}
	b.journal = journal.New(config.Journal, "rebind", journal.Earlier[binding]{Dir: config.Earlier, Convert: b.convert, Merge: mergeRecords})
	b.journal.Damaged, b.journal.Check = b.damagedRecord, check
	return b
}

// Open reads the records of an earlier agent of this boot; see [journal.Journal.Open]. For an
// invalid record, the functions of the unit are tracked nevertheless, and the kernel chooses their
// drivers.
func (b *Manager) Open() (problems []error) {
	problems = b.journal.Open()
	b.index()
	return problems
}

// ReadAgain reads the records that Open could not list or read, and reports whether unread records
// remain.
func (b *Manager) ReadAgain() (problems []error, unread bool) {
	if !b.journal.MayLack() {
		return nil, false
	}
	found, problems, unread := b.journal.ReadAgain()
	if len(found) > 0 {
		b.index()
		b.config.Changed()
	}
	return problems, unread
}

// index rebuilds b.bound from the journal.
func (b *Manager) index() {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.functions)
	for _, r := range b.journal.All() {
		for _, f := range r.Body.Functions {
			if f.unit == "" { // the function was decoded from a file
				f.unit, f.Device.Source, f.Device.CommonNodes = r.Group, f.Source, f.CommonNodes
			}
			// An agent killed while it moved a function between the records of two units leaves the
			// function in both.
			if other := b.functions[f.Address]; other == nil || other.Choose {
				b.functions[f.Address] = f
			}
		}
	}
}

// convert converts the record of one function by an earlier version. If the record is invalid, the
// kernel chooses the driver of the function. convert returns nil for an invalid record of a missing
// function, because the kernel has lost its binding.
func (b *Manager) convert(address string, data []byte) (*record, error) {
	var r struct {
		Boot string `json:"boot"`
		function
	}
	err := json.Unmarshal(data, &r)
	if err == nil && (r.Address != address || r.Source == "") {
		err = errors.New("it is for another function")
	}
	switch {
	case !sysfs.IsPCIAddress(address):
		return nil, errors.New("it is for no function")
	case err == nil:
		return recordOf(r.Boot, unitOf(b.config.readFunction(r.Source)), &r.function), nil
	}
	source, there := b.sourceOf(address)
	if !there {
		return nil, nil
	}
	return recordOf(b.config.Journal.Boot, unitOf(b.config.readFunction(source)), b.unknownFunction(source)), fmt.Errorf("function %s: the kernel will choose its driver: %w", address, err)
}

func recordOf(boot, unit string, functions ...*function) *record {
	r := &record{Boot: boot, Group: unit, Body: binding{Functions: functions}}
	for _, f := range functions {
		if f.unit != unit { // do not write to functions that may be in use
			f.unit = unit
		}
		if f.Device.Name != "" {
			r.Silicon, r.Devices = f.Device.Silicon(), append(r.Devices, f.Device.Name)
		}
	}
	return r
}

// mergeRecords adds the functions of a converted record to the record of the unit. Functions from a
// damaged record of the unit are replaced by converted ones, which contain the drivers.
func mergeRecords(there, converted *record) *record {
	functions := slices.Clone(there.Body.Functions)
	for _, f := range converted.Body.Functions {
		i := slices.IndexFunc(functions, func(has *function) bool { return has.Address == f.Address })
		switch {
		case i < 0:
			functions = append(functions, f)
		case functions[i].Choose:
			functions[i] = f
		}
	}
	return recordOf(there.Boot, there.Group, functions...)
}

// check returns why a record is invalid, nil if it is valid.
func check(r *record) error {
	if len(r.Body.Functions) == 0 {
		return errors.New("it has no function")
	}
	for _, f := range r.Body.Functions {
		if f == nil || !sysfs.IsPCIAddress(f.Address) || filepath.Base(f.Source) != f.Address {
			return errors.New("one of its functions has no address, or the directory of another one")
		}
	}
	return nil
}

// damagedRecord returns a record for a unit with an unreadable record, nil if the host has no such
// unit.
func (b *Manager) damagedRecord(unit string) *record {
	all, _ := sysfs.BusDevices(b.config.Host.FS, "pci")
	var functions []*function
	for _, function := range all {
		if unitOf(function) == unit {
			functions = append(functions, b.unknownFunction(function.Path))
		}
	}
	if len(functions) == 0 {
		return nil
	}
	return recordOf(b.config.Journal.Boot, unit, functions...)
}

// sourceOf returns the directory of a function, and whether the function exists.
func (b *Manager) sourceOf(address string) (source string, there bool) {
	function, there := sysfs.At(b.config.Host.FS, "sys/bus/pci/devices").LinkTo(address)
	return function.Path, there
}

// unitOf returns the unit of a function without a described device; see [UnitOf].
func unitOf(function sysfs.Device) string {
	if group, ok := function.LinkTo("iommu_group"); ok {
		return "iommu-group-" + group.Name()
	}
	return discovery.DeviceName(function)
}

// unknownFunction returns the state of a function without a readable record.
func (b *Manager) unknownFunction(source string) *function {
	return &function{Choose: true, Address: filepath.Base(source), Source: source, To: b.config.readFunction(source).Driver()}
}

// recordOf returns the recorded state of a device's function, nil if the function is not under
// passthrough.
func (b *Manager) recordOf(d *discovery.Device) *function {
	b.mu.Lock()
	f := b.functions[filepath.Base(d.Source)]
	b.mu.Unlock()
	if f == nil || !b.config.isCurrent(f) {
		return nil
	}
	return f
}

// recordFunctions records the state of a unit's functions before any of them changes, except
// functions with a usable record. If a record could not be read and its function has its own driver
// again, recordFunctions records that driver.
func (b *Manager) recordFunctions(change driverChange, sources []string, to string, d discovery.Device) error {
	if b.journal.MayLack() {
		return discovery.TransientError(errors.New("the records of an earlier agent cannot be read yet, so the previous drivers of functions are unknown"))
	}
	unit := UnitOf(&d)
	var now, moved []*function
	for _, source := range sources {
		b.mu.Lock()
		before, device := b.functions[filepath.Base(source)], b.lastScan[source] // none if no family describes the function
		b.mu.Unlock()
		if device.Passthrough == nil {
			device = discovery.Device{} // the description under vfio
		}
		current := before != nil && b.config.isCurrent(before)
		if current && !before.Choose {
			if err := b.journal.EnsureWritten(before.unit); err != nil {
				return err
			}
			continue
		}
		if source == d.Source {
			device = d
		}
		f, err := change.describeNow(source, to, current)
		if err != nil {
			return err
		}
		f.Device, f.CommonNodes = device, device.CommonNodes
		now = append(now, f)
		if before != nil && before.unit != unit {
			moved = append(moved, before)
		}
	}
	if err := b.changeRecord(unit, nil, now...); err != nil {
		return err
	}
	for _, f := range moved {
		if err := b.changeRecord(f.unit, []string{f.Address}); err != nil {
			return err
		}
	}
	return nil
}

// changeRecord removes functions, by address, from the record of a unit, and adds others. A record
// without functions is removed.
func (b *Manager) changeRecord(unit string, without []string, with ...*function) error {
	if len(without)+len(with) == 0 {
		return nil
	}
	b.recordLock <- struct{}{}
	defer func() { <-b.recordLock }()
	var functions []*function
	if r := b.journal.Get(unit); r != nil {
		functions = slices.DeleteFunc(slices.Clone(r.Body.Functions), func(f *function) bool {
			return slices.Contains(without, f.Address) || slices.ContainsFunc(with, func(other *function) bool { return other.Address == f.Address })
		})
	}
	functions = append(functions, with...)
	defer b.index()
	if len(functions) == 0 {
		return b.journal.Remove(unit)
	}
	return b.journal.Put(recordOf("", unit, functions...))
}

// removeRecord removes the record of a unit whose functions have their previous state again.
func (b *Manager) removeRecord(r *record) error {
	var addresses []string
	for _, f := range r.Body.Functions {
		addresses = append(addresses, f.Address)
	}
	if err := b.changeRecord(r.Group, addresses); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.failures, r.Group)
	return nil
}

// RestoreRecords rewrites records that were removed or could not be written; see
// [journal.Journal.RestoreRecords]. It needs no lease: while a write to a function hangs, the agent
// may end, and the next agent needs the record.
func (b *Manager) RestoreRecords() error { return b.journal.RestoreRecords() }

// leaseFunctions reserves functions, with all their devices, for a change on behalf of a consumer.
// The error wraps [*exclusion.Blocked].
func (b *Manager) leaseFunctions(functions []string, consumer string) (*ledger.Lease, error) {
	stock := b.config.Stock()
	return b.leaseChange(allocation.Change{
		Name: "driver of " + filepath.Base(functions[0]), Consumer: consumer, API: discovery.ModeDRA, Functions: b.config.keysOf(functions...),
		Devices: exclusion.HoldsOn(stock, functions...),
	}, stock)
}

// leaseRecord blocks other calls for a function while its record is removed, whichever consumer has
// the function.
func (b *Manager) leaseRecord(source string) (*ledger.Lease, error) {
	return b.leaseChange(allocation.Change{Name: "record of " + filepath.Base(source), Functions: b.config.keysOf(source)}, b.config.Stock())
}

func (b *Manager) leaseChange(c allocation.Change, stock exclusion.Stock) (*ledger.Lease, error) {
	c.OnEnd = b.config.Changed
	lease, blocked := b.config.Ledger.Leases.LeaseDevices(c, stock)
	if blocked != nil {
		return nil, blocked
	}
	return lease, nil
}
