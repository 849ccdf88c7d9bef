package sharing

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/internal/hostservice/wire"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
)

// newManager returns a [Manager] with a directory of a family's program that contains a
// claim's record.
func newManager(t *testing.T, host fstest.MapFS, record string) *Manager {
	t.Helper()
	dir, err := os.MkdirTemp("", "o") // socket names have a length limit
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.MkdirAll(filepath.Join(dir, "maker/uid"), 0o700); err != nil {
		t.Fatal(err)
	}
	if record != "" {
		if err := os.WriteFile(filepath.Join(dir, "maker/uid", wire.Record), []byte(record), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return New(Config{Host: &discovery.Host{FS: host}, Boot: "now", Dir: dir, Families: []string{"maker"}, Changed: func() {}})
}

// Without the program, a claim ends once no process can serve it, and no GPU can have the claim's
// settings.
func TestEndsWithoutTheProgram(t *testing.T) {
	stat := func(state, start string) fstest.MapFS {
		return fstest.MapFS{"proc/7/stat": {Data: []byte("7 (a) b) " + state + strings.Repeat(" 0", 18) + " " + start + " 0 0\n")}}
	}
	const record = `{"uid":"uid","process":{"pid":7,"start":"100"}}`
	for name, test := range map[string]struct {
		host   fstest.MapFS
		record string
		ends   bool
	}{
		"it runs":           {stat("S", "100"), record, false},
		"it has ended":      {fstest.MapFS{}, record, true},
		"is ending":         {stat("Z", "100"), record, true},
		"another process":   {stat("S", "101"), record, true},
		"none was started":  {stat("S", "100"), `{"uid":"uid"}`, true},
		"nothing was begun": {stat("S", "100"), "", true},
		"unreadable":        {stat("S", "100"), "{", false},
		"a changed GPU":     {fstest.MapFS{}, `{"uid":"uid","process":{"pid":7,"start":"100"},"changed":true,"boot":"now"}`, false},
		"before a reboot":   {fstest.MapFS{}, `{"uid":"uid","process":{"pid":7,"start":"100"},"changed":true,"boot":"earlier"}`, true},
		"an unknown boot":   {fstest.MapFS{}, `{"uid":"uid","changed":true}`, false},
	} {
		o := newManager(t, test.host, test.record)
		err := o.Remove(&allocation.Claim{UID: "uid"}, nil)
		if (err == nil) != test.ends || err != nil && !errors.Is(err, errNoListener) {
			t.Errorf("%s: %v", name, err)
		}
	}
	o := newManager(t, stat("S", "100"), record)
	if err := o.Remove(&allocation.Claim{UID: "other"}, nil); err != nil {
		t.Errorf("a claim without a sharing daemon: %v", err)
	}
	if err := o.Remove(&allocation.Claim{UID: "uid"}, []allocation.Entry{&allocation.Claim{UID: "uid"}}); err != nil {
		t.Errorf("a claim that goes on: %v", err)
	}
}

// The program's response is passed on. A program that does not respond delays the agent for a
// limited time only.
func TestAnswers(t *testing.T) {
	o := newManager(t, nil, "")
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", filepath.Join(o.config.Dir, "maker", wire.Socket))
	if err != nil {
		t.Fatal(err)
	}
	release := make(chan struct{})
	server := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "refused"):
			http.Error(w, "GPU x: claim other has it still", http.StatusInternalServerError)
		case strings.HasSuffix(r.URL.Path, "hangs"):
			<-release
		default:
			fmt.Fprint(w, "nonsense")
		}
	})}
	go func() { _ = server.Serve(listener) }()
	defer server.Close()
	defer close(release)
	orders := []discovery.Order{{Family: "maker", How: map[string]string{"a": "b"}}}
	for uid, want := range map[types.UID]string{"refused": "GPU x: claim other has it still", "hangs": "context deadline exceeded", "well": ""} {
		limit := time.Minute
		if uid == "hangs" {
			limit = 200 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		err := o.Begin(ctx, uid, orders)
		cancel()
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", uid, err, want)
		}
	}
	if err := o.call(t.Context(), "maker", http.MethodGet, wire.ClaimsPath, nil, &[]wire.Claim{}); err == nil {
		t.Error("nonsense is understood")
	}
	o.checkProgram(t.Context(), "maker") // ignores the response
}

// A request waits for the restart of a crashed program.
func TestCrashed(t *testing.T) {
	o := newManager(t, nil, "")
	listen := func() net.Listener {
		listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", filepath.Join(o.config.Dir, "maker", wire.Socket))
		if err != nil {
			t.Fatal(err)
		}
		return listener
	}
	crashed, ok := listen().(*net.UnixListener)
	if !ok {
		t.Fatal("it is no socket")
	}
	crashed.SetUnlinkOnClose(false)
	crashed.Close()
	began := make(chan error)
	go func() { began <- o.Begin(t.Context(), "uid", []discovery.Order{{Family: "maker"}}) }()
	select {
	case err := <-began:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	if err := os.Remove(filepath.Join(o.config.Dir, "maker", wire.Socket)); err != nil {
		t.Fatal(err)
	}
	server := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })}
	listener := listen()
	defer server.Close()
	go func() { _ = server.Serve(listener) }()
	if err := <-began; err != nil {
		t.Error(err)
	}
}

// An unexpected end makes the devices unhealthy until the claim ends.
func TestDeviceFaults(t *testing.T) {
	o := newManager(t, nil, "")
	if faults := o.DeviceFaults(); len(faults) > 0 {
		t.Errorf("before the end: %v", faults)
	}
	o.troubles["uid"] = trouble{reason: "it ended", devices: []string{"a", "b"}}
	want := discovery.Health{Status: discovery.Unhealthy, Reason: "it ended"}
	if faults := o.DeviceFaults(); len(faults) != 2 || faults["a"] != want || faults["b"] != want {
		t.Errorf("%v; want %v for a and b", faults, want)
	}
	changed := 0
	o.config.Changed = func() { changed++ }
	if err := o.Remove(&allocation.Claim{UID: "uid"}, nil); err != nil || len(o.DeviceFaults()) > 0 || changed != 1 {
		t.Errorf("the end of the claim: %v, %d changes; want 1", err, changed)
	}
}

// allocateClaim sets the ledger of a manager, and allocates a device to a claim.
func allocateClaim(t *testing.T, o *Manager) {
	t.Helper()
	o.config.Ledger = ledger.New(ledger.Config{Dir: t.TempDir(), Boot: "boot"})
	o.config.Ledger.SetOutputs(o)
	if _, err := o.config.Ledger.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := o.config.Ledger.NewClaim("uid", "default", "claim")
	c.Results = []allocation.Result{{Request: "r", Device: "d", Silicon: "d", Whole: true, Source: "d", CDI: "d"}}
	if err := o.config.Ledger.AllocateClaim(c, allocation.Allocated, &exclusion.Present{}); err != nil {
		t.Fatal(err)
	}
}

// A program that cannot read the record of a claim does not know what was ordered. Its device is
// unhealthy, and the program gets no order until the kubelet prepares the claim again.
func TestUnknownOrderIsNotRepeated(t *testing.T) {
	o := newManager(t, nil, "{")
	allocateClaim(t, o)
	o.config.Transport = transport(func(r *http.Request) string {
		if r.Method != http.MethodGet {
			t.Errorf("the program gets the request %s %s", r.Method, r.URL.Path)
		}
		return `[{"uid":"uid","broken":"its record cannot be read"}]`
	})
	o.checkProgram(t.Context(), "maker")
	if reason := o.DeviceFaults()["d"].Reason; !strings.HasPrefix(reason, "its record cannot be read; ") {
		t.Errorf("the device's fault is %q", reason)
	}
}

// transport answers requests with texts.
type transport func(*http.Request) string

func (answer transport) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(answer(r))), Request: r}, nil
}

// A claim does not end while its work is restarted, and the work of an ended claim is not restarted.
func TestRestartMeetsTheEnd(t *testing.T) {
	o := newManager(t, nil, `{"uid":"uid"}`)
	allocateClaim(t, o)
	var mu sync.Mutex
	var answered []string
	begun, proceed := make(chan struct{}), make(chan struct{})
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", filepath.Join(o.config.Dir, "maker", wire.Socket))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Method {
		case http.MethodGet:
			fmt.Fprint(w, `[{"uid":"uid","how":{"gpus":"GPU-1"},"begun":true,"broken":"its daemon has ended"}]`)
			return
		case http.MethodPut:
			close(begun)
			<-proceed
		}
		mu.Lock()
		answered = append(answered, r.Method)
		mu.Unlock()
		w.WriteHeader(http.StatusNoContent)
	})}
	go func() { _ = server.Serve(listener) }()
	defer server.Close()
	checked := make(chan struct{})
	go func() {
		defer close(checked)
		o.checkProgram(t.Context(), "maker")
	}()
	<-begun
	ended := make(chan error)
	go func() { // as the driver does for Unprepare
		unlock, err := o.config.Ledger.Lock(t.Context(), "uid")
		if err == nil {
			defer unlock()
			err = o.config.Ledger.End("uid", &exclusion.Present{})
		}
		ended <- err
	}()
	select {
	case err := <-ended:
		t.Errorf("the claim ends while its work is restarted: %v", err)
		close(proceed)
	case <-time.After(100 * time.Millisecond):
		close(proceed)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	<-checked
	if got := strings.Join(answered, " "); got != "PUT DELETE" {
		t.Errorf("answered %s; want PUT DELETE", got)
	}
	o.checkProgram(t.Context(), "maker") // would close begun again
}

// The program may have work for a claim that no longer exists, and no directory: its disk was full.
func TestEndsUnknownClaimWithoutDirectory(t *testing.T) {
	o := newManager(t, nil, "")
	o.config.Ledger = ledger.New(ledger.Config{Dir: t.TempDir(), Boot: "boot"})
	if _, err := o.config.Ledger.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", filepath.Join(o.config.Dir, "maker", wire.Socket))
	if err != nil {
		t.Fatal(err)
	}
	var ended []string
	server := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			fmt.Fprint(w, `[{"uid":"gone","broken":"no space left on device"}]`)
			return
		}
		ended = append(ended, r.Method+" "+r.URL.Path)
	})}
	go func() { _ = server.Serve(listener) }()
	o.checkProgram(t.Context(), "maker")
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	if want := "DELETE /claims/gone"; len(ended) != 1 || ended[0] != want {
		t.Errorf("requests %q, want %s", ended, want)
	}
}
