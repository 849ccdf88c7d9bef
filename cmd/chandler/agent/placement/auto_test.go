package placement

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/driver"
	"chandler.dev/internal/disk"
)

func TestAuto(t *testing.T) {
	yes := func(context.Context) (bool, error) { return true, nil }
	no := func(context.Context) (bool, error) { return false, nil }
	silent := func(context.Context) (bool, error) { return false, errors.New("connection refused") }
	tests := map[string]struct {
		last         discovery.Mode
		served       func(context.Context) (bool, error)
		registration driver.Registration
		want         discovery.Mode
	}{
		"registered": {served: yes, registration: driver.Accepted, want: discovery.ModeDRA},
		"registered, and the API server is silent": {served: silent, registration: driver.Accepted, want: discovery.ModeDRA},
		"refused":                    {served: yes, registration: driver.Refused, want: discovery.ModeDevicePlugin},
		"not served":                 {served: no, want: discovery.ModeDevicePlugin},
		"not served any more":        {last: discovery.ModeDRA, served: no, want: discovery.ModeDevicePlugin},
		"silence at the first start": {served: silent, want: discovery.ModeAuto},
		"silence later":              {last: discovery.ModeDevicePlugin, served: silent, want: discovery.ModeDevicePlugin},
		"the kubelet is silent at the first start":  {served: yes, want: discovery.ModeAuto},
		"the kubelet is silent later":               {last: discovery.ModeDRA, served: yes, want: discovery.ModeDRA},
		"moves to DRA when the kubelet registers":   {last: discovery.ModeDevicePlugin, served: yes, registration: driver.Accepted, want: discovery.ModeDRA},
		"stays classic while the kubelet is silent": {last: discovery.ModeDevicePlugin, served: yes, want: discovery.ModeDevicePlugin},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			registration := func() driver.Registration { return test.registration }
			a := newAuto(t.Context(), test.served, registration, disk.Files{}, dir)
			a.last = test.last
			if got := a.chooseMode(t.Context()); got != test.want {
				t.Errorf("chose %q; want %q", got, test.want)
			}
			// The choice survives a restart, and is written again after its file was removed.
			if err := os.Remove(filepath.Join(dir, "mode")); err == nil {
				a.chooseMode(t.Context())
			}
			a = newAuto(t.Context(), silent, func() driver.Registration { return driver.Unanswered }, disk.Files{}, dir)
			if got := a.chooseMode(t.Context()); test.last == "" && got != test.want {
				t.Errorf("after a restart in silence it chose %q; want %q", got, test.want)
			}
		})
	}
}

// While the kubelet has not registered the driver, the API server is asked about once a minute, and
// less often if it does not answer.
func TestAutoAsksRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		var fault error
		served := func(context.Context) (bool, error) { asked++; return true, fault }
		a := newAuto(t.Context(), served, func() driver.Registration { return driver.Unanswered }, disk.Files{}, t.TempDir())
		intervals := make(map[time.Duration]bool)
		for range 10 {
			intervals[ServedInterval()] = true
		}
		if len(intervals) == 1 {
			t.Error("all nodes ask at the same interval")
		}
		for _, test := range []struct {
			fault        error
			fewest, most int
		}{{nil, 47, 81}, {errors.New("connection refused"), 20, 60}} {
			asked, fault = 0, test.fault
			for range 60 * 60 {
				a.chooseMode(t.Context())
				time.Sleep(time.Second)
			}
			if asked < test.fewest || asked > test.most {
				t.Errorf("asked %d times in an hour (%v), want %d to %d", asked, fault, test.fewest, test.most)
			}
		}
	})
}
