package agent

import (
	"context"
	"encoding/json"
	"path/filepath"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// placements is the last decision which API offers each physical device. If the file is lost,
// [PlaceDevices] decides again, and leaves an allocated physical device with the API of its
// consumer.
type placements struct {
	*stateFile
	api map[string]discovery.Mode // by silicon
}

// placementFile is the name of the file with the placements, in the agent's directory.
const placementFile = "sides.json"

// loadPlacements reads the placements from the file.
func loadPlacements(ctx context.Context, files disk.Files, stateDir string) *placements {
	p := &placements{}
	p.stateFile = openMemo(ctx, files, filepath.Join(stateDir, placementFile), func(data []byte) (err error) {
		p.api, err = parsePlacement(data)
		return err
	})
	return p
}

// set stores the placements and writes them to the file.
func (p *placements) set(ctx context.Context, api map[string]discovery.Mode) {
	p.api = api
	if data, err := json.Marshal(api); err == nil {
		p.write(ctx, data)
	}
}
