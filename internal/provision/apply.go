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
	"chandler.dev/discovery/sysfs"
)

// Held returns who has which of the devices, by their names: containers, by
// claims and by the device-plugin API.
type Held func(known []discovery.Device) (map[string]string, error)

// Provisioner makes the functions of a host as the rules say.
type Provisioner struct {
	Host     *discovery.Host
	Families []*discovery.Family
	Rules    []Rule
	Held     Held

	// Write writes an attribute of the host, as of fs.FS. Nil writes nothing,
	// and the plan is printed only.
	Write func(name, value string) error

	// Keep writes the journal, and removes it if that is nil. Nil keeps none.
	Keep func(journal []byte) error

	Out io.Writer // gets a line for each change, before it is made

	owed []discovery.Write // what the journal had when Run began
}

// Run does all that can be done, one function after the other. The error says by
// function what could not or must not be done. A function that fails keeps no
// other from being done.
func (p *Provisioner) Run(ctx context.Context) error {
	changes, err := p.resume()
	if errors.Is(err, errJournal) {
		return err // a later write to the journal would replace what it has
	}
	errs := []error{err}
	known := discovery.Scan(p.Host, p.Families).Devices
	selected, notes, err := functions(p.Host, p.Rules, known)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, note := range notes {
		fmt.Fprintln(p.Out, note)
	}
	for _, f := range selected {
		if ctx.Err() != nil { // said so that nobody takes it for an end that was asked for
			return errors.Join(append(errs, fmt.Errorf("%s and those after it: interrupted, and not looked at", f.Name()))...)
		}
		n, err := p.provision(f, known)
		changes += n
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); changes > 0 || err != nil {
		return err
	}
	fmt.Fprintln(p.Out, "nothing to do")
	return nil
}

// provision plans one function and writes what is planned. It returns how many
// changes there are.
func (p *Provisioner) provision(f function, known []discovery.Device) (changes int, err error) {
	parts, err := p.plan(f, known)
	errs := []error{err}
	failed := make(map[string]bool)
	for _, part := range parts {
		changes += len(part.writes)
		if err := p.apply(part); err != nil {
			errs = append(errs, err)
			failed[part.name] = true
		}
		if failed[f.Name()] {
			break // its virtual functions are not as planned
		}
	}
	if p.Write != nil && changes > 0 && !failed[f.Name()] {
		errs = append(errs, p.check(f, known, failed))
	}
	return changes, errors.Join(errs...)
}

// plan looks at the host as it is now.
func (p *Provisioner) plan(f function, known []discovery.Device) ([]part, error) {
	planner := &planner{
		host:     p.Host,
		families: p.Families,
		uses:     sync.OnceValue(func() *uses { return readUses(p.Host, known, p.Held) }),
	}
	return planner.plan(f)
}

// apply makes the writes of a part. The journal has those that end what others begin,
// until they are made.
func (p *Provisioner) apply(part part) error {
	ends := p.ends(part.writes)
	if p.Write == nil || p.Keep == nil || len(ends) == 0 {
		return p.write(part)
	}
	if err := p.keep(ends); err != nil {
		return fmt.Errorf("%s: %w", part.name, err)
	}
	err := p.write(part)
	return errors.Join(err, p.keep(p.left(ends)))
}

// write makes the writes of a part. After a write that failed, it makes only the
// writes that end what was begun.
func (p *Provisioner) write(part part) error {
	var errs []error
	made := false
	for _, w := range part.writes {
		if len(errs) > 0 && (!w.Always || !made || p.shown(w.Shows) == w.To) {
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
			errs = append(errs, fmt.Errorf("%s: write %q to /%s: %w%s", part.name, value, w.Path, err, advice(w, err)))
			continue
		}
		made = true
	}
	return errors.Join(errs...)
}

// advice says what an error of the kernel means, as far as it is known, and what helps.
func advice(w discovery.Write, err error) string {
	if path.Base(w.Path) != "sriov_numvfs" {
		return ""
	}
	return discovery.ExplainVirtual(w.Value, err)
}

// value returns what is written.
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

// shown returns what an attribute shows now.
func (p *Provisioner) shown(name string) string {
	text, _ := sysfs.At(p.Host.FS, path.Dir(name)).Text(path.Base(name))
	return text
}

// check plans again. If the plan is not empty after everything was written, the
// kernel took a write and did not do it.
func (p *Provisioner) check(f function, known []discovery.Device, failed map[string]bool) error {
	left, _ := p.plan(f, known)
	left = slices.DeleteFunc(left, func(part part) bool { return failed[part.name] })
	var errs []error
	for _, part := range left {
		first := part.writes[0]
		if driver := first.To; strings.Contains(driver, "vfio") && sysfs.At(p.Host.FS, path.Dir(first.Shows)).Link("iommu_group") == "" {
			errs = append(errs, fmt.Errorf("%s: driver %s did not take it: %w", part.name, driver, errUnserved))
			continue
		}
		errs = append(errs, fmt.Errorf("%s: was written, and is not done: %s; the kernel's log may say why", part.name, first))
	}
	return errors.Join(errs...)
}
