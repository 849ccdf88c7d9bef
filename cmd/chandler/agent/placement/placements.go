package placement

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"

	"chandler.dev/cmd/chandler/agent/statefile"
	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// placements is the last decision which API offers each physical device. If the file is lost,
// [PlaceDevices] decides again, and leaves an allocated physical device with the API of its
// consumer.
type placements struct {
	*statefile.File
	api map[string]discovery.Mode // by silicon
}

// placementFile is the name of the file with the placements, in the agent's directory.
const placementFile = "sides.json"

// loadPlacements reads the placements from the file. The file is synchronized: after a loss of power
// an earlier placement would offer the physical device of a pod by DRA, until the agent has read the
// allocations of the device plugin API.
func loadPlacements(ctx context.Context, files disk.Files, stateDir string) *placements {
	files.Synced = true
	p := &placements{}
	p.File = statefile.Open(ctx, files, filepath.Join(stateDir, placementFile), func(data []byte) (err error) {
		p.api, err = parsePlacement(data)
		return err
	})
	return p
}

// set writes a placement to the file and stores it. After an error, physical devices that changed
// their API stay with the earlier one and are withheld.
func (p *placements) set(ctx context.Context, placement *Placement) {
	if data, err := json.Marshal(placement.API); err != nil || !p.Write(ctx, data) {
		for silicon, api := range placement.API {
			if earlier, is := p.api[silicon]; is && earlier != api {
				placement.API[silicon] = earlier
				placement.To[silicon] = api
				placement.Moving[silicon] = fmt.Sprintf("the agent cannot record in %s that %s offers it", p.Path, api)
			}
		}
	}
	p.api = placement.API
}
