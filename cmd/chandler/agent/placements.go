package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// readLimit is how long a file that cannot be read is tried again before the agent
// does without it: a passing error of the disk should not cost what the file says.
const readLimit = 10 * time.Second

// placements are the API that offers each silicon, as it was decided last. They are
// in a file, so that a restart changes nothing.
type placements struct {
	files disk.Files
	file  string
	api   map[string]discovery.Mode // by silicon
	lost  bool                      // the file could be neither read nor set aside
}

// loadPlacements reads the placements. If the file cannot be read, it is set aside,
// and placements are found out anew: [Place] leaves silicon with the API by which
// somebody has it.
func loadPlacements(ctx context.Context, files disk.Files, stateDir string) *placements {
	p := &placements{files: files, file: filepath.Join(stateDir, "sides.json")}
	began := time.Now()
	for {
		data, err := p.files.Read(p.file)
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		unread := err != nil
		if err == nil {
			if p.api, err = parsePlacements(data); err == nil {
				break
			}
		}
		if unread && time.Since(began) < readLimit {
			if waitFor(ctx, nil, time.Second); ctx.Err() != nil {
				break
			}
			continue
		}
		p.setAside(ctx, err)
		break
	}
	if p.api == nil {
		p.api = make(map[string]discovery.Mode)
	}
	return p
}

// parsePlacements reads what a file of placements says.
func parsePlacements(data []byte) (map[string]discovery.Mode, error) {
	var api map[string]discovery.Mode
	if err := json.Unmarshal(data, &api); err != nil {
		return nil, err
	}
	for silicon, mode := range api {
		if mode != discovery.ModeDRA && mode != discovery.ModeDevicePlugin {
			return nil, fmt.Errorf("silicon %s: there is no API %q", silicon, mode)
		}
	}
	return api, nil
}

// setAside renames the file, so that it is not written over.
func (p *placements) setAside(ctx context.Context, reason error) {
	aside := p.file + ".unreadable"
	err := p.files.Rename(p.file, aside)
	p.lost = err != nil
	klog.FromContext(ctx).Error(errors.Join(fmt.Errorf("read placements: %w", reason), err),
		"Which API offered which device is not known any more; devices stay with the API by which somebody has them", "setAside", aside)
}

// set takes over what was decided, and writes it down if it is new. If that fails,
// placements are found out anew after a restart.
func (p *placements) set(ctx context.Context, api map[string]discovery.Mode) {
	if maps.Equal(p.api, api) {
		return
	}
	p.api = api
	if p.lost {
		return
	}
	data, err := json.Marshal(api)
	if err == nil {
		_, err = p.files.Write(p.file, data, 0o600)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Writing down which API offers which device")
	}
}
