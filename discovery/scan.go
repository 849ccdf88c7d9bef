package discovery

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"

	"chandler.dev/discovery/sysfs"
)

// Scan returns the devices of the given families on a host. It never fails. A
// device that cannot be described is left out of the snapshot, or is in it with
// health Unknown and without what could not be read. Problems name it.
//
// Scan reads one file after the other and waits for each, as is good enough for
// what lies in memory. [Watch] does not wait for what hangs.
func Scan(host *Host, families []*Family) *Snapshot {
	m := match(host, families)
	looks := []look{{Problems: m.problems}}
	for _, f := range leftoversLast(families) {
		looks = append(looks, m.of[f].left(f, looks).read(f, host))
	}
	return joinLooks(looks)
}

// leftoversLast returns the families in the order in which they are asked.
func leftoversLast(families []*Family) []*Family {
	leftovers := func(f *Family) bool { return f.Leftovers }
	ordinary := func(f *Family) bool { return !f.Leftovers }
	return slices.Concat(slices.DeleteFunc(slices.Clone(families), leftovers), slices.DeleteFunc(slices.Clone(families), ordinary))
}

// look is what one family finds on a host. The work on devices of several families
// is not yet done; see [joinLooks].
type look struct {
	Devices  []Device
	Problems []Problem

	matched []sysfs.Device // by the family
	claims  bool           // no Unclaimed family may have what is matched
	unread  bool           // the family has not answered
	had     []Device       // what it found when it last did

	// These are readings that may change without an event; see [trace].
	traces    bool     // it is to be remembered
	traced    bool     // it was, and tells whether the host is the same
	steps     []traced // in describing devices, by name
	sensors   []traced // in readings of functions, less these
	functions map[string][]Health
	places    []string // of sysfs that were read, in order; see [look.seesDeviceOf]
}

// matches are which kernel devices each family matches.
type matches struct {
	of       map[*Family]look
	problems []Problem // of lists of devices
}

// match lists the kernel devices of a host and decides which families they
// belong to. It reads no file whose reader has to wait for a device: the kernel
// makes modalias, vendor, device and class of what it has in memory, and the
// rest are directories and links (drivers/pci/pci-sysfs.c, fs/kernfs).
func match(host *Host, families []*Family) matches {
	kernel := newKernel(host)
	m := matches{of: make(map[*Family]look, len(families))}
	for _, f := range families {
		found, problems := f.matched(kernel)
		m.of[f] = look{matched: found, Problems: problems, claims: !f.Leftovers}
	}
	m.problems = kernel.problems
	return m
}

// left returns the look of a family before it is read. A family of leftovers
// gets only the kernel devices that the looks before leave it: no device consists
// of them, and nobody failed to read them. A device that a family matched which has
// not answered may be one of its own.
func (l look) left(f *Family, before []look) look {
	if !f.Leftovers {
		return l
	}
	taken := make(map[string]bool) // paths, and names of devices
	for _, look := range before {
		take(taken, look.Devices)
		take(taken, look.had)
		for _, problem := range look.Problems {
			taken[problem.Device] = true
		}
		if look.unread || f.Unclaimed && look.claims {
			for _, d := range look.matched {
				function, _ := d.PCIFunction()
				taken[d.Path], taken[function.Path] = true, true
			}
		}
	}
	l.matched = slices.DeleteFunc(l.matched, func(d sysfs.Device) bool { return taken[d.Path] || taken[DeviceName(d)] })
	return l
}

// of reports whether the look is of the same kernel devices as the one that is asked for, all
// of which could be listed.
func (l look) of(asked look) bool {
	same := func(a, b sysfs.Device) bool { return a.Path == b.Path }
	return len(asked.Problems) == 0 && slices.EqualFunc(l.matched, asked.matched, same)
}

// asks reports whether there is anything to ask the family.
func (l look) asks(f *Family) bool { return len(l.matched) > 0 || f.FromConfig || f.Always }

// in returns the look with its kernel devices in another view of the host.
func (l look) in(fsys fs.FS) look {
	matched := make([]sysfs.Device, len(l.matched))
	for i, d := range l.matched {
		matched[i] = d.In(fsys)
	}
	l.matched = matched
	return l
}

// take marks the kernel devices that devices consist of.
func take(taken map[string]bool, devices []Device) {
	for i := range devices {
		taken[devices[i].Source] = true
		for _, path := range devices[i].Includes {
			taken[path] = true
		}
	}
}

// read asks the family what the kernel devices offer that it matches, and reads
// what there is to be read of the devices of any family.
func (l look) read(f *Family, host *Host) look {
	if !l.asks(f) {
		return l
	}
	described, sensed, found := host, host, l.matched
	var answers, sensors *trace
	if l.traces {
		answers, described = newTrace(host)
		sensors, sensed = newTrace(host)
		found = l.in(answers).matched
	}
	devices, problems := f.describe(described, found)
	l.Problems = slices.Concat(l.Problems, problems)
	l.add(devices, f)
	functions := readPCI(sensed, l.Devices)
	setPlaces(described, l.Devices)
	l.Problems = slices.Concat(l.Problems, setRebindable(described, l.Devices))
	if l.traces {
		for _, d := range found {
			if sysfs.IsPCIAddress(d.Name()) && IsVFIO(d.Driver()) { // which may be remembered from the matching
				_, _ = answers.ReadLink(path.Join(d.Path, "driver"))
			}
		}
		l.steps, l.traced = answers.done(nil)
		l.sensors, _ = sensors.done(answers)
		l.functions = functions
		l.places = placesOf(l.matched, answers, sensors)
	}
	return l
}

// describe calls the family's Describe. A family that panics on what it finds
// is a defect of ours, but must not take the devices of the others with it.
func (f *Family) describe(host *Host, found []sysfs.Device) (devices []Device, problems []Problem) {
	defer func() {
		if cause := recover(); cause != nil {
			devices, problems = nil, []Problem{{f.Name, fmt.Errorf("describe: panic: %v", cause)}}
		}
	}()
	return f.Describe(host, found)
}

// add takes the family's devices into the look, less those that could not be
// published or handed out.
func (l *look) add(devices []Device, f *Family) {
	l.Devices = slices.Grow(l.Devices, len(devices))
	for i := range devices {
		d := &devices[i]
		d.Family, d.FromConfig = f.Name, f.FromConfig
		d.CommonNodes = slices.Concat(f.CommonNodes, d.CommonNodes)
		if d.Attributes == nil {
			d.Attributes = Attributes{}
		}
		d.Attributes.SetString("family", f.Name)
		if d.Health.Status == "" {
			d.Health.Status = Healthy
		}
		if err := errors.Join(d.Validate(), d.checkFiles(f.FileDirs)); err != nil {
			l.Problems = append(l.Problems, Problem{d.Name, err})
			continue
		}
		l.Devices = append(l.Devices, *d)
	}
}

// share gives devices that are described as in the last looks, in the same order, the memory
// of that description. A reader keeps a snapshot until something has changed, so without it
// there would be two descriptions of every device: the reader's, and those of the last scan.
func share(looks, last []look) {
	if len(looks) != len(last) {
		return
	}
	for i := range looks {
		if len(looks[i].Devices) == 0 || len(last[i].Devices) > 0 && &looks[i].Devices[0] == &last[i].Devices[0] {
			continue // the look was kept
		}
		before := make(map[string]*Device, len(last[i].Devices))
		for j := range last[i].Devices {
			before[last[i].Devices[j].Name] = &last[i].Devices[j]
		}
		for j := range looks[i].Devices {
			d := &looks[i].Devices[j]
			if known := before[d.Name]; known != nil && equality.Semantic.DeepEqual(known, d) {
				*d = *known
			}
		}
	}
}
