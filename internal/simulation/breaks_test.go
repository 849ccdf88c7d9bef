package simulation

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

var breaks = flag.Bool("breaks", false, "build the product with one deliberate defect at a time, and demand that each is found")

// deliberate is a defect: a change that removes necessary code from the product.
type deliberate struct {
	what, file string
	old, new   string
}

// deliberates lists the defects that the simulation finds within limit seeds each.
var deliberates = []deliberate{
	{"claims take what others have", "internal/ledger/ledger.go", "	if b := l.accounts.index.FindBlocked(q); b != nil {\n		return nil, b\n	}\n	if before != nil && before.State != allocation.Ended {", "	if before != nil && before.State != allocation.Ended {"},
	{"a claim that is being given keeps nobody out", "internal/ledger/ledger.go", "	l.accounts.put(a)\n	return before, nil", "	return before, nil"},
	{"a claim that was given is forgotten", "internal/ledger/ledger.go", "		l.accounts.put(exclusion.NewAccount(c, to))\n	case disk.Old:", "		l.accounts.drop(c.Key())\n	case disk.Old:"},
	{"outputs are not written", "internal/ledger/core.go", "		if err := o.Write(a.Entry); err != nil {\n			return err\n		}", "		_ = o"},
	{"outputs are not removed", "internal/ledger/output.go", "		if err := o.Remove(e, others); err != nil {\n			return err\n		}", "		_ = o"},
	{"the record is not removed", "internal/ledger/ledger.go", "	for _, file := range files {\n		if err := l.files.Claims.Remove(file); err != nil {", "	for _, file := range files[:0] {\n		if err := l.files.Claims.Remove(file); err != nil {"},
	{"an ended claim stays in the account", "internal/ledger/ledger.go", "	l.accounts.drop(key)\n	l.accounts.drop(allocation.SealedKey(key))\n	delete(l.replaced, key)\n	now", "	delete(l.replaced, key)\n	now"},
	{"specs without a claim stay", "internal/ledger/output.go", "func (all outputs) sweepOrphans(removeUnknown func(types.UID, func() error) (bool, error)) error {\n", "func (all outputs) sweepOrphans(removeUnknown func(types.UID, func() error) (bool, error)) error {\n	return nil\n"},
	{"a new name of a file is not synchronised", "internal/disk/disk.go", "	return f.SyncDir(filepath.Dir(to))\n", "	return nil\n"},
	{"a failed write is taken for done", "internal/disk/disk.go", "		return Old, err\n	}\n	return Unknown", "		return New, err\n	}\n	return Unknown"},
	{"claims are not ended", "driver/prepare.go", "	if err := traces.Do(ctx, \"remove CDI spec, files and record\", func() error { return h.ledger.End(uid, h.view.Load()) }); err != nil {\n		return err\n	}\n	if h.offeredFor", "	if h.offeredFor"},
	{"a claim is answered before it is given", "driver/prepare.go", "	if err := h.recordClaim(ctx, claim, plan); err != nil {\n		return nil, err\n	}\n	return preparedDevices(plan.wanted", "	return preparedDevices(plan.wanted"},
	{"an earlier allocation stays", "driver/prepare.go", "!plan.earlier.SameAllocation(plan.wanted) {", "!plan.earlier.SameAllocation(plan.wanted) && false {"},
	{"abandoned claims are not swept", "driver/sweep.go", "		suspects = d.unprepareAbandoned(ctx, suspects)\n", "		_ = d.unprepareAbandoned\n"},
	{"two agents are active at once", "cmd/chandler/agent/agent.go", "		unlock, err := a.Lock.Acquire(ctx)\n", "		unlock, err := func() {}, error(nil)\n"},
	{"an agent with a wrong configuration registers beside another", "cmd/chandler/agent/agent.go", "	a.awaitTurn(ctx)\n", "	_ = a.awaitTurn\n"},
	{"slices are published once", "driver/publish/schedule.go", "	return s.wanted != nil && s.wanted != s.last && (s.last == nil ||", "	return s.wanted != nil && s.wanted != s.last && (s.last == nil || false &&"},
	{"the file boot is not synchronised", "internal/ledger/boot.go", "	if err := l.files.WriteSynced(allocation.BootFile, l.bootText()); err", "	if _, err := l.files.Claims.Write(l.files.Path(allocation.BootFile), l.bootText(), 0o600); err"},
	{"the file of grants is not synchronised", "internal/ledger/grants.go", "err = gs.files.WriteSynced(allocation.GrantsFile, data)", "_, err = gs.files.Claims.Write(gs.files.Path(allocation.GrantsFile), data, 0o600)"},
	{"nodes that others were given are free", "internal/ledger/exclusion/index.go", "			case !touchesHold(&h, &w) && hasNode(&h, nodes) && !a.explainsNodes(&w, q.Stock):", "			case false:"},
	{"grants end by answers that are not whole", "internal/ledger/observe.go", "	if said.Whole {\n		gs.listing.whole", "	if true {\n		gs.listing.whole"},
	{"what another plugin gave is not entered", "internal/ledger/observe.go", "		if known == nil && !ours {", "		if known == nil || true {"},
	{"a spec without a record keeps nobody out", "internal/ledger/open.go", "		if l.accounts.byKey[key] == nil && l.accounts.byKey[allocation.SealedKey(key)] == nil && !past {", "		if false {"},
	{"claims of an earlier boot keep their devices", "internal/ledger/open.go", "	case c.Boot != config.Boot:", "	case false:"},
	{"what the earlier agent gave is not read", "internal/ledger/open.go", "		l.accounts.put(exclusion.NewAccount(c, l.config.stateOf(c)))\n		return nil\n	}\n	sealed :=", "		return nil\n	}\n	sealed :="},
	{"a damaged record keeps nobody out", "internal/ledger/open.go", "	l.accounts.put(newSealedAccount(sealed))\n	if sealed.EarlierBoot", "	if sealed.EarlierBoot"},
	{"claims of an earlier boot are noted by what PodResources says", "internal/ledger/observe.go", "	if !gs.recordsLost {", "	if false {"},
	{"the outputs come before the record", "driver/prepare.go", "	if err := traces.Do(ctx, \"write record\", func() error { return h.ledger.AllocateClaim(wanted, allocation.Allocated, plan.view) }); err != nil {\n		return err\n	}\n	if err := h.checkUnchanged(ctx, claim, plan); err != nil {\n		return err\n	}\n	if err := h.startDaemons(ctx, plan); err != nil {\n		return err\n	}\n	if err := traces.Do(ctx, \"write CDI spec and files\", func() error { return h.ledger.Write(wanted.Key()) }); err != nil {\n		return err\n	}\n", "	if err := traces.Do(ctx, \"write CDI spec and files\", func() error { return h.ledger.Write(wanted.Key()) }); err != nil {\n		return err\n	}\n	if err := traces.Do(ctx, \"write record\", func() error { return h.ledger.AllocateClaim(wanted, allocation.Allocated, plan.view) }); err != nil {\n		return err\n	}\n"},
	{"what a file holds is not synchronised", "internal/disk/disk.go", "	return file.Sync()\n", "	return nil\n"},
	{"names of directories are not synchronised", "internal/ledger/allocation/files.go", "		if err := f.Synced.SyncDir(filepath.Dir(dir)); err != nil {", "		if err := f.Claims.SyncDir(filepath.Dir(dir)); err != nil {"},
	{"names of directories that somebody removed are not synchronised", "internal/ledger/allocation/files.go", "		if err := f.MakeDirs(); err != nil { //", "		if err := error(nil); err != nil { //"},
	{"the driver of a function that goes to vfio is not recorded", "internal/passthrough/passthrough.go", "	if err := b.changeRecord(unit, nil, now...); err != nil {", "	if err := error(nil); err != nil {"},
	{"the journal does not write a record before the change", "internal/journal/journal.go", "	there, err := j.write(r)\n", "	there, err := disk.New, error(nil)\n"},
	{"devices are handed over that processes have open", "internal/reclaim/reclaim.go", "	if why != \"\" {\n		return why, openInterval\n	}\n	isUnknown := of.isUnknown()", "	isUnknown := of.isUnknown()"},
	{"a device is reset that has the name of another one", "internal/reclaim/rules.go", "	case known && r.Device.MayEqual(key):\n", "	case known:\n"},
	{"devices are reset whose pods are not known", "internal/reclaim/reclaim.go", "		case isUnknown:\n			return \"\", 0 // no reset, which could hit a running process\n", ""},
	{"the lock is released while a write goes on", "internal/ledger/lease.go", "			some = some || a.IsChange()\n", "			_ = a\n"},
	{"a claim whose Unprepare failed is ended later", "internal/ledger/ledger.go", "	err := l.end(uid, s)\n	if err == nil {\n		return nil\n	}\n", "	err := l.end(uid, s)\n	if err == nil {\n		return nil\n	}\n	time.AfterFunc(30*time.Second, func() { _ = l.end(uid, s) })\n"},
	{"a function that has left the IOMMU group goes to vfio with it", "internal/passthrough/take.go", "		return b.config.readFunction(source).HasEntry(\"iommu_group\") && unitOf(b.config.readFunction(source)) != unit\n", "		return false && unit == source\n"},
	{"a claim ends while its daemon is started again", "internal/sharing/sharing.go", "	defer unlock()\n	entry, state := o.config.Ledger.Claim(uid)\n", "	unlock()\n	entry, state := o.config.Ledger.Claim(uid)\n"},
	{"a GPU in exclusive mode is given away while the supervisor is gone", "internal/sharing/sharing.go", "	if claim.Changed && (claim.Boot == \"\" || claim.Boot == o.config.Boot) {\n		return false\n	}\n", ""},
	{"a GPU is given away whose mode cannot be restored", "internal/sharing/sharing.go", "		if err != nil {\n			return err\n		}\n	}\n	o.mu.Lock()\n	_, hadTrouble", "	}\n	o.mu.Lock()\n	_, hadTrouble"},
	{"a claim that is prepared again gets another one of equal devices", "driver/devices.go", "	before := earlier.SourcesOf(&wanted)\n", "	before := earlier.SourcesOf(&wanted)[:0]\n"},
	{"a claim leaves a pod that started with its earlier devices", "driver/prepare.go", "	case len(started) > 0:\n", "	case false && len(started) > 0:\n"},
	{"admin access is judged as other access is", "driver/requests.go", "		case !r.Admin:\n", "		case true:\n"},
}

// rare lists, by defect, the fault without which the simulation does not find the defect. For that
// defect, the fault strikes ten times as often.
var rare = map[string]string{
	"a function that has left the IOMMU group goes to vfio with it":   "groupChanges",
	"the lock is released while a write goes on":                      "writesHang",
	"a device is reset that has the name of another one":              "numbersReassigned",
	"devices are reset whose pods are not known":                      "podUnseen",
	"devices are handed over that processes have open":                "deviceKeptOpen",
	"a spec without a record keeps nobody out":                        "stateWiped",
	"a claim whose Unprepare failed is ended later":                   "joinedWhileEnding",
	"names of directories that somebody removed are not synchronised": "stateWiped",

	"grants end by answers that are not whole":                           "kubeletAlone",
	"a claim leaves a pod that started with its earlier devices":         "claimReallocated",
	"a claim ends while its daemon is started again":                     "daemonDies",
	"a GPU in exclusive mode is given away while the supervisor is gone": "supervisorKilled",
	"a GPU is given away whose mode cannot be restored":                  "modesRefused",
}

// limit is the maximum number of seeds to find a defect. sure is the number of times that the
// unchanged product must pass the seed that found the defect.
const (
	limit = 1000
	sure  = 20
)

// The source has the place of each defect exactly once.
func TestPlacesOfDefects(t *testing.T) {
	for _, d := range deliberates {
		source, err := os.ReadFile(filepath.Join("../..", d.file))
		if n := strings.Count(string(source), d.old); err != nil || n != 1 {
			t.Errorf("%s: %s has the place %d times, %v", d.what, d.file, n, err)
		}
	}
}

// TestBreaks shows that the simulation finds defects. The unchanged product must pass the seeds
// that find defects; otherwise these seeds prove nothing. TestBreaks builds the product for each
// defect, and runs only with make simulate-breaks.
func TestBreaks(t *testing.T) {
	if !*breaks {
		t.Skip("see make simulate-breaks")
	}
	whole := deliberate{}.build(t)
	for _, d := range deliberates {
		t.Run(d.what, func(t *testing.T) {
			program := d.build(t)
			for next := 1; next <= limit; {
				broken := tally{program: program, often: rare[d.what], first: uint64(next), count: limit + 1 - next, stop: true}
				broken.run(t)
				if len(broken.failed) == 0 {
					break
				}
				found := broken.failed[0]
				as := tally{program: whole, often: rare[d.what], first: found.seed, count: sure, same: true}
				as.run(t)
				if len(as.failed) == 0 {
					t.Logf("seed %d: %s", found.seed, found.why)
					return
				}
				t.Logf("the product as it is does not pass seed %d either: %s", found.seed, as.failed[0].why)
				next = int(found.seed) + 1
			}
			t.Errorf("not found within %d seeds", limit)
		})
	}
}

// build builds the simulation with the defect and the changed runtime, and returns the path of the
// program.
func (d deliberate) build(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, fmt.Sprintf("%0*d", programPath-len(dir)-1, 0))
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	changes := make(map[string][]deliberate) // by file
	for _, c := range runtimeChanges {
		file := filepath.Join(strings.TrimSpace(string(root)), "src", c.file)
		changes[file] = append(changes[file], c)
	}
	if d.file != "" {
		file, err := filepath.Abs(filepath.Join("../..", d.file))
		if err != nil {
			t.Fatal(err)
		}
		changes[file] = []deliberate{d}
	}
	replace := make(map[string]string)
	for file, all := range changes {
		replace[file] = filepath.Join(dir, fmt.Sprintf("%d.go", len(replace)))
		if err := os.WriteFile(replace[file], changed(t, file, all), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err = errors.Join(err, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600)); err != nil {
		t.Fatal(err)
	}
	command := exec.Command("go", "test", "-c", "-vet=off", "-tags", "simulated", "-overlay", filepath.Join(dir, "overlay.json"), "-o", program, ".")
	command.Env = append(os.Environ(), "CGO_ENABLED=0") // with cgo, threads exist that the scheduler does not choose
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return program
}

// programPath is the length of the path of the program that runs a world. The program reads its own
// path when it starts. The length determines the size class of that string on the heap, and thus
// the addresses of later values, which determine the order of maps of pointers.
const programPath = 120

// changed returns the source of a file with the changes applied.
func changed(t *testing.T, file string, changes []deliberate) []byte {
	t.Helper()
	source, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range changes {
		if n := strings.Count(string(source), c.old); n != 1 {
			t.Fatalf("%s: %s has the place %d times", c.what, file, n)
		}
		source = []byte(strings.Replace(string(source), c.old, c.new, 1))
	}
	return source
}
