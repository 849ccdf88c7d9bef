package machine_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"chandler.dev/e2e/machine"
)

// roles are the roles of the test program besides a test: a caller of Start that can be
// killed, and a server that runs in a machine.
var roles = map[string]func() error{
	"caller": beCaller,
	"server": beServer,
}

func TestMain(m *testing.M) {
	if role := roles[os.Getenv("TEST_ROLE")]; role != nil {
		if err := role(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// A trace describes the possible remains of a machine on the host.
type trace struct {
	ID      string
	Init    int
	Dir     string
	Address string
}

// beCaller starts a machine, prints its trace, and waits to be killed.
func beCaller() error {
	dir := os.Getenv("TEST_DIR")
	m, err := machine.Start(context.Background(), machine.Config{
		Program: os.Getenv("TEST_PROGRAM"), Dir: dir, RemoveDir: true, Publish: "127.0.0.1:80",
	})
	if err != nil {
		return err
	}
	if err := m.Command(context.Background(), "sleep", "1000").Start(); err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(trace{m.ID(), m.PID(), dir, m.Published()}); err != nil {
		return err
	}
	select {}
}

func beServer() error {
	listener, err := net.Listen("tcp", "127.0.0.1:80")
	if err != nil {
		return err
	}
	fmt.Println("listening")
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		fmt.Fprintln(conn, "hello from inside")
		conn.Close()
	}
}

func program(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	if path := os.Getenv("TEST_PROGRAM"); path != "" { // built in advance, for hosts without Go
		return path
	}
	path := filepath.Join(t.TempDir(), "machine")
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", path, "chandler.dev/e2e/cmd/machine")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return path
}

func start(t *testing.T, cfg machine.Config) *machine.Machine {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	m, err := machine.Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Stop(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func output(t *testing.T, m *machine.Machine, name string, args ...string) string {
	t.Helper()
	out, err := m.Command(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

func TestMachineHasItsOwn(t *testing.T) {
	m := start(t, machine.Config{
		Program:   program(t),
		Dir:       t.TempDir(),
		Hostname:  "ship",
		Own:       []string{"/var/lib", "/etc/cni"},
		Files:     map[string]string{"/proc/sys/kernel/panic": "10\n"},
		Addresses: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
	})
	tests := map[string]struct {
		script string
		want   string
	}{
		"host name":        {"cat /proc/sys/kernel/hostname", "ship"},
		"PID namespace":    {"cat /proc/1/comm", "machine"},
		"network":          {"ls /sys/class/net", "lo"},
		"address":          {"grep -c '10.96.0.1' /proc/net/fib_trie | grep -v '^0$' >/dev/null && echo yes", "yes"},
		"empty /run":       {"ls /run", "machine"},
		"own directory":    {"ls /var/lib", ""},
		"directory in etc": {"ls /etc/cni", ""},
		"file":             {"cat /proc/sys/kernel/panic", "10"},
		"devices":          {"stat -c %t:%T /dev/null", "1:3"},
		"read-only root":   {"touch /usr/mark 2>/dev/null || echo refused", "refused"},
		"writable etc":     {"echo a > /etc/mark && cat /etc/mark", "a"},
		"cgroup":           {"cut -d: -f3 /proc/self/cgroup | sort -u | grep -v -e '^/$' -e '^/init$' || echo roots", "roots"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if got := output(t, m, "sh", "-c", test.script); got != test.want {
				t.Errorf("%s\ngot  %q\nwant %q", test.script, got, test.want)
			}
		})
	}
	if _, err := os.Stat("/etc/mark"); err == nil {
		t.Error("/etc/mark is on the host")
	}
}

func TestCommand(t *testing.T) {
	m := start(t, machine.Config{Program: program(t), Dir: t.TempDir()})

	t.Run("status", func(t *testing.T) {
		cmd := m.Command(t.Context(), "sh", "-c", "exit 7")
		if _ = cmd.Run(); cmd.ProcessState.ExitCode() != 7 {
			t.Errorf("got %d, want 7", cmd.ProcessState.ExitCode())
		}
	})
	t.Run("signal", func(t *testing.T) {
		cmd := m.Command(t.Context(), "sh", "-c", "trap 'exit 3' TERM; echo ready; while :; do sleep 0.1; done")
		stdout, _ := cmd.StdoutPipe()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		_, _ = bufio.NewReader(stdout).ReadString('\n')
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != 3 {
			t.Errorf("got %d, want 3", cmd.ProcessState.ExitCode())
		}
	})
	t.Run("killed", func(t *testing.T) {
		cmd := m.Command(t.Context(), "sleep", "1000")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		sleeping := func() bool {
			return strings.Contains(output(t, m, "sh", "-c", "cat /proc/[0-9]*/comm 2>/dev/null; true"), "sleep")
		}
		eventually(t, "sleep runs", sleeping)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		eventually(t, "sleep is gone", func() bool { return !sleeping() })
	})
	// A port of a killed program is free once the command has ended.
	for name, kill := range map[string]func(cmd *exec.Cmd, cancel func()){
		"signal Kill":    func(cmd *exec.Cmd, _ func()) { _ = cmd.Process.Signal(machine.Kill) },
		"end of context": func(_ *exec.Cmd, cancel func()) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			cmd := m.Command(ctx, "sleep", "1000")
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var child int
			eventually(t, "sleep runs", func() bool {
				threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", cmd.Process.Pid))
				for _, children := range threads {
					if data, _ := os.ReadFile(children); len(data) > 0 {
						child, _ = strconv.Atoi(strings.TrimSpace(string(data)))
					}
				}
				return child != 0
			})
			kill(cmd, cancel)
			_ = cmd.Wait()
			if alive(child) {
				t.Error("the program runs after the end of its command")
			}
			if cmd.ProcessState.ExitCode() != 128+int(syscall.SIGKILL) {
				t.Errorf("got %s, want the status of a killed program", cmd.ProcessState)
			}
		})
	}
}

func TestPath(t *testing.T) {
	m := start(t, machine.Config{Program: program(t), Dir: t.TempDir(), Own: []string{"/var/lib"}})
	output(t, m, "sh", "-c", "mkdir /run/cdi && echo spec > /run/cdi/a.json && echo own > /var/lib/b")
	for path, want := range map[string]string{"/var/run/cdi/a.json": "spec\n", "/var/lib/b": "own\n"} {
		got, err := os.ReadFile(m.Path(path))
		if err != nil || string(got) != want {
			t.Errorf("%s: got %q, %v; want %q", path, got, err, want)
		}
	}
}

func TestForwardAndPublish(t *testing.T) {
	m := start(t, machine.Config{
		Program:   program(t),
		Dir:       t.TempDir(),
		Addresses: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Forward:   map[string]string{"10.96.0.1:443": "127.0.0.1:80"},
		Publish:   "10.96.0.1:443",
	})
	server := m.Command(t.Context(), os.Args[0])
	server.Env = append(os.Environ(), "TEST_ROLE=server")
	stdout, _ := server.StdoutPipe()
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("tcp", m.Published())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	got, err := io.ReadAll(conn)
	if err != nil || string(got) != "hello from inside\n" {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestStopLeavesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	m := start(t, machine.Config{Program: program(t), Dir: dir, RemoveDir: true, Publish: "127.0.0.1:80"})
	if err := m.Command(t.Context(), "setsid", "sleep", "1000").Start(); err != nil {
		t.Fatal(err)
	}
	if err := m.Stop(); err != nil {
		t.Fatal(err)
	}
	if left := remains(trace{m.ID(), m.PID(), dir, m.Published()}); left != "" {
		t.Error(left)
	}
}

func TestKilledCallerLeavesNothing(t *testing.T) {
	caller, seen := startCaller(t)
	_ = caller.Process.Kill()
	_ = caller.Wait()
	eventually(t, "nothing is left", func() bool { return remains(seen) == "" })
}

func TestStartSweepsWhatKilledSupervisorLeft(t *testing.T) {
	caller, seen := startCaller(t)
	supervisor, err := parent(seen.Init)
	if err != nil {
		t.Fatal(err)
	}
	_ = syscall.Kill(supervisor, syscall.SIGKILL)
	_ = caller.Process.Kill()
	_ = caller.Wait()
	eventually(t, "the machine is dead", func() bool { return !alive(seen.Init) })
	if remains(seen) == "" {
		t.Fatal("nothing is left to sweep")
	}
	start(t, machine.Config{Program: program(t), Dir: t.TempDir()})
	if left := remains(seen); left != "" {
		t.Error(left)
	}
}

func startCaller(t *testing.T) (*exec.Cmd, trace) {
	t.Helper()
	program := program(t)
	dir, err := os.MkdirTemp("", "machine-test-") // t.TempDir would remove the directory itself
	if err != nil {
		t.Fatal(err)
	}
	caller := exec.Command(os.Args[0])
	caller.Env = append(os.Environ(), "TEST_ROLE=caller", "TEST_PROGRAM="+program, "TEST_DIR="+dir)
	caller.Stderr = os.Stderr
	stdout, _ := caller.StdoutPipe()
	if err := caller.Start(); err != nil {
		t.Fatal(err)
	}
	var seen trace
	if err := json.NewDecoder(stdout).Decode(&seen); err != nil {
		t.Fatal(err)
	}
	return caller, seen
}

// remains returns the first remaining part of a machine, or "".
func remains(seen trace) string {
	if alive(seen.Init) {
		return fmt.Sprintf("process %d", seen.Init)
	}
	cgroups, _ := filepath.Glob("/sys/fs/cgroup/chandler-e2e-" + seen.ID)
	below, _ := filepath.Glob("/sys/fs/cgroup/*/chandler-e2e-" + seen.ID)
	for _, path := range append(append(cgroups, below...), seen.Dir, "/run/chandler-e2e/"+seen.ID+".json") {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	if mounts, _ := os.ReadFile("/proc/self/mountinfo"); strings.Contains(string(mounts), seen.Dir) {
		return "a mount of " + seen.Dir
	}
	if conn, err := net.Dial("tcp", seen.Address); err == nil {
		conn.Close()
		return "listener " + seen.Address
	}
	return ""
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

// parent returns the fourth field of /proc/PID/stat, counted after the name in parentheses.
func parent(pid int) (int, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	return strconv.Atoi(fields[1])
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for limit := time.Now().Add(time.Minute); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}
