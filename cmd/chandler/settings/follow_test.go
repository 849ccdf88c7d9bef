package settings

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
)

// volume is a ConfigMap volume in the kubelet's layout: files are links into ..data, a link that
// the kubelet replaces when the ConfigMap changes (pkg/volume/util/atomic_writer.go, Write, in
// Kubernetes 1.34 and 1.37).
type volume struct {
	t   *testing.T
	dir string
	n   string
}

func newVolume(t *testing.T, text string) *volume {
	v := &volume{t: t, dir: t.TempDir()}
	v.update(text)
	v.must(os.Symlink("..data/config.yaml", v.file()))
	return v
}

func (v *volume) file() string { return filepath.Join(v.dir, "config.yaml") }

func (v *volume) must(err error) {
	v.t.Helper()
	if err != nil {
		v.t.Fatal(err)
	}
}

// update updates the volume as the kubelet does for a changed ConfigMap.
func (v *volume) update(text string) {
	v.t.Helper()
	before := v.n
	v.n += "."
	payload := filepath.Join(v.dir, ".."+v.n+"payload")
	v.must(os.Mkdir(payload, 0o755))
	v.must(os.WriteFile(filepath.Join(payload, "config.yaml"), []byte(text), 0o644))
	v.must(os.Symlink(filepath.Base(payload), filepath.Join(v.dir, "..data_tmp")))
	v.must(os.Rename(filepath.Join(v.dir, "..data_tmp"), filepath.Join(v.dir, "..data")))
	if before != "" {
		v.must(os.RemoveAll(filepath.Join(v.dir, ".."+before+"payload")))
	}
}

// An agent starts with the configuration, or else with the last valid one, or else without new
// offers. The error explains why the configuration is invalid.
func TestConfigToBeginWith(t *testing.T) {
	dra, wrong := header()+"mode: DRA\n", header()+"mode: Sometimes\n"
	tests := map[string]struct {
		text, kept string // "" for no file
		mode       discovery.Mode
		unknown    bool
		wrong      string
	}{
		"right":                                {text: dra, kept: header() + "mode: DevicePlugin\n", mode: discovery.ModeDRA},
		"wrong":                                {text: wrong, kept: dra, mode: discovery.ModeDRA, wrong: "Sometimes"},
		"missing":                              {kept: dra, mode: discovery.ModeDRA, wrong: "no such file"},
		"wrong, and none is known":             {text: wrong, unknown: true, wrong: "Sometimes"},
		"wrong, and the last one is no better": {text: wrong, kept: header() + "mode: Never\n", unknown: true, wrong: "Never"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file, kept := filepath.Join(dir, "config"), filepath.Join(dir, agent.KeptConfig)
			for name, text := range map[string]string{file: test.text, kept: test.kept} {
				if text != "" {
					saveFile(t, name, text)
				}
			}
			settings, err := (&File{Name: file, NewLabels: noLabels()}).Begin(t.Context(), dir)
			if settings.Rules.Mode != test.mode || (settings.Rules.Unknown != "") != test.unknown {
				t.Errorf("begins with %+v", settings.Rules)
			}
			if test.wrong == "" && err != nil || test.wrong != "" && (err == nil || !strings.Contains(err.Error(), test.wrong)) {
				t.Errorf("error %v, want %q in it", err, test.wrong)
			}
		})
	}
	if settings, err := (&File{NewLabels: noLabels()}).Begin(t.Context(), "/nowhere"); err != nil || settings.Rules.Unknown != "" {
		t.Errorf("without a configuration: %+v, %v", settings.Rules, err)
	}
}

// A changed ConfigMap is read and compiled while the agent runs. An invalid one is reported with
// its reason, and each content is reported once.
func TestFollowConfig(t *testing.T) {
	dra, classic := header()+"mode: DRA\n", header()+"mode: DevicePlugin\n"
	v := newVolume(t, dra)
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		changes, ended := make(chan agent.Change), make(chan struct{})
		go func() {
			defer close(ended)
			file := &File{Name: v.file()}
			_, err := file.Begin(ctx, "/nowhere")
			v.must(err)
			file.FollowChanges(ctx, changes)
		}()
		next := func() (agent.Change, bool) {
			select {
			case change := <-changes:
				return change, true
			case <-time.After(time.Hour):
				return agent.Change{}, false
			}
		}
		expect := func(step string, mode discovery.Mode, reason string) {
			t.Helper()
			change, is := next()
			switch {
			case !is:
				t.Fatalf("%s: nothing is told", step)
			case reason != "" && (change.Err == nil || !strings.Contains(change.Err.Error(), reason)):
				t.Errorf("%s: error %v, want %q in it", step, change.Err, reason)
			case reason == "" && (change.Err != nil || change.Settings.Rules.Mode != mode):
				t.Errorf("%s: %+v, want mode %s", step, change, mode)
			}
			if change, is := next(); is {
				t.Errorf("%s: told again: %+v", step, change)
			}
		}
		if change, is := next(); is {
			t.Errorf("told of what has not changed: %+v", change)
		}
		v.update(classic)
		expect("changed", discovery.ModeDevicePlugin, "")
		v.update(header() + "exclude:\n- cel: device.attributes[\n")
		expect("wrong", "", "exclude[0].cel")
		v.update(classic)
		expect("as before", discovery.ModeDevicePlugin, "")
		v.must(os.Remove(v.file()))
		expect("removed", "", "no such file")
		v.must(os.Symlink("..data/config.yaml", v.file()))
		expect("there again", discovery.ModeDevicePlugin, "")
		cancel()
		<-ended
	})
}
