package sharing

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	signals "os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"chandler.dev/internal/hostservice/wire"
)

const (
	gpuA = "GPU-00000000-0000-0000-0000-00000000000a"
	gpuB = "GPU-00000000-0000-0000-0000-00000000000b"
)

// fake is the program in place of NVIDIA's; it is static, and so runs in any root.
var fake string

func TestMain(m *testing.M) {
	if dir := os.Getenv("SHARING_DIR_OF_TEST"); dir != "" {
		serve(dir)
		return
	}
	dir, err := os.MkdirTemp("", "sharing")
	if err != nil {
		panic(err)
	}
	fake = filepath.Join(dir, "fake")
	build := exec.Command("go", "build", "-o", fake, "./testdata/fake")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		panic(fmt.Sprintf("%v: %s", err, out))
	}
	defer os.RemoveAll(dir)
	m.Run()
}

// serve runs the supervisor in a separate process.
func serve(dir string) {
	config := Config{Dir: filepath.Join(dir, "state"), Root: filepath.Join(dir, "root"), Quit: time.Second}
	ctx, stop := signals.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	do := Serve
	if os.Getenv("SHARING_WITH_PARENT") != "" {
		do = Run
	}
	if err := do(ctx, config); err != nil {
		panic(err)
	}
}

// machine is a node with NVIDIA's programs.
type machine struct {
	t      *testing.T
	config Config
}

func newMachine(t *testing.T, behaviour ...string) *machine {
	t.Helper()
	dir, err := os.MkdirTemp("", "mps") // short, because socket paths have a limit
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t}
	m.config = Config{
		Dir: filepath.Join(dir, "state"), Root: filepath.Join(dir, "root"), Quit: 500 * time.Millisecond,
		Log: log.New(io.Discard, "", 0),
	}
	for _, sub := range []string{"usr/bin", "tmp", "dev", "proc"} {
		if err := os.MkdirAll(filepath.Join(m.config.Root, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{control, management} {
		if err := os.Link(fake, filepath.Join(m.config.Root, "usr/bin", name)); err != nil {
			t.Fatal(err)
		}
	}
	m.behave(behaviour...)
	t.Cleanup(func() {
		for _, uid := range []string{"one", "two"} {
			signal(m.dir(uid), syscall.SIGKILL)
		}
		os.RemoveAll(dir)
	})
	return m
}

// behave sets the behaviour of NVIDIA's programs from now on.
func (m *machine) behave(how ...string) {
	m.t.Helper()
	if err := os.WriteFile(filepath.Join(m.config.Root, "behaviour"), []byte(strings.Join(how, "\n")+"\n"), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) supervisor() *Supervisor {
	m.t.Helper()
	k, err := New(m.config)
	if err != nil {
		m.t.Fatal(err)
	}
	return k
}

func (m *machine) dir(uid string) string { return filepath.Join(m.config.Dir, uid) }

// left returns what remains of claims: directories, and processes.
func (m *machine) left(uids ...string) (left []string) {
	entries, _ := os.ReadDir(m.config.Dir)
	for _, entry := range entries {
		if entry.IsDir() {
			left = append(left, entry.Name())
		}
	}
	for _, uid := range uids {
		for _, p := range ofClaim(m.dir(uid)) {
			left = append(left, fmt.Sprint("process ", p.PID))
		}
	}
	return left
}

// managed checks the calls of nvidia-smi.
func (m *machine) managed(want ...string) {
	m.t.Helper()
	said, err := os.ReadFile(filepath.Join(m.config.Root, "smi.log"))
	if got := strings.Split(strings.TrimSpace(string(said)), "\n"); err != nil || !slices.Equal(got, want) {
		m.t.Errorf("nvidia-smi: %q, %v\nwant %q", got, err, want)
	}
}

func order(how ...string) wire.Order {
	o := wire.Order{How: map[string]string{gpus: gpuA}}
	for i := 0; i < len(how); i += 2 {
		o.How[how[i]] = how[i+1]
	}
	return o
}

var plain = order(mps, "true")

// A daemon runs after its order and applies the limits. After its end, nothing remains of it,
// whatever its faults.
func TestDaemon(t *testing.T) {
	for _, behaviour := range []string{"", "slow", "leaves its server", "leaves its pipe", "stubborn"} {
		t.Run(behaviour, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t, behaviour)
			k := m.supervisor()
			uid := "daemon-" + strings.ReplaceAll(behaviour, " ", "-")
			limited := order(gpus, gpuA+","+gpuB, mps, "true", threads, "40", memory, "4096")
			for range 2 { // the second order changes nothing
				if err := k.Begin(t.Context(), uid, limited); err != nil {
					t.Fatal(err)
				}
			}
			for command, want := range map[string]string{
				"get_default_active_thread_percentage":        "40.0\n",
				"get_default_device_pinned_mem_limit " + gpuB: "4096M\n",
			} {
				if answer, err := k.command(t.Context(), uid, command); answer != want || err != nil {
					t.Errorf("%s: %q, %v", command, answer, err)
				}
			}
			environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", k.Claims()[0].Process.PID))
			if err != nil || !slices.Contains(strings.Split(string(environ), "\x00"), "CUDA_VISIBLE_DEVICES="+gpuA+","+gpuB) {
				t.Errorf("%q, %v", environ, err)
			}
			if err := k.End(t.Context(), uid); err != nil {
				t.Fatal(err)
			}
			if left := m.left(uid); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
			m.managed("-i "+gpuA+" -c EXCLUSIVE_PROCESS", "-i "+gpuB+" -c EXCLUSIVE_PROCESS", "-i "+gpuA+" -c DEFAULT", "-i "+gpuB+" -c DEFAULT")
			if err := k.End(t.Context(), uid); err != nil {
				t.Errorf("again: %v", err)
			}
		})
	}
}

// Each claim has its own daemon with its own limits, and ends independently.
func TestTwoClaims(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	k := m.supervisor()
	limits := map[string]string{"one": "30", "two": "70"}
	for uid, gpu := range map[string]string{"one": gpuA, "two": gpuB} {
		if err := k.Begin(t.Context(), uid, order(gpus, gpu, mps, "true", threads, limits[uid])); err != nil {
			t.Fatal(err)
		}
	}
	for uid, limit := range limits {
		if answer, err := k.command(t.Context(), uid, "get_default_active_thread_percentage"); answer != limit+".0\n" || err != nil {
			t.Errorf("claim %s: %q, %v", uid, answer, err)
		}
	}
	if err := k.End(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if answer, err := k.command(t.Context(), "two", "get_default_active_thread_percentage"); answer != "70.0\n" || err != nil || len(ofClaim(m.dir("one"))) > 0 {
		t.Errorf("%q, %v, %v", answer, err, ofClaim(m.dir("one")))
	}
	if err := k.End(t.Context(), "two"); err != nil || len(m.left("one", "two")) > 0 {
		t.Errorf("%v; left: %q", err, m.left("one", "two"))
	}
}

// Refusal of an order by a daemon causes an error and ends the daemon. The daemon can be started
// later.
func TestRefusals(t *testing.T) {
	for behaviour, want := range map[string]string{
		"dies":    "ended at once; its log ends with \"cannot load libcuda.so.1\"",
		"silent":  "does not answer within",
		"deaf":    "does not answer within",
		"refuses": "operation not permitted",
		"forgets": "does not keep to 40 %",
	} {
		t.Run(behaviour, func(t *testing.T) {
			t.Parallel()
			m := newMachine(t, behaviour)
			if strings.Contains(want, "within") {
				m.config.Begin, m.config.Ask = time.Second, 300*time.Millisecond
			}
			k := m.supervisor()
			limited := order(mps, "true", threads, "40")
			uid := "refusal-" + behaviour
			if err := k.Begin(t.Context(), uid, limited); err == nil || !strings.Contains(err.Error(), want) {
				t.Fatalf("%v; want %q", err, want)
			}
			if all := k.Claims(); len(ofClaim(m.dir(uid))) > 0 || all[0].Broken == "" {
				t.Errorf("left: %v, %+v", ofClaim(m.dir(uid)), all)
			}
			if err := k.Begin(t.Context(), "other", plain); err == nil || !strings.Contains(err.Error(), "claim "+uid+" has it still") {
				t.Errorf("another claim: %v", err)
			}
			m.behave()
			k.config.Begin, k.config.Ask = 20*time.Second, 5*time.Second
			if err := k.Begin(t.Context(), uid, limited); err != nil {
				t.Fatal(err)
			}
			if err := k.End(t.Context(), uid); err != nil || len(m.left(uid)) > 0 {
				t.Errorf("%v; left: %q", err, m.left(uid))
			}
		})
	}
}

// Invalid orders have no effect.
func TestOrders(t *testing.T) {
	k := newMachine(t).supervisor()
	for uid, how := range map[string]wire.Order{
		"../x": plain, "": plain,
		"a": order(gpus, "0", mps, "true"), "b": order(), "c": order(mps, "true", timeSlice, "1"), "d": order(timeSlice, "4"),
		"e": order(mps, "true", threads, "101"), "f": order(mps, "true", memory, "4G"), "g": order(mps, "true", "run", "x"),
	} {
		if err := k.Begin(t.Context(), uid, how); err == nil || len(k.Claims()) > 0 {
			t.Errorf("%q: %v, %+v", uid, err, k.Claims())
		}
	}
}

// The end of a daemon is reported. After another order, the new daemon serves the containers that
// have the claim's directory.
func TestDaemonDies(t *testing.T) {
	m := newMachine(t)
	k := m.supervisor()
	if err := k.Begin(t.Context(), "one", plain); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(filepath.Join(m.config.Dir, "one", pipes))
	if err != nil {
		t.Fatal(err)
	}
	dead := k.Claims()[0].Process.PID
	if err := syscall.Kill(dead, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { return k.Claims()[0].Broken != "" })
	if got, want := k.Claims()[0].Broken, fmt.Sprintf("MPS daemon %d has ended by itself", dead); got != want {
		t.Errorf("%q; want %q", got, want)
	}
	if err := k.Begin(t.Context(), "one", plain); err != nil { // although the pipe and the server remain
		t.Fatal(err)
	}
	after, err := os.Stat(filepath.Join(m.config.Dir, "one", pipes))
	if err != nil || !os.SameFile(before, after) || k.Claims()[0].Broken != "" {
		t.Errorf("%v, %+v", err, k.Claims())
	}
	if err := k.End(t.Context(), "one"); err != nil || len(m.left("one")) > 0 {
		t.Errorf("%v; left: %q", err, m.left("one"))
	}
}

// Another order for a claim ends the previous one.
func TestAnotherOrder(t *testing.T) {
	m := newMachine(t)
	k := m.supervisor()
	for _, o := range []wire.Order{plain, order(mps, "true", threads, "10"), order(timeSlice, "1"), order(gpus, gpuB, mps, "true")} {
		if err := k.Begin(t.Context(), "one", o); err != nil {
			t.Fatal(err)
		}
		if daemons := len(ofClaim(m.dir("one"))); (daemons > 0) != (o.How[mps] != "") || daemons > 2 {
			t.Errorf("%v: %d processes", o.How, daemons)
		}
	}
	if err := k.Begin(t.Context(), "two", plain); err != nil { // GPU A is free again
		t.Error(err)
	}
	k.Stop(t.Context())
	if left := append(ofClaim(m.dir("one")), ofClaim(m.dir("two"))...); len(left) > 0 {
		t.Errorf("after stop: %v", left)
	}
}

// A time slice is in force while the claim has the GPU, and is reset to the driver's default
// afterwards.
func TestTimeSlice(t *testing.T) {
	m := newMachine(t)
	k := m.supervisor()
	if err := k.Begin(t.Context(), "one", order(timeSlice, "2")); err != nil {
		t.Fatal(err)
	}
	k = m.supervisor() // another process
	if all := k.Claims(); len(all) != 1 || all[0].Broken != "" {
		t.Fatalf("%+v", all)
	}
	if err := k.End(t.Context(), "one"); err != nil || len(m.left("one")) > 0 {
		t.Fatalf("%v; left: %q", err, m.left("one"))
	}
	m.managed("compute-policy -i "+gpuA+" --set-timeslice=2", "compute-policy -i "+gpuA+" --set-timeslice=0")
}

// A GPU that cannot be changed causes an error. It does not delay the end of a claim if nothing was
// changed, or if nothing can be restored. Otherwise, the claim ends once the GPU is restored.
func TestUnmanageable(t *testing.T) {
	m := newMachine(t)
	for _, behaviour := range []string{"cannot manage", "may not manage"} {
		for what, o := range map[string]wire.Order{"time slice": order(timeSlice, "2"), "compute mode": plain} {
			k := m.supervisor()
			m.behave(behaviour)
			if err := k.Begin(t.Context(), "one", o); err == nil || !strings.Contains(err.Error(), what+" of GPU "+gpuA+": exit status") {
				t.Errorf("%s: %s: %v", behaviour, what, err)
			}
			if err := k.End(t.Context(), "one"); err != nil || len(m.left("one")) > 0 {
				t.Errorf("%s: %s was never set: %v; left: %q", behaviour, what, err, m.left("one"))
			}
			m.behave()
			if err := k.Begin(t.Context(), "one", o); err != nil {
				t.Fatal(err)
			}
			m.behave(behaviour)
			if err := k.End(t.Context(), "one"); (err == nil) != (behaviour == "cannot manage") {
				t.Errorf("%s: %s was set: %v", behaviour, what, err)
			}
			m.behave()
			if err := k.End(t.Context(), "one"); err != nil || len(m.left("one")) > 0 {
				t.Errorf("%s: %v; left: %q", behaviour, err, m.left("one"))
			}
		}
	}
	if err := os.Remove(filepath.Join(m.config.Root, "usr/bin", management)); err != nil {
		t.Fatal(err)
	}
	k := m.supervisor()
	if err := k.Begin(t.Context(), "one", plain); err == nil || !strings.Contains(err.Error(), "there is no nvidia-smi in "+m.config.Root) {
		t.Error(err)
	}
	if err := k.End(t.Context(), "one"); err != nil || len(m.left("one")) > 0 {
		t.Errorf("%v; left: %q", err, m.left("one"))
	}
}

// The second GPU of a claim cannot be changed. The first one is restored, and the claim ends although
// the second GPU cannot be restored either, also by the next process.
func TestSecondGPUIsUnmanageable(t *testing.T) {
	for what, test := range map[string]struct {
		order wire.Order
		calls []string // of nvidia-smi, for the first GPU
	}{
		"time slice":   {order(gpus, gpuA+","+gpuB, timeSlice, "2"), []string{"compute-policy -i " + gpuA + " --set-timeslice=2", "compute-policy -i " + gpuA + " --set-timeslice=0"}},
		"compute mode": {order(gpus, gpuA+","+gpuB, mps, "true"), []string{"-i " + gpuA + " -c EXCLUSIVE_PROCESS", "-i " + gpuA + " -c DEFAULT"}},
	} {
		for _, killed := range []bool{false, true} {
			m := newMachine(t, "may not manage "+gpuB)
			k := m.supervisor()
			if err := k.Begin(t.Context(), "one", test.order); err == nil || !strings.Contains(err.Error(), what+" of GPU "+gpuB+": exit status") {
				t.Errorf("%s: %v", what, err)
			}
			m.managed(test.calls...)
			if killed {
				k = m.supervisor()
			}
			if err := k.End(t.Context(), "one"); err != nil || len(m.left("one")) > 0 {
				t.Errorf("%s, killed %t: %v; left: %q", what, killed, err, m.left("one"))
			}
			if err := k.Begin(t.Context(), "two", plain); err != nil {
				t.Errorf("%s, killed %t: the next claim of the first GPU: %v", what, killed, err)
			}
			if err := k.End(t.Context(), "two"); err != nil {
				t.Error(err)
			}
		}
	}
}

func await(t *testing.T, so func() bool) {
	t.Helper()
	for limit := time.Now().Add(time.Minute); !so(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatal("it did not come to be so")
		}
	}
}

// In its own mount namespace, a daemon has the claim's shared memory and pipes, in the root of
// NVIDIA's driver.
func TestPrivate(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounts take root")
	}
	m := newMachine(t)
	m.config.Private = true
	k := m.supervisor()
	err := k.Begin(t.Context(), "one", order(mps, "true", threads, "30"))
	if err != nil && strings.Contains(err.Error(), "operation not permitted") {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	shm := filepath.Join(m.config.Dir, "one", sharedMemory)
	if text, err := os.ReadFile(filepath.Join(shm, "of-mps-daemon")); string(text) != gpuA || err != nil || !isMount(shm) {
		t.Errorf("shared memory: %q, %v", text, err)
	}
	if entries, err := os.ReadDir(filepath.Join(m.config.Root, "tmp")); len(entries) > 0 || err != nil {
		t.Errorf("others see %v, %v", entries, err)
	}
	m.supervisor() // nothing is mounted twice

	// After a reboot, only the directory remains.
	await(t, func() bool { return !signal(m.dir("one"), syscall.SIGKILL) })
	if err := unix.Unmount(shm, 0); err != nil {
		t.Fatal(err)
	}
	k = m.supervisor()
	if all := k.Claims(); len(all) != 1 || all[0].Broken != "its daemon ended while chandler-host was not running" {
		t.Errorf("after a reboot: %+v", all)
	}
	if err := k.Begin(t.Context(), "one", order(mps, "true", threads, "30")); err != nil || !isMount(shm) || len(ofClaim(m.dir("one"))) != 2 {
		t.Errorf("after a reboot: %v, mounted %t, processes %v", err, isMount(shm), ofClaim(m.dir("one")))
	}
	if err := k.End(t.Context(), "one"); err != nil || len(m.left("one")) > 0 {
		t.Errorf("%v; left: %q", err, m.left("one"))
	}
}
