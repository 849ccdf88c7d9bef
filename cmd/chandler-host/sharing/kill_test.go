package sharing

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"chandler.dev/internal/hostservice/wire"
)

// process starts the supervisor as a separate process, with additional environment variables.
func (m *machine) process(env ...string) *exec.Cmd {
	m.t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), "SHARING_DIR_OF_TEST="+filepath.Dir(m.config.Dir)), env...)
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

// call sends a request to the supervisor, until it answers.
func (m *machine) call(method, path string, body any) (string, int) {
	m.t.Helper()
	client := http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(m.config.Dir, wire.Socket))
		},
	}}
	data, err := json.Marshal(body)
	if err != nil {
		m.t.Fatal(err)
	}
	for limit := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		request, err := http.NewRequestWithContext(m.t.Context(), method, "http://nvidia"+path, bytes.NewReader(data))
		if err != nil {
			m.t.Fatal(err)
		}
		response, err := client.Do(request)
		if err == nil {
			defer response.Body.Close()
			text, err := io.ReadAll(response.Body)
			if err == nil {
				return string(text), response.StatusCode
			}
		}
		if time.Now().After(limit) {
			m.t.Fatal(err)
		}
	}
}

// A killed supervisor leaves its daemon to the next one, which adopts the daemon, detects its end,
// and ends it.
func TestSupervisorIsKilled(t *testing.T) {
	m := newMachine(t)
	first := m.process()
	if text, status := m.call("PUT", wire.ClaimsPath+"/one", plain); status != http.StatusNoContent {
		t.Fatal(status, text)
	}
	var before, after []wire.Claim
	text, _ := m.call("GET", wire.ClaimsPath, nil)
	if err := json.Unmarshal([]byte(text), &before); err != nil {
		t.Fatal(err)
	}
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = first.Wait()
	m.process()
	text, _ = m.call("GET", wire.ClaimsPath, nil)
	if err := json.Unmarshal([]byte(text), &after); err != nil || fmt.Sprint(before) != fmt.Sprint(after) || !isAlive(after[0].Process) {
		t.Fatalf("%+v, then %+v, %v", before, after, err)
	}
	if text, status := m.call("PUT", wire.ClaimsPath+"/one", plain); status != http.StatusNoContent || !isAlive(after[0].Process) {
		t.Fatal("it is not the same daemon any more", status, text)
	}
	if text, status := m.call("PUT", wire.ClaimsPath+"/two", plain); status != http.StatusInternalServerError {
		t.Fatal("another claim got the GPU", status, text)
	}
	if text, status := m.call("PUT", wire.ClaimsPath+"/two", order()); status != http.StatusBadRequest {
		t.Fatal(status, text)
	}
	if err := syscall.Kill(after[0].Process.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool {
		text, _ := m.call("GET", wire.ClaimsPath, nil)
		return json.Unmarshal([]byte(text), &after) == nil && after[0].Broken != ""
	})
	if text, status := m.call("DELETE", wire.ClaimsPath+"/one", nil); status != http.StatusNoContent || len(m.left("one")) > 0 {
		t.Fatal(status, text, m.left("one"))
	}
}

// claims returns the claims by the supervisor's answer.
func (m *machine) claims() (all []wire.Claim) {
	m.t.Helper()
	text, _ := m.call("GET", wire.ClaimsPath, nil)
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		m.t.Fatal(err)
	}
	return all
}

// child returns a child of a process that is not among the others.
func (m *machine) child(pid int, others ...int) (child int) {
	m.t.Helper()
	await(m.t, func() bool {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) // any thread may have started it
		for _, file := range threads {
			text, _ := os.ReadFile(file)
			for field := range strings.FieldsSeq(string(text)) {
				if child, _ = strconv.Atoi(field); !slices.Contains(others, child) {
					return true
				}
			}
		}
		return false
	})
	return child
}

// After a crash, the parent restarts the supervisor. The parent keeps the daemons, and reaps them
// when they end. Both processes end with all daemons on a signal, or when the parent is killed.
func TestParent(t *testing.T) {
	m := newMachine(t)
	parent := m.process("SHARING_WITH_PARENT=1")
	if text, status := m.call("PUT", wire.ClaimsPath+"/one", plain); status != http.StatusNoContent {
		t.Fatal(status, text)
	}
	before := m.claims()
	first := m.child(parent.Process.Pid)
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	daemon := before[0].Process
	second := m.child(parent.Process.Pid, first, daemon.PID)
	if after := m.claims(); fmt.Sprint(before) != fmt.Sprint(after) || !isAlive(daemon) {
		t.Fatalf("%+v, then %+v", before, after)
	}
	if err := syscall.Kill(daemon.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { return syscall.Kill(daemon.PID, 0) != nil }) // it is reaped, and not left as a zombie
	await(t, func() bool { return m.claims()[0].Broken != "" })
	if text, status := m.call("PUT", wire.ClaimsPath+"/one", plain); status != http.StatusNoContent {
		t.Fatal(status, text)
	}
	if err := parent.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := parent.Wait(); err != nil || syscall.Kill(second, 0) == nil || len(ofClaim(m.dir("one"))) > 0 {
		t.Errorf("%v, %v", err, ofClaim(m.dir("one")))
	}

	parent = m.process("SHARING_WITH_PARENT=1")
	if text, status := m.call("PUT", wire.ClaimsPath+"/one", plain); status != http.StatusNoContent {
		t.Fatal(status, text)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { return len(ofClaim(m.dir("one"))) == 0 })
}

// A supervisor with repeated crashes is not restarted forever.
func TestParentGivesUp(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	if err := os.WriteFile(m.config.Dir, nil, 0o600); err != nil { // in place of the directory
		t.Fatal(err)
	}
	began := time.Now()
	if err := m.process("SHARING_WITH_PARENT=1").Wait(); err == nil || time.Since(began) < (maxCrashes-1)*restartPause {
		t.Errorf("%v after %s", err, time.Since(began))
	}
}

// A daemon without limits, left by a killed supervisor, is not taken for one with limits.
func TestSupervisorIsKilledBeforeLimits(t *testing.T) {
	m := newMachine(t, "deaf")
	first := m.process()
	started := make(chan wire.Process, 1)
	go func() {
		var early wire.Claim
		for early.Process.PID == 0 {
			time.Sleep(10 * time.Millisecond)
			if data, err := os.ReadFile(filepath.Join(m.config.Dir, "one", wire.Record)); err == nil {
				_ = json.Unmarshal(data, &early)
			}
		}
		_ = first.Process.Kill()
		_ = first.Wait()
		started <- early.Process
		m.behave()
		m.process()
	}()
	// The first supervisor does not answer this, and the second one does.
	if text, status := m.call("PUT", wire.ClaimsPath+"/one", order(mps, "true", threads, "40")); status != http.StatusNoContent {
		t.Fatal(status, text)
	}
	if answer, err := m.supervisor().command(t.Context(), "one", "get_default_active_thread_percentage"); answer != "40.0\n" || err != nil {
		t.Errorf("%q, %v", answer, err)
	}
	if isAlive(<-started) {
		t.Error("the daemon that was not told its limits is there still")
	}
}

// An nvidia-smi that a killed supervisor has left is ended before the next supervisor changes the
// GPU. Otherwise, its change could come last.
func TestSupervisorIsKilledBeforeChange(t *testing.T) {
	m := newMachine(t, "hesitates")
	first := m.process()
	left := make(chan wire.Process, 1)
	go func() {
		var pid int
		for pid == 0 {
			time.Sleep(10 * time.Millisecond)
			text, _ := os.ReadFile(filepath.Join(m.config.Root, "hesitating"))
			pid, _ = strconv.Atoi(string(text))
		}
		left <- wire.Process{PID: pid, Start: startTime(pid)}
		_ = first.Process.Kill()
		_ = first.Wait()
		m.behave()
		m.process()
	}()
	// The first supervisor does not answer this, and the second one does.
	if text, status := m.call("PUT", wire.ClaimsPath+"/one", plain); status != http.StatusNoContent {
		t.Fatal(status, text)
	}
	if p := <-left; isAlive(p) {
		t.Errorf("process %d may change the GPU still", p.PID)
	}
}

// Whenever a supervisor is killed, during the beginning or the end of a claim, nothing leaks.
func TestSupervisorIsKilledAnytime(t *testing.T) {
	m := newMachine(t, "leaves its server", "leaves its pipe")
	rounds := 8
	if testing.Short() {
		rounds = 3
	}
	for range rounds {
		cmd := m.process()
		wait := rand.N(150 * time.Millisecond)
		time.AfterFunc(wait, func() { _ = cmd.Process.Kill() })
		next := make(chan *exec.Cmd)
		go func() { _ = cmd.Wait(); next <- m.process() }()
		if text, status := m.call("PUT", wire.ClaimsPath+"/one", plain); status != http.StatusNoContent {
			t.Fatal(wait, status, text)
		}
		last := <-next
		if text, status := m.call("PUT", wire.ClaimsPath+"/one", plain); status != http.StatusNoContent {
			t.Fatal(wait, status, text)
		}
		if all := ofClaim(m.dir("one")); len(all) != 2 {
			t.Fatalf("killed after %s: processes %v; want a daemon and its server", wait, all)
		}
		if text, status := m.call("DELETE", wire.ClaimsPath+"/one", nil); status != http.StatusNoContent || len(m.left("one")) > 0 {
			t.Fatal(wait, status, text, m.left("one"))
		}
		_ = last.Process.Kill()
	}
}
