package placement

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
)

// The forms of the devices of DRA survive a restart. After a failed write, the physical devices
// whose form has changed are withheld, and the previous forms stay on record.
func TestFormsSurviveRestart(t *testing.T) {
	dir := t.TempDir()
	faulty := &disktest.Disk{}
	of := func(sharing *rules.Sharing) *rules.Snapshot {
		plugin := rules.Offered{Device: discovery.Device{Name: "kvm"}}
		gpu := rules.Offered{Device: discovery.Device{Name: "gpu"}, Sharing: sharing}
		return &rules.Snapshot{Devices: []rules.Offered{gpu, plugin, {Device: discovery.Device{Name: "nic"}}}}
	}
	place := func() *Placement {
		return placementOf(map[string]discovery.Mode{"gpu": dra, "nic": dra, "kvm": classic})
	}
	byMemory := &rules.Sharing{Capacity: "memory", Unit: resource.MustParse("1Gi")}
	want := map[string]rules.ShareForm{"gpu": {Capacity: "memory", Unit: "1Gi"}, "nic": {}}

	f := loadForms(t.Context(), disk.Files{FS: faulty}, dir)
	if f.forms != nil {
		t.Errorf("without a file: %v", f.forms)
	}
	f.set(t.Context(), of(byMemory), place())
	if got := loadForms(t.Context(), disk.Files{}, dir).forms; !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}

	faulty.Before = func(disktest.Op, string) error { return syscall.ENOSPC }
	held := place()
	f.set(t.Context(), of(nil), held)
	if len(held.Moving) != 1 || !strings.Contains(held.Moving["gpu"], filepath.Join(dir, "forms.json")) {
		t.Errorf("after a failed write: %v", held.Moving)
	}
	if got := loadForms(t.Context(), disk.Files{}, dir).forms; !maps.Equal(got, want) {
		t.Errorf("after a failed write: %v, want %v", got, want)
	}

	faulty.Before = nil
	held = place()
	f.set(t.Context(), of(nil), held)
	if got := loadForms(t.Context(), disk.Files{}, dir).forms; len(held.Moving) > 0 || got["gpu"] != (rules.ShareForm{}) {
		t.Errorf("written again: %v, moving %v", got, held.Moving)
	}
}

// Unchanged forms are not encoded again at each decision, but a removed file is written again.
func TestFormsThatAreUnchanged(t *testing.T) {
	dir := t.TempDir()
	s := &rules.Snapshot{Devices: make([]rules.Offered, 1000)}
	modes := make(map[string]discovery.Mode)
	for i := range s.Devices {
		s.Devices[i].Name = fmt.Sprint("gpu-", i)
		modes[s.Devices[i].Name] = dra
	}
	f, placement := loadForms(t.Context(), disk.Files{}, dir), placementOf(modes)
	f.set(t.Context(), s, placement)
	if allocations := testing.AllocsPerRun(5, func() { f.set(t.Context(), s, placement) }); allocations > 100 {
		t.Errorf("%v allocations, as if the forms were encoded", allocations)
	}
	if err := os.Remove(filepath.Join(dir, formsFile)); err != nil {
		t.Fatal(err)
	}
	f.set(t.Context(), s, placement)
	if got := loadForms(t.Context(), disk.Files{}, dir).forms; len(got) != len(s.Devices) {
		t.Errorf("%d forms in the file that was removed", len(got))
	}
}

// A damaged file of forms is kept beside the new file.
func TestFormsThatAreDamaged(t *testing.T) {
	for name, text := range map[string]string{"no JSON": `{"gpu":{`, "empty": "", "no quantity": `{"gpu":{"capacity":"memory","unit":"1Gx"}}`} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "forms.json")
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if f := loadForms(t.Context(), disk.Files{}, filepath.Dir(file)); f.forms != nil {
				t.Errorf("got %v", f.forms)
			}
			if kept, err := os.ReadFile(file + ".unreadable"); err != nil || string(kept) != text {
				t.Errorf("kept %q, %v", kept, err)
			}
		})
	}
}
