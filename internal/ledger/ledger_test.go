package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/ledger/stocktest"
)

// always returns a function that returns the same stock each time.
func always(s stocktest.Stock) func() exclusion.Stock { return func() exclusion.Stock { return s } }

// notes is an output that records which entries have outputs.
type notes struct {
	mu    sync.Mutex
	of    map[string]bool
	names map[string][]allocation.SealedDevice

	// unlisted is the error of listing the claims with specs.
	unlisted error
	fails    error

	tidied time.Duration // the age argument of the last sweep
}

func (n *notes) Write(e allocation.Entry) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fails == nil {
		n.of[e.Key()] = true
	}
	return n.fails
}

func (n *notes) Remove(e allocation.Entry, others []allocation.Entry) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	key := strings.TrimSuffix(e.Key(), " sealed")
	if n.fails == nil && !slices.ContainsFunc(others, func(o allocation.Entry) bool { return o.Key() == key }) {
		delete(n.of, key)
	}
	return n.fails
}

func (n *notes) RemoveOrphans(look func(types.UID, func() error) (bool, error)) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var errs []error
	for key := range n.of {
		_, err := look(types.UID(key), func() error {
			if n.fails == nil {
				delete(n.of, key)
			}
			return n.fails
		})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (n *notes) RemoveTemporary(age time.Duration) error {
	n.tidied = age
	return nil
}

func (n *notes) Named() (map[string][]allocation.SealedDevice, error) {
	if n.unlisted != nil {
		return nil, n.unlisted
	}
	return n.names, nil
}

// bench is a ledger on a disk that outlives it.
type bench struct {
	*Ledger
	t      *testing.T
	config Config
	disk   *disktest.Disk
	notes  *notes
}

func newBench(t *testing.T) *bench {
	d := &disktest.Disk{}
	b := &bench{t: t, disk: d, notes: &notes{of: make(map[string]bool)}, config: Config{Dir: filepath.Join(t.TempDir(), "state"), Boot: "boot-1", Disk: d}}
	return b.open()
}

// open opens the ledger again, as another process does.
func (b *bench) open() *bench {
	b.t.Helper()
	b.Ledger = New(b.config)
	b.SetOutputs(b.notes)
	problems, err := b.Open(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	for _, problem := range problems {
		b.t.Logf("open: %v", problem)
	}
	return b
}

func (b *bench) reboot(boot string) *bench {
	b.config.Boot = boot
	return b.open()
}

func (b *bench) mustGive(c *allocation.Claim, s exclusion.Stock) {
	b.t.Helper()
	if err := errors.Join(b.AllocateClaim(c, allocation.Allocated, s), b.Write(c.Key())); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) mustRefuse(c *allocation.Claim, s exclusion.Stock, words ...string) {
	b.t.Helper()
	err := b.AllocateClaim(c, allocation.Allocated, s)
	if _, blocked := errors.AsType[*exclusion.Blocked](err); !blocked {
		b.t.Fatalf("claim %s is not refused: %v", c.Name, err)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			b.t.Errorf("refused with %q, which lacks %q", err, word)
		}
	}
}

func (b *bench) state(c *allocation.Claim) allocation.State {
	_, state := b.Claim(c.UID)
	return state
}

// A claim excludes others from its first state until it has ended, also after restarts, and a
// reboot makes it a Past claim.
func TestLifeOfAClaim(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	c := stocktest.Claim("c", s["a"])
	b.mustGive(c, s)
	b.mustRefuse(stocktest.Claim("other", s["a"]), s, "device a is in use by claim default/c")
	b.mustGive(stocktest.Claim("second", s["b"]), s)
	b.open()
	if got, state := b.Claim(c.UID); state != allocation.Allocated || got.Name != "c" {
		t.Fatalf("after a restart: %v, %v", got, state)
	}
	b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim default/c")
	b.reboot("boot-2")
	if state := b.state(c); state != allocation.Ended {
		t.Errorf("after a reboot: %v", state)
	}
	other := stocktest.Claim("other", s["a"])
	other.Boot = "boot-2"
	b.mustGive(other, s)
	if err := b.End(other.UID, s); err != nil {
		t.Fatal(err)
	}
	again := stocktest.Claim("c", s["a"])
	again.Boot = "boot-2"
	b.mustGive(again, s)
	if !b.notes.of["uid-c"] || b.notes.of["uid-other"] {
		t.Errorf("outputs: %v", b.notes.of)
	}
}

// No write is rolled back: after a disk error the state of a claim follows from its file, in memory
// as after a restart.
func TestDiskErrors(t *testing.T) {
	s := stocktest.New(stocktest.NewGPU("a", 128))
	anew := func(boot string, configuring bool) *allocation.Claim {
		c := stocktest.Claim("c", s["a"])
		c.Boot = boot
		return c
	}
	before := map[string]struct {
		boots []string // boots in which the claim was given
		state allocation.State
	}{
		"nothing": {nil, allocation.None},
		"past":    {[]string{"boot-1"}, allocation.Ended},
		"given":   {[]string{"boot-2"}, allocation.Allocated},
	}
	for name, was := range before {
		for _, to := range []allocation.State{allocation.Configuring, allocation.Allocated} {
			for _, op := range []disktest.Op{disktest.Create, disktest.Write, disktest.Rename} {
				t.Run(fmt.Sprintf("%s to %v, %s", name, to, op), func(t *testing.T) {
					b := newBench(t)
					for _, boot := range was.boots {
						b.reboot(boot)
						b.mustGive(anew(boot, false), s)
					}
					b.reboot("boot-2")
					b.disk.Before = func(o disktest.Op, file string) error {
						if o == op {
							return syscall.ENOSPC
						}
						return nil
					}
					wanted := anew("boot-2", false)
					wanted.Results[0].Nodes[1].Minor = 99
					if err := b.AllocateClaim(wanted, to, s); !errors.Is(err, syscall.ENOSPC) {
						t.Fatalf("error is %v", err)
					}
					if state := b.state(wanted); state != was.state {
						t.Errorf("state is %v, want %v", state, was.state)
					}
					if err := b.AllocateClaim(wanted, to, s); !errors.Is(err, syscall.ENOSPC) {
						t.Errorf("the second time the error is %v", err)
					}
					b.disk.Before = nil
					b.open()
					if state := b.state(wanted); state != was.state {
						t.Errorf("after a restart the state is %v, want %v", state, was.state)
					}
					if err := b.AllocateClaim(wanted, to, s); err != nil || b.state(wanted) != to {
						t.Errorf("with space again: %v, %v", b.state(wanted), err)
					}
				})
			}
		}
	}
}

// A claim whose file was written despite an error is given: the next call reads the file. While the
// file cannot be read, the claim excludes others.
func TestUnsure(t *testing.T) {
	s := stocktest.New(stocktest.NewGPU("a", 128))
	for _, written := range []bool{true, false} {
		b := newBench(t)
		c, other := stocktest.Claim("c", s["a"]), stocktest.Claim("other", s["a"])
		file := b.files.ClaimFile(c.UID)
		b.disk.Before = func(op disktest.Op, name string) error {
			if op == disktest.Rename && name == file {
				if written {
					data, _ := c.Encode()
					if err := os.WriteFile(file, data, 0o600); err != nil {
						t.Fatal(err)
					}
				}
				return syscall.EIO
			}
			return nil
		}
		b.disk.BeforeRead = func(name string) error {
			if name == file {
				return syscall.EIO
			}
			return nil
		}
		if err := b.AllocateClaim(c, allocation.Allocated, s); !errors.Is(err, syscall.EIO) || b.state(c) != allocation.Uncertain {
			t.Fatalf("%v, %v", b.state(c), err)
		}
		b.mustRefuse(other, s, "in use by claim default/c")
		if err := b.AllocateClaim(c, allocation.Allocated, s); !errors.Is(err, syscall.EIO) || b.state(c) != allocation.Uncertain {
			t.Errorf("read again before anything else: %v, %v", b.state(c), err)
		}
		b.disk.Before, b.disk.BeforeRead = nil, nil
		if err := b.ReconcileFiles(t.Context()); err != nil {
			t.Fatal(err)
		}
		if written {
			if b.state(c) != allocation.Allocated || !b.notes.of[c.Key()] {
				t.Errorf("it was written: %v, outputs %v", b.state(c), b.notes.of)
			}
			continue
		}
		if b.state(c) != allocation.None {
			t.Errorf("it was not written: %v", b.state(c))
		}
		b.mustGive(other, s)
	}
}

// A claim that may have either of two devices keeps both if its end fails.
func TestFailedEndOfUnsureClaim(t *testing.T) {
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	b := newBench(t)
	before, after := stocktest.Claim("c", s["a"]), stocktest.Claim("c", s["b"])
	b.mustGive(before, s)
	b.disk.Before = func(disktest.Op, string) error { return syscall.EIO }
	b.disk.BeforeRead = func(string) error { return syscall.EIO }
	if err := b.AllocateClaim(after, allocation.Allocated, s); !errors.Is(err, syscall.EIO) || b.state(after) != allocation.Uncertain {
		t.Fatalf("%v, %v", b.state(after), err)
	}
	if err := b.End(after.UID, s); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	b.disk.Before, b.disk.BeforeRead = nil, nil
	for _, device := range []string{"a", "b"} {
		b.mustRefuse(stocktest.Claim("other", s[device]), s, "in use by claim default/c")
	}
	if err := b.ReconcileFiles(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim default/c")
	b.mustGive(stocktest.Claim("other", s["b"]), s)
}

// An output that fails leaves the claim given, and is tried again.
func TestOutputsAreReconciled(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128))
	c := stocktest.Claim("c", s["a"])
	b.notes.fails = syscall.ENOSPC
	if err := b.AllocateClaim(c, allocation.Allocated, s); err != nil {
		t.Fatal(err)
	}
	if err := b.Write(c.Key()); !errors.Is(err, syscall.ENOSPC) || b.state(c) != allocation.Allocated {
		t.Fatalf("%v, %v", b.state(c), err)
	}
	b.notes.fails = nil
	if err := b.ReconcileFiles(t.Context()); err != nil || !b.notes.of[c.Key()] {
		t.Errorf("outputs %v, %v", b.notes.of, err)
	}
	if b.notes.tidied != disk.Abandoned {
		t.Errorf("temporary files of age %s were swept", b.notes.tidied)
	}
	delete(b.notes.of, c.Key()) // as if the directory had been wiped
	if err := b.ReconcileFiles(t.Context()); err != nil || !b.notes.of[c.Key()] {
		t.Errorf("outputs %v, %v", b.notes.of, err)
	}
}

// A claim that could not be ended remains given, with its outputs, until the next call ends it: a
// kubelet up to 1.36 may start the claim's next pod without another call.
func TestFailedEndLeavesClaimGiven(t *testing.T) {
	for name, fails := range map[string]func(b *bench, fails bool){
		"an output": func(b *bench, fails bool) {
			if b.notes.fails = nil; fails {
				b.notes.fails = syscall.EROFS
			}
		},
		"the record": func(b *bench, fails bool) {
			if b.disk.Before = nil; fails {
				b.disk.Before = func(op disktest.Op, name string) error {
					if op == disktest.Remove && strings.Contains(name, "claims") {
						return syscall.EROFS
					}
					return nil
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			s := stocktest.New(stocktest.NewGPU("a", 128))
			c := stocktest.Claim("c", s["a"])
			b.mustGive(c, s)
			fails(b, true)
			if err := b.End(c.UID, s); !errors.Is(err, syscall.EROFS) || b.state(c) != allocation.Allocated {
				t.Fatalf("%v, %v", b.state(c), err)
			}
			fails(b, false)
			if err := b.ReconcileFiles(t.Context()); err != nil || b.state(c) != allocation.Allocated || !b.notes.of[c.Key()] {
				t.Errorf("%v, outputs %v, %v", b.state(c), b.notes.of, err)
			}
			b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim default/c")
			if err := b.End(c.UID, s); err != nil || b.state(c) != allocation.None || b.notes.of[c.Key()] {
				t.Errorf("once more: %v, outputs %v, %v", b.state(c), b.notes.of, err)
			}
			b.mustGive(stocktest.Claim("other", s["a"]), s)
		})
	}
}

// Run compares the files with the entries every 30 s, also after a failure.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		s := stocktest.New(stocktest.NewGPU("a", 128))
		c := stocktest.Claim("c", s["a"])
		b.mustGive(c, s)
		delete(b.notes.of, c.Key())
		b.notes.fails = syscall.EROFS
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); b.Run(ctx) }()
		there := func() bool {
			b.notes.mu.Lock()
			defer b.notes.mu.Unlock()
			return b.notes.of[c.Key()]
		}
		time.Sleep(reconcileInterval + time.Second)
		synctest.Wait()
		b.notes.mu.Lock()
		b.notes.fails = nil
		b.notes.mu.Unlock()
		time.Sleep(reconcileInterval - 2*time.Second)
		if synctest.Wait(); there() {
			t.Error("written before it was time")
		}
		time.Sleep(2 * time.Second)
		if synctest.Wait(); !there() {
			t.Error("not written again")
		}
		cancel()
		<-ended
	})
}

// The directories of the file boot are synchronised before the file is written, even if a directory
// was removed and created again by another process.
func TestDirectoriesAreSynchronised(t *testing.T) {
	b := newBench(t)
	var did []string
	b.disk.Before = func(op disktest.Op, name string) error {
		if op == disktest.SyncDir || op == disktest.Rename {
			did = append(did, string(op)+" "+filepath.Base(name))
		}
		return nil
	}
	b.open()
	s := stocktest.New(stocktest.NewGPU("a", 128))
	b.mustGive(stocktest.Claim("c", s["a"]), s)
	if err := errors.Join(os.RemoveAll(b.config.Dir), os.Mkdir(b.config.Dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := b.ReconcileFiles(t.Context()); err != nil {
		t.Fatal(err)
	}
	above := "sync directory " + filepath.Base(filepath.Dir(b.config.Dir))
	dirs := []string{above, "sync directory state", "sync directory state"}
	files := []string{"rename boot", "sync directory state", "rename uid-c.record"}
	want := slices.Concat(dirs, dirs, files, dirs, files)
	if !slices.Equal(did, want) {
		t.Errorf("%q, want %q", did, want)
	}
}

// Outputs that reappear after a loss of power are removed later if they cannot be removed when the
// ledger is opened.
func TestOutputsThatCannotBeSwept(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128))
	b.mustGive(stocktest.Claim("c", s["a"]), s)
	b.notes.of["uid-gone"], b.notes.fails = true, errors.New("no")
	b.open()
	if !b.notes.of["uid-gone"] {
		t.Fatal("swept all the same")
	}
	b.notes.fails = nil
	if err := b.ReconcileFiles(t.Context()); err != nil || b.notes.of["uid-gone"] || !b.notes.of["uid-c"] {
		t.Errorf("outputs %v, %v; want that of the claim", b.notes.of, err)
	}
}

// The file of a claim is removed last, and a file that cannot be removed keeps the claim.
func TestEndThatFails(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128))
	c := stocktest.Claim("c", s["a"])
	b.mustGive(c, s)
	b.disk.Before = func(op disktest.Op, name string) error {
		if op == disktest.Remove && name == b.files.ClaimFile(c.UID) {
			return syscall.EROFS
		}
		return nil
	}
	if err := b.End(c.UID, s); !errors.Is(err, syscall.EROFS) || b.notes.of[c.Key()] {
		t.Fatalf("outputs %v, %v", b.notes.of, err)
	}
	b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim default/c")
	b.disk.Before = nil
	b.open()
	if b.state(c) != allocation.Allocated || !b.notes.of[c.Key()] {
		t.Errorf("after a crash it is %v, outputs %v: it must be what its file says", b.state(c), b.notes.of)
	}
}

// If many owners want one device at once, exactly one gets the device.
func TestGiveAtOnce(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128))
	var group sync.WaitGroup
	var mu sync.Mutex
	given := 0
	for i := range 32 {
		group.Go(func() {
			var err error
			if i%2 == 0 {
				c := stocktest.Claim(fmt.Sprint(i), s["a"])
				unlock, _ := b.Lock(context.Background(), c.Key())
				defer unlock()
				err = errors.Join(b.AllocateClaim(c, allocation.Allocated, s), b.Write(c.Key()))
			} else {
				g := &allocation.Grant{Resource: "ours/gpu", ID: fmt.Sprint(i), Devices: []string{"a"}, Silicon: []string{"a"}, Exclusive: true}
				err = b.Grants.AllocateIDs(s, []*allocation.Grant{g})
			}
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				given++
			}
			b.View(s)
		})
	}
	group.Wait()
	if given != 1 {
		t.Errorf("%d got it", given)
	}
}

// A consumer does not get an exclusively opened device while a process has the device open. A claim
// that has the device is not checked again: its own pod has the device open.
func TestOpenedDevice(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	who := ""
	b.config.OpenBy = func(d *discovery.Device, own []types.UID) string {
		if d.Name != "a" || slices.Contains(own, "own") {
			return ""
		}
		return who
	}
	b.open()
	first, next := stocktest.Claim("first", s["a"], s["b"]), stocktest.Claim("next", s["b"])
	grant := &allocation.Grant{Resource: "ours/gpu", ID: "a", Devices: []string{"a"}, Silicon: []string{"a"}, Exclusive: true}

	who = "process 47"
	if err := b.AllocateClaim(first, allocation.Configuring, s); err != nil {
		t.Fatal(err)
	}
	freed := b.FreedSignal()
	b.mustRefuse(first, s, "device a is in use by process 47")
	first.Users = []types.UID{"other"}
	b.mustRefuse(first, s, "device a is in use by process 47")
	if got := b.state(first); got != allocation.Configuring {
		t.Errorf("state %v after a refusal", got)
	}
	select {
	case <-freed:
		t.Error("a refusal frees something, and who waits for that tries again at once")
	default:
	}
	b.mustRefuse(next, s, "claim default/first")
	who = ""
	b.mustGive(first, s)
	who = "process 48"
	b.mustGive(first, s)
	if err := b.End(first.UID, s); err != nil {
		t.Fatal(err)
	}

	blocked, ok := errors.AsType[*exclusion.Blocked](b.Grants.AllocateIDs(s, []*allocation.Grant{grant}))
	if !ok || blocked.Kind != exclusion.Reclaiming || blocked.OwnerText != who {
		t.Errorf("a container is refused with %v", blocked)
	}
	own := stocktest.Claim("own", s["a"])
	own.Users = []types.UID{"own"}
	b.mustGive(own, s) // the claim's own pod has the device open, and the files of the ledger were lost
	if err := b.End(own.UID, s); err != nil {
		t.Error(err)
	}
	if len(b.View(s).Grants()) > 0 {
		t.Error("a grant that was refused is in the ledger")
	}
	shared := &allocation.Grant{Resource: "ours/shared", ID: "a-1", Devices: []string{"a"}, Silicon: []string{"a"}}
	if err := b.Grants.AllocateIDs(s, []*allocation.Grant{shared}); err != nil {
		t.Errorf("a share is refused while the container of another share has the device open: %v", err)
	}
	if err := b.Grants.EndGrants([]*allocation.Grant{shared}); err != nil {
		t.Error(err)
	}
	who = ""
	if err := b.Grants.AllocateIDs(s, []*allocation.Grant{grant}); err != nil {
		t.Error(err)
	}
}

// A wiped directory is written again from memory while the process lives.
func TestWipedDirectoryIsWrittenAgain(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	c := stocktest.Claim("c", s["a"])
	b.mustGive(c, s)
	g := &allocation.Grant{Resource: "ours/gpu", ID: "b", Devices: []string{"b"}, Silicon: []string{"b"}, Exclusive: true}
	if err := b.Grants.AllocateIDs(s, []*allocation.Grant{g}); err != nil {
		t.Fatal(err)
	}
	want, _ := os.ReadFile(b.files.ClaimFile(c.UID))
	if err := os.RemoveAll(b.config.Dir); err != nil {
		t.Fatal(err)
	}
	if err := b.ReconcileFiles(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(b.files.ClaimFile(c.UID)); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the record is %q, %v", got, err)
	}
	b.open()
	b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim default/c")
	b.config.Listings = true
	b.open()
	b.mustRefuse(stocktest.Claim("other", s["b"]), s, "container")
	if data, err := os.ReadFile(b.files.Path(allocation.BootFile)); err != nil || !strings.HasPrefix(string(data), "boot-1\n") {
		t.Errorf("boot is %q, %v", data, err)
	}
}

// Two views are the same as long as nothing has changed, also without any entries, so that lists
// need not be computed again.
func TestSameViews(t *testing.T) {
	l := New(Config{Dir: t.TempDir(), Boot: "boot-1"})
	if _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	empty := l.View(nil)
	if !l.View(nil).SameAs(empty) {
		t.Error("two views without an entry are not the same")
	}
	if err := l.AllocateClaim(l.NewClaim("uid", "default", "one"), allocation.Allocated, nil); err != nil {
		t.Fatal(err)
	}
	if l.View(nil).SameAs(empty) {
		t.Error("a view with a claim is the same as one without")
	}
}
