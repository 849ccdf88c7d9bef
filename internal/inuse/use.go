// Package inuse finds the users of a PCI function: file systems, swap, arrays and exports on its
// disks, routes and interfaces above its ports, and processes with one of its nodes open. It reads
// the host and changes nothing. Containers and their devices are recorded in package ledger.
package inuse

import (
	"fmt"
	"slices"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Use is one way in which a function is in use, or may be.
type Use struct {
	Object string // the used object of the function: "disk nvme0n1", "interface eth0", "/dev/vfio/42"
	How    string // "it is mounted on /data", "process 47 (qemu) has it open"

	// Unbinding is set if the use only prevents that the function is unbound from its driver, as
	// with an interface that is up and has no routes.
	Unbinding bool

	// Unseen is why it is unknown whether the object is used; How is empty in that case. Unseen
	// wraps fs.ErrPermission if the only cause is a lack of privilege.
	Unseen error
}

// String describes the use: "in use: disk nvme0n1: it is mounted on /data".
func (u Use) String() string {
	if u.Unseen != nil {
		return fmt.Sprintf("it is unknown whether %s is in use: %v", u.Object, u.Unseen)
	}
	return fmt.Sprintf("in use: %s: %s", u.Object, u.How)
}

// Uses are all uses of a function.
type Uses []Use

// Err returns the uses as one error, or nil if there are none, so that the function is free. The
// error wraps the errors in Unseen.
func (u Uses) Err() error {
	if len(u) == 0 {
		return nil
	}
	return usesError(u)
}

// Seen returns the uses that are known, without those that have Unseen set.
func (u Uses) Seen() Uses {
	return slices.DeleteFunc(slices.Clone(u), func(use Use) bool { return use.Unseen != nil })
}

// usesError is an error that consists of uses.
type usesError Uses

func (e usesError) Error() string {
	texts := make([]string, len(e))
	for i, use := range e {
		texts[i] = use.String()
	}
	return strings.Join(texts, "; ")
}

// Unwrap returns the errors in Unseen, but none if another use is known: the function is in use in
// that case, whatever the other objects are.
func (e usesError) Unwrap() (errs []error) {
	if len(Uses(e).Seen()) > 0 {
		return nil
	}
	for _, use := range e {
		errs = append(errs, use.Unseen)
	}
	return errs
}

// Options are optional inputs of a [View].
type Options struct {
	// Known are the devices that the families found. A View searches for users of their nodes too.
	Known []discovery.Device

	// Except reports whether to ignore a process, by its number in the host's /proc.
	Except func(process int) bool
}

// View is a record of the users of a host's functions at one moment.
type View struct {
	host  *discovery.Host
	known []discovery.Device

	opened *opened
	disks  *disks
	nets   *nets
}

// Look records the users of a host's functions now. If the reader lacks privilege, objects that it
// cannot read have Unseen set.
func Look(host *discovery.Host, o Options) *View {
	return &View{host: host, known: o.Known, opened: openNodes(host, o.Except), disks: readDisks(host), nets: readNets(host)}
}

// Of returns the uses of one function now. It combines [Look] and [View.Of].
func Of(host *discovery.Host, function sysfs.Device, o Options) Uses {
	return Look(host, o).Of(function)
}

// Disks returns the present uses of the disks on functions: mounted file systems, swap, arrays and
// exports. The result has an error for the directory of each function whose disks are in use.
// Unreadable objects are left out. Disks neither opens a disk nor reads which files processes have
// open, so frequent calls are cheap.
func Disks(host *discovery.Host, functions []sysfs.Device) map[string]error {
	used := make(map[string]error)
	disks := readDisks(host)
	for _, function := range functions {
		if err := disks.usesBelow(function, disks.userInTables).Seen().Err(); err != nil {
			used[function.Path] = err
		}
	}
	return used
}

// Of returns the uses of a function that is to be unbound from its driver, or to be destroyed.
// Without uses the function is free.
func (v *View) Of(function sysfs.Device) Uses {
	uses := v.disks.below(function)
	uses = append(uses, v.nets.below(function)...)
	uses = append(uses, v.hanging(function)...)
	return append(uses, v.open(function)...)
}

// Bound returns the uses of a function that keeps its driver while it is changed: its interface may
// be up, for example.
func (v *View) Bound(function sysfs.Device) Uses {
	var uses Uses
	for _, use := range v.Of(function) {
		if !use.Unbinding {
			uses = append(uses, use)
		}
	}
	return uses
}

// Err returns the uses of the first function in use as an error that begins with the name of the
// function; nil if all are free. With keep the functions keep their drivers, as in [View.Bound];
// otherwise the functions are to be unbound or destroyed, as in [View.Of].
func (v *View) Err(keep bool, functions ...sysfs.Device) error {
	uses := v.Of
	if keep {
		uses = v.Bound
	}
	for _, function := range functions {
		if err := uses(function).Err(); err != nil {
			return fmt.Errorf("%s: %w", function.Name(), err)
		}
	}
	return nil
}

// below reports whether a kernel device is on the function, or is the function.
func below(d, function sysfs.Device) bool { return Within(d.Path, function) }

// Within reports whether a path of sysfs is the function's directory, or lies in that directory.
func Within(name string, function sysfs.Device) bool {
	return name == function.Path || strings.HasPrefix(name, function.Path+"/")
}
