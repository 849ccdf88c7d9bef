// Package inuse finds the users of a PCI function: file systems, swap, arrays and exports on its
// disks, routes and interfaces above its ports, and processes with one of its nodes open. It reads
// the host and changes nothing. Containers and their devices are recorded in package ledger.
package inuse

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Use is one way in which a function is in use, or may be.
type Use struct {
	Object string // the used object of the function: "disk nvme0n1", "interface eth0", "/dev/vfio/42"
	How    string // "it is mounted on /data", "process 47 (qemu) has it open"

	// BlocksUnbind is set if the use only prevents that the function is unbound from its driver, as
	// with an interface that is up and has no routes.
	BlocksUnbind bool

	// ReadError is why it is unknown whether the object is used; How is empty in that case. ReadError
	// wraps fs.ErrPermission if the only cause is a lack of privilege.
	ReadError error
}

// String describes the use: "in use: disk nvme0n1: it is mounted on /data".
func (u Use) String() string {
	if u.ReadError != nil {
		return fmt.Sprintf("it is unknown whether %s is in use: %v", u.Object, u.ReadError)
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

// KnownUses returns the uses that are known, without those that have Unseen set.
func (u Uses) KnownUses() Uses {
	return slices.DeleteFunc(slices.Clone(u), func(use Use) bool { return use.ReadError != nil })
}

// BoundUses returns the uses of a function that keeps its driver while it is changed: its interface may
// be up, for example.
func (u Uses) BoundUses() (bound Uses) {
	for _, use := range u {
		if !use.BlocksUnbind {
			bound = append(bound, use)
		}
	}
	return bound
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
	if len(Uses(e).KnownUses()) > 0 {
		return nil
	}
	for _, use := range e {
		errs = append(errs, use.ReadError)
	}
	return errs
}

// Options are optional inputs of a [View].
type Options struct {
	// Known are the devices that the families found. A View searches for users of their nodes too.
	Known []discovery.Device

	// Except are the pods whose processes are ignored.
	Except []types.UID
}

// View is a record of the users of a host's functions at one moment.
type View struct {
	host  *discovery.Host
	known []discovery.Device

	opened *opened
	disks  *disks
	nets   *nets
}

// FindUsers records the users of a host's functions now. If the reader lacks privilege, objects
// that it cannot read have Unseen set.
func FindUsers(host *discovery.Host, o Options) *View {
	return &View{host: host, known: o.Known, opened: openNodes(host, inPods(host.FS, o.Except)), disks: readDisks(host), nets: readNets(host)}
}

// UsesOf returns the uses of one function now. It combines [FindUsers] and [View.UsesOf].
func UsesOf(host *discovery.Host, function sysfs.Device, o Options) Uses {
	return FindUsers(host, o).UsesOf(function)
}

// DiskUses returns the present uses of the disks on functions: mounted file systems, swap, arrays
// and exports. The result has an error for the directory of each function whose disks are in use.
// Unreadable objects are left out. DiskUses neither opens a disk nor reads which files processes
// have open, so frequent calls are cheap.
func DiskUses(host *discovery.Host, functions []sysfs.Device) map[string]error {
	used := make(map[string]error)
	disks := readDisks(host)
	for _, function := range functions {
		if err := disks.usesBelow(function, disks.userInTables).KnownUses().Err(); err != nil {
			used[function.Path] = err
		}
	}
	return used
}

// UsesOf returns the uses of a function that is to be unbound from its driver, or to be destroyed.
// Without uses the function is free.
func (v *View) UsesOf(function sysfs.Device) Uses {
	uses := v.disks.usesOn(function)
	uses = append(uses, v.nets.usesOn(function)...)
	uses = append(uses, v.dependentUses(function)...)
	return append(uses, v.open(function)...)
}

// isBelow reports whether a kernel device is on the function, or is the function.
func isBelow(d, function sysfs.Device) bool { return IsWithin(d.Path, function) }

// IsWithin reports whether a path of sysfs is the function's directory, or lies in that directory.
func IsWithin(name string, function sysfs.Device) bool {
	return name == function.Path || strings.HasPrefix(name, function.Path+"/")
}
