package provision

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"sync"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
)

// Held returns the consumers of allocated devices by device name, for allocations to claims
// and by the device plugin API.
type Held func(known []discovery.Device) (map[string]string, error)

// Provisioner configures the PCI functions of a host according to rules.
type Provisioner struct {
	Host     *discovery.Host
	Families []*discovery.Family
	Rules    []Rule
	Held     Held

	// Write writes an attribute of the host, named as in fs.FS. If nil, Run only prints the plan.
	Write func(name, value string) error

	// Keep writes the journal, or removes the journal if its argument is nil. If Keep is nil,
	// there is no journal.
	Keep func(journal []byte) error

	Out io.Writer // receives a line before each change

	outstanding []discovery.Write // contents of the journal at the start of Run
}

// Run carries out the rules, one function after the other. The error lists by function the
// work that failed or was refused. A failure at one function does not prevent work on the
// others.
func (p *Provisioner) Run(ctx context.Context) error {
	changes, err := p.resumeWrites()
	if errors.Is(err, errJournal) {
		return err // the next write to the journal would destroy its contents
	}
	errs := []error{err}
	known := scan.ReadHost(p.Host, p.Families).Devices
	selected, notes, err := selectFunctions(p.Host, p.Rules, known)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, note := range notes {
		fmt.Fprintln(p.Out, note)
	}
	for _, f := range selected {
		if ctx.Err() != nil { // the message shows that the interruption was not a regular end
			return errors.Join(append(errs, fmt.Errorf("%s and further functions: interrupted, and not checked", f.Name()))...)
		}
		n, err := p.provisionFunction(f, known)
		changes += n
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); changes > 0 || err != nil {
		return err
	}
	fmt.Fprintln(p.Out, "nothing to do")
	return nil
}

// provisionFunction plans one function and executes the plan. It returns the number of changes.
func (p *Provisioner) provisionFunction(f function, known []discovery.Device) (changes int, err error) {
	parts, err := p.planFunction(f, known)
	errs := []error{err}
	failed := make(map[string]bool)
	for _, part := range parts {
		changes += len(part.writes)
		if err := p.applyPart(part); err != nil {
			errs = append(errs, err)
			failed[part.name] = true
		}
		if failed[f.Name()] {
			break // the state of the virtual functions differs from the plan
		}
	}
	if p.Write != nil && changes > 0 && !failed[f.Name()] {
		errs = append(errs, p.check(f, known, failed))
	}
	return changes, errors.Join(errs...)
}

// planFunction returns the plan for a function according to the current state of the host.
func (p *Provisioner) planFunction(f function, known []discovery.Device) ([]part, error) {
	planner := &planner{
		host:     p.Host,
		families: p.Families,
		uses:     sync.OnceValue(func() *uses { return readUses(p.Host, known, p.Held) }),
	}
	return planner.planFunction(f)
}

// applyPart executes the writes of a part. The journal contains those writes that undo earlier
// ones, until they are executed.
func (p *Provisioner) applyPart(part part) error {
	ends := p.restoringWrites(part.writes)
	if p.Write == nil || p.Keep == nil || len(ends) == 0 {
		return p.write(part)
	}
	if err := p.keepJournal(ends); err != nil {
		return fmt.Errorf("%s: %w", part.name, err)
	}
	err := p.write(part)
	return errors.Join(err, p.keepJournal(p.missingWrites(ends)))
}

// write executes the writes of a part. After a failed write, it executes only the writes that
// undo earlier ones.
func (p *Provisioner) write(part part) error {
	var errs []error
	made := false
	for _, w := range part.writes {
		if len(errs) > 0 && (!w.Always || !made || p.currentValue(w.Shows) == w.To) {
			continue
		}
		fmt.Fprintln(p.Out, w)
		if p.Write == nil {
			continue
		}
		value, err := p.value(w)
		if err == nil {
			err = p.Write(w.Path, value)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: write %q to /%s: %w%s", part.name, value, w.Path, err, errorAdvice(w, err)))
			continue
		}
		made = true
	}
	return errors.Join(errs...)
}

// errorAdvice explains an error of the kernel, if the cause is known, and suggests a remedy.
func errorAdvice(w discovery.Write, err error) string {
	if path.Base(w.Path) != "sriov_numvfs" {
		return ""
	}
	return pci.ExplainVirtual(w.Value, err)
}

// value returns the value to write.
func (p *Provisioner) value(w discovery.Write) (string, error) {
	if w.NameOf == "" {
		return w.Value, nil
	}
	name := sysfs.At(p.Host.FS, path.Dir(w.NameOf)).Link(path.Base(w.NameOf))
	if name == "" {
		return "", fmt.Errorf("%s did not appear", path.Base(w.NameOf))
	}
	return name, nil
}

// currentValue returns the current value of an attribute.
func (p *Provisioner) currentValue(name string) string {
	text, _ := sysfs.At(p.Host.FS, path.Dir(name)).Text(path.Base(name))
	return text
}

// check plans again after all writes. A nonempty plan means that the kernel accepted a write
// without effect.
func (p *Provisioner) check(f function, known []discovery.Device, failed map[string]bool) error {
	left, _ := p.planFunction(f, known)
	left = slices.DeleteFunc(left, func(part part) bool { return failed[part.name] })
	var errs []error
	for _, part := range left {
		first := part.writes[0]
		if driver := first.To; strings.Contains(driver, "vfio") && sysfs.At(p.Host.FS, path.Dir(first.Shows)).Link("iommu_group") == "" {
			errs = append(errs, fmt.Errorf("%s: driver %s did not take it: %w", part.name, driver, errUnserved))
			continue
		}
		errs = append(errs, fmt.Errorf("%s: was written without effect: %s; the kernel's log may have the reason", part.name, first))
	}
	return errors.Join(errs...)
}
