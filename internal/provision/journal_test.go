package provision_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/internal/provision"
)

// keep writes the journal.
func (k *kernel) keep(journal []byte) error {
	const file = "run/chandler/provision.json"
	if journal == nil {
		delete(k.MapFS, file)
		return nil
	}
	k.file(file, string(journal))
	return nil
}

// runKilled provisions the host, and is killed after a number of writes.
func (k *kernel) runKilled(writes int, rules ...provision.Rule) {
	p := &provision.Provisioner{
		Host: &discovery.Host{FS: host{k.MapFS, k.broken}}, Families: families.All, Rules: rules, Out: io.Discard, Keep: k.keep,
		Held: func([]discovery.Device) (map[string]string, error) { return nil, nil },
	}
	p.Write = func(name, value string) error {
		if len(k.writes) == writes {
			panic("killed")
		}
		return k.write(name, value)
	}
	defer func() { _ = recover() }()
	_ = p.Run(context.Background())
}

// A command completes the work of a killed command, even without other work, but not after a
// reboot.
func TestProvisionAfterAKill(t *testing.T) {
	for boot, want := range map[string]string{"1": "1", "2": "0"} {
		k, dir := qatHost()
		k.file("proc/sys/kernel/random/boot_id", "1")
		k.file(dir+"/qat/cfg_services", "sym;dc")
		k.runKilled(1, qatRule(1))
		if probes := k.text(dir + "/sriov_drivers_autoprobe"); probes != "0" {
			t.Fatalf("the command was killed after it wrote %s", probes)
		}
		k.file("proc/sys/kernel/random/boot_id", boot)
		if _, err := k.run(); err != nil {
			t.Error(err)
		}
		if probes := k.text(dir + "/sriov_drivers_autoprobe"); probes != want {
			t.Errorf("boot %s: left sriov_drivers_autoprobe at %s; want %s", boot, probes, want)
		}
		if k.text("run/chandler/provision.json") != "" {
			t.Errorf("boot %s: left the journal", boot)
		}
	}
	k, _ := qatHost()
	k.file("run/chandler/provision.json", "{")
	if _, err := k.run(); err == nil || !strings.Contains(err.Error(), "run/chandler/provision.json") {
		t.Errorf("a damaged journal: %v", err)
	}
}

// A failed write remains in the journal until it succeeds, even if the command makes other
// changes in the meantime, which use the journal too.
func TestProvisionKeepsTheJournalUntilItsWritesAreMade(t *testing.T) {
	k, dir := qatHost()
	k.file(dir+"/qat/cfg_services", "sym;dc")
	other := k.function("0000:6c:00.0", qatID, "0b4000", "4xxx", map[string]string{
		"qat/state": "up", "qat/cfg_services": "sym;dc", "sriov_numvfs": "0", "sriov_totalvfs": "16", "sriov_drivers_autoprobe": "1"})
	k.runKilled(1, qatRule(1))
	autoprobe := dir + "/sriov_drivers_autoprobe"
	k.refuses[autoprobe] = syscall.EIO
	for range 2 {
		if _, err := k.run(qatRule(1)); !errors.Is(err, syscall.EIO) {
			t.Errorf("error %v", err)
		}
		if vfs := k.text(other + "/sriov_numvfs"); vfs != "1" {
			t.Errorf("the other function has %s virtual functions", vfs)
		}
		if !strings.Contains(k.text("run/chandler/provision.json"), autoprobe) {
			t.Fatalf("the journal has %q", k.text("run/chandler/provision.json"))
		}
	}
	delete(k.refuses, autoprobe)
	if _, err := k.run(qatRule(1)); err != nil {
		t.Error(err)
	}
	if k.text(autoprobe) != "1" || k.text("run/chandler/provision.json") != "" {
		t.Errorf("sriov_drivers_autoprobe is %s, the journal has %q", k.text(autoprobe), k.text("run/chandler/provision.json"))
	}
}

// The writes of a journal are independent: a failure does not prevent the others.
func TestProvisionMakesAllWritesOfTheJournalThatItCan(t *testing.T) {
	k, first := qatHost()
	second := k.function("0000:6c:00.0", qatID, "0b4000", "4xxx", sriov(16))
	var left []string
	for _, dir := range []string{first, second} {
		k.file(dir+"/sriov_drivers_autoprobe", "0")
		left = append(left, fmt.Sprintf(`{"Path":%[1]q,"Value":"1","Shows":%[1]q,"From":"0","To":"1","Always":true}`, dir+"/sriov_drivers_autoprobe"))
	}
	k.file("run/chandler/provision.json", `{"boot":"","writes":[`+strings.Join(left, ",")+`]}`)
	k.refuses[first+"/sriov_drivers_autoprobe"] = syscall.EIO
	if _, err := k.run(); !errors.Is(err, syscall.EIO) {
		t.Errorf("error %v", err)
	}
	if k.text(second+"/sriov_drivers_autoprobe") != "1" {
		t.Error("the second write was not made")
	}
}

// While the journal is unreadable, no change is made that could overwrite the journal.
func TestProvisionKeepsAJournalThatItCannotRead(t *testing.T) {
	k, _ := qatHost()
	const damaged = "{"
	k.file("run/chandler/provision.json", damaged)
	if _, err := k.run(qatRule(1)); err == nil || len(k.writes) > 0 || k.text("run/chandler/provision.json") != damaged {
		t.Errorf("error %v, wrote %q, left %q", err, k.writes, k.text("run/chandler/provision.json"))
	}
}

// Only one command at a time uses the journal.
func TestJournal(t *testing.T) {
	dir := t.TempDir()
	journal, err := provision.OpenJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := provision.OpenJournal(dir); err == nil || !strings.Contains(err.Error(), "another chandler provision runs") {
		t.Errorf("a second one: %v", err)
	}
	file := filepath.Join(dir, "run/chandler/provision.json")
	for _, text := range []string{"one", "", "", "two"} {
		var data []byte
		if text != "" {
			data = []byte(text)
		}
		if err := journal.KeepJournal(data); err != nil {
			t.Error(err)
		}
		if kept, _ := os.ReadFile(file); string(kept) != text {
			t.Errorf("kept %q; want %q", kept, text)
		}
	}
	if err := journal.Close(); err != nil {
		t.Error(err)
	}
	if journal, err = provision.OpenJournal(dir); err != nil {
		t.Fatalf("after the first ended: %v", err)
	}
	journal.Close()
}
