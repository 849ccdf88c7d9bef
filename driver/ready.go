package driver

// Ready is closed when Run has read what was prepared before this instance
// became the active one. Until then everything counts as held.
func (d *Driver) Ready() <-chan struct{} { return d.calls.ready }
