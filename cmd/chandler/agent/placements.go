package agent

import (
	"context"
	"encoding/json"
	"path/filepath"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
)

// placements are the API that offers each silicon, as it was decided last. If their
// file is lost, they are found out anew: [Place] leaves silicon with the API by which
// somebody has it.
type placements struct {
	*memo
	api map[string]discovery.Mode // by silicon
}

// placementFile is the file, in the agent's directory, in which they are.
const placementFile = "sides.json"

// loadPlacements reads the placements.
func loadPlacements(ctx context.Context, files disk.Files, stateDir string) *placements {
	p := &placements{}
	p.memo = openMemo(ctx, files, filepath.Join(stateDir, placementFile), func(data []byte) (err error) {
		p.api, err = parsePlacement(data)
		return err
	})
	return p
}

// set takes over what was decided, and writes it down.
func (p *placements) set(ctx context.Context, api map[string]discovery.Mode) {
	p.api = api
	if data, err := json.Marshal(api); err == nil { // always
		p.write(ctx, data)
	}
}
