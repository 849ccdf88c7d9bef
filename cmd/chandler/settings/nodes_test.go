package settings

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
)

// noLabels returns a channel with the empty labels of a node.
func noLabels() <-chan map[string]string {
	labels := make(chan map[string]string, 1)
	labels <- map[string]string{}
	return labels
}

// An agent starts with the last known labels of the node, and otherwise with the labels that it
// receives. Without labels, the agent offers nothing new if entries depend on labels.
func TestLabelsToBeginWith(t *testing.T) {
	const byLabel = "resources: [{name: a.b/c, cel: 'true', nodes: {matchLabels: {pool: big}}}]\n"
	tests := map[string]struct {
		text    string
		kept    string            // "" for no file
		heard   map[string]string // nil for none
		mode    discovery.Mode
		entries int
		unknown bool
		wrong   string
	}{
		"kept":                               {text: byLabel, kept: `{"pool":"big","chandler.dev/mode":"DRA"}`, heard: map[string]string{}, mode: discovery.ModeDRA, entries: 1},
		"heard":                              {text: byLabel, heard: map[string]string{"pool": "big", "chandler.dev/mode": "DevicePlugin"}, mode: discovery.ModeDevicePlugin, entries: 1},
		"heard, other":                       {text: byLabel, heard: map[string]string{"pool": "small"}},
		"neither":                            {text: byLabel, unknown: true, wrong: "are unknown"},
		"neither, and nothing goes by them":  {text: "mode: DRA\n", mode: discovery.ModeDRA},
		"damaged":                            {text: byLabel, kept: `{"pool":`, unknown: true, wrong: "are unknown"},
		"the label of the mode is wrong":     {text: byLabel, heard: map[string]string{"chandler.dev/mode": "dra"}, unknown: true, wrong: `label chandler.dev/mode of node worker: is "dra"`},
		"the mode's label without a file":    {heard: map[string]string{"chandler.dev/mode": "DRA"}, mode: discovery.ModeDRA},
		"a wrong label without a file":       {heard: map[string]string{"chandler.dev/mode": ""}, unknown: true, wrong: `is ""; want Auto, DRA, DevicePlugin or ReportOnly`},
		"the configuration is without nodes": {text: "mode: DevicePlugin\n", heard: map[string]string{"chandler.dev/mode": "Auto"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			f := &File{Node: v1alpha1.Node{Name: "worker"}}
			if test.text != "" {
				f.Name = filepath.Join(dir, "config")
				saveFile(t, f.Name, header()+test.text)
			}
			if test.kept != "" {
				saveFile(t, filepath.Join(dir, agent.KeptLabels), test.kept)
			}
			synctest.Test(t, func(t *testing.T) {
				labels := make(chan map[string]string, 1)
				f.NewLabels = labels
				if test.heard != nil {
					labels <- test.heard
				}
				settings, err := f.Begin(t.Context(), dir)
				if r := settings.Rules; r.Mode != test.mode || len(r.Resources) != test.entries || (r.Unknown != "") != test.unknown {
					t.Errorf("begins with %+v", r)
				}
				if test.wrong == "" && err != nil || test.wrong != "" && (err == nil || !strings.Contains(err.Error(), test.wrong)) {
					t.Errorf("error %v, want %q in it", err, test.wrong)
				}
			})
		})
	}
}

// Labels of the node change the configuration as the file does: entries come and go. An invalid
// label is reported and changes nothing, and other labels do not affect the rules.
func TestFollowLabels(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config")
	saveFile(t, file, header()+"mode: DevicePlugin\nexclude: [{cel: 'true', nodes: {matchLabels: {pool: idle}}}]\n")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		labels, changes := make(chan map[string]string, 1), make(chan agent.Change)
		f := &File{Name: file, NewLabels: labels}
		labels <- map[string]string{}
		if _, err := f.Begin(ctx, "/nowhere"); err != nil {
			t.Fatal(err)
		}
		go f.FollowChanges(ctx, changes)
		last := f.lastValid
		label := func(l map[string]string) (change agent.Change, told bool) {
			labels <- l
			select {
			case change = <-changes:
				return change, true
			case <-time.After(time.Hour):
				return change, false
			}
		}
		if change, told := label(map[string]string{}); told {
			t.Errorf("the same labels are told: %+v", change)
		}
		if change, _ := label(map[string]string{"zone": "a"}); change.Settings.Rules != last.Rules || change.Settings.Labels["zone"] != "a" {
			t.Errorf("a label by which nothing goes: %+v", change)
		}
		change, _ := label(map[string]string{"pool": "idle"})
		if change.Err != nil || len(change.Settings.Rules.Exclude) != 1 {
			t.Errorf("a label that excludes: %+v", change)
		}
		if change, _ := label(map[string]string{"chandler.dev/mode": "Both"}); change.Err == nil || !strings.Contains(change.Err.Error(), `"Both"`) {
			t.Errorf("a wrong mode: %+v", change)
		}
		if change, told := label(map[string]string{"chandler.dev/mode": "Both", "zone": "b"}); told {
			t.Errorf("the same mistake is told again: %+v", change)
		}
		if change, _ := label(map[string]string{"pool": "idle"}); change.Err != nil || len(change.Settings.Rules.Exclude) != 1 {
			t.Errorf("right again: %+v", change)
		}
		if change, _ := label(map[string]string{"chandler.dev/mode": "DRA"}); change.Err != nil || change.Settings.Rules.Mode != discovery.ModeDRA || len(change.Settings.Rules.Exclude) != 0 {
			t.Errorf("the node is moved: %+v", change)
		}
		saveFile(t, file, header()+"mode: DevicePlugin\n")
		if change := <-changes; change.Err != nil || change.Settings.Rules.Mode != discovery.ModeDRA {
			t.Errorf("the file changed under the label: %+v", change)
		}
	})
}

func saveFile(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
