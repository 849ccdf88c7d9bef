package inuse

import (
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Finder finds the users of devices. A [HostFinder] reads the host itself, which requires
// privilege; other implementations pass the question to a privileged program.
type Finder interface {
	// FunctionUses returns the uses of functions at one moment, in the order of the functions.
	FunctionUses(o Options, functions ...sysfs.Device) []Uses

	// PodUses returns which processes of some pods have a device open.
	PodUses(d discovery.Device, pods []types.UID) Uses

	// UnlistedPodUses is PodUses for the pods that are not listed.
	UnlistedPodUses(d discovery.Device, listed []types.UID) Uses
}

// ErrUnanswered is wrapped by the ReadError of uses that another program should have found, and that
// the program does not answer. Unlike a lack of permission, this usually passes.
var ErrUnanswered = errors.New("the users of the device are not known yet")

// HostFinder finds the users of devices on a host that it reads.
type HostFinder struct{ Host *discovery.Host }

var _ Finder = HostFinder{}

// FunctionUses implements [Finder].
func (f HostFinder) FunctionUses(o Options, functions ...sysfs.Device) (all []Uses) {
	view := FindUsers(f.Host, o)
	for _, function := range functions {
		all = append(all, view.UsesOf(function))
	}
	return all
}

// PodUses implements [Finder]; see [ByPods].
func (f HostFinder) PodUses(d discovery.Device, pods []types.UID) Uses {
	return ByPods(f.Host, d, pods)
}

// UnlistedPodUses implements [Finder]; see [ByUnlistedPods].
func (f HostFinder) UnlistedPodUses(d discovery.Device, listed []types.UID) Uses {
	return ByUnlistedPods(f.Host, d, listed)
}

// CheckFree returns the uses of the first function in use as an error that begins with the name of
// the function; nil if all are free. With keep the functions keep their drivers, as in
// [Uses.BoundUses]; otherwise the functions are to be unbound or destroyed.
func CheckFree(f Finder, o Options, keep bool, functions ...sysfs.Device) error {
	for i, uses := range f.FunctionUses(o, functions...) {
		if keep {
			uses = uses.BoundUses()
		}
		if err := uses.Err(); err != nil {
			return fmt.Errorf("%s: %w", functions[i].Name(), err)
		}
	}
	return nil
}
