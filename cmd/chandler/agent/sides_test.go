package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"chandler.dev/discovery"
)

// holders is who holds which silicon.
type holders map[string]string

func (h holders) Holder(silicon string) (string, bool) {
	who, held := h[silicon]
	return who, held
}

// claims is what the API server says, by device.
type claims struct {
	by  map[string]string
	err error
}

func (c claims) Claimed(context.Context) (map[string]string, error) { return c.by, c.err }

// unknown is the side of silicon that neither API offers yet.
const unknown = discovery.ModeAuto

func TestSplit(t *testing.T) {
	gpu := discovery.Device{Name: "gpu"}
	tests := map[string]struct {
		now      discovery.Mode
		device   discovery.Device
		mode     discovery.Mode // of the device
		auto     discovery.Mode
		dra      holders
		classic  holders
		claims   claims
		want     discovery.Mode
		withheld bool
	}{
		"auto goes where the node goes":               {device: gpu, auto: discovery.ModeDRA, want: discovery.ModeDRA},
		"auto waits while the node does not know":     {device: gpu, want: unknown},
		"auto stays while the node does not know":     {now: discovery.ModeDevicePlugin, device: gpu, want: discovery.ModeDevicePlugin},
		"the device's mode counts more":               {device: gpu, mode: discovery.ModeDevicePlugin, auto: discovery.ModeDRA, want: discovery.ModeDevicePlugin},
		"held by a claim":                             {now: discovery.ModeDRA, device: gpu, mode: discovery.ModeDevicePlugin, dra: holders{"gpu": "claim"}, want: discovery.ModeDRA, withheld: true},
		"allocated to a claim":                        {now: discovery.ModeDRA, device: gpu, mode: discovery.ModeDevicePlugin, claims: claims{by: map[string]string{"gpu": "claim"}}, want: discovery.ModeDRA, withheld: true},
		"another device allocated":                    {now: discovery.ModeDRA, device: gpu, mode: discovery.ModeDevicePlugin, claims: claims{by: map[string]string{"gpu2": "claim"}}, want: discovery.ModeDevicePlugin},
		"API server cannot be asked":                  {now: discovery.ModeDRA, device: gpu, mode: discovery.ModeDevicePlugin, claims: claims{err: errors.New("timeout")}, want: discovery.ModeDRA, withheld: true},
		"held by a pod":                               {now: discovery.ModeDevicePlugin, device: gpu, auto: discovery.ModeDRA, classic: holders{"gpu": "pod"}, want: discovery.ModeDevicePlugin, withheld: true},
		"held by a pod, and where it was is lost":     {device: gpu, auto: discovery.ModeDRA, classic: holders{"gpu": "pod"}, want: discovery.ModeDevicePlugin, withheld: true},
		"free again":                                  {now: discovery.ModeDevicePlugin, device: gpu, auto: discovery.ModeDRA, want: discovery.ModeDRA},
		"back where it is allocated: nothing to wait": {now: discovery.ModeDRA, device: gpu, auto: discovery.ModeDRA, dra: holders{"gpu": "claim"}, want: discovery.ModeDRA},
		"what all may have is held by nobody":         {now: discovery.ModeDRA, device: discovery.Device{Name: "kvm", Shareable: true}, mode: discovery.ModeDevicePlugin, dra: holders{"kvm": "claim"}, want: discovery.ModeDevicePlugin},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newSides(t.Context(), test.dra, test.classic, test.claims, t.TempDir())
			test.device.Mode = test.mode
			if test.now != unknown {
				s.current[test.device.Silicon()] = test.now
			}
			dra, classic, waiting := s.split(t.Context(), &discovery.Snapshot{Devices: []discovery.Device{test.device}}, test.auto)
			got, withheld := sideOf(t, test.device.Name, dra, classic)
			if got != test.want || withheld != test.withheld || waiting != test.withheld {
				t.Errorf("got side %q, withheld %t, waiting %t; want side %q, withheld %t", got, withheld, waiting, test.want, test.withheld)
			}
		})
	}
}

// sideOf returns which of the snapshots offers the device; both is a failure. A
// device that the classic API offers is in DRA's too, withheld.
func sideOf(t *testing.T, name string, dra, classic *discovery.Snapshot) (discovery.Mode, bool) {
	t.Helper()
	onDRA, inDRA := dra.Lookup(name)
	onClassic, inClassic := classic.Lookup(name)
	switch {
	case inDRA && inClassic && onDRA.Withheld == "":
		t.Fatalf("device %s is offered by both APIs", name)
	case inClassic && !inDRA:
		t.Fatalf("device %s is gone for claims that have it", name)
	case inClassic:
		return discovery.ModeDevicePlugin, onClassic.Withheld != ""
	case inDRA:
		return discovery.ModeDRA, onDRA.Withheld != ""
	}
	return unknown, false
}

// A Whole moves when all of its parts are free, and then all of them move.
func TestSplitMovesSiliconAsOne(t *testing.T) {
	whole := &discovery.Whole{Name: "gpu"}
	snapshot := &discovery.Snapshot{Devices: []discovery.Device{
		{Name: "gpu-0", PartOf: whole, Mode: discovery.ModeDevicePlugin},
		{Name: "gpu-1", PartOf: whole, Mode: discovery.ModeDevicePlugin},
	}}
	asked := claims{by: map[string]string{"gpu-1": "claim"}}
	s := newSides(t.Context(), holders{}, holders{}, asked, t.TempDir())
	s.current["gpu"] = discovery.ModeDRA
	if dra, classic, _ := s.split(t.Context(), snapshot, ""); len(dra.Devices) != 2 || len(classic.Devices) != 0 {
		t.Errorf("one part is claimed: %d parts in DRA, %d in the classic API; want 2, 0", len(dra.Devices), len(classic.Devices))
	}
	delete(asked.by, "gpu-1")
	if dra, classic, _ := s.split(t.Context(), snapshot, ""); offered(dra) != 0 || offered(classic) != 2 {
		t.Errorf("no part is claimed: %d parts in DRA, %d in the classic API; want 0, 2", offered(dra), offered(classic))
	}
}

func TestSidesSurviveRestart(t *testing.T) {
	dir := t.TempDir()
	snapshot := &discovery.Snapshot{Devices: []discovery.Device{{Name: "gpu"}}}
	s := newSides(t.Context(), holders{}, holders{}, claims{}, dir)
	s.split(t.Context(), snapshot, discovery.ModeDRA)
	s = newSides(t.Context(), holders{}, holders{}, claims{}, dir)
	if dra, _, _ := s.split(t.Context(), snapshot, unknown); len(dra.Devices) != 1 {
		t.Error("after a restart, with nothing known of the cluster, the device is not where it was")
	}
}

// What is gone is known behind the rules and on either side.
func TestGoneReachesBothSides(t *testing.T) {
	gone := map[string]discovery.Health{"gpu": discovery.Gone("NoSchedule")}
	snapshot := new(discovery.Rules).Apply(&discovery.Snapshot{Gone: gone})
	s := newSides(t.Context(), holders{}, holders{}, claims{}, t.TempDir())
	dra, classic, _ := s.split(t.Context(), snapshot, unknown)
	if len(dra.Gone) != 1 || len(classic.Gone) != 1 {
		t.Errorf("DRA knows of %v, the device-plugin API of %v", dra.Gone, classic.Gone)
	}
}

// offered counts the devices that are not withheld.
func offered(s *discovery.Snapshot) (n int) {
	for _, d := range s.Devices {
		if d.Withheld == "" {
			n++
		}
	}
	return n
}

// What cannot be read of the last sides is no reason not to start.
func TestSidesThatCannotBeRead(t *testing.T) {
	for name, spoil := range map[string]func(file string) error{
		"garbage":     func(file string) error { return os.WriteFile(file, []byte("{"), 0o600) },
		"a directory": func(file string) error { return os.Mkdir(file, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := spoil(filepath.Join(dir, "sides.json")); err != nil {
				t.Fatal(err)
			}
			s := newSides(t.Context(), holders{}, holders{}, claims{}, dir)
			dra, _, _ := s.split(t.Context(), &discovery.Snapshot{Devices: []discovery.Device{{Name: "gpu"}}}, discovery.ModeDRA)
			if offered(dra) != 1 {
				t.Error("nothing is offered")
			}
		})
	}
}
