package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// holder knows who holds a piece of silicon through one of the two APIs.
type holder interface {
	Holder(silicon string) (who string, held bool)
}

// claimed knows what the API server says of this node's devices: which are
// still in its ResourceSlices, and which a ResourceClaim has allocated.
type claimed interface {
	Claimed(ctx context.Context) (by map[string]string, err error)
}

// sides decides which API offers which device. Each piece of silicon is on
// one side at a time, and changes sides only while nobody holds it and
// nobody could: to be sure of that, both sides are asked.
type sides struct {
	dra, classic holder
	claimed      claimed
	file         string // where the sides are written down

	current map[string]discovery.Mode // by silicon
}

// newSides reads the sides that silicon was last on.
func newSides(ctx context.Context, dra, classic holder, claimed claimed, stateDir string) *sides {
	s := &sides{dra: dra, classic: classic, claimed: claimed, file: filepath.Join(stateDir, "sides.json")}
	data, err := os.ReadFile(s.file)
	if err == nil {
		err = json.Unmarshal(data, &s.current)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		klog.FromContext(ctx).Error(err, "Which API offered which device is not known any more; who holds what still is")
	}
	if s.current == nil {
		s.current = make(map[string]discovery.Mode)
	}
	return s
}

// split returns what each API is to offer of the snapshot, where auto is the
// API for devices whose mode leaves the choice, "" while that is not known. A
// device that waits to change sides stays where it is and is withheld there,
// so that it becomes free; split reports whether there is one. What the classic
// API offers is in DRA's snapshot too, withheld: claims that were allocated it
// before it moved can still be prepared and are not told that it is gone.
func (s *sides) split(ctx context.Context, snapshot *discovery.Snapshot, auto discovery.Mode) (dra, classic *discovery.Snapshot, waiting bool) {
	dra, classic = &discovery.Snapshot{Gone: snapshot.Gone}, &discovery.Snapshot{Gone: snapshot.Gone}
	silicon := make(map[string][]discovery.Device)
	for _, d := range snapshot.Devices {
		silicon[d.Silicon()] = append(silicon[d.Silicon()], d)
	}
	before := maps.Clone(s.current)
	inquiry := &inquiry{claimed: s.claimed}
	withheld := make(map[string]string)
	for name, devices := range silicon {
		withheld[name] = s.place(ctx, name, devices, auto, inquiry)
		waiting = waiting || withheld[name] != ""
	}
	for _, d := range snapshot.Devices {
		d.Withheld = withheld[d.Silicon()]
		switch s.current[d.Silicon()] {
		case discovery.ModeDRA:
			dra.Devices = append(dra.Devices, d)
		case discovery.ModeDevicePlugin:
			classic.Devices = append(classic.Devices, d)
			d.Withheld = cmp.Or(d.Withheld, "offered by the device-plugin API")
			dra.Devices = append(dra.Devices, d)
		}
	}
	if !maps.Equal(before, s.current) {
		s.save(ctx)
	}
	return dra, classic, waiting
}

// place puts a piece of silicon on the side that is wanted for its devices,
// if it is free to go there. Else it leaves it where it is, or where it must
// have been, and returns why it waits.
func (s *sides) place(ctx context.Context, silicon string, devices []discovery.Device, auto discovery.Mode, inquiry *inquiry) (withheld string) {
	now, wanted := s.current[silicon], devices[0].Mode // the same for all: see discovery.Rules
	if wanted == discovery.ModeAuto {
		wanted = auto
	}
	if wanted == discovery.ModeAuto || wanted == now {
		return ""
	}
	logger := klog.FromContext(ctx).WithValues("silicon", silicon, "from", now, "to", wanted)
	if who, held := s.heldAgainst(ctx, silicon, devices, wanted, inquiry); held {
		logger.V(2).Info("Waits to change sides", "heldBy", who)
		s.current[silicon] = other(wanted)
		return fmt.Sprintf("moves to API %s once it is free of %s", wanted, who)
	}
	logger.V(2).Info("Changes sides")
	s.current[silicon] = wanted
	return ""
}

func other(mode discovery.Mode) discovery.Mode {
	if mode == discovery.ModeDRA {
		return discovery.ModeDevicePlugin
	}
	return discovery.ModeDRA
}

// heldAgainst reports who keeps the silicon from changing to the wanted side.
// What any number of containers may have at once is held by nobody.
func (s *sides) heldAgainst(ctx context.Context, silicon string, devices []discovery.Device, wanted discovery.Mode, inquiry *inquiry) (string, bool) {
	devices = slices.DeleteFunc(slices.Clone(devices), func(d discovery.Device) bool { return d.Shareable })
	if len(devices) == 0 {
		return "", false
	}
	if wanted == discovery.ModeDRA {
		return s.classic.Holder(silicon)
	}
	if who, held := s.dra.Holder(silicon); held {
		return who, true
	}
	for _, d := range devices {
		if who, held := inquiry.by(ctx, d.Name); held {
			return who, true
		}
	}
	return "", false
}

// save writes the sides down. Where that fails they are found out anew after
// a restart, from who holds what.
func (s *sides) save(ctx context.Context) {
	data, err := json.Marshal(s.current)
	if err == nil {
		_, err = disk.Files{}.Write(s.file, data, 0o600)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Writing down which API offers which device")
	}
}

// inquiry asks the API server once for all devices of one split, and only if
// one of them needs it.
type inquiry struct {
	claimed claimed
	asked   bool
	answer  map[string]string
	err     error
}

func (q *inquiry) by(ctx context.Context, device string) (string, bool) {
	if !q.asked {
		q.answer, q.err = q.claimed.Claimed(ctx)
		q.asked = true
	}
	if q.err != nil {
		return fmt.Sprintf("unknown: %v", q.err), true
	}
	who, held := q.answer[device]
	return who, held
}
