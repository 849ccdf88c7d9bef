package ledger

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/ledger/stocktest"
)

var open = rules.Offered{Device: discovery.Device{Name: "kvm", Shareable: true}}

// damage makes the file of a claim invalid.
func (b *bench) damage(c *allocation.Claim) {
	b.t.Helper()
	if err := os.WriteFile(b.files.ClaimFile(c.UID), nil, 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// A claim with a damaged file and no spec may have any device. Only devices with unlimited sharing
// are allocated until the claim is unprepared. After a reboot the claim blocks nothing.
func TestDamagedFileWithoutSpec(t *testing.T) {
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129), open)
	s.AddFile("a")
	for name, boot := range map[string]string{"the same boot": "boot-1", "another boot": "boot-2"} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			c, other := stocktest.Claim("c", s["a"]), stocktest.Claim("other", s["b"])
			other.Boot = boot
			b.mustGive(c, s)
			b.damage(c)
			b.reboot(boot)
			if boot != "boot-1" {
				b.mustGive(other, s)
				return
			}
			b.mustRefuse(other, s, "device b is in use by claim with UID uid-c, whose record cannot be read")
			b.mustGive(stocktest.Claim("open", s["kvm"]), s)
			b.mustGive(stocktest.Claim("c", s["a"]), s) // the claim itself can be prepared
			b.mustRefuse(other, s, "in use by claim with UID uid-c")
			b.open()
			b.mustRefuse(other, s, "in use by claim with UID uid-c")
			if err := b.End(c.UID, s); err != nil {
				t.Fatal(err)
			}
			b.mustGive(other, s)
			if left, _ := os.ReadDir(b.files.Path(allocation.ClaimsDir)); len(left) != 2 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// A file damaged by a power failure belongs to an earlier boot, also after the file boot has the
// present boot, and for a later agent.
func TestDamagedFileOfThePast(t *testing.T) {
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	for name, at := range map[string]string{"removed at once": "", "removed when a claim is given": "uid-c"} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			c, other := stocktest.Claim("c", s["a"]), stocktest.Claim("other", s["b"])
			other.Boot = "boot-2"
			b.mustGive(c, s)
			b.damage(c)
			b.disk.Before = func(op disktest.Op, file string) error {
				if op == disktest.Remove && at != "" && strings.Contains(file, at) {
					return syscall.EROFS
				}
				return nil
			}
			b.reboot("boot-2")
			if err := b.AllocateClaim(other, allocation.Allocated, s); at != "" && !errors.Is(err, syscall.EROFS) {
				t.Errorf("the boot is said while the file is there: %v", err)
			}
			b.disk.Before = nil
			b.mustGive(other, s)
			b.open()
			another := stocktest.Claim("another", s["a"])
			another.Boot = "boot-2"
			b.mustGive(another, s)
			if left, _ := os.ReadDir(b.files.Path(allocation.ClaimsDir)); len(left) != 2 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// The host files of a claim with unknown devices are the files of the host's devices without
// another user.
func TestFilesOfAClaimOfWhichNothingIsKnown(t *testing.T) {
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	s.AddFile("a")
	s.AddFile("b")
	files := describeSealed(allocation.Seal("uid-c", nil, nil, "boot-1", false), s).Files()
	if len(files) != 2 {
		t.Errorf("%v", files)
	}
	if files := describeSealed(allocation.Seal("uid-c", nil, []allocation.SealedDevice{{Name: "a"}}, "boot-1", false), s).Files(); len(files) != 1 || files[0].Path != "/run/info/a.json" {
		t.Errorf("of one whose spec names a device: %v", files)
	}
}

// A claim with a damaged file and a spec keeps the devices of the spec.
func TestDamagedFileWithSpec(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129), stocktest.NewPart("card", "p0", 4), stocktest.NewPart("card", "p1", 4), stocktest.NewPart("card", "card", 8))
	c := stocktest.Claim("c", s["a"], s["p0"])
	b.mustGive(c, s)
	b.damage(c)
	b.notes.names = map[string][]allocation.SealedDevice{"uid-c": {{Name: "a-share-03"}, {Name: "p0"}}}
	b.open()
	b.mustGive(stocktest.Claim("other", s["b"]), s)
	b.mustGive(stocktest.Claim("part", s["p1"]), s)
	b.mustRefuse(stocktest.Claim("another", s["a"]), s, "in use by claim with UID uid-c")
	b.mustRefuse(stocktest.Claim("another", s["card"]), s, "in use by claim")
	if !b.notes.of["uid-c"] {
		t.Error("the spec of a claim whose record cannot be read is gone")
	}
}

// A claim of a newer agent keeps the devices in its file. A matching agent reads the file again.
func TestNewerFile(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	c := stocktest.Claim("c", s["a"])
	c.Version, c.ReadableBy = allocation.Version+1, allocation.Version+1
	b.mustGive(c, s)
	b.open()
	if !b.IsSealed(c.UID) {
		t.Fatal("it is understood")
	}
	b.mustGive(stocktest.Claim("other", s["b"]), s)
	b.mustRefuse(stocktest.Claim("another", s["a"]), s, "in use by claim default/c")
}

// One read error is not damage.
func TestFileThatCannotBeReadAtPresent(t *testing.T) {
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	for name, failures := range map[string]int{"once": 1, "for a while": 100} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			c := stocktest.Claim("c", s["a"])
			b.mustGive(c, s)
			b.notes.names = map[string][]allocation.SealedDevice{"uid-c": {{Name: "a"}}}
			file := b.files.ClaimFile(c.UID)
			b.disk.BeforeRead = func(name string) error {
				if name == file && failures > 0 {
					failures--
					return syscall.EIO
				}
				return nil
			}
			b.open()
			b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim")
			failures = 0
			if err := b.ReconcileFiles(t.Context()); err != nil {
				t.Fatal(err)
			}
			if b.state(c) != allocation.Allocated || b.IsSealed(c.UID) {
				t.Errorf("it is %v, sealed %t", b.state(c), b.IsSealed(c.UID))
			}
			if _, err := os.Lstat(file); err != nil {
				t.Error(err)
			}
		})
	}
}

// If neither the record nor a set-aside file of a claim can be read at present, or only the record,
// the claim keeps the devices of both files, and its end removes both.
func TestUnreadRecordBesideAsideFile(t *testing.T) {
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	for name, unread := range map[string]string{"both": "uid-c", "only the record": "uid-c" + allocation.ClaimExtension} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			c := stocktest.Claim("c", s["a"])
			c.Version, c.ReadableBy = allocation.Version+1, allocation.Version+1
			b.mustGive(c, s)
			b.open() // sets the record of a newer version aside
			other := stocktest.Claim("c", s["b"])
			b.mustGive(other, s)
			b.disk.BeforeRead = func(name string) error {
				if strings.HasPrefix(filepath.Base(name), unread) {
					return syscall.EIO
				}
				return nil
			}
			b.open()
			b.disk.BeforeRead = nil
			b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim")
			if err := b.ReconcileFiles(t.Context()); err != nil {
				t.Fatal(err)
			}
			if b.state(other) != allocation.Allocated {
				t.Errorf("the claim is %v", b.state(other))
			}
			b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim")
			if err := b.End(c.UID, s); err != nil {
				t.Fatal(err)
			}
			b.mustGive(stocktest.Claim("other", s["a"]), s)
			if left, _ := b.files.AsideFiles(c.UID); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// A claim without a CDI spec whose record cannot be read at first may have any device. Once its record
// and its set-aside file were read, it has only the devices that they name.
func TestUnreadRecordIsReadLater(t *testing.T) {
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129), stocktest.NewGPU("free", 130))
	for _, newer := range []bool{false, true} {
		b := newBench(t)
		c := stocktest.Claim("c", s["a"])
		c.Version, c.ReadableBy = allocation.Version+1, allocation.Version+1
		b.mustGive(c, s)
		b.open() // sets the record of a newer version aside
		other := stocktest.Claim("c", s["b"])
		if newer {
			other.Version, other.ReadableBy = allocation.Version+1, allocation.Version+1
		}
		b.mustGive(other, s)
		b.disk.BeforeRead = func(name string) error {
			if filepath.Base(name) == "uid-c"+allocation.ClaimExtension {
				return syscall.EIO
			}
			return nil
		}
		b.open()
		b.disk.BeforeRead = nil
		b.mustRefuse(stocktest.Claim("other", s["free"]), s, "it may have any device")
		if err := b.ReconcileFiles(t.Context()); err != nil {
			t.Fatal(err)
		}
		b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim")
		b.mustRefuse(stocktest.Claim("other", s["b"]), s, "in use by claim")
		b.mustGive(stocktest.Claim("other", s["free"]), s)
	}
}

// A claim has a CDI spec, and its files cannot be read at first. Once its record, which a newer agent
// wrote, and its set-aside file were read, the claim also has the devices that only they name.
func TestUnreadFilesNameMoreThanTheSpec(t *testing.T) {
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129), stocktest.NewGPU("spec", 130), stocktest.NewGPU("free", 131))
	for _, unread := range []string{"uid-c" + allocation.ClaimExtension, "uid-c"} {
		b := newBench(t)
		aside, record := stocktest.Claim("c", s["a"]), stocktest.Claim("c", s["b"])
		for _, c := range []*allocation.Claim{aside, record} {
			c.Version, c.ReadableBy = allocation.Version+1, allocation.Version+1
		}
		b.mustGive(aside, s)
		b.open() // sets the record of a newer version aside
		b.mustGive(record, s)
		b.notes.names = map[string][]allocation.SealedDevice{"uid-c": {{Name: "spec"}}}
		b.disk.BeforeRead = func(name string) error {
			if strings.HasPrefix(filepath.Base(name), unread) {
				return syscall.EIO
			}
			return nil
		}
		b.open()
		b.disk.BeforeRead = nil
		if err := b.ReconcileFiles(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, device := range []string{"a", "b", "spec"} {
			b.mustRefuse(stocktest.Claim("other", s[device]), s, "in use by claim default/c")
		}
		b.mustGive(stocktest.Claim("other", s["free"]), s)
	}
}

// If a file that cannot be read at present is removed by another program, the claim keeps its
// devices until it ends, also for the next agent.
func TestUnreadFileIsRemoved(t *testing.T) {
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	b := newBench(t)
	c := stocktest.Claim("c", s["a"])
	b.mustGive(c, s)
	file := b.files.ClaimFile(c.UID)
	b.disk.BeforeRead = func(name string) error {
		if name == file {
			return syscall.EIO
		}
		return nil
	}
	b.open()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	b.disk.BeforeRead = nil
	if err := b.ReconcileFiles(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim")
	b.open()
	b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim")
	if err := b.End(c.UID, s); err != nil {
		t.Fatal(err)
	}
	b.mustGive(stocktest.Claim("other", s["a"]), s)
}

// If the agent's directory was removed and only the spec of a claim is left, the claim keeps the
// devices of the spec until the claim is unprepared.
func TestSpecWithoutFile(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	c := stocktest.Claim("c", s["a"])
	b.mustGive(c, s)
	b.notes.names = map[string][]allocation.SealedDevice{"uid-c": {{Name: "a"}}}
	if err := os.RemoveAll(b.config.Dir); err != nil {
		t.Fatal(err)
	}
	b.open()
	select {
	case <-b.changed: // so that Run writes the entry at once
	default:
		t.Error("it is not written down")
	}
	b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim with UID uid-c")
	if err := b.ReconcileFiles(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(b.files.Path(allocation.BootFile)); err != nil {
		t.Errorf("it is written down before the boot is: %v", err)
	}
	b.mustGive(stocktest.Claim("another", s["b"]), s)
	if !b.notes.of["uid-c"] {
		t.Error("the spec of a running pod is gone")
	}
	if err := b.End("uid-c", s); err != nil || b.notes.of["uid-c"] {
		t.Errorf("unprepared: %v, outputs %v", err, b.notes.of)
	}
	b.mustGive(stocktest.Claim("other", s["a"]), s)
}

// A claim that has only a CDI spec keeps the nodes of the spec when it is prepared again, even if
// the device has other nodes now and the record of the sealed entry is damaged later.
func TestNodesOfSpecWithoutFile(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128))
	b.mustGive(stocktest.Claim("c", s["a"]), s)
	b.notes.names = map[string][]allocation.SealedDevice{"uid-c": {{Name: "a", Nodes: exclusion.NodesOf("a", s)}}}
	if err := os.RemoveAll(b.config.Dir); err != nil {
		t.Fatal(err)
	}
	b.open()
	if err := b.ReconcileFiles(t.Context()); err != nil {
		t.Fatal(err)
	}
	exchanged := stocktest.New(stocktest.NewGPU("a", 129), stocktest.NewGPU("b", 128))
	b.mustGive(stocktest.Claim("c", exchanged["a"]), exchanged)
	b.notes.names["uid-c"][0].Nodes = exclusion.NodesOf("a", exchanged) // the new spec
	sealed := b.files.Path(filepath.Join(allocation.ClaimsDir, "uid-c"+allocation.BadExtension+"0"))
	if _, err := os.Lstat(sealed); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(sealed, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	b.open()
	b.mustRefuse(stocktest.Claim("other", exchanged["b"]), exchanged, "in use by claim default/c, which was given its nodes")
	if err := b.End("uid-c", exchanged); err != nil {
		t.Fatal(err)
	}
	b.mustGive(stocktest.Claim("other", exchanged["b"]), exchanged)
}

// The ledger stays closed while the specs cannot be listed. Otherwise a running pod whose claim has
// only a spec would lose its device.
func TestSpecsThatCannotBeListed(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128))
	b.mustGive(stocktest.Claim("c", s["a"]), s)
	b.notes.names = map[string][]allocation.SealedDevice{"uid-c": {{Name: "a"}}}
	if err := os.RemoveAll(b.config.Dir); err != nil {
		t.Fatal(err)
	}
	b.notes.unlisted = errors.New("input/output error")
	b.Ledger = New(b.config)
	b.SetOutputs(b.notes)
	if _, err := b.Open(t.Context()); !errors.Is(err, b.notes.unlisted) || b.isOpen() || !b.notes.of["uid-c"] {
		t.Errorf("opened: %v, %t; outputs %v", err, b.isOpen(), b.notes.of)
	}
	b.notes.unlisted = nil
	if _, err := b.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim with UID uid-c")
}

func listing(whole bool, cdi ...string) *kubeletapi.Listing {
	resource := &podresourcesapi.ClaimResource{}
	for _, name := range cdi {
		resource.CdiDevices = append(resource.CdiDevices, &podresourcesapi.CDIDevice{Name: name})
	}
	return &kubeletapi.Listing{Whole: whole, Pods: []*podresourcesapi.PodResources{{
		Namespace: "default", Name: "pod",
		Containers: []*podresourcesapi.ContainerResources{{Name: "main", DynamicResources: []*podresourcesapi.DynamicResource{{
			ClaimName: "c", ClaimNamespace: "default", ClaimResources: []*podresourcesapi.ClaimResource{resource},
		}}}},
	}}}
}

// If the spec is gone too, the kubelet still lists the CDI devices of containers.
func TestClaimThatOnlyTheKubeletKnows(t *testing.T) {
	const uid = "6f8a1c3e-0d5b-1234-9a53-2f4c3b1f7a10"
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	said := listing(false, "chandler.dev/claim="+uid+"-0-a", "other.example.com/gpu=b")
	asked := time.Now()
	if err := b.Grants.ObserveListing(asked, said, always(s)); err != nil {
		t.Fatal(err)
	}
	b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim with UID "+uid)
	b.mustGive(stocktest.Claim("another", s["b"]), s)
	select {
	case <-b.changed: // so that Run writes the entry at once
	default:
		t.Error("it is not written down")
	}
	if err := b.End(uid, s); err != nil {
		t.Fatal(err)
	}
	// An answer to an earlier request is out of date, and the kubelet lists a claim for a moment
	// after the unprepare call.
	for _, asked := range []time.Time{asked, time.Now()} {
		if err := b.Grants.ObserveListing(asked, said, always(s)); err != nil {
			t.Fatal(err)
		}
	}
	b.mustGive(stocktest.Claim("other", s["a"]), s)
}

// The kubelet does not report how much of a device a claim has. Claims known only from the kubelet
// block each other until a single claim is left.
func TestSharesThatOnlyTheKubeletKnows(t *testing.T) {
	const one, other = "6f8a1c3e-0d5b-1234-9a53-2f4c3b1f7a10", "6f8a1c3e-0d5b-1234-9a53-2f4c3b1f7a11"
	b := newBench(t)
	s := stocktest.New(stocktest.NewShared("big"))
	said := listing(false, "chandler.dev/claim="+one+"-0-big-"+other, "chandler.dev/claim="+other+"-0-big-"+one)
	if err := b.Grants.ObserveListing(time.Now(), said, always(s)); err != nil {
		t.Fatal(err)
	}
	share := func(uid types.UID) *allocation.Claim {
		c := stocktest.Claim("c", s["big"])
		c.UID, c.Results[0].Consumes = uid, stocktest.Amount("memory", "1Gi")
		return c
	}
	b.mustRefuse(share(one), s, "in use by claim with UID "+other)
	b.mustRefuse(share(other), s, "in use by claim with UID "+one)
	if err := b.End(other, s); err != nil {
		t.Fatal(err)
	}
	b.mustGive(share(one), s)
}

// The known part of a claim without a file survives a restart of the agent, even if its directory
// and the specs were removed and the kubelet does not answer.
func TestSealedIsWrittenDown(t *testing.T) {
	for name, all := range map[string]bool{"a device is known": false, "nothing is known": true} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
			c := stocktest.Claim("c", s["a"])
			b.mustGive(c, s)
			b.damage(c)
			if !all {
				b.notes.names = map[string][]allocation.SealedDevice{"uid-c": {{Name: "a", Nodes: exclusion.NodesOf("a", s)}}}
			}
			b.open()
			b.notes.names = nil
			if err := os.RemoveAll(b.config.Dir); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if err := b.ReconcileFiles(t.Context()); err != nil {
					t.Fatal(err)
				}
				b.open()
			}
			b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim with UID uid-c")
			moved := stocktest.NewGPU("b", 128) // has the claim's node
			b.mustRefuse(stocktest.Claim("moved", moved), stocktest.New(moved), "in use by claim with UID uid-c")
			if all {
				b.mustRefuse(stocktest.Claim("another", s["b"]), s, "it may have any device")
			} else {
				b.mustGive(stocktest.Claim("another", s["b"]), s)
			}
			if err := b.End("uid-c", s); err != nil {
				t.Fatal(err)
			}
			b.open()
			b.mustGive(stocktest.Claim("other", s["a"]), s)
		})
	}
}

// After the removal of its directory, the ledger writes the file boot before the next allocation.
func TestBootIsSaidAgain(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	b.mustGive(stocktest.Claim("c", s["a"]), s)
	if err := os.RemoveAll(b.config.Dir); err != nil {
		t.Fatal(err)
	}
	b.mustGive(stocktest.Claim("other", s["b"]), s)
	if _, err := os.Lstat(b.files.Path(allocation.BootFile)); err != nil {
		t.Error(err)
	}
}

// After a kill of the agent, a power failure may revert the file boot, so the next agent
// synchronizes its directory when opening the ledger.
func TestBootIsSynchronisedByEachAgent(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128))
	synced, killed := 0, false
	b.disk.Before = func(op disktest.Op, name string) error {
		if op != disktest.SyncDir || name != b.config.Dir {
			killed = killed || op == disktest.Rename && name == b.files.Path(allocation.BootFile)
			return nil
		}
		if killed {
			return errors.New("killed")
		}
		synced++
		return nil
	}
	if err := b.AllocateClaim(stocktest.Claim("c", s["a"]), allocation.Allocated, s); err == nil {
		t.Fatal("a claim is given before the boot is synchronised")
	}
	if _, err := os.Lstat(b.files.Path(allocation.BootFile)); err != nil {
		t.Fatal(err)
	}
	killed = false
	b.open()
	opened := synced
	b.mustGive(stocktest.Claim("c", s["a"]), s)
	if opened == 0 || synced > opened {
		t.Errorf("synchronised %d times by Open, and %d times in all", opened, synced)
	}
}

// The record of a claim with a chosen device is synchronized, also when it is written again. The
// record of another claim is not.
func TestChosenDevicesAreSynchronised(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	synced := 0
	b.disk.Before = func(op disktest.Op, name string) error {
		if op == disktest.SyncDir && name == b.files.Path(allocation.ClaimsDir) {
			synced++
		}
		return nil
	}
	b.mustGive(stocktest.Claim("whole", s["a"]), s)
	if synced > 0 {
		t.Errorf("the record of a claim without a chosen device is synchronized %d times", synced)
	}
	chosen := stocktest.Claim("chosen", s["b"])
	chosen.Results[0].Device = "common"
	b.mustGive(chosen, s)
	if synced != 1 {
		t.Errorf("the record is synchronized %d times", synced)
	}
	if err := os.Remove(b.files.ClaimFile(chosen.UID)); err != nil {
		t.Fatal(err)
	}
	if err := b.restoreClaim(chosen); err != nil || synced != 2 {
		t.Errorf("the lost record is written again: %v, synchronized %d times", err, synced)
	}
}

// A damaged file boot is not evidence of another boot: an invalid record blocks other owners.
func TestDamagedBoot(t *testing.T) {
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	for name, text := range map[string]string{
		"empty": "", "zeros": "\x00\x00\x00\n", "zeros of its length": strings.Repeat("\x00", len("boot-1")) + "\n", "cut off": "boo", "too long": "boot-1boot-1\n",
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			c := stocktest.Claim("c", s["a"])
			b.mustGive(c, s)
			b.damage(c)
			if err := os.WriteFile(b.files.Path(allocation.BootFile), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			b.open()
			b.mustRefuse(stocktest.Claim("other", s["b"]), s, "in use by claim with UID uid-c")
		})
	}
}

// After a reboot PodResources lists the content of the kubelet's checkpoint, although nothing is
// prepared. Claims without records do not wait for each other.
func TestKubeletKnowsClaimsOfTheEarlierBoot(t *testing.T) {
	const uid = "6f8a1c3e-0d5b-1234-9a53-2f4c3b1f7a10"
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128))
	c := stocktest.Claim("c", s["a"])
	b.mustGive(c, s)
	if err := os.Remove(b.files.ClaimFile(c.UID)); err != nil {
		t.Fatal(err)
	}
	b.reboot("boot-2")
	if err := b.Grants.ObserveListing(time.Now(), listing(true, "chandler.dev/claim="+uid+"-0-a"), always(s)); err != nil {
		t.Fatal(err)
	}
	other := stocktest.Claim("other", s["a"])
	other.Boot = "boot-2"
	b.mustGive(other, s)
}

func TestErrorsNameTheFile(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128))
	c := stocktest.Claim("c", s["a"])
	b.mustGive(c, s)
	b.damage(c)
	l := New(b.config)
	problems, err := l.Open(t.Context())
	if err != nil || len(problems) != 1 || !strings.Contains(problems[0].Error(), b.files.ClaimFile(c.UID)) {
		t.Errorf("%v, %v", problems, err)
	}
	if !errors.Is(errors.Join(problems...), problems[0]) {
		t.Error("problems are not errors")
	}
}

// Claims whose files were lost are recorded for as long as the boot lasts, also by agents that
// start after other files exist again, and also if only the claims' files were lost.
func TestClaimsAreNotedAfterALoss(t *testing.T) {
	const uid = "6f8a1c3e-0d5b-1234-9a53-2f4c3b1f7a10"
	said := func() *kubeletapi.Listing { return listing(true, "chandler.dev/claim="+uid+"-0-a") }
	for name, lose := range map[string]func(b *bench, s stocktest.Stock){
		"all files, and an open device is given": func(b *bench, s stocktest.Stock) {
			if err := os.RemoveAll(b.config.Dir); err != nil {
				b.t.Fatal(err)
			}
			b.open()
			b.mustGive(stocktest.Claim("open", s["kvm"]), s)
		},
		"claims' files": func(b *bench, s stocktest.Stock) {
			if err := os.RemoveAll(b.files.Path(allocation.ClaimsDir)); err != nil {
				b.t.Fatal(err)
			}
			b.open()
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			s := stocktest.New(stocktest.NewGPU("a", 128))
			s["kvm"] = open
			c := stocktest.Claim("c", s["a"])
			c.UID = uid
			b.mustGive(c, s)
			b.config.Listings = true
			lose(b, s)
			b.open()
			if err := b.Grants.ObserveListing(time.Now(), said(), always(s)); err != nil {
				t.Fatal(err)
			}
			b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim with UID "+uid)
			b.reboot("boot-2")
			if err := b.Grants.ObserveListing(time.Now(), said(), always(s)); err != nil {
				t.Fatal(err)
			}
			other := stocktest.Claim("other", s["a"])
			other.Boot = "boot-2"
			b.mustGive(other, s)
		})
	}
}

// The loss of the claims' files is noted even if the agent that found the loss could not open the
// ledger, or was killed meanwhile.
func TestLossIsNotedBeforeDirectoryIsCreated(t *testing.T) {
	const uid = "6f8a1c3e-0d5b-1234-9a53-2f4c3b1f7a10"
	for _, killed := range []bool{false, true} {
		b := newBench(t)
		s := stocktest.New(stocktest.NewGPU("a", 128))
		b.mustGive(stocktest.Claim("earlier", s["a"]), s)
		b.reboot("boot-2") // the first agent on a node assumes a loss until a reboot
		c := stocktest.Claim("c", s["a"])
		c.UID, c.Boot = uid, "boot-2"
		b.mustGive(c, s)
		if err := os.RemoveAll(b.files.Path(allocation.ClaimsDir)); err != nil {
			t.Fatal(err)
		}
		b.config.Listings = true
		b.notes.unlisted = syscall.EMFILE
		b.Ledger = New(b.config)
		b.SetOutputs(b.notes)
		if _, err := b.Open(t.Context()); err == nil {
			t.Fatal("opened without the list of specs")
		}
		b.notes.unlisted = nil
		if killed {
			b.open()
		} else if _, err := b.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := b.Grants.ObserveListing(time.Now(), listing(true, "chandler.dev/claim="+uid+"-0-a"), always(s)); err != nil {
			t.Fatal(err)
		}
		b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim with UID "+uid)
	}
}

// Another program removes the files of all claims while the agent runs. The agent is killed after it
// has prepared a claim, or while it writes the lost files again. The next agent learns of the loss.
func TestLossIsNotedBeforeNextRecord(t *testing.T) {
	const uid = "6f8a1c3e-0d5b-1234-9a53-2f4c3b1f7a10"
	for _, restored := range []bool{false, true} {
		b := newBench(t)
		s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
		b.mustGive(stocktest.Claim("earlier", s["a"]), s)
		b.reboot("boot-2") // the first agent on a node assumes a loss until a reboot
		for i, device := range []string{"a", "b"} {
			c := stocktest.Claim("c", s[device])
			c.UID, c.Boot = types.UID([]string{uid, "a first claim"}[i]), "boot-2"
			b.mustGive(c, s)
		}
		if restored {
			if err := os.RemoveAll(b.files.Path(allocation.ClaimsDir)); err != nil {
				t.Fatal(err)
			}
			b.disk.Before = func(op disktest.Op, name string) error {
				if strings.HasPrefix(filepath.Base(name), uid) {
					return syscall.EIO
				}
				return nil
			}
			_ = b.ReconcileFiles(t.Context())
			b.disk.Before = nil
		} else {
			if err := os.RemoveAll(b.config.Dir); err != nil {
				t.Fatal(err)
			}
			next := stocktest.Claim("next", open)
			next.Boot = "boot-2"
			b.mustGive(next, s)
		}
		b.config.Listings = true
		b.open()
		if err := b.Grants.ObserveListing(time.Now(), listing(true, "chandler.dev/claim="+uid+"-0-a"), always(s)); err != nil {
			t.Fatal(err)
		}
		b.mustRefuse(stocktest.Claim("other", s["a"]), s, "in use by claim with UID "+uid)
	}
}

// A claim of an earlier boot blocks no other owner, even if its end fails.
func TestPastThatCannotBeEnded(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128))
	c := stocktest.Claim("c", s["a"])
	b.mustGive(c, s)
	b.reboot("boot-2")
	b.notes.fails = os.ErrPermission
	if err := b.End(c.UID, s); err == nil || b.state(c) != allocation.Ended {
		t.Errorf("it is %v, %v", b.state(c), err)
	}
	b.notes.fails = nil
	other := stocktest.Claim("other", s["a"])
	other.Boot = "boot-2"
	b.mustGive(other, s)
	if err := b.End(c.UID, s); err != nil {
		t.Error(err)
	}
}

// If a backup restores the spec of an ended claim while the agent runs, the spec is removed and
// blocks nothing. The spec of a claim whose record was removed stays.
func TestSpecThatComesBack(t *testing.T) {
	b := newBench(t)
	s := stocktest.New(stocktest.NewGPU("a", 128), stocktest.NewGPU("b", 129))
	b.mustGive(stocktest.Claim("c", s["a"]), s)
	b.mustGive(stocktest.Claim("d", s["b"]), s)
	if err := b.End("uid-c", s); err != nil {
		t.Fatal(err)
	}
	b.notes.of["uid-c"] = true
	if err := os.RemoveAll(b.config.Dir); err != nil {
		t.Fatal(err)
	}
	if err := b.ReconcileFiles(t.Context()); err != nil {
		t.Fatal(err)
	}
	if b.notes.of["uid-c"] || !b.notes.of["uid-d"] {
		t.Errorf("outputs %v", b.notes.of)
	}
}
