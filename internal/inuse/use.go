// Package inuse finds out who uses a PCI function: the file systems, swap, arrays and
// exports on its disks, the routes and interfaces above its ports, the processes that
// have one of its nodes open. It reads the host and changes nothing. It does not know
// which container was given what: the ledger does.
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
	Object string // what of the function: "disk nvme0n1", "interface eth0", "/dev/vfio/42"
	How    string // "it is mounted on /data", "process 47 (qemu) has it open"

	// Unbinding is set where only a function that is to be unbound from its driver
	// counts as used, such as one whose interface is up and has no routes.
	Unbinding bool

	// Unseen is why it cannot be told whether the object is used; How is empty then.
	// It wraps fs.ErrPermission if that is only because the reader lacks privilege.
	Unseen error
}

// String says the use in a sentence: "in use: disk nvme0n1: it is mounted on /data".
func (u Use) String() string {
	if u.Unseen != nil {
		return fmt.Sprintf("whether %s is in use cannot be told: %v", u.Object, u.Unseen)
	}
	return fmt.Sprintf("in use: %s: %s", u.Object, u.How)
}

// Uses are all uses of a function.
type Uses []Use

// Err returns the uses as one error, or nil if there are none: the function is then
// free. The error wraps what could not be seen.
func (u Uses) Err() error {
	if len(u) == 0 {
		return nil
	}
	return usesError(u)
}

// Seen returns the uses that are known, without those that cannot be told.
func (u Uses) Seen() Uses {
	return slices.DeleteFunc(slices.Clone(u), func(use Use) bool { return use.Unseen != nil })
}

// usesError are uses as an error.
type usesError Uses

func (e usesError) Error() string {
	texts := make([]string, len(e))
	for i, use := range e {
		texts[i] = use.String()
	}
	return strings.Join(texts, "; ")
}

// Unwrap returns why some uses cannot be told, unless others are known: the function is in use then, whatever the rest is.
func (e usesError) Unwrap() (errs []error) {
	if len(Uses(e).Seen()) > 0 {
		return nil
	}
	for _, use := range e {
		errs = append(errs, use.Unseen)
	}
	return errs
}

// Options say what is known of the host beforehand. All may be left out.
type Options struct {
	// Known are the devices that the families found. Their nodes are looked for too.
	Known []discovery.Device

	// Except says which processes do not count, by their numbers in the host's /proc.
	Except func(process int) bool
}

// View is what uses the functions of a host, as it was at one moment.
type View struct {
	host  *discovery.Host
	known []discovery.Device

	opened *opened
	disks  *disks
	nets   *nets
}

// Look reads what uses the functions of a host now. A reader without privilege looks
// as far as it can: what it must not see is Unseen in the uses that it could be.
func Look(host *discovery.Host, o Options) *View {
	return &View{host: host, known: o.Known, opened: openNodes(host, o.Except), disks: readDisks(host), nets: readNets(host)}
}

// Of returns who uses a function now, for one function. It is [Look] and [View.Of].
func Of(host *discovery.Host, function sysfs.Device, o Options) Uses {
	return Look(host, o).Of(function)
}

// Disks returns what uses the disks on functions now, as errors by the directories of those
// functions whose disks are in use: mounted file systems, swap, arrays and exports. It
// leaves out what cannot be read. It neither opens a disk nor reads which files processes
// have open, so it can be called often.
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

// Of returns who uses a function that is to be unbound from its driver, or to be
// destroyed. Nobody does if there are no uses.
func (v *View) Of(function sysfs.Device) Uses {
	uses := v.disks.below(function)
	uses = append(uses, v.nets.below(function)...)
	uses = append(uses, v.hanging(function)...)
	return append(uses, v.open(function)...)
}

// Bound returns who uses a function that keeps its driver while it is changed: its
// interface may be up, for example.
func (v *View) Bound(function sysfs.Device) Uses {
	var uses Uses
	for _, use := range v.Of(function) {
		if !use.Unbinding {
			uses = append(uses, use)
		}
	}
	return uses
}

// Err returns who uses one of several functions, as an error that begins with the name of the function; nil if they are
// free. The functions keep their drivers, or they are to be unbound or destroyed; see [View.Bound] and [View.Of].
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

// below reports whether a kernel device is on the function, or is it.
func below(d, function sysfs.Device) bool { return Within(d.Path, function) }

// Within reports whether a path of sysfs is the function's directory, or lies in it.
func Within(name string, function sysfs.Device) bool {
	return name == function.Path || strings.HasPrefix(name, function.Path+"/")
}
