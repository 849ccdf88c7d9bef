package informant

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/internal/hostservice"
)

// changer returns an informant for a program, which is a shell script.
func changer(t *testing.T, script string) *Informant {
	t.Helper()
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	fsys, err := hostfs.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	args := func(c discovery.PartitionChange) ([]string, error) { return []string{c.Function, c.Place}, nil }
	return newInformant(discovery.Program{Name: "program", MaxSize: 100, ChangeArgs: args}, program, hostfs.NewOverlay(fsys), []string{"--of-the-host"})
}

// A change is a separate run of the program, whose output is returned. Then the running program
// gets a request for a scan.
func TestChange(t *testing.T) {
	n := changer(t, `echo "$@"`)
	answer, err := n.ChangePartition(t.Context(), discovery.PartitionChange{Function: "x", Place: "y"})
	if err != nil || string(answer) != "x y --of-the-host\n" {
		t.Errorf("answer %q, error %v", answer, err)
	}
	if len(n.scanRequests) != 1 {
		t.Error("the program that keeps running is not told")
	}
}

// After a successful change, the program can still report a fault, such as a missing device node.
// The log then explains why the device is not found.
func TestChangeWithAComplaint(t *testing.T) {
	var log strings.Builder
	ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
	if answer, err := changer(t, "echo done; echo program: node: not permitted >&2").ChangePartition(ctx, discovery.PartitionChange{}); err != nil || string(answer) != "done\n" {
		t.Errorf("answer %q, error %v", answer, err)
	}
	if !strings.Contains(log.String(), `"node: not permitted"`) {
		t.Errorf("the log says: %s", log.String())
	}
}

func TestChangeFails(t *testing.T) {
	for name, test := range map[string]struct{ script, want string }{
		"refused":  {"echo program: in use >&2; exit 1", "in use"},
		"too long": {"head -c 100000 /dev/zero", "too long"},
	} {
		t.Run(name, func(t *testing.T) {
			if answer, err := changer(t, test.script).ChangePartition(t.Context(), discovery.PartitionChange{}); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("answer of %d bytes, error %v, want %q in it", len(answer), err, test.want)
			}
		})
	}
}

// A change that exceeds the time limit is killed, and no second change of the same device runs
// beside it. Other devices are changed meanwhile, and the device itself afterwards.
func TestChangeHangs(t *testing.T) {
	n := changer(t, `[ "$1" != slow ] || exec sleep 3600; echo "$1"`)
	within := func(d time.Duration, device string) error {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		defer cancel()
		_, err := n.ChangePartition(ctx, discovery.PartitionChange{Function: device})
		return err
	}
	if err := within(100*time.Millisecond, "slow"); err == nil {
		t.Error("no error")
	}
	leave, err := n.enterChange(t.Context(), "hangs") // simulates a process that cannot be killed
	if err != nil {
		t.Fatal(err)
	}
	if err := within(100*time.Millisecond, "hangs"); err == nil || !strings.Contains(err.Error(), "still makes another change") {
		t.Errorf("error %v", err)
	}
	if err := within(time.Minute, "other"); err != nil {
		t.Errorf("another device: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- within(time.Minute, "hangs") }()
	leave()
	if err := <-ended; err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// slowService is a transport to a host service that fails after a while.
type slowService struct{ takes time.Duration }

func (s slowService) RoundTrip(r *http.Request) (*http.Response, error) {
	select {
	case <-time.After(s.takes):
		return nil, errors.New("connection reset")
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}

// A change by the host service is awaited to its end, because a write may go on until then.
func TestChangeByServiceIsAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := changer(t, "")
		n.service = hostservice.NewClient("", slowService{2 * changeLimit})
		ctx := hostservice.WithLease(t.Context(), hostservice.Lease{Name: "test", Function: discovery.DeviceKey{Function: "x"}})
		began := time.Now()
		if _, err := n.ChangePartition(ctx, discovery.PartitionChange{Function: "x"}); err == nil || time.Since(began) != 2*changeLimit {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
	})
}

// The running program reads a line as the request for a scan.
func TestRequestedScan(t *testing.T) {
	n := changer(t, "echo first; read line; echo second; read line")
	n.Check = func(string) error { return nil }
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var said []string
	_ = n.runSession(ctx, func(text []byte) error {
		said = append(said, string(text))
		if len(said) == 2 {
			cancel()
		}
		n.requestScan()
		return nil
	})
	if strings.Join(said, " ") != "first second" {
		t.Errorf("said %q", said)
	}
}
