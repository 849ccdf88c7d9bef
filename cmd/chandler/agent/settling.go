package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// settling settles the states of devices and writes them down, so that a restart does
// not change since when they are so.
type settling struct {
	settler discovery.Settler
	files   disk.Files
	file    string
	saved   []byte
	again   *time.Timer // for the next scan
}

// newSettling reads the last states of devices. rescan is called when a state may
// change by itself, such as when a device has been well for long enough.
func newSettling(ctx context.Context, severity discovery.Severity, files disk.Files, stateDir string, rescan func()) *settling {
	s := &settling{files: files, file: filepath.Join(stateDir, "health.json"), again: time.AfterFunc(time.Hour, rescan)}
	s.again.Stop()
	s.settler.Severity = severity
	data, err := s.files.Read(s.file)
	if err == nil {
		err = json.Unmarshal(data, &s.settler)
		s.saved = data
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		klog.FromContext(ctx).Error(err, "The states of devices cannot be read; they begin anew")
	}
	return s
}

// settle returns a snapshot with the states of its devices.
func (s *settling) settle(ctx context.Context, snapshot *discovery.Snapshot) *discovery.Snapshot {
	settled, again := s.settler.Settle(snapshot, time.Now())
	if again > 0 {
		s.again.Reset(again)
	} else {
		s.again.Stop()
	}
	s.save(ctx)
	return settled
}

// save writes the states down if they have changed.
func (s *settling) save(ctx context.Context) {
	data, err := json.Marshal(&s.settler)
	if err == nil && bytes.Equal(data, s.saved) {
		return
	}
	if err == nil {
		_, err = s.files.Write(s.file, data, 0o600)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Writing down the states of devices")
		return
	}
	s.saved = data
}

// stop asks for no more scans.
func (s *settling) stop() { s.again.Stop() }
