package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/rules/rulestest"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/disk/disktest"
)

// labelled is an agent with a feature file.
type labelled struct {
	*node
	dir     string
	failing atomic.Bool // whether the disk fails

	mu     sync.Mutex
	writes int
	log    []string
}

// run runs the agent until the test ends.
func (l *labelled) run(t *testing.T, wanted *rules.Rules) {
	t.Helper()
	config := l.config(wanted)
	config.FeatureDir = l.dir
	config.Disk = &disktest.Disk{Before: func(op disktest.Op, name string) error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if filepath.Dir(name) != l.dir {
			return nil
		}
		if op == disktest.Rename {
			l.writes++
		}
		if l.failing.Load() {
			return syscall.EIO
		}
		return nil
	}}
	logger := funcr.New(func(_, args string) {
		l.mu.Lock()
		defer l.mu.Unlock()
		if strings.Contains(args, "Labels of the node") {
			l.log = append(l.log, args)
		}
	}, funcr.Options{})
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, config) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// expect waits, and checks the content of the directory, the number of writes to the file, and the
// number of logged errors.
func (l *labelled) expect(t *testing.T, lines string, writes, logged int) {
	t.Helper()
	time.Sleep(withdrawalLimit)
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	entries, _ := os.ReadDir(l.dir)
	got := ""
	for _, entry := range entries {
		data, err := os.ReadFile(filepath.Join(l.dir, entry.Name()))
		info, _ := entry.Info()
		if entry.Name() != featureName || err != nil || info.Mode() != 0o644 {
			t.Errorf("there is %s with mode %s (%v)", entry.Name(), info.Mode(), err)
		}
		_, got, _ = strings.Cut(string(data), "\n")
	}
	if got != lines || l.writes != writes || len(l.log) != logged {
		t.Errorf("labels %q, %d writes, errors %q; want %q, %d writes, %d errors", got, l.writes, l.log, lines, writes, logged)
	}
}

// The labels of the node follow its devices and the configuration. The file is written only when
// its content changes, and removed when no label is left.
func TestLabels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		l := &labelled{node: n, dir: filepath.Join(n.dir, "features.d")}
		l.run(t, &rules.Rules{Mode: discovery.ModeDRA})
		l.expect(t, "", 0, 0)
		if _, err := os.Stat(l.dir); err == nil {
			t.Error("the agent made the directory that Node Feature Discovery would make")
		}
		if err := os.Mkdir(l.dir, 0o755); err != nil {
			t.Fatal(err)
		}
		l.expect(t, "chandler.dev/hypervisor.count=2\nchandler.dev/hypervisor.total=2\n", 1, 0)
		l.expect(t, "chandler.dev/hypervisor.count=2\nchandler.dev/hypervisor.total=2\n", 1, 0)

		if err := os.Remove(filepath.Join(l.dir, featureName)); err != nil {
			t.Fatal(err)
		}
		l.expect(t, "chandler.dev/hypervisor.count=2\nchandler.dev/hypervisor.total=2\n", 2, 0)

		exclude := func(expression string) Change {
			return Change{Settings: Settings{Rules: &rules.Rules{Mode: discovery.ModeDRA, Exclude: []rules.Selector{rulestest.CompileSelector(t, expression)}}}}
		}
		n.changes <- exclude(`device.attributes["chandler.dev"].model == "tun"`)
		l.expect(t, "chandler.dev/hypervisor.count=1\nchandler.dev/hypervisor.model=kvm\nchandler.dev/hypervisor.total=1\n", 3, 0)
		n.changes <- exclude(`true`)
		l.expect(t, "", 3, 0)
		n.changes <- exclude(`false`)
		l.expect(t, "chandler.dev/hypervisor.count=2\nchandler.dev/hypervisor.total=2\n", 4, 0)
	})
}

// A disk error is logged once for as long as it lasts, and the file is written afterwards.
func TestLabelsOnABadDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		l := &labelled{node: n, dir: filepath.Join(n.dir, "features.d")}
		if err := os.Mkdir(l.dir, 0o755); err != nil {
			t.Fatal(err)
		}
		l.failing.Store(true)
		l.run(t, &rules.Rules{Mode: discovery.ModeDRA})
		l.expect(t, "", 0, 1)
		l.failing.Store(false)
		l.expect(t, "chandler.dev/hypervisor.count=2\nchandler.dev/hypervisor.total=2\n", 1, 1)
		l.failing.Store(true)
		l.expect(t, "chandler.dev/hypervisor.count=2\nchandler.dev/hypervisor.total=2\n", 1, 1)
		if err := os.Remove(filepath.Join(l.dir, featureName)); err != nil {
			t.Fatal(err)
		}
		l.expect(t, "", 1, 2)
	})
}

// The temporary file of a killed agent is removed, and a file with the same content is not
// rewritten.
func TestLabelsAfterAnotherAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		l := &labelled{node: n, dir: filepath.Join(n.dir, "features.d")}
		files := disk.Files{}
		text := "# Chandler writes this file for Node Feature Discovery.\nchandler.dev/hypervisor.count=2\nchandler.dev/hypervisor.total=2\n"
		if _, err := files.Write(filepath.Join(l.dir, featureName), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		left := filepath.Join(l.dir, "."+featureName+".1.tmp")
		if err := os.WriteFile(left, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		old := time.Now().Add(-2 * disk.Abandoned)
		if err := os.Chtimes(left, old, old); err != nil {
			t.Fatal(err)
		}
		l.run(t, &rules.Rules{Mode: discovery.ModeDRA})
		l.expect(t, "chandler.dev/hypervisor.count=2\nchandler.dev/hypervisor.total=2\n", 0, 0)
	})
}

// While the labels exceed the maximum size of a file, the previous file remains, even the file of
// an earlier agent.
func TestTooManyLabels(t *testing.T) {
	f := &featureFile{dir: t.TempDir(), families: []*discovery.Family{{Name: "x", Labels: []discovery.Labels{{Set: map[string]string{"x.io/{model}": "true"}}}}}}
	snapshot := func(devices int) *rules.Snapshot {
		s := &rules.Snapshot{}
		for i := range devices {
			d := discovery.Device{Name: fmt.Sprint(i), Family: "x", Attributes: discovery.Attributes{}}
			d.Attributes.SetString("model", fmt.Sprintf("%050d", i))
			s.Devices = append(s.Devices, rules.Offered{Device: d})
		}
		return s
	}
	many, name := snapshot(2000), filepath.Join(f.dir, featureName)
	if err := os.WriteFile(name, []byte("another agent's"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		devices *rules.Snapshot
		lines   int // lines of the file, 0 without a file
		wrong   bool
	}{{many, 1, true}, {snapshot(2), 5, false}, {many, 5, true}, {snapshot(0), 0, false}, {many, 0, true}} {
		f.writeLabels(t.Context(), step.devices)
		data, _ := os.ReadFile(name)
		lines := len(strings.Split(strings.TrimSuffix(string(data), "\n"), "\n"))
		if len(data) == 0 {
			lines = 0
		}
		if lines != step.lines || (f.lastError != "") != step.wrong {
			t.Errorf("%d devices: %d lines, error %q; want %d lines", len(step.devices.Devices), lines, f.lastError, step.lines)
		}
	}
}
