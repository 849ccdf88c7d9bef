// Package guest boots Debian's kernels in QEMU, without hardware virtualisation, for tests of what the product does on
// a real kernel. It knows how to make a guest and talk to it, and nothing of what is tested.
//
// A test is an ordinary one, which runs on the host:
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
// The first process of a guest is cmd/guestinit. It loads Modules, and then does what the host asks for over a port of
// virtio-serial (package inside). A guest has the product's own chandler, busybox, dash, kmod, and Debian's programs
// that Tools names. Nothing of it is left when the test ends, or when its process is killed.
//
// The tests are in this folder, in package guest_test. Those that call [Long] are left out of the selection that CI runs,
// which has to end within five minutes. Put what fits one boot into one boot, and do not boot two guests at once.
//
// A guest that says nothing is booted a second time. If it says nothing then either, or falls silent later, the test
// fails with a message that begins with "unknown:", for it says nothing about the product.
package guest

import (
	"context"
	"errors"
	"fmt"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"chandler.dev/e2e/guest/debian"
	"chandler.dev/e2e/guest/inside"
)

// A Version says which of two versions that Debian has is meant.
type Version int

// The versions of kernels and of QEMU.
const (
	Newer    Version = iota // in the backports of Debian 12: 6.12 and 10.0, or later
	Debian12                // Debian 12's own: 6.1 and 7.2
)

// Config is a guest to boot. Its zero value is one of one CPU without further devices.
type Config struct {
	Kernel Version
	QEMU   Version // igb, and the SR-IOV of it, needs the newer one

	Memory int  // in MiB; 1024 unless given
	CPUs   int  // 1 unless given
	NUMA   bool // two nodes, each with half of CPUs and Memory; 2 CPUs at least

	// IOMMU is "intel", "virtio" or none.
	IOMMU string
	// Args are further arguments of QEMU, such as devices; Kargs further parameters of the kernel.
	Args  []string
	Kargs []string

	// Modules are loaded at each boot, in this order; Carry are there to be loaded. Both bring those that they need.
	// Those in the folder modules, such as pcifake, are built with this machine's C compiler: see [HasCompiler].
	Modules []string
	Carry   []string
	// Tools are programs of Debian, such as lspci, ip, nvme, mke2fs, setpriv, losetup, mdadm.
	Tools []string
	// Programs are further programs, static ones, by the name that they have in the guest: see [Build].
	Programs map[string]string
	// Files are written into the initramfs, by path in the guest.
	Files map[string]string
	// Disks are the virtio disks vda, vdb and so on. They keep their content when the guest is reset.
	Disks []Disk
}

// A Disk is an empty disk, or one with an empty file system.
type Disk struct {
	Size int64 // in MiB
	Ext4 bool
}

// A Guest is one that runs.
type Guest struct {
	Kernel   string // as uname -r says it
	QEMU     string // the version of QEMU
	Greeting inside.Greeting

	dir    string
	qemu   *machine
	client *rpc.Client
	lost   chan struct{} // closed when the guest is known to be lost, for the reason why
	why    error
}

// Long leaves a test out of the selection that CI runs: "go test -short".
func Long(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("not in the short selection: make e2e-machine runs it")
	}
}

// patience is how long a guest may be silent. It is generous: an emulated machine on a busy host is slow.
const patience = 4 * time.Minute

// Boot boots a guest, which ends with the test.
func Boot(t testing.TB, config Config) *Guest {
	t.Helper()
	config = config.withDefaults()
	prepared, err := prepare(t.Context(), config)
	if err != nil {
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
	if c.IOMMU == "virtio" { // before the drivers of the devices that it translates for
		c.Modules = append([]string{"virtio_iommu"}, c.Modules...)
	}
	return c
}

// A prepared guest is all that is needed to boot it.
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

// errSilent is why a guest that runs, but says nothing, is tried again.
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

// greet connects to the guest's port and waits for its first word since a boot. QEMU may drop a connection that follows
// another one.
func (g *Guest) greet(ctx context.Context) error {
	silent := time.After(patience)
	for {
		conn, err := g.qemu.dial(ctx, portSocket)
		switch {
		case err != nil && g.qemu.failure() != nil: // the kernel panicked, and said nothing to us
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

// listen asks the guest now and then whether it is still there, until its connection ends.
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

// Reset resets the guest as a loss of power does, at once, and waits until it has booted again. Whatever the guest had
// not written to its disks is gone, and so are its processes.
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
	g.QMP(t, "set-action", map[string]any{"reboot": "shutdown"}) // only now: the firmware resets once more
}

// Console returns the last lines that the guest's kernel, and its first process, wrote.
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
