package guest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"chandler.dev/e2e/guest/inside"
)

// A machine is a running QEMU with a connection to its monitor by QMP
// (https://www.qemu.org/docs/master/interop/qmp-spec.html).
type machine struct {
	dir     string
	process *os.Process
	done    chan struct{} // closed when QEMU has ended, for the reason err
	err     error
	stderr  bytes.Buffer

	asking sync.Mutex // serializes commands
	qmp    net.Conn
	answer chan message

	mu      sync.Mutex
	waiting map[string]chan json.RawMessage // receivers of events, by name
}

// A message is an answer or an event of QEMU.
type message struct {
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class       string `json:"class"`
		Description string `json:"desc"`
	} `json:"error"`
	Event string          `json:"event"`
	Data  json.RawMessage `json:"data"`
}

func startMachine(ctx context.Context, p *prepared) (*machine, error) {
	for _, file := range []string{portSocket, qmpSocket, consoleFile} {
		_ = os.Remove(filepath.Join(p.dir, file)) // from a first attempt
	}
	cmd, err := p.qemu.Command(context.WithoutCancel(ctx), "qemu-system-x86_64", p.args()...)
	if err != nil {
		return nil, err
	}
	cmd.Env = append(os.Environ(), "QEMU_MODULE_DIR="+filepath.Join(string(p.qemu), "usr/lib/x86_64-linux-gnu/qemu"))
	cmd.Dir = p.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	m := &machine{dir: p.dir, done: make(chan struct{}), answer: make(chan message), waiting: make(map[string]chan json.RawMessage)}
	cmd.Stderr = &m.stderr
	if err := m.start(cmd); err != nil {
		return nil, err
	}
	if err := m.connect(ctx); err != nil {
		m.kill()
		return nil, fmt.Errorf("talk to QEMU: %w", errors.Join(err, m.failure()))
	}
	return m, nil
}

// start starts QEMU from a thread that lives until QEMU has ended: the kernel kills QEMU at the end
// of the thread, which ends only with this process.
func (m *machine) start(cmd *exec.Cmd) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		m.process = cmd.Process
		started <- err
		if err != nil {
			return
		}
		m.err = cmd.Wait()
		close(m.done)
	}()
	return <-started
}

// args returns the arguments of QEMU.
func (p *prepared) args() []string {
	c := p.config
	share := func(dir string) string { return filepath.Join(string(p.qemu), dir) }
	args := []string{
		"-machine", "q35,accel=tcg,kernel-irqchip=split", "-cpu", "max", "-m", strconv.Itoa(c.Memory),
		"-L", share("usr/share/qemu"), "-L", share("usr/share/seabios"), "-L", share("usr/lib/ipxe/qemu"),
		"-global", "e1000e.romfile=", "-global", "igb.romfile=", "-global", "virtio-net-pci.romfile=", // no booting from networks
		"-nodefaults", "-no-user-config", "-nographic", "-no-reboot",
		"-serial", "file:" + consoleFile,
		"-qmp", "unix:" + qmpSocket + ",server=on,wait=off",
		"-kernel", p.kernel.Image, "-initrd", initramfsFile,
		"-append", strings.Join(append(p.kargs(), c.Kargs...), " "),
	}
	if c.NUMA {
		half := strconv.Itoa(c.Memory / 2)
		args = append(args, "-smp", fmt.Sprintf("%d,sockets=2", c.CPUs),
			"-object", "memory-backend-ram,id=ram0,size="+half+"M", "-numa", fmt.Sprintf("node,nodeid=0,cpus=0-%d,memdev=ram0", c.CPUs/2-1),
			"-object", "memory-backend-ram,id=ram1,size="+half+"M", "-numa", fmt.Sprintf("node,nodeid=1,cpus=%d-%d,memdev=ram1", c.CPUs/2, c.CPUs-1))
	} else {
		args = append(args, "-smp", strconv.Itoa(c.CPUs))
	}
	switch c.IOMMU {
	case "intel":
		args = append(args, "-device", "intel-iommu,intremap=on,caching-mode=on")
	case "virtio":
		args = append(args, "-device", "virtio-iommu-pci")
	}
	args = append(args, "-chardev", "socket,id=port,path="+portSocket+",server=on,wait=off",
		"-device", "virtio-serial-pci,id=guest-serial", "-device", "virtserialport,chardev=port,name="+inside.Port)
	for i := range c.Disks {
		args = append(args, "-drive", fmt.Sprintf("if=none,id=guest-disk%d,format=raw,file=%s", i, filepath.Base(p.disk(i))),
			"-device", fmt.Sprintf("virtio-blk-pci,drive=guest-disk%d,serial=disk%d", i, i))
	}
	return append(args, c.Args...)
}

// kargs returns the kernel parameters. On a busy machine too few ticks of an emulated timer may
// arrive during the kernel's timer test, and the kernel would panic (timer_irq_works in
// arch/x86/kernel/apic/io_apic.c, 6.1 and 6.12).
func (p *prepared) kargs() []string {
	args := []string{"console=ttyS0", "quiet", "loglevel=5", "panic=-1", "no_timer_check"}
	if p.config.IOMMU == "intel" {
		args = append(args, "intel_iommu=on")
	}
	return args
}

// dial connects to one of QEMU's sockets as soon as the socket exists.
func (m *machine) dial(ctx context.Context, socket string) (net.Conn, error) {
	for {
		conn, err := net.Dial("unix", filepath.Join(m.dir, socket))
		if err == nil {
			return conn, nil
		}
		select {
		case <-m.done:
			return nil, m.failure()
		case <-ctx.Done():
			return nil, errors.Join(err, context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (m *machine) connect(ctx context.Context) error {
	conn, err := m.dial(ctx, qmpSocket)
	if err != nil {
		return err
	}
	m.qmp = conn
	decoder := json.NewDecoder(conn)
	var banner json.RawMessage
	if err := decoder.Decode(&banner); err != nil {
		return err
	}
	go m.listen(decoder)
	_, err = m.command("qmp_capabilities", nil)
	return err
}

func (m *machine) listen(decoder *json.Decoder) {
	defer close(m.answer)
	for {
		var said message
		if decoder.Decode(&said) != nil {
			return
		}
		if said.Event == "" {
			m.answer <- said
			continue
		}
		m.mu.Lock()
		if waiting := m.waiting[said.Event]; waiting != nil {
			select {
			case waiting <- said.Data:
			default: // the previous events were not read
			}
		}
		m.mu.Unlock()
	}
}

// command sends a command to QEMU, and returns the answer.
func (m *machine) command(name string, arguments map[string]any) (json.RawMessage, error) {
	m.asking.Lock()
	defer m.asking.Unlock()
	question := map[string]any{"execute": name}
	if len(arguments) > 0 {
		question["arguments"] = arguments
	}
	if err := json.NewEncoder(m.qmp).Encode(question); err != nil {
		return nil, err
	}
	said, open := <-m.answer
	switch {
	case !open:
		return nil, errors.Join(errors.New("QEMU's monitor is gone"), m.failure())
	case said.Error != nil:
		return nil, fmt.Errorf("%s: %s: %s", name, said.Error.Class, said.Error.Description)
	}
	return said.Return, nil
}

// events returns the data of later events of a name.
func (m *machine) events(name string) <-chan json.RawMessage {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waiting[name] = make(chan json.RawMessage, 64)
	return m.waiting[name]
}

func (m *machine) version() (string, error) {
	answer, err := m.command("query-version", nil)
	if err != nil {
		return "", err
	}
	var v struct {
		QEMU struct{ Major, Minor, Micro int }
	}
	err = json.Unmarshal(answer, &v)
	return fmt.Sprintf("%d.%d.%d", v.QEMU.Major, v.QEMU.Minor, v.QEMU.Micro), err
}

// kill ends QEMU and waits for its end.
func (m *machine) kill() {
	_ = m.process.Kill()
	<-m.done
	if m.qmp != nil {
		_ = m.qmp.Close()
	}
}

// failure returns the reason for the end of QEMU, nil while QEMU runs.
func (m *machine) failure() error {
	select {
	case <-m.done:
		return fmt.Errorf("QEMU ended (%v): %s", m.err, strings.TrimSpace(m.stderr.String()))
	default:
		return nil
	}
}

// QMP sends a command to QEMU, such as device_add, and returns the answer.
func (g *Guest) QMP(t testing.TB, command string, arguments map[string]any) json.RawMessage {
	t.Helper()
	answer, err := g.qemu.command(command, arguments)
	if err != nil {
		t.Fatalf("QMP: %v", err)
	}
	return answer
}

// Monitor runs a command of QEMU's human monitor, such as pcie_aer_inject_error, and returns its
// output.
func (g *Guest) Monitor(t testing.TB, command string) string {
	t.Helper()
	var said string
	if err := json.Unmarshal(g.QMP(t, "human-monitor-command", map[string]any{"command-line": command}), &said); err != nil {
		t.Fatalf("QMP: %s: %v", command, err)
	}
	return said
}

// Events returns the data of QEMU's later events of a name, such as DEVICE_DELETED.
func (g *Guest) Events(name string) <-chan json.RawMessage { return g.qemu.events(name) }
