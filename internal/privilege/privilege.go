// Package privilege describes the permission to change the host, which the agent lacks until a setting
// of the chart grants it.
package privilege

import (
	"fmt"

	"chandler.dev/discovery/sysfs"
)

// Missing is the error of a change for which the agent lacks the permission.
type Missing struct {
	Value string // the chart value that grants the permission, such as reclaim.enabled
	Page  string // the page that describes it, such as docs/reclaim.md
}

func (m Missing) Error() string {
	return fmt.Sprintf("the agent may not change the host: this needs %s, see %s", m.Value, m.Page)
}

// WrapReadOnly returns the error of a write. If the file is read-only for the agent, the error also
// wraps m.
func (m Missing) WrapReadOnly(err error) error {
	if sysfs.IsReadOnly(err) {
		return fmt.Errorf("%w: %w", err, m)
	}
	return err
}
