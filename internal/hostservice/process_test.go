package hostservice

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/child"
	"chandler.dev/internal/hostservice/wire"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/passthrough"
	"chandler.dev/internal/passthrough/passthroughtest"
	"chandler.dev/internal/provision"
)

// Environment variables of a process that serves as a host service: the root of its host, and the
// moments until it kills itself, before or after each write.
const (
	childRoot    = "CHANDLER_TEST_HOST_ROOT"
	childMoments = "CHANDLER_TEST_MOMENTS"
)

func TestMain(m *testing.M) {
	if root := os.Getenv(childRoot); root != "" {
		log.Fatal(serveHost(root))
	}
	m.Run()
}

func serveHost(root string) error {
	moments, err := strconv.Atoi(os.Getenv(childMoments))
	if err != nil {
		return err
	}
	host, err := hostfs.Open(root)
	if err != nil {
		return err
	}
	write, err := provision.Writer(root)
	if err != nil {
		return err
	}
	pass := func() {
		if moments--; moments == -1 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL) // it does not return
			select {}
		}
	}
	changes := PartitionProgram{Args: facts.ChangeArgs, Run: func(_ []string, held []*os.File) (*wire.Output, error) {
		_, _, err := child.Run(context.Background(), held, "/bin/sh", "-c", outliving, "sh", root)
		return &wire.Output{}, err
	}}
	programs := map[string]func() (Program, error){childProgram: func() (Program, error) { return child.Start("/bin/sh", "-c", scanner) }}
	return Run(context.Background(), socketDir(root), NewServer(Config{Host: &discovery.Host{FS: host}, Programs: programs, Partitions: map[string]PartitionProgram{childProgram: changes}, Allowed: ListAttributes(), Write: func(name, value string) error {
		pass()
		defer pass()
		return write(name, value)
	}}))
}

// childProgram is the program of that process, and the program for its partitions.
const childProgram = "scanner"

// outliving is a program that a signal to its process does not end, like a program that hangs in the
// kernel: another process does the work. It writes the PID of the first process to a FIFO, and ends
// after a line in another one.
const outliving = `(echo $$ > "$1/started"; read -r line < "$1/end") & wait`

func socketDir(root string) string { return filepath.Join(root, "run/host") }

// process is a host service in another process, which starts again after it was killed.
type process struct {
	root   string
	pid    atomic.Int32
	deaths atomic.Int32
	stop   func()
}

func startProcess(t *testing.T, root string, moments int) *process {
	p := &process{root: root}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		for ctx.Err() == nil {
			cmd := exec.CommandContext(ctx, os.Args[0])
			cmd.Env = append(os.Environ(), childRoot+"="+root, childMoments+"="+strconv.Itoa(moments))
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			err := cmd.Start()
			if err == nil {
				p.pid.Store(int32(cmd.Process.Pid))
				err = cmd.Wait()
			}
			if ctx.Err() == nil && cmd.ProcessState.ExitCode() != -1 {
				t.Errorf("host service: %v: %s", err, out.String())
				return
			}
			if ctx.Err() == nil {
				p.deaths.Add(1)
			}
			moments = -1
		}
	})
	p.stop = func() { cancel(); running.Wait() }
	return p
}

// A process that binds a disk to vfio through the socket, and returns it, while the host service is
// killed before and after each write, and starts again. The function is in one of the two states in
// the end, with no record left.
func TestProcessIsKilled(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, for device nodes")
	}
	for step := 0; ; step++ {
		k := passthroughtest.At(t, t.TempDir())
		k.Add(disk, "nvme", "3")
		service := startProcess(t, k.Dir, step)
		m, d := newManager(t, k)
		configure := m.Configurer(func(d discovery.Device, _ discovery.Parameters, _ string) (discovery.Device, discovery.Work, error) {
			return d, nil, nil
		})
		eventually(t, "bind", func() error {
			_, work, err := configure(d, discovery.Parameters{discovery.Driver: discovery.DriverVFIO}, "claim")
			if err != nil || work == nil {
				return err
			}
			if err := work(t.Context()); err != nil {
				return err
			}
			return errors.New("not checked yet")
		})
		if driver := k.Driver(disk); driver != "vfio-pci" {
			t.Fatalf("killed at moment %d: driver %q", step, driver)
		}
		eventually(t, "return", func() error { return m.ReturnUnit(t.Context(), "iommu-group-3") })
		if driver, left := k.Driver(disk), m.LeftUnits(); driver != "nvme" || len(left) > 0 {
			t.Fatalf("killed at moment %d: driver %q, left %v", step, driver, left)
		}
		service.stop()
		if service.deaths.Load() == 0 {
			if step < 8 {
				t.Errorf("killed at %d moments", step)
			}
			t.Logf("killed at %d moments", step)
			return
		}
	}
}

// The host service is killed while its program makes a change and hangs in the kernel. The agent's
// request, and with it the lease, lasts until the program has ended, and so does the wait of the next
// service. The program's first process, which does not hang, is killed with the service.
func TestProgramOutlivesProcess(t *testing.T) {
	k := passthroughtest.New(t)
	k.Add(disk, "nvme", "3")
	for _, name := range []string{"started", "end"} {
		if err := syscall.Mkfifo(filepath.Join(k.Dir, name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	end, err := os.OpenFile(filepath.Join(k.Dir, "end"), os.O_RDWR, 0) // does not block, and ends the program when it is closed
	if err != nil {
		t.Fatal(err)
	}
	defer end.Close()
	service := startProcess(t, k.Dir, -1)
	defer service.stop()
	client, next := NewClient(socketDir(k.Dir), nil), NewClient(socketDir(k.Dir), nil)
	eventually(t, "start", func() error { return client.BeginSession(t.Context()) })
	changed, begun := make(chan error, 1), make(chan error, 1)
	ctx := WithLease(t.Context(), Lease{Name: "test", Function: discovery.FunctionKey(k.Host(), passthroughtest.Source(disk))})
	go func() {
		_, _, err := client.ChangePartition(ctx, childProgram, discovery.PartitionChange{Function: disk, Place: "1g.10gb@4"})
		changed <- err
	}()
	pid, err := os.ReadFile(filepath.Join(k.Dir, "started")) // returns when the program runs
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(int(service.pid.Load()), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "death", func() error {
		if service.deaths.Load() == 0 {
			return errors.New("the service lives")
		}
		return nil
	})
	eventually(t, "end of the first process", func() error {
		stat, _ := os.ReadFile("/proc/" + strings.TrimSpace(string(pid)) + "/stat") // missing after its end
		if len(stat) > 0 && !bytes.Contains(stat, []byte(") Z ")) {
			return fmt.Errorf("it runs: %s", stat)
		}
		return nil
	})
	go func() {
		err := ErrAway
		for errors.Is(err, ErrAway) {
			time.Sleep(20 * time.Millisecond)
			err = next.BeginSession(t.Context())
		}
		begun <- err
	}()
	select {
	case err := <-changed:
		t.Errorf("the request ended before the program: %v", err)
		changed <- err
	case err := <-begun:
		t.Errorf("the next session began before the end of the program: %v", err)
		begun <- err
	case <-time.After(500 * time.Millisecond):
	}
	if _, err := end.WriteString("\n"); err != nil {
		t.Fatal(err)
	}
	if err := <-changed; !errors.Is(err, ErrAway) {
		t.Errorf("the request: %v", err)
	}
	if err := <-begun; err != nil {
		t.Errorf("the next session: %v", err)
	}
}

// newManager returns a manager of passthrough whose writes pass the socket, and its device.
func newManager(t *testing.T, k *passthroughtest.Kernel) (*passthrough.Manager, discovery.Device) {
	t.Helper()
	host, source := k.Host(), passthroughtest.Source(disk)
	l := ledger.New(ledger.Config{Dir: t.TempDir(), Boot: "1"})
	if _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	client := NewClient(socketDir(k.Dir), nil)
	m := passthrough.New(passthrough.Config{
		Host: host, Journal: journal.Config{Dir: t.TempDir(), Boot: "1"}, Ledger: l, Stock: func() exclusion.Stock { return &exclusion.Present{} },
		Write: func(name, value string) error {
			return client.Write("test", discovery.FunctionKey(host, source), name, value)
		},
		Busy: func(...sysfs.Device) error { return nil },
	})
	for _, problem := range m.Open() {
		t.Error(problem)
	}
	d := discovery.Device{Name: "pci-0000-03-00-0", Source: source, Attributes: discovery.Attributes{}, Health: discovery.Health{Status: discovery.Healthy}, Passthrough: &discovery.PassthroughOption{Driver: "vfio-pci"}}
	d.Attributes.SetInt("iommuGroup", 3)
	return m, d
}

// eventually repeats a step until it succeeds.
func eventually(t *testing.T, name string, step func() error) {
	t.Helper()
	var err error
	for limit := time.Now().Add(time.Minute); time.Now().Before(limit); time.Sleep(20 * time.Millisecond) {
		if err = step(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", name, err)
}

// Only root can open the socket. A second service waits for the end of the first one, and then
// serves the directory.
func TestSocket(t *testing.T) {
	k := passthroughtest.New(t)
	k.Add(disk, "nvme", "3")
	dir := filepath.Join(k.Dir, "run/host")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	client := NewClient(dir, nil)
	run := func(program string) (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- Run(ctx, dir, NewServer(Config{Host: k.Host(), Program: program, Allowed: ListAttributes(), Write: k.Write}))
		}()
		return func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	}
	serves := func(program string) {
		t.Helper()
		eventually(t, program, func() error {
			service, err := client.DescribeService(t.Context())
			if err == nil && service.Program != program {
				err = fmt.Errorf("%s serves", service.Program)
			}
			return err
		})
	}
	stopFirst := run("first")
	serves("first")
	for name, want := range map[string]os.FileMode{"": 0o700, wire.Socket: 0o600} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != want {
			t.Errorf("%q: %v, %v", name, info.Mode(), err)
		}
	}
	stopSecond := run("second")
	time.Sleep(200 * time.Millisecond)
	serves("first")
	stopFirst()
	serves("second")
	key := discovery.FunctionKey(k.Host(), passthroughtest.Source(disk))
	if err := client.Write("test", key, passthroughtest.Source(disk)+"/reset", "1"); err != nil {
		t.Error(err)
	}
	stopSecond()
	if err := client.Write("test", key, passthroughtest.Source(disk)+"/reset", "1"); !errors.Is(err, ErrAway) {
		t.Errorf("without a service: %v", err)
	}
}

// A service that ends still answers a request in progress.
func TestEnd(t *testing.T) {
	k := passthroughtest.New(t)
	k.Add(disk, "nvme", "3")
	dir := t.TempDir()
	writing, release := make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- Run(ctx, dir, NewServer(Config{Host: k.Host(), Allowed: ListAttributes(), Write: func(string, string) error { close(writing); <-release; return syscall.EBUSY }}))
	}()
	client := NewClient(dir, nil)
	eventually(t, "start", func() error { return client.BeginSession(t.Context()) })
	written := make(chan error, 1)
	go func() {
		written <- client.Write("test", discovery.FunctionKey(k.Host(), passthroughtest.Source(disk)), passthroughtest.Source(disk)+"/reset", "1")
	}()
	<-writing
	cancel()
	time.Sleep(50 * time.Millisecond)
	close(release)
	if err := <-written; !errors.Is(err, syscall.EBUSY) {
		t.Errorf("the write: %v", err)
	}
	if err := <-ended; err != nil && !errors.Is(err, http.ErrServerClosed) {
		t.Error(err)
	}
}
