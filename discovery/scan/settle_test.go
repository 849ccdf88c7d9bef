package scan_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
)

var settleStart = time.Date(2026, 1, 2, 3, 4, 5, 6789, time.UTC)

// scans settles one device, scan after scan.
type scans struct {
	t       *testing.T
	settler *scan.Settler
	now     time.Time
	device  discovery.Device
}

func newScans(t *testing.T) *scans {
	return &scans{t: t, settler: &scan.Settler{}, now: settleStart, device: discovery.Device{Name: "a"}}
}

// want scans after the given number of seconds, and expects a state in the form "condition reason
// since again". The times are seconds from the start. "-" is a healthy device without a reason.
func (s *scans) want(after int, reading discovery.Health, want string) {
	s.t.Helper()
	s.now = s.now.Add(time.Duration(after) * time.Second)
	s.device.Health = reading
	settled, again := s.settler.SettleStates(&discovery.Snapshot{Devices: []discovery.Device{s.device}}, s.now)
	h := settled.Devices[0].Health
	since := h.Since.Sub(settleStart.Truncate(time.Second))
	got := fmt.Sprintf("%s %s %.0f %.0f", h.Key(), h.Reason, since.Seconds(), again.Seconds())
	if h.Stale {
		got += " stale"
	}
	if got != want {
		s.t.Errorf("after %s: got %q, want %q", s.now.Sub(settleStart), got, want)
	}
}

// gone scans without the device after the given number of seconds.
func (s *scans) gone(after int) {
	s.now = s.now.Add(time.Duration(after) * time.Second)
	s.settler.SettleStates(&discovery.Snapshot{}, s.now)
}

// missing scans without the device after the given number of seconds. The device must be gone since
// the wanted number of seconds from the start, with the wanted effect.
func (s *scans) missing(after int, want string) {
	s.t.Helper()
	s.now = s.now.Add(time.Duration(after) * time.Second)
	settled, _ := s.settler.SettleStates(&discovery.Snapshot{}, s.now)
	h := settled.Gone.HealthOf("a", "")
	got := fmt.Sprintf("%s %.0f %s", h.Key(), h.Since.Sub(settleStart.Truncate(time.Second)).Seconds(), h.Effect)
	if h.Since.IsZero() {
		got = "forgotten"
	}
	if got != want {
		s.t.Errorf("missing after %s: got %q, want %q", s.now.Sub(settleStart), got, want)
	}
}

// hold marks the device as allocated.
func (s *scans) hold() { s.settler.IsHeld = func(device string) bool { return device == "a" } }

// restart continues with another Settler that has read the states of the first one.
func (s *scans) restart() {
	s.t.Helper()
	data, err := json.Marshal(s.settler)
	if err != nil {
		s.t.Fatal(err)
	}
	s.settler = &scan.Settler{Severity: s.settler.Severity}
	if err := json.Unmarshal(data, s.settler); err != nil {
		s.t.Fatalf("%s: %v", data, err)
	}
}

func TestSettle(t *testing.T) {
	well := discovery.Health{Status: discovery.Healthy}
	sick := discovery.Health{Status: discovery.Unhealthy, Reason: "sick"}
	worse := discovery.Health{Status: discovery.Unhealthy, Reason: "worse"}
	hot := discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionOverTemperature, Reason: "hot"}
	slow := discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionLinkDegraded, Reason: "slow"}
	unread := discovery.Health{Status: discovery.Unknown, Reason: "EIO"}
	unbound := discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionDriverUnbound, Reason: "no driver"}
	noNode := discovery.Health{Status: discovery.Unhealthy, Condition: discovery.ConditionNodeMissing, Reason: "no node"}
	tests := map[string]func(s *scans){
		"healthy": func(s *scans) {
			s.want(0, discovery.Health{}, "  0 0")
			s.want(60, well, "  0 0")
		},
		"unknown after a time": func(s *scans) {
			s.want(0, well, "  0 0")
			s.want(5, unread, "  0 30 stale")
			s.want(20, unread, "  0 10 stale")
			s.want(10, unread, "unknown EIO 35 0")
			s.want(5, well, "unknown EIO 35 10")
			s.want(10, well, "  50 0")
		},
		"read again in time": func(s *scans) {
			s.want(0, well, "  0 0")
			s.want(5, unread, "  0 30 stale")
			s.want(25, well, "  0 0")
			s.want(25, unread, "  0 30 stale")
		},
		"unread keeps what it had": func(s *scans) {
			s.want(0, sick, "unhealthy sick 0 0")
			s.want(5, unread, "unhealthy sick 0 30 stale")
			s.want(30, unread, "unknown EIO 35 0")
			s.want(1, sick, "unhealthy sick 36 0")
		},
		"never read": func(s *scans) {
			s.want(0, unread, "unknown EIO 0 0")
			s.want(5, well, "  5 0")
		},
		"never read, and held": func(s *scans) {
			s.hold()
			s.want(0, unread, "unknown EIO 0 0")
			s.want(5, well, "unknown EIO 0 10")
			s.want(10, well, "  15 0")
		},
		"made": func(s *scans) {
			s.want(0, unread, "unknown EIO 0 0")
			s.want(1, unbound, "driver-unbound no driver 1 0")
			s.want(1, noNode, "node-missing no node 2 0")
			s.restart()
			s.want(1, well, "  3 0")
		},
		"made and unmade in a row": func(s *scans) { // as virtual functions are
			s.want(0, well, "  0 0")
			for at := 3; at < 60; at += 3 {
				s.want(1, unbound, fmt.Sprintf("driver-unbound no driver %d 0", at-2))
				s.missing(1, fmt.Sprintf("gone %d NoSchedule", at-1))
				s.want(1, well, fmt.Sprintf("  %d 0", at))
			}
			s.want(1, sick, "unhealthy sick 58 0")
			s.want(1, well, "unhealthy sick 58 10") // it had not become worse before
		},
		"unbound while held": func(s *scans) {
			s.hold()
			s.want(0, well, "  0 0")
			s.want(1, unbound, "driver-unbound no driver 1 0")
			s.want(1, well, "driver-unbound no driver 1 10")
		},
		"held after it was unbound": func(s *scans) {
			s.want(0, well, "  0 0")
			s.want(1, unbound, "driver-unbound no driver 1 0")
			s.hold()
			s.want(1, unbound, "driver-unbound no driver 1 0")
			s.settler.IsHeld = nil
			s.want(1, well, "driver-unbound no driver 1 10")
		},
		"unbound after it was sick": func(s *scans) {
			s.want(0, well, "  0 0")
			s.want(1, sick, "unhealthy sick 1 0")
			s.want(1, unbound, "driver-unbound no driver 2 0")
			s.want(1, well, "driver-unbound no driver 2 10")
		},
		"sick after it was unbound": func(s *scans) {
			s.want(0, unbound, "driver-unbound no driver 0 0")
			s.want(1, sick, "unhealthy sick 1 0")
			s.want(1, well, "unhealthy sick 1 10")
		},
		"another reason is no other state": func(s *scans) {
			s.want(0, sick, "unhealthy sick 0 0")
			s.want(5, worse, "unhealthy worse 0 0")
			s.want(5, hot, "over-temperature hot 10 0")
		},
		"recovers": func(s *scans) {
			s.want(0, well, "  0 0")
			s.want(5, sick, "unhealthy sick 5 0")
			s.want(5, well, "unhealthy sick 5 10")
			s.want(6, well, "unhealthy sick 5 4")
			s.want(4, well, "  20 0")
		},
		"recovers anew after a bad reading": func(s *scans) {
			s.want(0, sick, "unhealthy sick 0 0")
			s.want(5, well, "unhealthy sick 0 10")
			s.want(6, sick, "unhealthy sick 0 0")
			s.want(5, well, "unhealthy sick 0 10")
			s.want(6, unread, "unhealthy sick 0 30 stale")
			s.want(1, well, "unhealthy sick 0 10")
		},
		"flapping": func(s *scans) {
			s.want(0, well, "  0 0")
			at := 0
			for _, hold := range []int{10, 20, 40, 80, 160, 300, 300} {
				s.want(1, sick, fmt.Sprintf("unhealthy sick %d 0", at+1))
				s.want(1, well, fmt.Sprintf("unhealthy sick %d %d", at+1, hold))
				at += 2 + hold
				s.want(hold, well, fmt.Sprintf("  %d 0", at))
			}
			s.want(600, sick, fmt.Sprintf("unhealthy sick %d 0", at+600)) // 901 s after the last time
			s.want(1, well, fmt.Sprintf("unhealthy sick %d 10", at+600))
		},
		"flapping over a restart": func(s *scans) {
			s.want(0, well, "  0 0")
			s.want(1, sick, "unhealthy sick 1 0")
			s.want(1, well, "unhealthy sick 1 10")
			s.want(10, well, "  12 0")
			s.restart()
			s.want(1, sick, "unhealthy sick 13 0")
			s.want(1, well, "unhealthy sick 13 20")
		},
		"a restart keeps the time": func(s *scans) {
			s.want(0, hot, "over-temperature hot 0 0")
			s.restart()
			s.want(60, hot, "over-temperature hot 0 0")
			s.restart()
			s.want(60, well, "over-temperature hot 0 10")
			s.restart()
			s.want(5, unread, "over-temperature hot 0 30 stale")
		},
		"what has no effect is better than what has": func(s *scans) {
			s.want(0, slow, "link-degraded slow 0 0")
			s.want(1, hot, "over-temperature hot 1 0")
			s.want(1, slow, "over-temperature hot 1 10")
			s.want(10, slow, "link-degraded slow 12 0")
			s.want(1, well, "link-degraded slow 12 10")
		},
		"the administrator's severity": func(s *scans) {
			s.settler.Severity = discovery.Severity{discovery.ConditionLinkDegraded: resourceapi.DeviceTaintEffectNoExecute}
			s.device.Readings = []discovery.Health{slow}
			s.want(0, hot, "link-degraded slow 0 0")
			s.device.Readings = nil
			s.want(1, hot, "link-degraded slow 0 10")
			s.want(10, hot, "over-temperature hot 11 0")
		},
		"missing for a while": func(s *scans) {
			s.want(0, sick, "unhealthy sick 0 0")
			s.gone(1)
			s.gone(598)
			s.want(1, sick, "unhealthy sick 0 0")
		},
		"missing for long": func(s *scans) {
			s.want(0, sick, "unhealthy sick 0 0")
			s.gone(1)
			s.gone(600)
			s.want(1, well, "  602 0")
		},
		"missing, without a consumer": func(s *scans) {
			s.want(0, well, "  0 0")
			s.missing(1, "gone 1 NoSchedule")
			s.want(1, well, "  0 0")
		},
		"missing, and held only when it is back": func(s *scans) { // as a device that was created for a claim
			s.want(0, well, "  0 0")
			s.missing(1, "gone 1 NoSchedule")
			s.hold()
			s.want(1, well, "  0 0")
		},
		"missing for long after it was held": func(s *scans) {
			s.hold()
			s.want(0, sick, "unhealthy sick 0 0")
			s.missing(1, "gone 1 NoSchedule")
			s.settler.IsHeld = nil
			s.missing(3600, "gone 1 NoSchedule")
			s.missing(600, "gone 1 NoSchedule")
			s.missing(1, "forgotten")
			s.want(1, well, "  4203 0")
		},
		"missing while held": func(s *scans) {
			const was = "gone the device was gone until just now"
			s.hold()
			s.want(0, well, "  0 0")
			s.missing(1, "gone 1 NoSchedule")
			s.missing(1, "gone 1 NoSchedule")
			s.want(1, well, was+" 1 10")
			s.missing(5, "gone 1 NoSchedule") // shorter than the time to recover
			s.want(1, well, was+" 1 10")
			s.want(10, well, "  19 0")
			s.missing(1, "gone 20 NoSchedule")
			s.want(1, well, was+" 20 20")
			s.want(20, well, "  41 0")
			s.settler.IsHeld = nil
			s.missing(1, "gone 42 NoSchedule")
			s.want(1, well, "  41 0")
		},
		"missing over a restart": func(s *scans) {
			s.settler.Severity = discovery.Severity{discovery.ConditionGone: resourceapi.DeviceTaintEffectNoExecute}
			s.want(0, hot, "over-temperature hot 0 0")
			s.missing(1, "gone 1 NoExecute")
			s.restart()
			s.missing(0, "gone 1 NoExecute") // after a restart, no allocation is known yet
			s.hold()
			s.missing(1, "gone 1 NoExecute")
			s.missing(3600, "gone 1 NoExecute")
			s.restart()
			s.want(1, hot, "gone the device was gone until just now 1 10")
			s.want(10, hot, "over-temperature hot 3613 0")
		},
		"a restart before it recovers from being gone": func(s *scans) {
			s.hold()
			s.want(0, well, "  0 0")
			s.missing(1, "gone 1 NoSchedule")
			s.want(1, well, "gone the device was gone until just now 1 10")
			s.restart()
			s.want(1, well, "gone the device was gone until just now 1 10")
		},
		"missing, the clock is set back": func(s *scans) {
			s.want(0, well, "  0 0")
			s.missing(60, "gone 60 NoSchedule")
			s.missing(-30, "gone 30 NoSchedule")
		},
		"other hardware in the place of what was held": func(s *scans) {
			s.hold()
			s.device.Identity = "first"
			s.want(0, well, "  0 0")
			s.missing(1, "gone 1 NoSchedule")
			s.device.Identity = "second"
			s.want(1, well, "  2 0")
		},
		"other hardware in its place": func(s *scans) {
			s.device.Identity = "first"
			s.want(0, sick, "unhealthy sick 0 0")
			s.device.Identity = "" // unreadable
			s.want(1, sick, "unhealthy sick 0 0")
			s.device.Identity = "second"
			s.want(1, well, "  2 0")
		},
		"the clock is set back": func(s *scans) {
			s.want(0, sick, "unhealthy sick 0 0")
			s.want(-60, sick, "unhealthy sick -60 0")
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) { test(newScans(t)) })
	}
}

// Settle sets the effect of a state, and does not modify the scan.
func TestSettleEffects(t *testing.T) {
	s := scan.Settler{Severity: discovery.Severity{discovery.ConditionUnknown: resourceapi.DeviceTaintEffectNone}}
	scan := &discovery.Snapshot{
		Devices: []discovery.Device{
			{Name: "a"},
			{Name: "b", Health: discovery.Health{Status: discovery.Unknown}},
			{Name: "c", Health: discovery.Health{Status: discovery.Unhealthy}},
		},
		Problems: []discovery.Problem{{Device: "b", Err: errors.New("EIO")}},
	}
	settled, _ := s.SettleStates(scan, settleStart)
	for i, want := range []struct {
		effect resourceapi.DeviceTaintEffect
		usable bool
	}{{"", true}, {"None", true}, {"NoSchedule", false}} {
		h := settled.Devices[i].Health
		if h.Effect != want.effect || h.IsUsable() != want.usable {
			t.Errorf("%s: effect %q, usable %v; want %+v", settled.Devices[i].Name, h.Effect, h.IsUsable(), want)
		}
		if !scan.Devices[i].Health.Since.IsZero() {
			t.Errorf("%s: the scan was modified", scan.Devices[i].Name)
		}
	}
	if len(settled.Problems) != 1 {
		t.Errorf("problems: %v", settled.Problems)
	}
}

// FuzzSettlerStates reads damaged states. They must be rejected, or must be possible states of a
// device.
func FuzzSettlerStates(f *testing.F) {
	for _, seed := range []string{
		`{"a":{"status":"Unhealthy","condition":"node-missing","reason":"r","since":"2026-01-02T03:04:05Z","worsened":"2026-01-02T03:04:05Z","flaps":3}}`,
		`{"a":{"status":"Healthy","since":"2026-01-02T03:04:05Z","missing":"2026-01-02T03:04:05Z"}}`,
		`{"a":null}`, `{"a":{"status":"Fine"}}`, `{"a":{"status":"Unhealthy","condition":"a b"}}`, `{"a":{"status":"Healthy","flaps":99}}`, `null`, `[`, ``,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var s scan.Settler
		if err := json.Unmarshal(data, &s); err != nil {
			if again, _ := json.Marshal(&s); string(again) != "null" {
				t.Errorf("%v, and took %s", err, again)
			}
		}
		settled, _ := s.SettleStates(&discovery.Snapshot{Devices: []discovery.Device{{Name: "a"}}}, settleStart)
		if h := settled.Devices[0].Health; h.Since.After(settleStart) || h.Key() != "" && h.Effect == "" {
			t.Errorf("settled as %+v", h)
		}
	})
}

// After a restart, a device that was not seen yet is not gone if the path to it is unreadable.
func TestSettleOfWhatCannotBeReached(t *testing.T) {
	for name, test := range map[string]struct {
		snapshot discovery.Snapshot
		gone     bool
	}{
		"the device":  {discovery.Snapshot{Problems: []discovery.Problem{{Device: "a-1", Err: errors.New("EIO")}}}, false},
		"its silicon": {discovery.Snapshot{Problems: []discovery.Problem{{Device: "a", Err: errors.New("EIO")}}}, false},
		"its family":  {discovery.Snapshot{Problems: []discovery.Problem{{Device: "widget", Err: errors.New("EIO")}}}, false},
		"a list":      {discovery.Snapshot{Problems: []discovery.Problem{{Device: "/sys/class/widget", Err: errors.New("EIO")}}}, false},
		"another":     {discovery.Snapshot{Problems: []discovery.Problem{{Device: "b", Err: errors.New("EIO")}}}, true},
		"no part any more": {discovery.Snapshot{
			Devices:  []discovery.Device{{Name: "a"}},
			Problems: []discovery.Problem{{Device: "a", Err: errors.New("EIO")}},
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScans(t)
			s.device = discovery.Device{Name: "a-1", Family: "widget", PartOf: &discovery.Silicon{Name: "a"}}
			s.hold()
			s.want(0, discovery.Health{}, "  0 0")
			s.restart()
			for _, want := range []struct {
				after time.Duration
				key   discovery.Condition
				stale bool
			}{{0, "", true}, {time.Minute, discovery.ConditionUnknown, false}} {
				if test.gone {
					want.key, want.stale = discovery.ConditionGone, false
				}
				settled, _ := s.settler.SettleStates(&test.snapshot, s.now.Add(want.after))
				if h := settled.Gone.HealthOf("a-1", ""); h.Key() != want.key || h.Stale != want.stale {
					t.Errorf("after %s: %+v; want %+v", want.after, h, want)
				}
			}
		})
	}
}
