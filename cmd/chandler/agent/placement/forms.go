package placement

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/cmd/chandler/agent/statefile"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/disk"
)

// shareForms records how the devices of DRA are shared. Claims that the scheduler allocated from
// the slices of one agent are prepared by the next agent, whose configuration may share the devices
// in another way or exclude them. If the file is lost, the next agent offers the devices by its own
// configuration at once, and refuses such claims.
type shareForms struct {
	*statefile.File
	forms map[string]rules.ShareForm // by device; nil if unknown
}

// formsFile is the name of the file with the forms, in the agent's directory.
const formsFile = "forms.json"

// loadForms reads the forms from the file. The file is synchronized: by an outdated form, the agent
// would refuse claims of the present one.
func loadForms(ctx context.Context, files disk.Files, stateDir string) *shareForms {
	files.Synced = true
	f := &shareForms{}
	f.File = statefile.Open(ctx, files, filepath.Join(stateDir, formsFile), func(data []byte) (err error) {
		f.forms, err = parseForms(data)
		return err
	})
	return f
}

// parseForms decodes the file of forms.
func parseForms(data []byte) (forms map[string]rules.ShareForm, err error) {
	if err := json.Unmarshal(data, &forms); err != nil {
		return nil, err
	}
	for device, form := range forms {
		if form.Unit == "" {
			continue
		}
		if _, err := resource.ParseQuantity(form.Unit); err != nil {
			return nil, fmt.Errorf("device %s: unit %q: %w", device, form.Unit, err)
		}
	}
	return forms, nil
}

// set records the forms of the devices that DRA has in a placement. After an error, physical devices
// whose form has changed are withheld.
func (f *shareForms) set(ctx context.Context, s *rules.Snapshot, placement *Placement) {
	next := make(map[string]rules.ShareForm, len(f.forms))
	changed := make(map[string]bool)
	for i := range s.Devices {
		d := &s.Devices[i]
		if placement.API[d.Silicon()] != discovery.ModeDRA {
			continue
		}
		next[d.Name] = d.ShareForm()
		if recorded, is := f.forms[d.Name]; is && recorded != next[d.Name] {
			changed[d.Silicon()] = true
		}
	}
	if f.forms != nil && maps.Equal(f.forms, next) && f.IsPresent() {
		return
	}
	data, err := json.Marshal(next)
	if err == nil && f.Write(ctx, data) {
		f.forms = next
		return
	}
	for silicon := range changed {
		placement.Moving[silicon] = fmt.Sprintf("the agent cannot record in %s how the device is shared", f.Path)
	}
}
