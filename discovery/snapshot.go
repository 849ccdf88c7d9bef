package discovery

import (
	"encoding/json"
	"errors"
	"regexp"
	"slices"
	"sort"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
)

// Snapshot holds all devices of a host at one moment. Snapshots are never modified.
type Snapshot struct {
	Devices  []Device // in name order
	Problems []Problem

	// Gone is the health of devices that were present before, including devices without a
	// consumer. The Settler of package scan sets Gone.
	Gone Missing
}

// SameSnapshots reports whether two snapshots describe the same host state, regardless of the scan
// time. A reader then needs to see only changes.
func SameSnapshots(a, b *Snapshot) bool {
	if a == nil || b == nil {
		return a == b
	}
	return equality.Semantic.DeepEqual(a.Devices, b.Devices) &&
		slices.EqualFunc(a.Problems, b.Problems, func(p, q Problem) bool { return p.Error() == q.Error() })
}

// Problem reports a file that could not be read, or an unexpected state. A problem never ends a
// scan.
type Problem struct {
	Device string // the name of the device, or of the object that was read
	Err    error

	// Setting is the part of the configuration that cannot be applied to the device. The device
	// itself could be read. Setting is "" for all other problems.
	Setting string
}

// The settings of problems.
const (
	SettingPassthrough = "passthrough"
	SettingPartitions  = "onDemand.partitions"
)

// The errors in problems of reads that do not return in time.
var (
	ErrHangs    = errors.New("does not answer") // a single read
	ErrNoAnswer = errors.New("no answer")       // a family
)

// ErrNotUnique is the error in a problem of devices with the same identity, device plugin ID or name.
var ErrNotUnique = errors.New("not unique")

// Lookup returns the device of that name.
func (s *Snapshot) Lookup(name string) (Device, bool) {
	i, found := sort.Find(len(s.Devices), func(i int) int { return strings.Compare(name, s.Devices[i].Name) })
	if !found {
		return Device{}, false
	}
	return s.Devices[i], true
}

// ReplaceDevices returns a copy of the snapshot with other descriptions of some devices, by name. A
// nil description removes a device, and a description of an unknown name is added. Without
// descriptions, ReplaceDevices returns the snapshot itself.
func (s *Snapshot) ReplaceDevices(described map[string]*Device) *Snapshot {
	if len(described) == 0 {
		return s
	}
	now := *s
	now.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(d Device) bool { _, is := described[d.Name]; return is })
	for _, d := range described {
		if d != nil {
			now.Devices = append(now.Devices, *d)
		}
	}
	slices.SortFunc(now.Devices, func(a, b Device) int { return strings.Compare(a.Name, b.Name) })
	return &now
}

// MarkUnhealthy returns a copy of the snapshot in which healthy devices have the health of the first
// map that contains their name. A device that is not healthy keeps its health. Without such a
// device, MarkUnhealthy returns the snapshot itself.
func (s *Snapshot) MarkUnhealthy(faults ...map[string]Health) *Snapshot {
	now := s
	for i := range s.Devices {
		if s.Devices[i].Health.Status != Healthy {
			continue
		}
		for _, f := range faults {
			fault, is := f[s.Devices[i].Name]
			if !is {
				continue
			}
			if now == s {
				marked := *s
				marked.Devices = slices.Clone(s.Devices)
				now = &marked
			}
			now.Devices[i].Health = fault
			break
		}
	}
	return now
}

// MarshalJSON writes {"devices":[…],"problems":[…]}. Both lists are present even if empty.
func (s *Snapshot) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Devices  []Device  `json:"devices"`
		Problems []Problem `json:"problems"`
	}{append([]Device{}, s.Devices...), append([]Problem{}, s.Problems...)})
}

// MarshalJSON writes {"device":…,"setting":…,"error":…}. An empty setting is left out.
func (p Problem) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Device  string `json:"device"`
		Setting string `json:"setting,omitempty"`
		Error   string `json:"error"`
	}{p.Device, p.Setting, p.Text()})
}

// IsUnread reports whether the problem means that its device could not be read. A setting that
// cannot be applied is a problem of a device that could be read.
func (p Problem) IsUnread() bool { return p.Setting == "" }

// relativePath matches a path of the host without its leading slash. Errors of an [fs.FS] have such
// paths.
var relativePath = regexp.MustCompile(`(^|[ "'(])((?:dev|etc|proc|run|sys|usr|var)/)`)

// ErrorText returns the text of an error, with absolute paths of the host.
func ErrorText(err error) string { return relativePath.ReplaceAllString(err.Error(), "$1/$2") }

// Text returns the text of the problem without the device, with absolute paths of the host. Each
// line has one cause.
func (p Problem) Text() string { return ErrorText(p.Err) }

// Problems returns the problem of a device as a list, which is empty if err is
// nil.
func Problems(device string, err error) []Problem {
	if err == nil {
		return nil
	}
	return []Problem{{Device: device, Err: err}}
}

// Error returns the problem as text.
func (p Problem) Error() string { return p.Device + ": " + p.Text() }

// Unwrap returns the underlying error.
func (p Problem) Unwrap() error { return p.Err }
