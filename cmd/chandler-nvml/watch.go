//go:build cgo

package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"chandler.dev/discovery/families/nvidia/facts"
)

// harmless are errors that leave a GPU as good as it was: an application brings
// 13 (graphics exception), 31 (memory page fault), 43 and 68 (its own work
// stopped) and 45 (cleanup after it) upon itself, as NVIDIA's device plugin has it;
// after 94 (memory error that was contained) it has to be started again; and 154 only
// says that what the driver wants done has changed, which is read then. 109 (context
// switch timeout), which that plugin ignores, wants the GPU reset. The remedies
// are in NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors/
// analyzing-xid-catalog.html: RESTART_APP for 94, RESET_GPU for 109).
var harmless = []uint64{13, 31, 43, 45, 68, 94, 154}

// settling is how long an error is remembered that the driver wants nothing done
// about: it may be about to say so.
const settling = time.Minute

// maxXIDs is how many errors of a GPU are remembered.
const maxXIDs = 16

// wanted are the events that are of interest, as far as a GPU has them.
const wanted = nvml.EventTypeXidCriticalError | nvml.EventMigConfigChange | nvml.EventTypeGpuRecoveryAction | nvml.EventTypeGpuUnavailableError

// watch writes what is known, again after the interval, and again when a GPU has
// an error or its MIG instances changed. It ends when the host has other GPUs
// than before: NVML knows only those that were there when it was loaded.
func (r *reader) watch(out io.Writer, o *options) error {
	set := r.register()
	before, err := listed(o.gpus)
	for err == nil {
		if err = r.write(out); err != nil {
			break
		}
		if err = r.wait(set, o.interval, o.again); err != nil {
			break
		}
		var now []string
		if now, err = listed(o.gpus); err == nil && !slices.Equal(before, now) {
			err = errors.New("the host has other GPUs than before")
		}
	}
	return err
}

// register returns the events of all GPUs, nil if they have none.
func (r *reader) register() nvml.EventSet {
	if !r.has("nvmlEventSetCreate") {
		return nil
	}
	set, ret := r.lib.EventSetCreate()
	if ret != nvml.SUCCESS {
		return nil
	}
	some := false
	for _, g := range r.gpus {
		if g.device == nil {
			continue
		}
		supported, ret := g.device.GetSupportedEventTypes()
		if ret != nvml.SUCCESS || supported&wanted == 0 {
			continue
		}
		some = g.device.RegisterEvents(supported&wanted, set) == nvml.SUCCESS || some
	}
	if !some {
		return nil
	}
	return set
}

// glance is how long NVML is asked to wait for events at a time: it cannot be interrupted.
const glance = 500 * time.Millisecond

// wait waits for events, and notes those that come together. It returns after the interval,
// or when it is to look again.
func (r *reader) wait(set nvml.EventSet, interval time.Duration, again <-chan struct{}) error {
	for left := interval; left > 0; left -= glance {
		select {
		case <-again:
			return nil
		default:
		}
		if set == nil {
			select {
			case <-again:
			case <-time.After(left):
			}
			return nil
		}
		event, ret := set.Wait(uint32(min(left, glance).Milliseconds()))
		heard := ret == nvml.SUCCESS
		for range maxXIDs {
			if ret != nvml.SUCCESS {
				break
			}
			r.note(event, time.Now())
			event, ret = set.Wait(50)
		}
		switch ret {
		case nvml.SUCCESS, nvml.ERROR_TIMEOUT:
		case nvml.ERROR_GPU_IS_LOST: // which it says at once, for ever
			set = nil
		default:
			return fmt.Errorf("wait for events: %s", describe(ret))
		}
		if heard {
			return nil
		}
	}
	return nil
}

// note remembers an error.
func (r *reader) note(event nvml.EventData, at time.Time) {
	if event.EventType != nvml.EventTypeXidCriticalError || slices.Contains(harmless, event.EventData) {
		return
	}
	xid := facts.XID{Code: event.EventData, Time: at.UTC().Truncate(time.Second)}
	if gi := int(event.GpuInstanceId); event.GpuInstanceId != 0xffffffff {
		xid.GI = &gi
	}
	uuid, ret := "", nvml.ERROR_UNKNOWN
	if event.Device != nil {
		uuid, ret = event.Device.GetUUID()
	}
	known := ret == nvml.SUCCESS && slices.ContainsFunc(r.gpus, func(g *gpu) bool { return g.last.UUID == uuid })
	for _, g := range r.gpus {
		// An error of nobody knows whom may be of any of them.
		if !known || g.last.UUID == uuid {
			g.remember(xid)
		}
	}
}

// remember keeps the last error of each number and place.
func (g *gpu) remember(xid facts.XID) {
	g.xids = slices.DeleteFunc(slices.Clone(g.xids), func(old facts.XID) bool {
		return old.Code == xid.Code && (old.GI == nil) == (xid.GI == nil) && (old.GI == nil || *old.GI == *xid.GI)
	})
	g.xids = append(g.xids, xid)
	if extra := len(g.xids) - maxXIDs; extra > 0 {
		g.xids = g.xids[extra:]
	}
}

// forgetGone drops the errors of GPU instances that were there and are not any more. NVML
// gives their numbers to others.
func (g *gpu) forgetGone(now *facts.GPU) {
	profile := func(of *facts.GPU, gi int) (name string, there bool) {
		i := slices.IndexFunc(of.Instances, func(i facts.Instance) bool { return i.GI == gi })
		if i < 0 {
			return "", false
		}
		_, name, divided := strings.Cut(of.Instances[i].Profile, "c.")
		if !divided {
			name = of.Instances[i].Profile
		}
		return name, true
	}
	g.xids = slices.DeleteFunc(slices.Clone(g.xids), func(xid facts.XID) bool {
		if xid.GI == nil {
			return false
		}
		before, was := profile(&g.last, *xid.GI)
		after, is := profile(now, *xid.GI)
		return was && (!is || before != after)
	})
}

// pending returns the errors that stand against a GPU. There are none while its
// driver wants nothing done.
func (g *gpu) pending(recovery string) []facts.XID {
	if recovery != "none" {
		return g.xids
	}
	g.xids = slices.DeleteFunc(slices.Clone(g.xids), func(xid facts.XID) bool { return time.Since(xid.Time) > settling })
	return nil
}
