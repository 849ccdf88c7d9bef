package simulation

import (
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

var breaks = flag.Bool("breaks", false, "build the product with one deliberate defect at a time, and demand that each is found")

// deliberate is a change of the product that takes something away which it needs.
type deliberate struct {
	what, file string
	old, new   string
}

// deliberates are found by the simulation within limit seeds each.
var deliberates = []deliberate{
	{"claims take what others have", "internal/ledger/ledger.go", "	if b := l.index.blocked(q); b != nil {\n		return nil, b\n	}\n	if before != nil && before.state != Past {", "	if before != nil && before.state != Past {"},
	{"a claim that is being given keeps nobody out", "internal/ledger/ledger.go", "	l.put(a)\n	return before, nil", "	return before, nil"},
	{"a claim that was given is forgotten", "internal/ledger/ledger.go", "		l.put(newAccount(c, to))\n	case disk.Old:", "		l.drop(c.Key())\n	case disk.Old:"},
	{"outputs are not written", "internal/ledger/ledger.go", "		if err := o.Write(a.entry); err != nil {\n			return err\n		}", "		_ = o"},
	{"outputs are not removed", "internal/ledger/ledger.go", "		if err := o.Remove(e, others); err != nil {\n			return err\n		}", "		_ = o"},
	{"the record is not removed", "internal/ledger/ledger.go", "	for _, file := range files {\n		if err := l.claims.Remove(file); err != nil {", "	for _, file := range files[:0] {\n		if err := l.claims.Remove(file); err != nil {"},
	{"an ended claim stays in the account", "internal/ledger/ledger.go", "	l.drop(key)\n	l.drop(sealedKey(key))\n	delete(l.replaced, key)\n	now", "	delete(l.replaced, key)\n	now"},
	{"temporary files are not swept", "internal/ledger/open.go", "		problems = append(problems, l.synced.Sweep(l.file(dir), \"\"))\n", ""},
	{"what the earlier agent gave is not read", "internal/ledger/open.go", "		l.put(newAccount(c, l.stateOf(c)))\n		return nil\n	}\n	l.put(newAccount(l.also(seal(uid, data, named, l.config.Boot, past)), Given))\n	return errors.Join", "		return nil\n	}\n	l.put(newAccount(l.also(seal(uid, data, named, l.config.Boot, past)), Given))\n	return errors.Join"},
	{"a damaged record keeps nobody out", "internal/ledger/open.go", "	l.put(newAccount(l.also(seal(uid, data, named, l.config.Boot, past)), Given))\n	return errors.Join", "	return errors.Join"},
	{"specs without a claim stay", "internal/ledger/open.go", "		problems = append(problems, o.Sweep(entries))\n", "		_, _ = o, entries\n"},
	{"a new name of a file is not synchronised", "internal/disk/disk.go", "	return f.syncDir(filepath.Dir(to))\n", "	return nil\n"},
	{"a failed write is taken for done", "internal/disk/disk.go", "		return Old, err\n	}\n	return Unknown", "		return New, err\n	}\n	return Unknown"},
	{"claims are not ended", "driver/prepare.go", "	if err := d.ledger.End(uid, d.view.Load()); err != nil {\n		return err\n	}\n	if d.offeredFor", "	if d.offeredFor"},
	{"a claim is answered before it is given", "driver/prepare.go", "	if err := d.take(ctx, plan); err != nil {\n		return nil, err\n	}\n	return answer(plan.wanted", "	return answer(plan.wanted"},
	{"an earlier allocation stays", "driver/prepare.go", "!plan.earlier.SameAllocation(plan.wanted)) {", "!plan.earlier.SameAllocation(plan.wanted)) && false {"},
	{"abandoned claims are not swept", "driver/sweep.go", "			suspects = d.sweep(ctx, suspects)", "			_ = d.sweep"},
	{"two agents are active at once", "cmd/chandler/agent/agent.go", "		unlock, err := a.Lock.Acquire(ctx)\n", "		unlock, err := func() {}, error(nil)\n"},
	{"slices are published once", "driver/publish.go", "	return p.wanted != nil && (p.last == nil ||", "	return p.wanted != nil && (p.last == nil && "},
	{"an ID leaves at once for another", "internal/ledger/blocked.go", "		if !a.blocks(q.by, q.now) {", "		if !a.blocks(q.by, q.now) || a.entry.API() != q.by {"},
}

// limit is within how many seeds a defect is to be found.
const limit = 1000

// TestBreaks shows that the simulation sees. The product as it is must pass the
// same seeds, or nothing is shown. It builds the product anew for each
// defect, and runs on demand: make simulate-breaks.
func TestBreaks(t *testing.T) {
	if !*breaks {
		t.Skip("see make simulate-breaks")
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if found, out := (deliberate{file: deliberates[0].file}).run(t, root); found {
		t.Fatalf("the product as it is fails, so that nothing is shown by defects: %s", out)
	}
	for _, d := range deliberates {
		t.Run(d.what, func(t *testing.T) {
			found, out := d.run(t, root)
			if !found {
				t.Fatalf("not found within %d seeds", limit)
			}
			t.Log(out)
		})
	}
}

// run builds the simulation with the defect and runs it until a seed fails.
func (d deliberate) run(t *testing.T, root string) (found bool, said string) {
	t.Helper()
	file := filepath.Join(root, d.file)
	source, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(source), d.old); n != 1 && d.old != "" {
		t.Fatalf("%s has the place of the defect %d times: mend the table of defects", d.file, n)
	}
	dir := t.TempDir()
	broken := filepath.Join(dir, "broken.go")
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{file: broken}})
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string, data []byte) {
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if d.old != "" {
		source = []byte(strings.Replace(string(source), d.old, d.new, 1))
	}
	write(broken, source)
	write(filepath.Join(dir, "overlay.json"), overlay)
	program := filepath.Join(dir, "simulation.test")
	build := exec.Command("go", "test", "-c", "-vet=off", "-overlay", filepath.Join(dir, "overlay.json"), "-o", program, ".")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	// A seed that does not end is found, too.
	run := exec.Command(program, "-test.run", "TestSimulation", "-test.timeout", "20m", "-seeds", "1000", "-stop", "-histories", dir)
	out, err := run.CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "seed ") || strings.HasPrefix(line, "panic:") {
			return err != nil, strings.TrimSpace(line)
		}
	}
	return err != nil, ""
}
