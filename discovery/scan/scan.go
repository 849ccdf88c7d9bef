package scan

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
)

// ReadHost returns the devices of the given families on a host. ReadHost never fails. A device that
// cannot be described is left out of the snapshot, or is included with health Unknown and without
// the values that could not be read. Problems name the device.
//
// ReadHost reads one file after the other and waits for each, which suits files in memory. [Watch]
// does not wait for reads that hang.
func ReadHost(host *discovery.Host, families []*discovery.Family) *discovery.Snapshot {
	return scanAll(host, families).Snapshot()
}

// scanAll returns the findings of the families on a host.
func scanAll(host *discovery.Host, families []*discovery.Family) *Findings {
	m := match(host, families)
	looks := []familyScan{{Problems: m.problems}}
	for _, f := range leftoversLast(families) {
		looks = append(looks, m.of[f].leftoversAfter(f, looks).read(f, host))
	}
	return findingsOf(looks)
}

// leftoversLast returns the families in the order of reading.
func leftoversLast(families []*discovery.Family) []*discovery.Family {
	leftovers := func(f *discovery.Family) bool { return f.Leftovers }
	ordinary := func(f *discovery.Family) bool { return !f.Leftovers }
	return slices.Concat(slices.DeleteFunc(slices.Clone(families), leftovers), slices.DeleteFunc(slices.Clone(families), ordinary))
}

// familyScan holds the findings of one family on a host. Devices of several families are not joined
// yet; see [Findings.Snapshot].
type familyScan struct {
	Devices  []discovery.Device
	Problems []discovery.Problem

	matched    []sysfs.Device     // by the family
	claims     bool               // Unclaimed families must not see the matched devices
	isUnread   bool               // the family has not answered
	hadDevices []discovery.Device // the findings of the family's last answer
	skipped    bool               // the answer lacks files of devices that hang

	// These fields record reads whose answers may change without an event; see [trace].
	traces    bool     // reads are to be recorded
	traced    bool     // reads were recorded, and show whether the host is unchanged
	steps     []traced // of describing devices, by name
	sensors   []traced // of health readings, without the steps above
	functions map[string][]discovery.Health
	dirs      map[string]dirState // at the last comparison of these steps; see [comparison]
	places    []string            // the places in sysfs that were read, in order; see [familyScan.seesDeviceOf]
	changed   bool                // the last comparison found changes; see [scanner.compare]
}

// matches holds the kernel devices that each family matches.
type matches struct {
	of       map[*discovery.Family]familyScan
	problems []discovery.Problem // with lists of devices
}

// match lists the kernel devices of a host and decides which families the devices belong to. match
// reads no file that makes a reader wait for a device: the kernel generates modalias, vendor,
// device and class from memory, and the rest are directories and links (drivers/pci/pci-sysfs.c,
// fs/kernfs).
func match(host *discovery.Host, families []*discovery.Family) matches {
	kernel := newKernel(host)
	m := matches{of: make(map[*discovery.Family]familyScan, len(families))}
	for _, f := range families {
		found, problems := kernel.matchedDevices(f)
		m.of[f] = familyScan{matched: found, Problems: problems, claims: !f.Leftovers}
	}
	m.problems = kernel.problems
	return m
}

// leftoversAfter returns the scan of a family before the family is read. A family of leftovers gets
// only the kernel devices that the earlier looks leave: devices that are neither part of a
// described device nor failed to be read. Every device matched by a family that has not answered
// may belong to that family, and is left out.
func (l familyScan) leftoversAfter(f *discovery.Family, before []familyScan) familyScan {
	if !f.Leftovers {
		return l
	}
	taken := make(map[string]bool) // paths and names of devices
	for _, look := range before {
		markTaken(taken, look.Devices)
		markTaken(taken, look.hadDevices)
		for _, problem := range look.Problems {
			if problem.IsUnread() {
				taken[problem.Device] = true
			}
		}
		if look.isUnread || f.Unclaimed && look.claims {
			for _, d := range look.matched {
				function, _ := d.PCIFunction()
				taken[d.Path], taken[function.Path] = true, true
			}
		}
	}
	l.matched = slices.DeleteFunc(l.matched, func(d sysfs.Device) bool { return taken[d.Path] || taken[discovery.DeviceName(d)] })
	return l
}

// sameDevices reports whether two scans of a family have the same kernel devices, and every list of
// devices could be read.
func (l familyScan) sameDevices(asked familyScan) bool {
	same := func(a, b sysfs.Device) bool { return a.Path == b.Path }
	return len(asked.Problems) == 0 && slices.EqualFunc(l.matched, asked.matched, same)
}

// isAnswered reports whether the family has answered in full.
func (l familyScan) isAnswered() bool { return !l.isUnread && !l.skipped }

// followsEvents reports whether the scan is valid until an event that the scan sees, or until a
// comparison of the recorded answers finds changes.
func (l familyScan) followsEvents() bool {
	return l.isAnswered() && (l.traced || len(l.matched)+len(l.Devices) == 0)
}

// needsRead reports whether the family has to be read.
func (l familyScan) needsRead(f *discovery.Family) bool {
	return len(l.matched) > 0 || f.FromConfig || f.Always
}

// in returns the scan with its kernel devices in another view of the host.
func (l familyScan) in(fsys fs.FS) familyScan {
	matched := make([]sysfs.Device, len(l.matched))
	for i, d := range l.matched {
		matched[i] = d.In(fsys)
	}
	l.matched = matched
	return l
}

// markTaken marks the kernel devices that belong to described devices.
func markTaken(taken map[string]bool, devices []discovery.Device) {
	for i := range devices {
		taken[devices[i].Source] = true
		for _, path := range devices[i].Includes {
			taken[path] = true
		}
	}
}

// read calls the family's Describe for the matched kernel devices, and adds the values that are
// read for devices of any family.
func (l familyScan) read(f *discovery.Family, host *discovery.Host) familyScan {
	if !l.needsRead(f) {
		return l
	}
	described, sensed, found := host, host, l.matched
	var answers, sensors *trace
	if l.traces {
		answers, described = newTrace(host)
		sensors, sensed = newTrace(host)
		found = l.in(answers).matched
	}
	devices, problems := describeDevices(f, described, found)
	l.Problems = slices.Concat(l.Problems, problems)
	l.add(devices, f)
	health := pci.NewHealthReader(sensed)
	health.AddReadings(l.Devices)
	pci.SetPlaceLists(described, l.Devices)
	l.Problems = slices.Concat(l.Problems, pci.SetPassthrough(described, l.Devices))
	if l.traces {
		for _, d := range found {
			if sysfs.IsPCIAddress(d.Name()) && discovery.IsVFIO(d.Driver()) { // match may have cached the driver link
				_, _ = answers.ReadLink(path.Join(d.Path, "driver"))
			}
		}
		l.steps, l.traced = answers.done(nil)
		l.sensors, _ = sensors.done(answers)
		l.sensors = slices.DeleteFunc(l.sensors, func(step traced) bool { return health.IsRepresented(step.name) })
		l.functions = health.ComparedFaults()
		l.places = placesOf(l.matched, answers, sensors)
	}
	return l
}

// describeDevices calls the family's Describe. A panic in Describe is a bug in the family, but must
// not affect the devices of other families.
func describeDevices(f *discovery.Family, host *discovery.Host, found []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
	defer func() {
		if cause := recover(); cause != nil {
			devices, problems = nil, []discovery.Problem{{Device: f.Name, Err: fmt.Errorf("describe: panic: %v", cause)}}
		}
	}()
	return f.Describe(host, found)
}

// add adds the family's devices to the scan, except devices that could not be published or
// allocated.
func (l *familyScan) add(devices []discovery.Device, f *discovery.Family) {
	l.Devices = slices.Grow(l.Devices, len(devices))
	for i := range devices {
		d := &devices[i]
		d.Family, d.FromConfig = f.Name, f.FromConfig
		d.CommonNodes = slices.Concat(f.CommonNodes, d.CommonNodes)
		if d.Attributes == nil {
			d.Attributes = discovery.Attributes{}
		}
		d.Attributes.SetString("family", f.Name)
		if d.Health.Status == "" {
			d.Health.Status = discovery.Healthy
		}
		if err := errors.Join(d.Validate(), d.ValidateFiles(f.FileDirs)); err != nil {
			l.Problems = append(l.Problems, discovery.Problem{Device: d.Name, Err: err})
			continue
		}
		l.Devices = append(l.Devices, *d)
	}
}

// shareDescriptions makes devices whose description is unchanged use the memory of the last scans'
// descriptions. A reader keeps a snapshot until the next change. Without shareDescriptions, memory
// would hold two descriptions of every device: the reader's and the last scan's. Device order must
// be the same.
func shareDescriptions(looks, last []familyScan) {
	if len(looks) != len(last) {
		return
	}
	for i := range looks {
		if len(looks[i].Devices) == 0 || len(last[i].Devices) > 0 && &looks[i].Devices[0] == &last[i].Devices[0] {
			continue // the scan was kept
		}
		before := make(map[string]*discovery.Device, len(last[i].Devices))
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
