package inuse

import (
	"bufio"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
)

// childEnv turns the test's program into a process with threads and files: "<files> <threads>
// <unshared|shared|leaderless>".
const childEnv = "INUSE_TEST_CHILD"

func TestMain(m *testing.M) {
	if wanted := os.Getenv(childEnv); wanted != "" {
		runtime.LockOSThread()
		child(wanted)
		return
	}
	m.Run()
}

// child opens files, starts threads, reports readiness, and waits for the end of its input.
func child(wanted string) {
	var files, threads int
	var kind string
	if _, err := fmt.Sscan(wanted, &files, &threads, &kind); err != nil {
		panic(err)
	}
	for range files {
		if _, err := unix.Open("/dev/null", unix.O_RDONLY, 0); err != nil {
			panic(err)
		}
	}
	var ready sync.WaitGroup
	for range threads {
		ready.Add(1)
		go func() {
			runtime.LockOSThread()
			ready.Done()
			select {}
		}()
	}
	ready.Add(1)
	go func() { // a thread with /dev/zero open, in a table of its own if wanted
		runtime.LockOSThread()
		if kind == "unshared" {
			if err := unix.Unshare(unix.CLONE_FILES); err != nil {
				panic(err)
			}
		}
		if _, err := unix.Open("/dev/zero", unix.O_RDONLY, 0); err != nil {
			panic(err)
		}
		ready.Done()
		select {}
	}()
	ready.Wait()
	fmt.Fprintln(os.Stdout, "ready")
	if kind == "leaderless" && os.Getpid() == unix.Gettid() {
		_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0) // only the first thread
	}
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// start starts a child. The child ends with the test.
func start(t testing.TB, files, threads int, kind string) (process int) {
	t.Helper()
	cmd := exec.Command(os.Args[0]) //nolint:gosec // this program
	cmd.Env = append(os.Environ(), childEnv+"="+fmt.Sprint(files, threads, " ", kind))
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		in.Close()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		t.Fatalf("child: %q, %v", line, err)
	}
	return cmd.Process.Pid
}

func realHost(t testing.TB) *discovery.Host {
	t.Helper()
	root, err := hostfs.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	return &discovery.Host{FS: root}
}

// without returns an opened for a kernel without table comparison.
func without(host fs.FS) *opened {
	o := newOpened(host)
	o.sharesFiles = func(string, string) bool { return false }
	return o
}

// The open files of threads are found whether the threads share the table of the process or have
// their own, and after the first thread has ended, also if the kernel does not compare tables.
func TestThreads(t *testing.T) {
	host := realHost(t)
	for _, kind := range []string{"shared", "unshared", "leaderless"} {
		process := start(t, 3, 5, kind)
		if kind == "leaderless" {
			waitForZombie(t, process)
		}
		for name, o := range map[string]*opened{"compared": newOpened(host.FS), "not compared": without(host.FS)} {
			found, err := o.read(host, strconv.Itoa(process), false)
			if !found || err != nil || o.users["/dev/zero"] == "" || o.users["/dev/null"] == "" {
				t.Errorf("%s, %s: found %t, %v, open %v", kind, name, found, err, o.users)
			}
		}
	}
}

// waitForZombie waits until the first thread of a process has ended.
func waitForZombie(t *testing.T, process int) {
	t.Helper()
	for limit := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", process))
		if err != nil || time.Now().After(limit) {
			t.Fatalf("the first thread has not ended: %s, %v", stat, err)
		}
		if _, state, _ := strings.Cut(string(stat), ") "); strings.HasPrefix(state, "Z") {
			return
		}
	}
}

// A shared table is read once, and a thread with a table of its own is read separately.
func TestSharedTable(t *testing.T) {
	host := realHost(t)
	process := strconv.Itoa(start(t, 3, 5, "unshared"))
	shares := sharesFiles(host.FS)
	if !shares(process, process) {
		t.Skip("the kernel does not compare tables here")
	}
	var apart []string
	for _, thread := range threadsOf(host.FS, process) {
		if !shares(thread, process) {
			apart = append(apart, thread)
		}
	}
	if len(apart) != 1 {
		t.Errorf("threads with a table of their own: %q", apart)
	}
	first := newOpened(host.FS)
	first.sharesFiles = func(string, string) bool { return true }
	if _, err := first.read(host, process, false); err != nil || first.users["/dev/null"] == "" || first.users["/dev/zero"] != "" {
		t.Errorf("open in the first table: %v, %v", first.users, err)
	}
}

// /proc of a recorded host does not describe this machine's threads.
func TestIsOwnProc(t *testing.T) {
	if isOwnProc(os.DirFS(t.TempDir())) {
		t.Error("an empty directory is taken for /proc of this machine")
	}
}

// BenchmarkOpenFiles reads the open files of a process with 10,000 files and 200 threads.
func BenchmarkOpenFiles(b *testing.B) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Max < 12000 {
		b.Skipf("a process may have %d files open: %v", limit.Max, err)
	}
	host := realHost(b)
	process := strconv.Itoa(start(b, 10000, 200, "shared"))
	for name, o := range map[string]func(fs.FS) *opened{"kcmp": newOpened, "without": without} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := o(host.FS).read(host, process, false); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
