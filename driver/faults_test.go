package driver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery/rules"
	"chandler.dev/driver/outputs"
	"chandler.dev/internal/disk/disktest"
)

var errFault = errors.New("input/output error")

// fault makes one step of the file operations fail, or all steps from a number on. The second form
// prevents any cleanup, as if the process was killed.
type fault struct {
	step  int
	crash bool
	trace []string
}

func (f *fault) before(op disktest.Op, name string) error {
	f.trace = append(f.trace, fmt.Sprintf("%s %s", op, filepath.Base(name)))
	if n := len(f.trace); n == f.step || f.crash && n > f.step {
		return errFault
	}
	return nil
}

// met reports whether the step was reached.
func (f *fault) met() bool { return len(f.trace) >= f.step }

// trial is an operation under a fault. The claim "held" has device a at the start.
type trial struct {
	prepare func(*bench)       // preceding events; may be nil
	do      func(*bench) error // the kubelet's request
	keeps   bool               // whether "held" has a device all the time
	after   map[string]string  // expected claims by device after success
}

// trials returns the kubelet's requests in different circumstances.
func trials(t *testing.T) map[string]trial {
	held, other, anew, none := claim("held", "a"), claim("other", "b"), claim("held", "b"), claim("held", "x")
	none.Status.Allocation.Devices.Results[0].Driver = "other.example.com"
	try := func(c *resourceapi.ResourceClaim) func(*bench) error {
		return func(b *bench) error { _, err := b.try(c); return err }
	}
	damage := func(b *bench) {
		if err := os.WriteFile(b.recordFile(held), []byte("noise"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	reboot := func(b *bench) { b.boot = "boot-2" }
	letGo := func(b *bench) error { return b.tryUnprepare(held) }
	return map[string]trial{
		"prepare":                         {nil, try(other), true, map[string]string{"a": "held", "b": "other"}},
		"prepare again":                   {nil, try(held), true, map[string]string{"a": "held"}},
		"prepare in a new boot":           {reboot, try(held), false, map[string]string{"a": "held"}},
		"prepare with a damaged record":   {damage, try(held), true, map[string]string{"a": "held"}},
		"prepare, allocated anew":         {nil, try(anew), false, map[string]string{"b": "held"}},
		"prepare, allocated to others":    {nil, try(none), false, nil},
		"unprepare":                       {nil, letGo, false, nil},
		"unprepare with a damaged record": {damage, letGo, false, nil},
	}
}

// TestFaults makes each step of each trial fail in turn, once or permanently. The failure is
// reported, no device is lost or allocated twice, a repeated request or a restart of the driver
// succeeds, and everything can be released.
func TestFaults(t *testing.T) {
	for name, trial := range trials(t) {
		for _, crash := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, crash %t", name, crash), func(t *testing.T) {
				t.Parallel() // each waits for the disk
				for step := 1; ; step++ {
					if step > 60 {
						t.Fatal("no end of steps")
					}
					if !trial.failAt(t, step, crash) {
						t.Logf("%d steps", step-1)
						return
					}
				}
			})
		}
	}
}

// failAt does one run with a failing step, and reports whether the step was reached.
func (tr *trial) failAt(t *testing.T, step int, crash bool) bool {
	devices := []rules.Offered{nic("a"), nic("b")}
	b := newBench(t)
	hostFile := b.withFiles()
	b.restart().offers(devices...)
	mustPrepare(t, b, claim("held", "a"))
	b.writeMetadata("held")
	if tr.prepare != nil {
		tr.prepare(b)
	}
	f := &fault{step: step, crash: crash}
	b.restart().offers(devices...) // the restart itself has no fault
	b.disk.Before = f.before
	err := tr.do(b)
	at := fmt.Sprintf("step %d of %s", step, strings.Join(f.trace, ", "))
	if f.met() != (err != nil) || f.met() && !errors.Is(err, errFault) {
		t.Fatalf("%s: error is %v", at, err)
	}

	b.disk.Before = nil
	if crash {
		b.restart().offers(devices...)
	}
	if tr.keeps {
		if who, held := b.holderOfEither(); !held || !strings.Contains(who, "held") {
			t.Errorf("%s: the claim that has a device is said to have none, but %q", at, who)
		}
		// A rival is refused, whatever the claim has now.
		for _, device := range []string{"a", "b"} {
			if _, held := b.OwnerOf(device); held {
				mustRefuse(t, b, claim("rival", device), "is in use by claim")
			}
		}
	}
	b.expectSpecsHaveRecords(at)
	if err := tr.do(b); err != nil {
		t.Fatalf("%s: asked again: %v", at, err)
	}
	b.expectHolders(at+"; asked again", tr.after, hostFile)
	b.restart().offers(devices...)
	b.expectHolders(at+"; started anew", tr.after, hostFile)
	for _, c := range []*resourceapi.ResourceClaim{claim("held"), claim("other")} {
		if err := b.tryUnprepare(c); err != nil {
			t.Fatalf("%s: unprepare %s: %v", at, c.Name, err)
		}
	}
	for _, dir := range []string{b.records(), b.config.CDI.Path, b.metadata.Dir, filepath.Dir(hostFile("a"))} {
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("%s: left %v", at, left)
		}
	}
	mustPrepare(t, b, claim("rival", "a", "b"))
	return f.met()
}

// Nothing is rolled back: a claim whose CDI spec cannot be written keeps the device, and the next
// call continues.
func TestNothingIsUndone(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	c := claim("c", "a")
	mustPrepare(t, b, c)
	b.disk.Before = func(op disktest.Op, name string) error {
		if op == disktest.Rename && name == b.specFile(c) {
			return errFault
		}
		return nil
	}
	b.boot = "boot-2"
	b.restart().offers(gpu("a", 1))
	for range 2 {
		mustRefuse(t, b, c, "input/output error")
		if who, held := b.OwnerOf("a"); !held || who != "claim default/c" {
			t.Errorf("held: %t, by %q", held, who)
		}
		b.restart().offers(gpu("a", 1))
	}
	mustRefuse(t, b, claim("other", "a"), "in use by claim default/c")
	b.disk.Before = nil
	mustPrepare(t, b, c)
}

// The driver synchronises no file of a claim. Before the first claim of a boot it synchronises the
// file with the boot ID, since a reboot invalidates everything else.
func TestSynchronisedFiles(t *testing.T) {
	b := newBench(t)
	var synced []string
	b.restart().offers(gpu("a", 1), gpu("b", 2))
	b.disk.Before = func(op disktest.Op, name string) error {
		if op == disktest.Sync {
			synced = append(synced, filepath.Base(name))
		}
		return nil
	}
	for _, c := range []*resourceapi.ResourceClaim{claim("one", "a"), claim("two", "b")} {
		mustPrepare(t, b, c)
		mustUnprepare(t, b, c)
	}
	if len(synced) != 1 || synced[0] != "boot" {
		t.Errorf("synchronised: %q", synced)
	}
}

// On a full disk a record of the previous boot stays unchanged. The second Prepare fails like the
// first, and no device is allocated without a record for the next restart.
func TestFullDiskAfterAReboot(t *testing.T) {
	b := newBench(t).restart().offers(gpu("a", 1))
	c, other := claim("c", "a"), claim("other", "a")
	mustPrepare(t, b, c)
	b.boot = "boot-2"
	b.restart().offers(gpu("a", 1))
	b.disk.Before = func(op disktest.Op, _ string) error {
		if op == disktest.Create || op == disktest.Write {
			return syscall.ENOSPC
		}
		return nil
	}
	for range 2 {
		mustRefuse(t, b, c, "no space left on device")
		if exists(b.specFile(c)) {
			t.Fatal("a container can have the device")
		}
	}
	b.disk.Before = nil
	b.restart().offers(gpu("a", 1))
	mustPrepare(t, b, other)
	mustRefuse(t, b, c, "in use by claim default/other")
}

// writeMetadata writes metadata files of a claim in the format of the library.
func (b *bench) writeMetadata(name string) {
	b.t.Helper()
	file := filepath.Join(b.metadata.Dir, "default_"+name, "r", "metadata.json")
	spec := fmt.Sprintf(`{"cdiVersion": "0.6.0", "kind": "chandler.dev/metadata", "devices": [
		{"name": "uid-%s_r", "containerEdits": {"mounts": [{"hostPath": %q, "containerPath": "/m"}]}}]}`, name, file)
	for file, text := range map[string]string{file: "{}", filepath.Join(b.metadata.SpecDir, outputs.MetadataSpecPrefix+"uid-"+name+"_r.json"): spec} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			b.t.Fatal(err)
		}
	}
}

// holderOfEither returns the claim that has one of the devices.
func (b *bench) holderOfEither() (string, bool) {
	if who, held := b.OwnerOf("a"); held {
		return who, true
	}
	return b.OwnerOf("b")
}

// expectSpecsHaveRecords checks that each claim with a CDI spec has a record.
func (b *bench) expectSpecsHaveRecords(at string) {
	b.t.Helper()
	uids, err := b.config.CDI.Claims()
	if err != nil {
		b.t.Fatal(err)
	}
	for _, uid := range uids {
		if !b.holds(uid) {
			b.t.Errorf("%s: claim %s has a spec and no record", at, uid)
		}
	}
}

// holds reports whether the ledger has anything of a claim.
func (b *bench) holds(uid types.UID) bool {
	c, _ := b.ledger.Claim(uid)
	return c != nil || b.ledger.IsSealed(uid)
}

// expectHolders checks the claim of each device, in memory and on disk.
func (b *bench) expectHolders(at string, want map[string]string, hostFile func(string) string) {
	b.t.Helper()
	for _, device := range []string{"a", "b"} {
		who, held := b.OwnerOf(device)
		name, wanted := want[device]
		if held != wanted || held && who != "claim default/"+name {
			b.t.Errorf("%s: device %s is in use by %q, want %q", at, device, who, name)
			continue
		}
		if exists(hostFile(device)) != wanted {
			b.t.Errorf("%s: host file of %s: %t", at, device, !wanted)
		}
		if !held {
			continue
		}
		c := claim(name)
		if _, found := b.specOf(c)[fmt.Sprintf("chandler.dev/claim=%s-0-%s", c.UID, device)]; !found || !exists(b.recordFile(c)) {
			b.t.Errorf("%s: of %s there is spec %t, record %t", at, name, found, exists(b.recordFile(c)))
		}
	}
	if specs, _ := b.config.CDI.Claims(); len(specs) != len(want) {
		b.t.Errorf("%s: specs of %q", at, specs)
	}
}
