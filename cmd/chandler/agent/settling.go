package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"path/filepath"
	"time"

	"chandler.dev/cmd/chandler/agent/statefile"
	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
	"chandler.dev/internal/disk"
)

// healthStates settles the health of devices and writes the states to a file, so that their times
// survive a restart.
type healthStates struct {
	*statefile.File
	settler   scan.Settler
	nextCheck *time.Timer // triggers the next scan
}

// HealthFile is the name of the file with the states of devices, in the agent's directory; see
// [scan.Settler].
const HealthFile = "health.json"

// newSettling reads the last states of devices. The timer calls rescan when a state may change
// without an event, such as after a device was healthy for long enough.
func newSettling(ctx context.Context, severity discovery.Severity, files disk.Files, stateDir string, rescan func()) *healthStates {
	s := &healthStates{nextCheck: time.AfterFunc(time.Hour, rescan)}
	s.nextCheck.Stop()
	s.settler.Severity = severity
	s.File = statefile.Open(ctx, files, filepath.Join(stateDir, HealthFile), func(data []byte) error { return json.Unmarshal(data, &s.settler) })
	return s
}

// settleStates returns a copy of the snapshot with settled states, and writes the states to the
// file.
func (s *healthStates) settleStates(ctx context.Context, snapshot *discovery.Snapshot) *discovery.Snapshot {
	settled, again := s.settler.SettleStates(snapshot, time.Now())
	if data, err := json.Marshal(&s.settler); err == nil {
		if !s.Write(ctx, data) {
			again = min(cmp.Or(again, writeAgain), writeAgain)
		}
	}
	if again > 0 {
		s.nextCheck.Reset(again)
	} else {
		s.nextCheck.Stop()
	}
	return settled
}

// writeAgain is how long after a failed write the states are written again.
const writeAgain = 30 * time.Second

// stop stops the timer, so that no more scans follow.
func (s *healthStates) stop() { s.nextCheck.Stop() }
