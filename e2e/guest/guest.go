// Package guest boots Debian kernels in QEMU, without hardware virtualization, for tests of the
// product on a real kernel. It creates a guest and communicates with it, and is independent of the
// tested product.
//
// A test is an ordinary Go test on the host:
//
//	func TestNVMe(t *testing.T) {
//		g := guest.Boot(t, guest.Config{
//			Kernel:  guest.Newer,
//			Modules: []string{"nvme", "vfio-pci"},
//			Tools:   []string{"lspci"},
//			IOMMU:   "intel",
//			Args:    []string{"-device", "pcie-root-port,id=rp0,chassis=1", "-device", "nvme,id=disk,serial=A,bus=rp0"},
//		})
//		discovered := g.Must(t, "chandler", "discover", "-o", "json")
//		agent := g.Start(t, "chandler", "agent", "--standalone")
//		g.QMP(t, "device_del", map[string]any{"id": "disk"})
//		agent.Until(t, "is gone")
//		agent.Stop(t)
//	}
//
// The first process of a guest is cmd/guestinit. It loads Modules, and then serves requests of the
// host over a virtio-serial port (package inside). A guest has the product's own chandler, busybox,
// dash, kmod, and the Debian programs in Tools. The guest is removed when the test ends, or when
// its process is killed.
//
// The tests are in this folder, in package guest_test. Tests that call [Long] are left out of the
// selection for CI, which must end within five minutes. Use one boot for as many checks as
// possible, and do not boot two guests at once.
//
// A silent guest is booted a second time. If the guest stays silent, or becomes silent later, the
// test fails with a message that begins with "unknown:", because such a failure is no evidence
// about the product.
package guest

import (
	"context"
	"errors"
	"fmt"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"chandler.dev/e2e/guest/debian"
	"chandler.dev/e2e/guest/inside"
)

// A Version selects one of two versions in Debian.
type Version int

// The versions of kernels and of QEMU.
const (
	Newer    Version = iota // in the backports of Debian 12: 6.12 and 10.0, or later
	Debian12                // in Debian 12 itself: 6.1 and 7.2
)

// Config describes a guest. The zero value is a guest with one CPU and no further devices.
type Config struct {
	Kernel Version
	QEMU   Version // igb and its SR-IOV need the newer version

	Memory int  // in MiB, 1024 by default
	CPUs   int  // 1 by default
	NUMA   bool // two nodes, each with half of CPUs and Memory; needs at least 2 CPUs

	// IOMMU is "intel", "virtio" or "" for none.
	IOMMU string
	// Args are further arguments of QEMU, such as devices. Kargs are further kernel parameters.
	Args  []string
	Kargs []string

	// Modules are loaded at each boot, in this order. Carry are available for loading. Dependencies
	// are included. The modules in the folder modules, such as pcifake, are built with this machine's
	// C compiler: see [HasCompiler].
	Modules []string
	Carry   []string
	// Tools are Debian programs, such as lspci, ip, nvme, mke2fs, setpriv, losetup, mdadm.
	Tools []string
	// Programs are further static programs, by their name in the guest: see [Build].
	Programs map[string]string
	// Files are the texts of files in the initramfs, by path in the guest.
	Files map[string]string
	// Disks are the virtio disks vda, vdb and so on. They keep their content across resets of the
	// guest.
	Disks []Disk
}

// A Disk is an empty disk, or a disk with an empty file system.
type Disk struct {
	Size int64 // in MiB
	Ext4 bool
}

// A Guest is a running guest.
type Guest struct {
	Kernel   string // as reported by uname -r
	QEMU     string // the version of QEMU
	Greeting inside.Greeting

	dir    string
	qemu   *machine
	client *rpc.Client
	lost   chan struct{} // closed when the guest is lost, for the reason why
	why    error
}

// Long excludes a test from the selection for CI: "go test -short".
func Long(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("not in the short selection: make e2e-machine runs it")
	}
}

// patience is the maximum silence of a guest. It is long because an emulated machine on a busy host
// is slow.
const patience = 4 * time.Minute

// Boot boots a guest. The guest ends with the test. If this machine cannot run Debian's programs,
// or its apt is not configured to use a Debian archive, the test is skipped.
func Boot(t testing.TB, config Config) *Guest {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("guests need an amd64 machine")
	}
	config = config.withDefaults()
	prepared, err := prepare(t.Context(), config)
	if errors.Is(err, debian.ErrNoArchive) {
		t.Skipf("guests need packages of Debian: %v", err)
	} else if err != nil {
		t.Fatalf("prepare the guest: %v", err)
	}
	t.Cleanup(prepared.remove)
	for attempt := 1; ; attempt++ {
		g, err := prepared.boot(t.Context())
		if err == nil {
			t.Cleanup(func() { g.end(t) })
			for _, problem := range g.Greeting.Problems {
				t.Fatalf("guest: %s", problem)
			}
			return g
		}
		console := lastLines(filepath.Join(prepared.dir, consoleFile), 60)
		if !errors.Is(err, errSilent) {
			t.Fatalf("boot the guest: %v\n%s", err, console)
		}
		if attempt == 2 {
			t.Fatalf("unknown: UNKNOWN, two guests said nothing: %v\n%s", err, console)
		}
		t.Logf("a guest said nothing, and is tried again: %v\n%s", err, console)
	}
}

func (c Config) withDefaults() Config {
	if c.Memory == 0 {
		c.Memory = 1024
	}
	if c.CPUs == 0 {
		c.CPUs = 1
	}
	if c.NUMA {
		c.CPUs = max(c.CPUs, 2)
	}
	if len(c.Disks) > 0 {
		c.Modules = append([]string{"virtio_blk"}, c.Modules...)
	}
	if c.IOMMU == "virtio" { // before the drivers of the devices behind the IOMMU
		c.Modules = append([]string{"virtio_iommu"}, c.Modules...)
	}
	return c
}

// A prepared guest has everything needed for a boot.
type prepared struct {
	config Config
	dir    string
	kernel debian.Kernel
	qemu   debian.Root
	unlock func()
}

// Names of files in a guest's directory.
const (
	consoleFile   = "console.log"
	initramfsFile = "initramfs"
	portSocket    = "port.sock"
	qmpSocket     = "qmp.sock"
)

func prepare(ctx context.Context, config Config) (*prepared, error) {
	archive, err := archive()
	if err != nil {
		return nil, err
	}
	p := &prepared{config: config}
	if p.kernel, err = archive.Kernel(ctx, config.Kernel == Newer); err != nil {
		return nil, err
	}
	if p.qemu, err = archive.QEMU(ctx, config.QEMU == Newer); err != nil {
		return nil, err
	}
	tools, err := archive.Tools(ctx)
	if err != nil {
		return nil, err
	}
	if p.dir, p.unlock, err = runDir(); err != nil {
		return nil, err
	}
	err = errors.Join(writeInitramfs(ctx, filepath.Join(p.dir, initramfsFile), p.kernel, tools, config), p.makeDisks(ctx, tools))
	if err != nil {
		p.remove()
		return nil, err
	}
	return p, nil
}

func (p *prepared) remove() {
	_ = os.RemoveAll(p.dir)
	p.unlock()
}

// runDir makes a directory for one guest, and removes those of test processes that were killed.
func runDir() (dir string, unlock func(), err error) {
	const prefix = "chandler-guest-"
	old, err := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*"))
	if err != nil {
		return "", nil, err
	}
	for _, dir := range old {
		lock, err := os.Open(filepath.Join(dir, "lock"))
		if err != nil {
			continue
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			_ = os.RemoveAll(dir)
		}
		_ = lock.Close()
	}
	if dir, err = os.MkdirTemp("", prefix); err != nil {
		return "", nil, err
	}
	lock, err := os.Create(filepath.Join(dir, "lock"))
	if err != nil {
		return "", nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return "", nil, errors.Join(err, lock.Close())
	}
	return dir, func() { _ = lock.Close() }, nil
}

func (p *prepared) makeDisks(ctx context.Context, tools debian.Root) error {
	for i, disk := range p.config.Disks {
		path := p.disk(i)
		if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, disk.Size<<20)); err != nil {
			return err
		}
		if !disk.Ext4 {
			continue
		}
		cmd, err := tools.Command(ctx, "mke2fs", "-q", "-F", "-t", "ext4", path)
		if err != nil {
			return err
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("mke2fs: %w\n%s", err, out)
		}
	}
	return nil
}

func (p *prepared) disk(i int) string { return filepath.Join(p.dir, fmt.Sprintf("disk%d", i)) }

// errSilent is the error of a running but silent guest. The boot is repeated.
var errSilent = errors.New("the guest says nothing")

func (p *prepared) boot(ctx context.Context) (*Guest, error) {
	qemu, err := startMachine(ctx, p)
	if err != nil {
		return nil, err
	}
	g := &Guest{dir: p.dir, qemu: qemu, lost: make(chan struct{})}
	err = g.greet(ctx)
	if err == nil {
		g.Kernel = g.Greeting.Kernel
		g.QEMU, err = qemu.version()
	}
	if err != nil {
		qemu.kill()
		return nil, err
	}
	return g, nil
}

// greet connects to the guest's port and waits for the first answer since a boot. QEMU may drop a
// connection that follows another one.
func (g *Guest) greet(ctx context.Context) error {
	silent := time.After(patience)
	for {
		conn, err := g.qemu.dial(ctx, portSocket)
		switch {
		case err != nil && g.qemu.failure() != nil: // the kernel panicked before the first answer
			return fmt.Errorf("%w: %w", errSilent, err)
		case err != nil:
			return err
		}
		g.client = jsonrpc.NewClient(conn)
		call := g.client.Go(inside.Service+".Hello", inside.Nothing{}, &g.Greeting, make(chan *rpc.Call, 1))
		select {
		case <-call.Done:
			if call.Error == nil {
				go g.listen(g.client)
				return nil
			}
			time.Sleep(100 * time.Millisecond)
		case <-g.qemu.done:
			return fmt.Errorf("%w: %w", errSilent, g.qemu.failure())
		case <-silent:
			return fmt.Errorf("%w for %s", errSilent, patience)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// listen checks from time to time that the guest still answers, until its connection ends.
func (g *Guest) listen(client *rpc.Client) {
	for {
		call := client.Go(inside.Service+".Hello", inside.Nothing{}, new(inside.Greeting), make(chan *rpc.Call, 1))
		select {
		case <-call.Done:
			if call.Error != nil {
				return
			}
		case <-g.qemu.done:
			return
		case <-time.After(patience):
			g.why = fmt.Errorf("the guest has been silent for %s", patience)
			close(g.lost)
			return
		}
		select {
		case <-g.qemu.done:
			return
		case <-time.After(10 * time.Second):
		}
	}
}

// Reset resets the guest immediately, like a power failure, and waits until it has booted again.
// Unwritten data of the guest is lost, and its processes end.
func (g *Guest) Reset(t testing.TB) {
	t.Helper()
	_ = g.client.Close()
	reset := g.qemu.events("RESET")
	g.QMP(t, "set-action", map[string]any{"reboot": "reset"})
	g.QMP(t, "system_reset", nil)
	select {
	case <-reset:
	case <-time.After(patience):
		t.Fatalf("unknown: UNKNOWN, QEMU did not reset the guest")
	}
	before := g.Greeting.Boot
	if err := g.greet(t.Context()); err != nil {
		t.Fatalf("unknown: UNKNOWN, after a reset: %v\n%s", err, g.Console())
	}
	if g.Greeting.Boot == before {
		t.Fatalf("the guest was not reset")
	}
	g.QMP(t, "set-action", map[string]any{"reboot": "shutdown"}) // only now, because the firmware resets once more
}

// Console returns the last lines of output of the guest's kernel and first process.
func (g *Guest) Console() string { return lastLines(filepath.Join(g.dir, consoleFile), 150) }

func (g *Guest) end(t testing.TB) {
	if t.Failed() {
		t.Logf("console of the guest (Linux %s, QEMU %s):\n%s", g.Kernel, g.QEMU, g.Console())
	}
	_ = g.client.Close()
	g.qemu.kill()
}

func lastLines(path string, count int) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.ReplaceAll(string(data), "\r", ""), "\n")
	return strings.Join(lines[max(0, len(lines)-count):], "\n")
}
