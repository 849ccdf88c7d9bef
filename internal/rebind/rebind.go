// Package rebind gives PCI functions to a vfio driver for those who ask for them so, and
// back to the drivers that they had. It writes down what a function had before it changes
// it, and goes on from whatever a killed agent has left. It knows no vendor and no
// Kubernetes. Who may have a device is not its to decide.
package rebind

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/overdue"
)

// Config is what a Binder works with.
type Config struct {
	Host *discovery.Host

	// Write writes an attribute of the host, as of fs.FS. Nil means that the agent may not
	// change the host.
	Write func(name, value string) error

	// Busy returns who uses a function, nil if nobody does. It is asked before a function is
	// taken from a driver. Nil means that nobody can tell, and nothing is taken.
	Busy func(function sysfs.Device) error

	Files disk.Files
	Dir   string // where it is written down what functions had
	Boot  string // the kernel's boot ID: no binding outlives a boot

	// Family is the name of the family whose Grant serves functions under vfio.
	Family string

	// Changed is called when a device may be other than the last scan has it. It must not
	// block.
	Changed func()

	// Ledger is asked for a lease before a function changes, and Stock for the devices of the host as both APIs
	// offer them.
	Ledger *ledger.Ledger
	Stock  func() ledger.Stock

	Limit time.Duration // how long a write may take before nobody waits for it any more; 20 s if 0
	Wait  time.Duration // how long until a driver must have taken a function; 10 s if 0
}

// Binder gives functions to vfio and back.
type Binder struct {
	config Config
	filing chan struct{} // has one while a call writes, reads or removes records

	mu     sync.Mutex
	bound  map[string]*record          // by the function's address
	failed map[string]error            // likewise, why it could not be given back
	unread bool                        // what an earlier agent has left could not be listed yet
	seen   map[string]discovery.Device // by directory, those that can be rebound, as they were scanned last
}

// record is what a function was before it was given to vfio. It is on disk before
// anything is changed, and is removed when the function is as it was.
type record struct {
	Boot     string `json:"boot"`
	Function string `json:"function"` // its address
	Source   string `json:"source"`   // its directory, as of fs.FS
	Driver   string `json:"driver"`   // "" if it had none
	Override string `json:"override"` // its driver_override, "" if it had none
	To       string `json:"to"`       // the vfio driver

	// Choose says that the driver which it had is not known. The kernel chooses.
	Choose bool `json:"choose,omitempty"`

	// Device is the device that is the function, as it was described. It is described so
	// until it is that again.
	Device discovery.Device `json:"device"`
}

// New returns a Binder. It is ready once it was opened.
func New(config Config) *Binder {
	if config.Limit == 0 {
		config.Limit = 20 * time.Second
	}
	if config.Wait == 0 {
		config.Wait = 10 * time.Second
	}
	if config.Changed == nil {
		config.Changed = func() {}
	}
	return &Binder{
		config: config, filing: make(chan struct{}, 1), bound: make(map[string]*record), failed: make(map[string]error),
		seen: make(map[string]discovery.Device),
	}
}

// Open reads what an earlier agent of this boot has left. A record of an earlier boot is
// removed, since the kernel has forgotten the binding. If a record cannot be read, its name
// says of which function it is, and the kernel is left to choose the driver; if there is no such
// function, the record is removed, too. If the disk does not
// list the records, [Binder.ReadAgain] does it later.
func (b *Binder) Open() (problems []error) {
	addresses, err := b.records().Names()
	if err != nil {
		b.setUnread(true)
		return []error{fmt.Errorf("list what was rebound: %w", err)}
	}
	for _, address := range addresses {
		if sysfs.IsPCIAddress(address) {
			problems = append(problems, b.open(address)...)
		}
	}
	return problems
}

// open takes over the record of a function, unless it was written anew meanwhile.
func (b *Binder) open(address string) (problems []error) {
	defer b.takeTurn()()
	b.mu.Lock()
	anew := b.bound[address] != nil
	b.mu.Unlock()
	if anew {
		return nil
	}
	r, err := b.read(address)
	switch {
	case errors.Is(err, fs.ErrNotExist): // removed meanwhile
		return nil
	case err != nil && b.isOut(address), err == nil && r.Boot != b.config.Boot:
		if err := b.records().Remove(address); err != nil {
			problems = append(problems, err)
		}
		return problems
	case err != nil:
		problems = append(problems, fmt.Errorf("what function %s was before it was rebound cannot be read; the kernel will choose its driver: %w", address, err))
		r = b.unknown(address)
	}
	b.keep(r)
	return problems
}

// ReadAgain reads what an earlier agent has left, if that could not be listed yet, and reports
// whether there is still something to read.
func (b *Binder) ReadAgain() (problems []error, unread bool) {
	if !b.isUnread() {
		return nil, false
	}
	b.setUnread(false)
	problems = b.Open()
	if unread = b.isUnread(); unread {
		return nil, true
	}
	b.config.Changed()
	return problems, false
}

func (b *Binder) isUnread() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.unread
}

func (b *Binder) setUnread(unread bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.unread = unread
}

func (b *Binder) records() disk.Records[record] {
	return disk.Records[record]{Files: b.config.Files, Dir: b.config.Dir}
}

func (b *Binder) read(address string) (*record, error) {
	r, err := b.records().Read(address)
	if err != nil {
		return nil, err
	}
	if r.Function != address || r.Source == "" {
		return nil, errors.New("it is of no function")
	}
	r.Device.Source = r.Source
	return r, nil
}

// unknown returns the record of a function of which nothing else is known.
func (b *Binder) unknown(address string) *record {
	source := "sys/bus/pci/devices/" + address
	if function, ok := sysfs.At(b.config.Host.FS, "sys/bus/pci/devices").LinkTo(address); ok {
		source = function.Path
	}
	return &record{Choose: true, Boot: b.config.Boot, Function: address, Source: source, To: b.function(source).Driver()}
}

// isOut reports whether there is no such function: a virtual one after a reboot, or one that was taken out. The kernel
// has forgotten its binding, whatever was written down.
func (b *Binder) isOut(address string) bool {
	_, err := fs.Lstat(b.config.Host.FS, "sys/bus/pci/devices/"+address)
	return errors.Is(err, fs.ErrNotExist)
}

// function returns a function as the host has it now.
func (b *Binder) function(source string) sysfs.Device { return sysfs.At(b.config.Host.FS, source) }

func (b *Binder) keep(r *record) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bound[r.Function] = r
}

func (b *Binder) forget(r *record) error {
	defer b.takeTurn()()
	if err := b.records().Remove(r.Function); err != nil {
		return fmt.Errorf("remove what %s was before it was rebound: %w", r.Function, err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.bound, r.Function)
	delete(b.failed, r.Function)
	return nil
}

// of returns the record of a device, nil if it is not rebound.
func (b *Binder) of(d *discovery.Device) *record {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bound[filepath.Base(d.Source)]
}

// note writes down what a function is before it is changed, unless that is written
// down already. If the record could not be read and the function has its own driver by now, what
// it is can be told again.
func (b *Binder) note(lease *ledger.Lease, function sysfs.Device, to string, d discovery.Device) (*record, error) {
	address := function.Name()
	b.mu.Lock()
	r := b.bound[address]
	b.mu.Unlock()
	if r != nil && !r.Choose {
		return r, nil
	}
	driver := function.Driver()
	choose := r != nil && (driver == "" || discovery.IsVFIO(driver))
	override, err := b.override(lease, function, b.config.Limit)
	if err != nil {
		return nil, err
	}
	if override == to && driver != to {
		override = "" // left by an agent whose record could not be read; under it no other driver takes the function
	}
	if choose {
		driver, override = "", ""
	}
	r = &record{Choose: choose, Boot: b.config.Boot, Function: address, Source: function.Path, Driver: driver, Override: override, To: to, Device: d}
	defer b.takeTurn()()
	there, err := b.save(r)
	if there != disk.Old {
		b.keep(r) // perhaps
	}
	if err != nil {
		return nil, err
	}
	return r, nil
}

// save writes a record, and says which one is on disk then.
func (b *Binder) save(r *record) (disk.InPlace, error) {
	there, err := b.records().Write(r.Function, r)
	if err != nil {
		err = fmt.Errorf("function %s: write down what it is: %w", r.Function, err)
	}
	return there, err
}

// Restore writes records again that somebody has removed: an agent that starts would not know that it is to
// give those functions back.
func (b *Binder) Restore() error {
	b.mu.Lock()
	addresses := slices.Sorted(maps.Keys(b.bound))
	b.mu.Unlock()
	var errs []error
	for _, address := range addresses {
		if b.records().Lacks(address) {
			errs = append(errs, b.restore(address))
		}
	}
	return errors.Join(errs...)
}

// restore writes the record of a function again. It needs no lease: while a write to the function hangs, the agent may
// end, and the next one needs the record.
func (b *Binder) restore(address string) error {
	defer b.takeTurn()()
	b.mu.Lock()
	r := b.bound[address]
	b.mu.Unlock()
	if r == nil || !b.records().Lacks(address) {
		return nil // it was given back meanwhile, or written anew
	}
	_, err := b.save(r)
	return err
}

// takeTurn returns once no other call writes, reads or removes records.
func (b *Binder) takeTurn() (done func()) {
	b.filing <- struct{}{}
	return func() { <-b.filing }
}

// overrideOf returns the driver that a function is for whatever its identity, "" if there is
// none (Documentation/ABI/testing/sysfs-bus-pci).
func overrideOf(function sysfs.Device) (string, error) {
	text, err := function.Text("driver_override")
	if text == "(null)" {
		text = ""
	}
	return text, err
}

// lease reserves functions, with all devices that are on them, to change them for a consumer. The error wraps
// [*ledger.Blocked].
func (b *Binder) lease(functions []string, consumer string) (*ledger.Lease, error) {
	stock := b.config.Stock()
	return b.leased(ledger.Change{
		Name: "driver of " + filepath.Base(functions[0]), Consumer: consumer, API: discovery.ModeDRA, Functions: functions,
		Devices: ledger.On(stock, functions...),
	}, stock)
}

// leaseRecord keeps other calls from a function while its record changes, whichever consumer has the function.
func (b *Binder) leaseRecord(source string) (*ledger.Lease, error) {
	return b.leased(ledger.Change{Name: "record of " + filepath.Base(source), Functions: []string{source}}, b.config.Stock())
}

func (b *Binder) leased(c ledger.Change, stock ledger.Stock) (*ledger.Lease, error) {
	c.Ended = b.config.Changed
	lease, blocked := b.config.Ledger.Lease(c, stock)
	if blocked != nil {
		return nil, blocked
	}
	return lease, nil
}

// write writes an attribute for a function.
func (b *Binder) write(lease *ledger.Lease, address, what, name, value string) error {
	if b.config.Write == nil {
		return errNoPrivilege
	}
	err := lease.Do(b.config.Limit, what, func() error { return b.config.Write(name, value) })
	switch {
	case err == nil:
		return nil
	case errors.Is(err, overdue.Err):
		return fmt.Errorf("function %s: %w", address, err)
	case sysfs.IsReadOnly(err):
		err = fmt.Errorf("%w: %w", err, errNoPrivilege)
	}
	return fmt.Errorf("function %s: %s: write %q to /%s: %w", address, what, value, name, err)
}

// override returns the driver_override of a function. The kernel may keep it waiting for as long as a
// process has the function open.
func (b *Binder) override(lease *ledger.Lease, function sysfs.Device, limit time.Duration) (string, error) {
	var override string
	err := lease.Do(limit, "a read of its driver_override", func() (err error) {
		override, err = overrideOf(function)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("function %s: %w", function.Name(), err)
	}
	return override, nil
}

var errNoPrivilege = errors.New("the agent may not change the host: it takes rebinding.enabled, see docs/rebinding.md")

// bind has a driver take a function that no driver has, and waits until it has.
func (b *Binder) bind(ctx context.Context, lease *ledger.Lease, source, driver string, write func() error) error {
	address := filepath.Base(source)
	wrote := write()
	if lease.Late() != nil {
		return wrote
	}
	if wrote != nil && b.function(source).Driver() != driver {
		return fmt.Errorf("driver %s did not take it: %w", driver, wrote)
	}
	return b.until(ctx, func() error {
		switch now := b.function(source).Driver(); now {
		case driver:
			return nil
		case "":
			return fmt.Errorf("function %s: driver %s did not take it; the kernel's log may say why", address, driver)
		default:
			return fmt.Errorf("function %s: driver %s has it now and not %s", address, now, driver)
		}
	})
}

// until returns when there is no error any more, or the last one after a while.
func (b *Binder) until(ctx context.Context, look func() error) error {
	limit := time.Now().Add(b.config.Wait)
	for {
		err := look()
		if err == nil || time.Now().After(limit) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// loaded reports whether the kernel has a driver for PCI functions.
func (b *Binder) loaded(driver string) bool {
	return b.config.Host.Exists("/" + driverDir(driver))
}

func driverDir(driver string) string { return "sys/bus/pci/drivers/" + driver }
