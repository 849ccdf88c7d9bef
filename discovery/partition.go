package discovery

import "errors"

// Partitioning is which devices the administrator lets be divided into partitions for
// those who ask for these.
type Partitioning struct {
	Expression string // as the administrator wrote it
	Selects    func(Device) (bool, error)
}

// SamePartitioning reports whether two entries say the same.
func SamePartitioning(a, b Partitioning) bool { return a.Expression == b.Expression }

// Partitions reports whether the administrator lets a device be divided. The device is
// described as a whole. The error is of expressions that cannot be evaluated for it.
func (h *Host) Partitions(d Device) (bool, error) {
	var errs []error
	for _, partitioning := range h.Partition {
		selected, err := partitioning.Selects(d)
		if err != nil {
			errs = append(errs, err)
		}
		if selected {
			return true, nil
		}
	}
	return false, errors.Join(errs...)
}
