package reclaim

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/overdue"
)

// ruleSelector finds the devices of records in the present snapshot, and the rules that select them.
type ruleSelector struct {
	config *Config
	reads  overdue.Calls // reads of device keys, by the device's directory

	mu      sync.Mutex
	choices choices
}

// ruleOf returns the device of a record and the administrator's rule, or nil without a rule. why is
// set if the rule cannot be determined.
func (s *ruleSelector) ruleOf(r *record) (d discovery.Device, rule *Rule, why string) {
	rules := s.config.Rules()
	if len(rules) == 0 {
		return d, nil, ""
	}
	d, rule, known := s.selectRule(rules, r.Hold.Device)
	var key discovery.DeviceKey
	var unread error
	if known {
		key, unread = s.keyOf(d)
	}
	switch {
	case s.config.Snapshot() == nil:
		return d, nil, reasonChecking
	case known && r.Device.MayEqual(key) && unread != nil && rule != nil:
		return d, nil, fmt.Sprintf("it cannot be described at present: %v", unread)
	case known && r.Device.MayEqual(key):
		return d, rule, ""
	case known && rule != nil: // the device has another name by now: its nodes are checked, and nothing is reset
		return discovery.Device{Name: r.Hold.Device, Source: r.Source}, &Rule{}, ""
	case r.Source != "" && !s.config.Host.FileExists("/"+r.Source):
		return d, nil, "" // the device was removed
	case r.Source != "" && (s.isOther(r.Source) || s.isDivided(r.Source)):
		// The device does not exist any more: a partition of a GPU that was removed, or a function that
		// now has virtual functions. Its remaining processes have the replacement open, or a device
		// that contains the replacement.
		return discovery.Device{Name: r.Hold.Device, Source: r.Source}, &Rule{}, ""
	}
	return d, nil, "it cannot be described at present"
}

// keyLimit is the time limit for reading the key of a device.
const keyLimit = time.Second

// keyOf returns the key of a device. A driver may block a read of its function. After the limit the
// read continues in the background, and the key has only the parts that need no read, such as the
// inode.
func (s *ruleSelector) keyOf(d discovery.Device) (discovery.DeviceKey, error) {
	read := make(chan discovery.DeviceKey, 1)
	err := s.reads.OverdueCall(d.Source)
	if err == nil {
		err = s.reads.Do(keyLimit, d.Source, "reading the IDs of its function", func() error {
			read <- discovery.KeyOf(s.config.Host, &d)
			return nil
		})
	}
	if err == nil {
		return <-read, nil
	}
	var key discovery.DeviceKey
	if function, ok := sysfs.At(s.config.Host.FS, d.Source).PCIFunction(); ok {
		key = discovery.FunctionKey(s.config.Host, function.Path)
	}
	key.Identity = d.Identity
	return key, err
}

// selectRule returns a device of the present snapshot, and the first rule that selects the device, or
// nil. The rules are evaluated once per snapshot, because allocations are checked every few seconds.
func (s *ruleSelector) selectRule(rules []discovery.Selection[Rule], name string) (d discovery.Device, rule *Rule, known bool) {
	snapshot := s.config.Snapshot()
	if snapshot == nil {
		return d, nil, false
	}
	if d, known = snapshot.Lookup(name); !known || len(rules) == 0 {
		return d, nil, known
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.choices.snapshot != snapshot || s.choices.by != &rules[0] {
		s.choices = choices{snapshot: snapshot, by: &rules[0], rules: make(map[string]*Rule)}
	}
	rule, is := s.choices.rules[name]
	if !is {
		rule, _ = discovery.FirstSelected(rules, d)
		s.choices.rules[name] = rule
	}
	return d, rule, true
}

// choices are the rules that select the devices of a snapshot, by device name.
type choices struct {
	snapshot *discovery.Snapshot
	by       *discovery.Selection[Rule] // the first of all rules
	rules    map[string]*Rule
}

// isOther reports whether the snapshot describes another device in a directory.
func (s *ruleSelector) isOther(source string) bool {
	snapshot := s.config.Snapshot()
	return snapshot != nil && slices.ContainsFunc(snapshot.Devices, func(d discovery.Device) bool { return d.Source == source })
}

// isDivided reports whether a directory is of a function with virtual functions. Such a function is
// not offered.
func (s *ruleSelector) isDivided(source string) bool {
	function, ok := sysfs.At(s.config.Host.FS, source).PCIFunction()
	if !ok {
		return false
	}
	divided, err := pci.HasVirtualFunctions(function)
	return divided && err == nil
}
