package agent

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"path/filepath"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// settling settles the states of devices and writes them down, so that a restart does
// not change since when they are so.
type settling struct {
	*memo
	settler discovery.Settler
	again   *time.Timer // for the next scan
}

// HealthFile is the file, in the agent's directory, in which the states of devices are; see
// [discovery.Settler].
const HealthFile = "health.json"

// newSettling reads the last states of devices. rescan is called when a state may
// change by itself, such as when a device has been well for long enough.
func newSettling(ctx context.Context, severity discovery.Severity, files disk.Files, stateDir string, rescan func()) *settling {
	s := &settling{again: time.AfterFunc(time.Hour, rescan)}
	s.again.Stop()
	s.settler.Severity = severity
	s.memo = openMemo(ctx, files, filepath.Join(stateDir, HealthFile), func(data []byte) error { return json.Unmarshal(data, &s.settler) })
	return s
}

// settle returns a snapshot with the states of its devices.
func (s *settling) settle(ctx context.Context, snapshot *discovery.Snapshot) *discovery.Snapshot {
	settled, again := s.settler.Settle(snapshot, time.Now())
	if data, err := json.Marshal(&s.settler); err == nil { // always
		if s.write(ctx, data); !s.lost && !bytes.Equal(s.said, data) {
			again = min(cmp.Or(again, writeAgain), writeAgain)
		}
	}
	if again > 0 {
		s.again.Reset(again)
	} else {
		s.again.Stop()
	}
	return settled
}

// writeAgain is after which time states are written down again if that failed.
const writeAgain = 30 * time.Second

// stop asks for no more scans.
func (s *settling) stop() { s.again.Stop() }
