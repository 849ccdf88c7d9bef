package discovery

import "errors"

// Partitioning selects devices that may be partitioned on demand.
type Partitioning struct {
	Expression string // as in the configuration
	Selects    func(Device) (bool, error)
}

// SamePartitioning reports whether two entries have the same expression.
func SamePartitioning(a, b Partitioning) bool { return a.Expression == b.Expression }

// AllowsPartition reports whether the administrator allows a device to be partitioned. d is the
// description of the whole device. The error joins the errors of expressions that cannot be
// evaluated for the device.
func (h *Host) AllowsPartition(d Device) (bool, error) {
	var errs []error
	for _, partitioning := range h.Partitionings {
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
