package agent

import (
	"context"
	"encoding/json"
	"fmt"
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

// loadPlacements reads the placements.
func loadPlacements(ctx context.Context, files disk.Files, stateDir string) *placements {
	p := &placements{}
	p.memo = openMemo(ctx, files, filepath.Join(stateDir, "sides.json"), func(data []byte) error {
		var api map[string]discovery.Mode
		if err := json.Unmarshal(data, &api); err != nil {
			return err
		}
		for silicon, mode := range api {
			if mode != discovery.ModeDRA && mode != discovery.ModeDevicePlugin {
				return fmt.Errorf("silicon %s: there is no API %q", silicon, mode)
			}
		}
		p.api = api
		return nil
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
