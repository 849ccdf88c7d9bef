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

// harmlessXIDs are errors that leave a GPU usable. An application causes 13 (graphics exception),
// 31 (memory page fault), 43 and 68 (its own work stopped) and 45 (cleanup after it), as in
// NVIDIA's device plugin; after 94 (contained memory error) the application has to be restarted;
// and 154 only reports a change of the recovery action, which is read anyway. 109 (context switch
// timeout), which that plugin ignores, requires a reset of the GPU. The remedies are in NVIDIA's
// XID catalogue (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html: RESTART_APP for 94,
// RESET_GPU for 109).
var harmlessXIDs = []uint64{13, 31, 43, 45, 68, 94, 154}

// settleTime is how long an error is kept without a recovery action of the driver, which may follow
// a little later.
const settleTime = time.Minute

// maxXIDs limits the errors that are kept for each GPU.
const maxXIDs = 16

// wantedEvents are the registered events, as far as a GPU supports them.
const wantedEvents = nvml.EventTypeXidCriticalError | nvml.EventMigConfigChange | nvml.EventTypeGpuRecoveryAction | nvml.EventTypeGpuUnavailableError

// watchGPUs writes the current facts, and again after the interval, after an error of a GPU, or
// after a change of its MIG instances. It ends when the host's GPUs change: NVML has only the GPUs
// from the time of its start.
func (r *reader) watchGPUs(out io.Writer, o *options) error {
	set := r.register()
	before, err := listGPUs(o.gpus)
	for err == nil {
		if err = r.write(out); err != nil {
			break
		}
		if err = r.wait(set, o.interval, o.again); err != nil {
			break
		}
		var now []string
		if now, err = listGPUs(o.gpus); err == nil && !slices.Equal(before, now) {
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
		if ret != nvml.SUCCESS || supported&wantedEvents == 0 {
			continue
		}
		some = g.device.RegisterEvents(supported&wantedEvents, set) == nvml.SUCCESS || some
	}
	if !some {
		return nil
	}
	return set
}

// eventWait limits each wait for events, because NVML's wait cannot be interrupted.
const eventWait = 500 * time.Millisecond

// wait waits for events, and stores all that arrive together. It returns after the interval, or on
// a request for a scan.
func (r *reader) wait(set nvml.EventSet, interval time.Duration, again <-chan struct{}) error {
	for left := interval; left > 0; left -= eventWait {
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
		event, ret := set.Wait(uint32(min(left, eventWait).Milliseconds()))
		heard := ret == nvml.SUCCESS
		for range maxXIDs {
			if ret != nvml.SUCCESS {
				break
			}
			r.noteXID(event, time.Now())
			event, ret = set.Wait(50)
		}
		switch ret {
		case nvml.SUCCESS, nvml.ERROR_TIMEOUT:
		case nvml.ERROR_GPU_IS_LOST: // from now on, NVML returns this at once
			set = nil
		default:
			return fmt.Errorf("wait for events: %s", describeReturn(ret))
		}
		if heard {
			return nil
		}
	}
	return nil
}

// noteXID stores an error.
func (r *reader) noteXID(event nvml.EventData, at time.Time) {
	if event.EventType != nvml.EventTypeXidCriticalError || slices.Contains(harmlessXIDs, event.EventData) {
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
		// An error of an unknown GPU may be of any GPU.
		if !known || g.last.UUID == uuid {
			g.rememberXID(xid)
		}
	}
}

// rememberXID keeps the last error of each code and GPU instance.
func (g *gpu) rememberXID(xid facts.XID) {
	g.xids = slices.DeleteFunc(slices.Clone(g.xids), func(old facts.XID) bool {
		return old.Code == xid.Code && (old.GI == nil) == (xid.GI == nil) && (old.GI == nil || *old.GI == *xid.GI)
	})
	g.xids = append(g.xids, xid)
	if extra := len(g.xids) - maxXIDs; extra > 0 {
		g.xids = g.xids[extra:]
	}
}

// forgetGone drops the errors of removed GPU instances, because NVML reuses their IDs.
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

// pending returns the errors with an effect on a GPU's health. There are none while the driver
// requests no recovery action.
func (g *gpu) pending(recovery string) []facts.XID {
	if recovery != "none" {
		return g.xids
	}
	g.xids = slices.DeleteFunc(slices.Clone(g.xids), func(xid facts.XID) bool { return time.Since(xid.Time) > settleTime })
	return nil
}
