package idxd

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/pattern"
)

// unitName matches the kernel's names of a DSA and of an IAA.
var unitName = pattern.Lazy(`^(?:dsa|iax)([0-9]{1,9})$`)

// Groups are the groups of a device's work queues, numbered from 0.
type Groups []Group

// Group is a group of work queues with its number of engines.
type Group struct {
	Engines int
	Queues  []Queue
}

// Queue is a work queue for programs in user space.
type Queue struct {
	Name      string
	Shared    bool // several processes may use the queue; otherwise one at a time
	Size      int  // entries
	Priority  int
	Threshold int // entries available without privilege, for a shared queue
}

// provision configures the work queues and engines of a device, and enables the device and the
// queues (Documentation/ABI/stable/sysfs-driver-dma-idxd). Queues and engines are configurable only
// while the device is disabled, and disabling the device resets all of them. So provision returns
// an error if a queue is in use, or if a queue is enabled that is not in the configuration.
func provision(host *discovery.Host, function sysfs.Device, want any) ([]discovery.Write, error) {
	i := slices.IndexFunc(function.Children("."), func(d sysfs.Device) bool { return unitName().MatchString(d.Name()) })
	groups, ours := want.(Groups)
	if i < 0 || !ours {
		return nil, errors.ErrUnsupported
	}
	device := function.Children(".")[i]
	u := &unit{Device: device, attrs: device.Attrs(), number: unitName().FindStringSubmatch(device.Name())[1]}
	u.enabled = u.text("state") == "enabled"
	u.assignNumbers(groups)
	u.readOthers()
	writes, err := u.provision(host, len(groups))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", u.Name(), err)
	}
	return writes, nil
}

func (u *unit) provision(host *discovery.Host, groups int) ([]discovery.Write, error) {
	if err := u.fitsLimits(groups); err != nil {
		return nil, err
	}
	writes, err := u.writes()
	if err = errors.Join(err, u.err()); err != nil || len(writes) == 0 {
		return nil, err
	}
	return writes, driversLoaded(host)
}

// driversLoaded checks that the kernel has the drivers for devices and queues. Before Linux 5.14
// one driver handled both.
func driversLoaded(host *discovery.Host) error {
	for _, name := range []string{"idxd", userDriver} {
		if _, err := fs.Stat(host.FS, "sys/bus/dsa/drivers/"+name); err != nil {
			return fmt.Errorf("driver %s of bus dsa: %w", name, err)
		}
	}
	return nil
}

// userDriver is the driver of queues for programs in user space.
const userDriver = "user"

// unit is a device with its wanted configuration.
type unit struct {
	sysfs.Device

	attrs   *sysfs.Attrs
	number  string
	enabled bool
	queues  []*queue
	engines []engine
	others  []*queue // not in the configuration
	spare   []engine // to be removed from their groups
}

// queue is a work queue.
type queue struct {
	sysfs.Device

	attrs   *sysfs.Attrs
	enabled bool
	size    [2]int      // present and wanted
	want    [][2]string // attributes in write order, with their values
}

// engine is an engine with its wanted group.
type engine struct {
	sysfs.Device

	attrs *sysfs.Attrs
	group string
}

func (u *unit) text(name string) string {
	text, _ := u.attrs.Text(name)
	return text
}

// assignNumbers numbers the wanted queues and engines.
func (u *unit) assignNumbers(groups Groups) {
	for i, group := range groups {
		id := strconv.Itoa(i)
		for range group.Engines {
			d := u.Child(fmt.Sprintf("engine%s.%d", u.number, len(u.engines)))
			u.engines = append(u.engines, engine{d, d.Attrs(), id})
		}
		for _, want := range group.Queues {
			q := u.queue(len(u.queues))
			q.size[1] = want.Size
			q.want = q.queueAttributes(want, id)
			u.queues = append(u.queues, q)
		}
	}
}

func (u *unit) queue(i int) *queue {
	d := u.Child(fmt.Sprintf("wq%s.%d", u.number, i))
	q := &queue{Device: d, attrs: d.Attrs()}
	state, _ := q.attrs.Text("state")
	q.enabled = state == "enabled"
	size, _ := q.attrs.Uint("size")
	q.size[0] = int(min(size, 1<<30))
	return q
}

// queueAttributes returns the wanted attributes of a queue except its size. The name comes after
// the type, because a change of the type clears the name.
func (q *queue) queueAttributes(want Queue, group string) [][2]string {
	mode := "dedicated"
	if want.Shared {
		mode = "shared"
	}
	list := [][2]string{
		{"group_id", group}, {"mode", mode}, {"priority", strconv.Itoa(want.Priority)},
		{"type", "user"}, {"name", want.Name},
	}
	if q.HasEntry("driver_name") { // since Linux 6.7
		list = append(list, [2]string{"driver_name", userDriver})
	}
	if want.Shared {
		list = append(list, [2]string{"threshold", strconv.Itoa(want.Threshold)})
	}
	return list
}

// readOthers reads the queues and engines that are not in the configuration.
func (u *unit) readOthers() {
	for i := len(u.queues); u.HasEntry(fmt.Sprintf("wq%s.%d", u.number, i)); i++ {
		u.others = append(u.others, u.queue(i))
	}
	groups := make(map[string]bool)
	for _, e := range u.engines {
		groups[e.group] = true
	}
	for i := len(u.engines); ; i++ {
		d := u.Child(fmt.Sprintf("engine%s.%d", u.number, i))
		if !u.HasEntry(d.Name()) {
			return
		}
		e := engine{d, d.Attrs(), "-1"}
		if now, _ := e.attrs.Text("group_id"); groups[now] {
			u.spare = append(u.spare, e)
		}
	}
}

// err returns the read errors of the device, its queues and engines.
func (u *unit) err() error {
	errs := []error{u.attrs.Err()}
	check := func(d sysfs.Device, attrs *sysfs.Attrs) {
		if err := attrs.Err(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", d.Name(), err))
		}
	}
	for _, q := range slices.Concat(u.queues, u.others) {
		check(q.Device, q.attrs)
	}
	for _, e := range slices.Concat(u.engines, u.spare) {
		check(e.Device, e.attrs)
	}
	return errors.Join(errs...)
}

// fitsLimits checks the wanted configuration against the limits of the device.
func (u *unit) fitsLimits(groups int) error {
	size := 0
	for _, q := range u.queues {
		size += q.size[1]
	}
	for _, q := range u.others { // other queues keep their entries unless they are reset
		if !u.enabled {
			size += q.size[0]
		}
	}
	for _, bound := range []struct {
		what string
		want int
		name string
	}{
		{"groups", groups, "max_groups"},
		{"engines", len(u.engines), "max_engines"},
		{"work queues", len(u.queues), "max_work_queues"},
		{"entries in all work queues", size, "max_work_queues_size"},
	} {
		has, ok := u.attrs.Uint(bound.name)
		if err := u.attrs.Err(); err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("attribute %s: missing", bound.name)
		}
		if uint64(bound.want) > has {
			return fmt.Errorf("%d %s are wanted, and it has %d", bound.want, bound.what, has)
		}
	}
	shared := slices.ContainsFunc(u.queues, func(q *queue) bool { return slices.Contains(q.want, [2]string{"mode", "shared"}) })
	if shared && u.text("pasid_enabled") == "0" {
		return errors.New("a shared queue is wanted, and PASIDs are not enabled, which needs an IOMMU in scalable mode")
	}
	return nil
}

// writes returns the required writes, in order.
func (u *unit) writes() (writes []discovery.Write, err error) {
	if !u.asWanted() {
		if writes, err = u.disableDevice(); err != nil {
			return nil, err
		}
		writes = append(writes, u.layOut(u.enabled)...)
		u.enabled = false
		for _, q := range u.queues {
			q.enabled = false
		}
	}
	if !u.enabled {
		writes = append(writes, bind("idxd", u.Device))
	}
	for _, q := range u.queues {
		if !q.enabled {
			writes = append(writes, bind(userDriver, q.Device))
		}
	}
	return writes, nil
}

// asWanted reports whether queues and engines have the wanted configuration, enabled or not.
func (u *unit) asWanted() bool {
	for _, q := range u.queues {
		if q.size[0] != q.size[1] {
			return false
		}
		for _, want := range q.want {
			if now, _ := q.attrs.Text(want[0]); now != want[1] {
				return false
			}
		}
	}
	return len(u.spare) == 0 && !slices.ContainsFunc(u.engines, func(e engine) bool {
		now, _ := e.attrs.Text("group_id")
		return now != e.group
	})
}

// disableDevice returns the writes that disable the device, none if it is disabled. It returns an
// error if a queue is in use or not in the configuration.
func (u *unit) disableDevice() (writes []discovery.Write, err error) {
	if u.text("configurable") == "0" {
		return nil, errors.New("its work queues are fixed by its firmware, and not as they are wanted")
	}
	var errs []error
	for _, q := range u.others {
		if q.enabled {
			errs = append(errs, fmt.Errorf("%s is enabled and not in the configuration; to change the others would undo it", q.Name()))
		}
	}
	for _, q := range u.queues {
		if !q.enabled {
			continue
		}
		clients, _ := q.attrs.Uint("clients")
		kind, _ := q.attrs.Text("type")
		switch {
		case clients > 0:
			errs = append(errs, fmt.Errorf("%s is in use: clients: %d", q.Name(), clients))
		case kind == "kernel":
			errs = append(errs, fmt.Errorf("%s is in use by the kernel", q.Name()))
		}
		writes = append(writes, disableWrite(cmp.Or(q.Driver(), userDriver), q.Device))
	}
	if u.enabled {
		writes = append(writes, disableWrite("idxd", u.Device))
	}
	return writes, errors.Join(errs...)
}

// layOut returns the writes for the queues and engines of a disabled device. After disabling, all
// attributes have been reset.
func (u *unit) layOut(reset bool) (writes []discovery.Write) {
	set := func(attrs *sysfs.Attrs, d sysfs.Device, name, value string, again bool) bool {
		now, _ := attrs.Text(name)
		if reset || again {
			now = "" // force a write
		}
		if now == value {
			return false
		}
		writes = append(writes, discovery.Set(d.Child(name).Path, now, value))
		return true
	}
	for _, e := range slices.Concat(u.spare, u.engines) {
		if !reset || e.group != "-1" {
			set(e.attrs, e.Device, "group_id", e.group, false)
		}
	}
	// Shrink queues first, because another queue may need their entries.
	bySize := slices.Clone(u.queues)
	if !reset {
		slices.SortStableFunc(bySize, func(a, b *queue) int { return cmp.Compare(a.size[1]-a.size[0], b.size[1]-b.size[0]) })
	}
	for _, q := range bySize {
		set(q.attrs, q.Device, "size", strconv.Itoa(q.size[1]), false)
	}
	for _, q := range u.queues {
		renamed := false
		for _, want := range q.want {
			changed := set(q.attrs, q.Device, want[0], want[1], want[0] == "name" && renamed)
			renamed = renamed || changed && want[0] == "type"
		}
	}
	return writes
}

// bind returns the write that enables a device or a queue.
func bind(driver string, d sysfs.Device) discovery.Write {
	return discovery.Write{Path: "sys/bus/dsa/drivers/" + driver + "/bind", Value: d.Name(), Shows: d.Child("state").Path, From: "disabled", To: "enabled"}
}

// disableWrite returns the write that disables a device or a queue.
func disableWrite(driver string, d sysfs.Device) discovery.Write {
	return discovery.Write{Path: "sys/bus/dsa/drivers/" + driver + "/unbind", Value: d.Name(), Shows: d.Child("state").Path, From: "enabled", To: "disabled"}
}
