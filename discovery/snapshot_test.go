package discovery

import (
	"fmt"
	"strings"
	"testing"
)

// states returns the devices of a snapshot as text.
func states(s *Snapshot) string {
	var text []string
	for _, d := range s.Devices {
		text = append(text, fmt.Sprint(d.Name, " ", d.Health.Status, " ", d.Health.Reason))
	}
	return strings.Join(text, "; ")
}

func overlaid() *Snapshot {
	return &Snapshot{Devices: []Device{
		{Name: "a", Health: Health{Status: Healthy}},
		{Name: "b", Health: Health{Status: Unknown}},
		{Name: "c", Health: Health{Status: Healthy}},
	}}
}

func TestReplaceDevices(t *testing.T) {
	s := overlaid()
	if s.ReplaceDevices(nil) != s {
		t.Error("a copy without a description")
	}
	now := s.ReplaceDevices(map[string]*Device{
		"a":  nil,
		"b":  {Name: "b", Health: Health{Status: Healthy}},
		"b2": {Name: "b2", Health: Health{Status: Unhealthy}},
		"d":  nil,
	})
	if got, want := states(now), "b Healthy ; b2 Unhealthy ; c Healthy "; got != want {
		t.Errorf("%q; want %q", got, want)
	}
	if got, want := states(s), states(overlaid()); got != want {
		t.Errorf("the snapshot itself is modified: %q", got)
	}
}

func TestMarkUnhealthy(t *testing.T) {
	s := overlaid()
	fault := func(reason string) Health { return Health{Status: Unhealthy, Reason: reason} }
	if s.MarkUnhealthy(nil, map[string]Health{"b": fault("is not healthy"), "d": fault("is unknown")}) != s {
		t.Error("a copy without a marked device")
	}
	now := s.MarkUnhealthy(map[string]Health{"a": fault("first"), "b": fault("first")}, map[string]Health{"a": fault("second"), "c": fault("second")})
	if got, want := states(now), "a Unhealthy first; b Unknown ; c Unhealthy second"; got != want {
		t.Errorf("%q; want %q", got, want)
	}
	if got, want := states(s), states(overlaid()); got != want {
		t.Errorf("the snapshot itself is modified: %q", got)
	}
}
