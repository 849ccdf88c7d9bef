package hostservice

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/hostservice/wire"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/passthrough/passthroughtest"
)

const (
	disk  = "0000:03:00.0"
	other = "0000:04:00.0"
)

// handled is a transport to a handler in this process.
type handled struct{ http.Handler }

// RoundTrip implements [http.RoundTripper].
func (h handled) RoundTrip(r *http.Request) (*http.Response, error) {
	recorder := httptest.NewRecorder()
	h.ServeHTTP(recorder, r)
	return recorder.Result(), nil
}

// service is a host service for a simulated host.
type service struct {
	*passthroughtest.Kernel
	*Server

	log bytes.Buffer
}

func newService(t *testing.T, allowed ...string) *service {
	s := &service{Kernel: passthroughtest.New(t)}
	s.Add(disk, "nvme", "3")
	s.Add(other, "nvme", "4")
	s.Server = NewServer(Config{Host: s.Host(), Program: "test", Allowed: allowed, Write: s.Write, Log: log.New(&s.log, "", 0)})
	return s
}

func (s *service) client() *Client { return NewClient("/run", handled{s.Handler()}) }

// key returns the key of a function as in a lease of the agent.
func (s *service) key(function string) discovery.DeviceKey {
	return discovery.FunctionKey(s.Host(), passthroughtest.Source(function))
}

// A client writes the attributes that the agent writes, and the service writes the same attribute
// with the same value.
func TestWrites(t *testing.T) {
	s := newService(t, ListAttributes()...)
	source := passthroughtest.Source(disk)
	for _, name := range []string{"sriov_numvfs", "current_compute_partition"} {
		s.File(source+"/"+name, "")
	}
	var written []string
	s.config.Write = func(name, value string) error { written = append(written, name+"="+value); return nil }
	client := s.client()
	var want []string
	for _, w := range [][2]string{
		{source + "/driver_override", "vfio-pci"}, {source + "/driver_override", ""}, {source + "/reset", "1"}, {source + "/reset_method", "flr bus"},
		{source + "/sriov_numvfs", "16"}, {source + "/sriov_numvfs", "0"}, {source + "/current_compute_partition", "CPX"},
		{"sys/bus/pci/drivers/nvme/unbind", disk}, {"sys/bus/pci/drivers/vfio-pci/bind", disk}, {"sys/bus/pci/drivers_probe", disk},
	} {
		want = append(want, w[0]+"="+w[1])
		if err := client.Write("test", s.key(disk), w[0], w[1]); err != nil {
			t.Errorf("%q to %s: %v", w[1], w[0], err)
		}
	}
	if diff := cmp.Diff(want, written); diff != "" {
		t.Errorf("written (-want +got):\n%s", diff)
	}
	if !strings.Contains(s.log.String(), `wrote "vfio-pci" to /`+source+`/driver_override, lease "test": <nil>`) {
		t.Errorf("log %s", s.log.String())
	}
}

// An error of the kernel is the same for the agent as if the agent had written itself.
func TestKernelErrors(t *testing.T) {
	s := newService(t, ListAttributes()...)
	client := s.client()
	for _, errno := range []syscall.Errno{syscall.EBUSY, syscall.EROFS, syscall.ENODEV} {
		s.config.Write = func(string, string) error { return errno }
		err := client.Write("test", s.key(disk), passthroughtest.Source(disk)+"/reset", "1")
		if !errors.Is(err, errno) || err.Error() != errno.Error() {
			t.Errorf("%v: error %v", errno, err)
		}
	}
}

// Each request is checked by the service: no refused request reaches the host, and each refusal is
// logged.
func TestRefusals(t *testing.T) {
	valid := wire.Write{Lease: "test", Function: disk, Attribute: "driver_override", Value: "vfio-pci"}
	for name, c := range map[string]struct {
		change func(*wire.Write)
		want   string
	}{
		"not in the list":         {func(w *wire.Write) { w.Attribute = "enable" }, `"enable" is not one that`},
		"not allowed here":        {func(w *wire.Write) { w.Attribute, w.Value = "reset", "1" }, "reset is not in --allow"},
		"path as attribute":       {func(w *wire.Write) { w.Attribute = "../driver_override" }, "is not one that"},
		"path as function":        {func(w *wire.Write) { w.Function = "../../devices/" + disk }, "is not the address"},
		"function without domain": {func(w *wire.Write) { w.Function = disk[5:] }, "is not the address"},
		"no lease":                {func(w *wire.Write) { w.Lease = "" }, "request names no lease"},
		"lease of two lines":      {func(w *wire.Write) { w.Lease = "a\nb" }, "request names no lease"},
		"value of two lines":      {func(w *wire.Write) { w.Value = "vfio-pci\nx" }, "is not a value"},
		"path as value":           {func(w *wire.Write) { w.Value = "../vfio-pci" }, "is not a value"},
		"driver missing":          {func(w *wire.Write) { w.Attribute, w.Value = "bind", "" }, "is not the driver"},
		"driver for a function":   {func(w *wire.Write) { w.Driver = "nvme" }, "is not the driver"},
		"path as driver":          {func(w *wire.Write) { w.Attribute, w.Driver, w.Value = "bind", "..", "" }, "is not the driver"},
		"value for a driver":      {func(w *wire.Write) { w.Attribute, w.Driver, w.Value = "bind", "nvme", other }, "is not a value"},
		"unknown driver":          {func(w *wire.Write) { w.Attribute, w.Driver, w.Value = "bind", "absent", "" }, "is missing"},
		"removed function":        {func(w *wire.Write) { w.Function = "0000:05:00.0" }, "is missing"},
		"another function":        {func(w *wire.Write) { w.Function = other }, "is not the one of the lease"},
		"no inode":                {func(w *wire.Write) { w.Inode = 0 }, "is not the one of the lease"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newService(t, "driver_override", "bind")
			w := valid
			w.Session, w.Inode = "s", s.key(disk).Inode
			if err := s.beginSession(t.Context(), "s"); err != nil {
				t.Fatal(err)
			}
			c.change(&w)
			client := s.client()
			err := client.call(t.Context(), http.MethodPut, wire.WritePath, w, nil)
			if err == nil || !strings.Contains(err.Error(), c.want) || len(s.ListWrites()) > 0 {
				t.Errorf("error %v, want %q; writes %q", err, c.want, s.ListWrites())
			}
			if a := (*answer)(nil); !errors.As(err, &a) || !strings.Contains(s.log.String(), "refused: "+a.text) {
				t.Errorf("error %v is not in the log %q", err, s.log.String())
			}
			if err := client.call(t.Context(), http.MethodPut, wire.WritePath, valid, nil); err == nil {
				t.Error("a write without a session succeeds")
			}
		})
	}
}

// A link in the place of an attribute or of a directory is not followed, and the refusal is logged.
func TestLinks(t *testing.T) {
	for name, plant := range map[string]func(t *testing.T, s *service){
		"attribute": func(t *testing.T, s *service) { s.replace(t, passthroughtest.Source(disk)+"/reset", "/etc/passwd") },
		"driver":    func(t *testing.T, s *service) { s.replace(t, "sys/bus/pci/drivers/nvme", "vfio-pci") },
		"address":   func(t *testing.T, s *service) { s.replace(t, "sys/bus/pci/devices/"+disk, "../../../../etc/"+disk) },
		"function": func(t *testing.T, s *service) {
			source := filepath.Join(s.Dir, passthroughtest.Source(disk))
			if err := os.Rename(source, source+".moved"); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(source+".moved", source); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newService(t, ListAttributes()...)
			s.File("etc/"+disk+"/reset", "")
			plant(t, s)
			for _, w := range [][2]string{{passthroughtest.Source(disk) + "/reset", "1"}, {"sys/bus/pci/drivers/nvme/unbind", disk}} {
				if name == "attribute" && w[1] == disk || name == "driver" && w[1] != disk {
					continue // this write does not meet the link
				}
				key := s.key(disk)
				if linked := discovery.FunctionKey(s.Host(), "etc/"+disk); name == "address" {
					key = linked
				}
				if err := s.client().Write("test", key, w[0], w[1]); err == nil || len(s.ListWrites()) > 0 {
					t.Errorf("%q to %s: %v, writes %q", w[1], w[0], err, s.ListWrites())
				}
				if !strings.Contains(s.log.String(), "refused: ") {
					t.Errorf("%q to %s: no refusal is in the log %q", w[1], w[0], s.log.String())
				}
				s.log.Reset()
			}
		})
	}
}

// replace replaces a file or directory by a link.
func (s *service) replace(t *testing.T, name, target string) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(s.Dir, name)); err != nil {
		t.Fatal(err)
	}
	s.Link(name, target)
}

// A function that the kernel has registered again since the lease began is not written.
func TestRegisteredAgain(t *testing.T) {
	s := newService(t, ListAttributes()...)
	before := s.key(disk)
	s.ReturnFunction(disk, "nvme", "3")
	err := s.client().Write("test", before, passthroughtest.Source(disk)+"/reset", "1")
	if err == nil || !strings.Contains(err.Error(), "registered it again") || len(s.ListWrites()) > 0 {
		t.Errorf("error %v, writes %q", err, s.ListWrites())
	}
}

// The next agent's session begins after the last write of the earlier agent, and ends the earlier
// agent's right to write.
func TestNextAgent(t *testing.T) {
	s := newService(t, ListAttributes()...)
	hanging, release := make(chan struct{}), make(chan struct{})
	s.config.Write = func(string, string) error { close(hanging); <-release; return nil }
	killed, next := s.client(), s.client()
	reset := passthroughtest.Source(disk) + "/reset"
	late := make(chan error, 1)
	go func() { late <- killed.Write("test", s.key(disk), reset, "1") }()
	<-hanging
	if err := killed.Write("test", s.key(disk), reset, "1"); err == nil || !strings.Contains(err.Error(), "has not ended") || !errors.Is(err, discovery.ErrTransient) {
		t.Errorf("a second write to the function: %v", err)
	}
	begun := make(chan error, 1)
	go func() { begun <- next.BeginSession(t.Context()) }()
	select {
	case err := <-begun:
		t.Fatalf("the session begins during a write: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	close(release)
	if err := <-begun; err != nil {
		t.Fatal(err)
	}
	if err := <-late; err != nil {
		t.Errorf("the late write: %v", err)
	}
	s.config.Write = s.Write
	if err := killed.Write("test", s.key(disk), reset, "1"); err == nil || !strings.Contains(err.Error(), "another agent") {
		t.Errorf("a write of the earlier agent: %v", err)
	}
	if err := next.Write("test", s.key(disk), reset, "1"); err != nil {
		t.Errorf("a write of the next agent: %v", err)
	}
}

// After a restart of the service, the agent begins its session again.
func TestRestart(t *testing.T) {
	s := newService(t, ListAttributes()...)
	client := s.client()
	for range 2 {
		if err := client.Write("test", s.key(disk), passthroughtest.Source(disk)+"/reset", "1"); err != nil {
			t.Error(err)
		}
		s.session = ""
	}
}

// The answers are those of a process that reads the host itself, with privilege or without.
func TestUsers(t *testing.T) {
	s := newService(t)
	s.OpenNode("47", "qemu", "/dev/nvme0")
	s.File("proc/47/cgroup", "0::/kubepods/podone/0\n")
	s.OpenNode("48", "train", "/"+passthroughtest.Source(other)+"/resource0")
	s.File(passthroughtest.Source(other)+"/resource0", "")
	s.File("proc/48/cgroup", "0::/kubepods/pod11111111-2222-3333-4444-555555555555/0\n")
	s.File("dev/nvme0", "c 240:0")
	host := s.Host()
	known := discovery.Device{Name: "disk", Source: passthroughtest.Source(disk)}
	known.Edits.DeviceNodes = []*specs.DeviceNode{{Path: "/dev/nvme0", HostPath: "/dev/nvme0", Type: "c", Major: 240}}
	part := known
	part.Source = "sys/devices/virtual/part"
	functions := []sysfs.Device{sysfs.At(host.FS, passthroughtest.Source(disk)), sysfs.At(host.FS, passthroughtest.Source(other))}
	local, remote := inuse.HostFinder{Host: host}, s.client()
	partition := sysfs.At(host.FS, "sys/devices/platform/amdgpu_xcp.0") // a part of a GPU that is not a PCI function
	s.File(partition.Path+"/drm/renderD129/dev", "240:0\n")
	functions = append(functions, partition)
	uses := 0
	compare := func(name string, want, got any) {
		t.Helper()
		uses += strings.Count(fmt.Sprint(want), "process 4")
		if diff := cmp.Diff(fmt.Sprint(want), fmt.Sprint(got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	for _, options := range []inuse.Options{{}, {Known: []discovery.Device{known}}, {Known: []discovery.Device{known}, Except: []types.UID{"one"}}} {
		compare("functions", local.FunctionUses(options, functions...), remote.FunctionUses(options, functions...))
	}
	for _, d := range []discovery.Device{known, part, {Source: passthroughtest.Source(other)}} {
		for _, pods := range [][]types.UID{nil, {"one"}, {"two"}} {
			compare("pods", local.PodUses(d, pods), remote.PodUses(d, pods))
			compare("unlisted pods", local.UnlistedPodUses(d, pods), remote.UnlistedPodUses(d, pods))
		}
	}
	if uses < 6 {
		t.Errorf("only %d uses were compared", uses)
	}
	if err := os.RemoveAll(filepath.Join(s.Dir, "proc/1")); err != nil {
		t.Fatal(err)
	}
	compare("hidden", local.PodUses(known, []types.UID{"one"}), remote.PodUses(known, []types.UID{"one"}))
}

// Permission errors keep their kind, because callers treat them differently.
func TestForbidden(t *testing.T) {
	uses := fromWire(toWire(inuse.Uses{{Object: "a node", ReadError: fmt.Errorf("list: %w", fs.ErrPermission)}, {Object: "x", BlocksUnbind: true, ReadError: errors.New("broken")}}))
	if len(uses) != 2 || !errors.Is(uses[0].ReadError, fs.ErrPermission) || errors.Is(uses[1].ReadError, fs.ErrPermission) || !uses[1].BlocksUnbind {
		t.Errorf("uses %v", uses)
	}
}

// A service that cannot be reached, or that has no version of the protocol in common with the
// agent, leaves all questions open, and the reason names it.
func TestAway(t *testing.T) {
	versioned := func(oldest, newest int) *Client {
		return NewClient("/run", handled{http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != wire.ServicePath {
				t.Errorf("request %s", r.URL.Path)
			}
			fmt.Fprintf(w, `{"program": "v9", "oldest": %d, "newest": %d, "added": true}`, oldest, newest)
		})})
	}
	for name, c := range map[string]struct {
		client *Client
		want   string
	}{
		"no socket": {NewClient("/nowhere", nil), "at /nowhere/socket: dial unix /nowhere/socket: connect: no such file"},
		"newer":     {versioned(wire.NewestVersion+1, wire.NewestVersion+2), "it is v9 with versions 2 to 3"},
		"older":     {versioned(wire.OldestVersion-1, wire.OldestVersion-1), "it is v9 with versions 0 to 0"},
	} {
		d := discovery.Device{Name: "disk", Source: passthroughtest.Source(disk)}
		_, programErr := c.client.StartProgram(t.Context(), "test", time.Minute)
		errs := []error{
			c.client.Write("test", discovery.DeviceKey{Function: disk, Inode: 1}, passthroughtest.Source(disk)+"/reset", "1"),
			c.client.BeginSession(t.Context()), programErr,
			c.client.PodUses(d, nil).Err(), c.client.UnlistedPodUses(d, nil).Err(),
			inuse.CheckFree(c.client, inuse.Options{}, true, sysfs.At(os.DirFS("/"), d.Source)),
		}
		for i, err := range errs {
			if err == nil || !strings.Contains(err.Error(), c.want) || !errors.Is(err, ErrAway) || !errors.Is(err, discovery.ErrTransient) || (i > 2) != errors.Is(err, inuse.ErrUnanswered) {
				t.Errorf("%s, %d: %v", name, i, err)
			}
		}
	}
}

// A service of the next version that still has this version works with this agent.
func TestServiceOfNextVersion(t *testing.T) {
	s := newService(t, ListAttributes()...)
	newer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == wire.ServicePath {
			fmt.Fprintf(w, `{"program": "next", "oldest": %d, "newest": %d}`, wire.NewestVersion, wire.NewestVersion+1)
			return
		}
		s.Handler().ServeHTTP(w, r)
	})
	if err := NewClient("/run", handled{newer}).Write("test", s.key(disk), passthroughtest.Source(disk)+"/reset", "1"); err != nil {
		t.Error(err)
	}
}

// A question about a directory outside of the kernel's devices is refused.
func TestQuestionRefusals(t *testing.T) {
	s := newService(t)
	for _, source := range []string{"etc", "sys/devices/../../etc", "/sys/devices/x", "sys/devices/"} {
		uses := s.client().FunctionUses(inuse.Options{}, sysfs.At(s.Host().FS, source))
		if err := uses[0].Err(); err == nil || !strings.Contains(err.Error(), "is not the directory of a kernel device") || !strings.Contains(s.log.String(), fmt.Sprintf("refused: %q", source)) {
			t.Errorf("%q: %v", source, err)
		}
	}
}
