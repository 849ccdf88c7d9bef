package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// verify reports why the device is not what it was when it was allocated, as
// far as can be known: by what an earlier record of the claim says, also one of
// before a reboot, and by its nodes on the host, which it writes down.
func (r *result) verify(host fs.FS, earlier *result) error {
	if earlier != nil {
		if err := r.sameSilicon(earlier); err != nil {
			return err
		}
	}
	r.Nodes = nil
	for _, edit := range r.Edits.DeviceNodes {
		found, err := nodeOnHost(host, edit)
		if err != nil {
			return fmt.Errorf("device %s: %w", r.Device, err)
		}
		r.Nodes = append(r.Nodes, found)
	}
	return nil
}

// sameSilicon reports how the device differs from the one that was prepared.
func (r *result) sameSilicon(earlier *result) error {
	if earlier.Identity != "" && r.Identity != "" && earlier.Identity != r.Identity {
		return fmt.Errorf("device %s was swapped: it is %s now and was %s when the claim was prepared", r.Device, r.Identity, earlier.Identity)
	}
	if earlier.Driver != "" && earlier.Driver != r.Driver {
		return fmt.Errorf("device %s has changed drivers: %q is bound to it now and %q was when the claim was prepared", r.Device, r.Driver, earlier.Driver)
	}
	return nil
}

// replacedBy reports how the device in the place of the one that was prepared is
// another. Where it has no driver, its health says so.
func (r *result) replacedBy(device *discovery.Device) error {
	now := result{Device: r.Device, Identity: device.Identity, Driver: device.Attributes.String("driver")}
	if now.Driver == "" {
		now.Driver = r.Driver
	}
	return now.sameSilicon(r)
}

// sameSince reports whether another device has taken the place of the one that
// was allocated. The API server keeps the time of that in whole seconds, and
// only since Kubernetes 1.36.
func (v *view) sameSince(allocated *metav1.Time, r *result) error {
	seen := v.identities[r.Source]
	if allocated == nil || seen.before == "" || !seen.since.Truncate(time.Second).After(allocated.Time) {
		return nil
	}
	return fmt.Errorf("device %s was swapped: it is %s now and was %s when the claim was allocated", r.Device, seen.now, seen.before)
}

// sameNodes reports whether the host's nodes are those of an earlier record.
func (r *result) sameNodes(earlier *result) bool { return slices.Equal(r.Nodes, earlier.Nodes) }

// nodeOnHost returns the device node that an edit is about, as it is on the
// host. One that is not as the edit says is an error.
func nodeOnHost(host fs.FS, edit *specs.DeviceNode) (node, error) {
	name := edit.HostPath
	if name == "" {
		name = edit.Path
	}
	info, err := fs.Stat(host, strings.TrimPrefix(name, "/"))
	if errors.Is(err, fs.ErrNotExist) {
		return node{}, fmt.Errorf("device node %s is missing", name)
	}
	if err != nil {
		return node{}, fmt.Errorf("device node %s: %w", name, err)
	}
	found := node{Path: name, Type: typeOf(info.Mode())}
	wanted := edit.Type
	if wanted == "u" {
		wanted = "c" // the same, unbuffered
	}
	if found.Type == "" || wanted != "" && found.Type != wanted {
		return node{}, fmt.Errorf("device node %s is of type %v on the host, want %q", name, info.Mode().Type(), wanted)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || found.Type == "p" {
		return found, nil // a file system that has no numbers
	}
	found.Major, found.Minor = unix.Major(uint64(stat.Rdev)), unix.Minor(uint64(stat.Rdev))
	numbered := edit.Major != 0 || edit.Minor != 0
	if numbered && (int64(found.Major) != edit.Major || int64(found.Minor) != edit.Minor) {
		return node{}, fmt.Errorf("device node %s is %d:%d on the host, want %d:%d", name, found.Major, found.Minor, edit.Major, edit.Minor)
	}
	return found, nil
}
