package agent

import (
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery/rules"
	"chandler.dev/internal/hostservice"
)

// hostService is a transport to a host service that can be missing.
type hostService struct {
	config hostservice.Config

	mu     sync.Mutex
	server *hostservice.Server // nil while it is missing
}

func (s *hostService) start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.server = hostservice.NewServer(s.config)
}

func (s *hostService) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.server = nil
}

// RoundTrip implements [http.RoundTripper].
func (s *hostService) RoundTrip(r *http.Request) (*http.Response, error) {
	s.mu.Lock()
	server := s.server
	s.mu.Unlock()
	if server == nil {
		return nil, syscall.ECONNREFUSED
	}
	recorder := httptest.NewRecorder()
	server.Handler().ServeHTTP(recorder, r)
	return recorder.Result(), nil
}

// blind is a host that the agent sees without privilege: it can read no open file.
type blind struct{ fs.FS }

// ReadDir implements [fs.ReadDirFS].
func (b blind) ReadDir(name string) ([]fs.DirEntry, error) {
	if process, ok := strings.CutPrefix(name, "proc/"); ok && process[0] >= '0' && process[0] <= '9' {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return fs.ReadDir(b.FS, name)
}

// Stat implements [fs.StatFS].
func (b blind) Stat(name string) (fs.FileInfo, error) { return fs.Stat(b.FS, name) }

// ReadLink implements [fs.ReadLinkFS].
func (b blind) ReadLink(name string) (string, error) { return fs.ReadLink(b.FS, name) }

// Lstat implements [fs.ReadLinkFS].
func (b blind) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(b.FS, name) }

// serve makes a node's configuration that of an agent without privilege beside a host service.
func serve(r *rebinding, config Config) (Config, *hostService) {
	s := &hostService{config: hostservice.Config{Host: r.Host(), Allowed: hostservice.ListAttributes(), Write: r.Write}}
	s.start()
	config.FS, config.Write = blind{config.FS}, nil
	config.HostService = hostservice.NewClient("/run/chandler/host", s)
	return config, s
}

const away = "the host service does not answer at /run/chandler/host/socket"

// An agent without privilege binds a disk to vfio through the host service, and refuses a disk that
// a process has open. While the service is missing, a claim waits and reports it, claims without
// passthrough are prepared, and a disk returns to its driver as soon as the service is there again.
func TestPassthroughByHostService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		config, s := serve(r, r.config(&rules.Rules{Mode: "DRA"}))
		stop := r.run(config)
		r.offers(diskName, "")
		s.kill()
		vm := r.claim("vm", "vfio")
		r.refuses(vm, away)
		r.bound("nvme", 0)
		pod := r.claim("pod", "")
		r.unprepare(vm)
		r.gives(pod, diskNode)
		r.unprepare(pod)

		s.start()
		r.OpenNode("47", "train", diskNode)
		r.refuses(vm, "process 47 (train) has it open")
		r.EndProcess("47")
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		r.bound("vfio-pci", 0)

		s.kill()
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio") // it has the disk
		r.unprepare(vm)
		r.bound("vfio-pci", time.Minute)
		next := r.claim("next", "vfio")
		r.refuses(next, away) // who has the disk open is unknown
		s.start()
		r.bound("nvme", time.Minute)
		stop()
	})
}

// A write that the kernel delays is reported, and the function keeps its lease, until the service
// answers.
func TestHostServiceIsOverdue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		config, _ := serve(r, r.config(&rules.Rules{Mode: "DRA"}))
		stop := r.run(config)
		r.offers(diskName, "")
		hang := make(chan struct{})
		r.Hangs["nvme"] = hang
		vm := r.claim("vm", "vfio")
		r.refuses(vm, "has not ended")
		r.refuses(vm, "has not ended")
		close(hang)
		time.Sleep(time.Minute)
		r.gives(vm, "/dev/vfio/3", "/dev/vfio/vfio")
		stop()
	})
}

// Reclaim withholds a disk while the host service is missing, and resets the disk through the
// service.
func TestReclaimByHostService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newReclaimNode(t, true)
		config, s := serve(h.rebinding, h.config(&rules.Rules{Mode: "DRA"}))
		stop := h.run(config)
		h.offers(diskName, "")
		before, next := h.claimOf("old"), h.claimOf("next")
		h.gives(before, diskNode)
		h.runs("47", "train", "old", diskNode)
		h.unprepare(before)
		h.refuses(next, "process 47 (train) has it open")
		s.kill()
		h.EndProcess("47")
		time.Sleep(5 * time.Minute)
		h.refuses(next, away)
		s.start()
		time.Sleep(10 * time.Second)
		h.gives(next, diskNode)
		if got := h.resets(); len(got) != 1 || got[0] != "reset 1" {
			t.Errorf("written %q", got)
		}
		stop()
	})
}

// The reason why a claim waits names the attribute that the host service may not write.
func TestHostServiceRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRebinding(t)
		config, s := serve(r, r.config(&rules.Rules{Mode: "DRA"}))
		s.config.Allowed = []string{"driver_override"}
		s.start()
		stop := r.run(config)
		r.offers(diskName, "")
		r.refuses(r.claim("vm", "vfio"), "attribute unbind is not in --allow of the host service on this node")
		stop()
	})
}
