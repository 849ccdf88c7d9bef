package hostservice

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/hostservice/wire"
	"chandler.dev/internal/inuse"
)

// Config is the configuration of a [Server].
type Config struct {
	Host    *discovery.Host
	Program string   // the version of the program
	Allowed []string // the attributes that may be written; see [ListAttributes]

	// Write writes an attribute, by its name in fs.FS.
	Write func(name, value string) error

	// Programs start the programs that the service runs for the agent, by their names.
	Programs map[string]func() (Program, error)

	// Partitions create and remove partitions of PCI functions, by the names of the programs. Run is
	// only called if the function is the one of the lease.
	Partitions map[string]PartitionProgram

	// Families are the families whose devices the service configures, by [discovery.Family.Configure].
	Families []*discovery.Family

	Log *log.Logger // writes and refusals; nil discards them
}

// Server executes the requests of the agent.
type Server struct {
	config Config
	lock   *os.File // of the directory, set by Run; nil in tests

	mu      sync.Mutex
	session string                // the session that may write, "" since the start
	writes  map[string]wire.Write // writes without a result, by function
	ended   chan struct{}         // closed and replaced when a write or a program ends

	running, killed map[string]int // running programs by name, and those of them that were killed

	ending chan struct{} // closed by end, which ends all programs
	end    func()
}

// NewServer returns a server without a session.
func NewServer(config Config) *Server {
	if config.Log == nil {
		config.Log = log.New(io.Discard, "", 0)
	}
	s := &Server{
		config: config, writes: make(map[string]wire.Write), running: make(map[string]int), killed: make(map[string]int),
		ended: make(chan struct{}), ending: make(chan struct{}),
	}
	s.end = sync.OnceFunc(func() { close(s.ending) })
	return s
}

// answer is an error with a status of HTTP, and the kernel's error if there is one.
type answer struct {
	status int
	text   string
	errno  syscall.Errno
}

// Error implements error.
func (a *answer) Error() string { return a.text }

// Statuses of refused writes. The remaining errors are errors of the kernel.
const (
	statusRefused   = http.StatusForbidden          // the request is not in the list, or not allowed
	statusGone      = http.StatusGone               // the function or the attribute is missing
	statusBusy      = http.StatusLocked             // an earlier write to the function has not ended
	statusNoSession = http.StatusPreconditionFailed // the service has started and has no session
	statusReplaced  = http.StatusConflict           // another agent has begun its session
)

// loggedStatuses are the statuses of refusals in the log. A request that meets another request, or a
// service that has just started, is repeated.
var loggedStatuses = []int{statusRefused, statusGone, statusReplaced, http.StatusBadRequest}

func refuseRequest(format string, args ...any) *answer {
	return &answer{status: statusRefused, text: fmt.Sprintf(format, args...)}
}

// maxRequest limits the body of a request, in bytes.
const maxRequest = 1 << 20

// Handler answers the requests of a host service; see package wire.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+wire.ServicePath, func(w http.ResponseWriter, _ *http.Request) { s.reply(w, s.describe(), nil) })
	mux.HandleFunc("PUT "+wire.SessionsPath+"/{id}", func(w http.ResponseWriter, r *http.Request) {
		s.reply(w, nil, s.beginSession(r.Context(), r.PathValue("id")))
	})
	mux.HandleFunc("PUT "+wire.WritePath, func(w http.ResponseWriter, r *http.Request) {
		var request wire.Write
		err := decode(r, &request)
		if err == nil {
			err = s.write(&request)
		}
		s.reply(w, nil, err)
	})
	mux.HandleFunc("PUT "+wire.PartitionsPath, func(w http.ResponseWriter, r *http.Request) {
		var change wire.PartitionChange
		if err := decode(r, &change); err != nil {
			s.reply(w, nil, err)
			return
		}
		output, err := s.changePartition(r.Context(), &change)
		s.reply(w, output, err)
	})
	mux.HandleFunc("PUT "+wire.ConfigurePath, func(w http.ResponseWriter, r *http.Request) {
		var configuration wire.Configuration
		err := decode(r, &configuration)
		if err == nil {
			err = s.configure(r.Context(), &configuration)
		}
		s.reply(w, nil, err)
	})
	mux.HandleFunc("POST "+wire.ProgramsPath+"/{name}", s.runProgram)
	mux.HandleFunc("POST "+wire.FunctionUsersPath, func(w http.ResponseWriter, r *http.Request) {
		var query wire.FunctionQuery
		if err := decode(r, &query); err != nil {
			s.reply(w, nil, err)
			return
		}
		uses, err := s.functionUses(&query)
		s.reply(w, uses, err)
	})
	mux.HandleFunc("POST "+wire.PodUsersPath, func(w http.ResponseWriter, r *http.Request) {
		var query wire.PodQuery
		if err := decode(r, &query); err != nil {
			s.reply(w, nil, err)
			return
		}
		uses, err := s.podUses(&query)
		s.reply(w, uses, err)
	})
	return mux
}

func decode(r *http.Request, into any) error {
	decoder := json.NewDecoder(io.LimitReader(r.Body, maxRequest))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return &answer{status: http.StatusBadRequest, text: fmt.Sprintf("request: %v", err)}
	}
	return nil
}

// reply writes a result, or an error.
func (s *Server) reply(w http.ResponseWriter, result any, err error) {
	var a *answer
	switch {
	case err == nil && result == nil:
		w.WriteHeader(http.StatusNoContent)
	case err == nil:
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(result) // the agent may be gone
	case errors.As(err, &a):
		if a.errno == 0 && slices.Contains(loggedStatuses, a.status) {
			s.config.Log.Printf("refused: %s", a.text)
		}
		if a.errno != 0 {
			w.Header().Set(wire.ErrnoHeader, strconv.Itoa(int(a.errno)))
		}
		http.Error(w, a.text, a.status)
	default:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}

func (s *Server) describe() wire.Service {
	reason := func(err error) string {
		if err != nil {
			return err.Error()
		}
		return ""
	}
	service := wire.Service{Program: s.config.Program, Oldest: wire.OldestVersion, Newest: wire.NewestVersion, Attributes: s.config.Allowed, Programs: s.listPrograms()}
	service.HiddenFromPods = reason(inuse.CheckVisibility(s.config.Host.FS))
	if service.HiddenFromAll = service.HiddenFromPods; service.HiddenFromAll == "" {
		service.HiddenFromAll = reason(inuse.VisibilityOfAll(s.config.Host.FS))
	}
	return service
}

// beginSession makes a session the one that may write, and waits for the writes of other sessions.
func (s *Server) beginSession(ctx context.Context, id string) error {
	if len(id) > 64 || !isPlain(id) {
		return refuseRequest("%q is not the ID of a session", id)
	}
	s.mu.Lock()
	s.session = id
	s.mu.Unlock()
	for {
		ended, left := s.otherWrite(id)
		if left == nil {
			return nil
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return &answer{status: statusBusy, text: fmt.Sprintf("a write of %s of function %s for an earlier agent has not ended", left.Attribute, left.Function)}
		}
	}
}

// otherWrite returns a write of another session, nil if there is none, and a channel that is closed
// when a write ends.
func (s *Server) otherWrite(id string) (ended <-chan struct{}, left *wire.Write) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.writes {
		if w.Session != id {
			return s.ended, &w
		}
	}
	return s.ended, nil
}

// write executes a write. It returns when the kernel has returned.
func (s *Server) write(w *wire.Write) error {
	if err := s.beginWrite(w); err != nil {
		return err
	}
	defer s.endWrite(w)
	name, value, err := resolve(s.config.Host, s.config.Allowed, w)
	if err != nil {
		return err
	}
	err = s.config.Write(name, value)
	s.config.Log.Printf("wrote %q to /%s, lease %q: %v", value, name, w.Lease, err)
	if err == nil {
		return nil
	}
	failed := &answer{status: http.StatusInternalServerError, text: err.Error()}
	errors.As(err, &failed.errno)
	return failed
}

// beginWrite registers a write of the present session, one for each function.
func (s *Server) beginWrite(w *wire.Write) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch before, isBusy := s.writes[w.Function]; {
	case s.session == "" && w.Session != "":
		return &answer{status: statusNoSession, text: "the host service has started, and no agent has begun a session since"}
	case w.Session != s.session || w.Session == "":
		return &answer{status: statusReplaced, text: "another agent has begun its session"}
	case isBusy:
		return &answer{status: statusBusy, text: fmt.Sprintf("a write of %s of function %s has not ended", before.Attribute, w.Function)}
	}
	s.writes[w.Function] = *w
	return nil
}

func (s *Server) endWrite(w *wire.Write) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.writes, w.Function)
	s.noteEnd()
}

// noteEnd reports the end of a write or a program to those who wait for it. The caller holds s.mu.
func (s *Server) noteEnd() {
	close(s.ended)
	s.ended = make(chan struct{})
}

func (s *Server) functionUses(q *wire.FunctionQuery) ([][]wire.Use, error) {
	options := inuse.Options{Except: q.Except}
	var functions []sysfs.Device
	for _, f := range q.Functions {
		d, err := deviceOf(&f)
		if err != nil {
			return nil, err
		}
		functions = append(functions, sysfs.At(s.config.Host.FS, d.Source))
		options.Known = append(options.Known, d)
	}
	all := make([][]wire.Use, 0, len(functions))
	for _, uses := range (inuse.HostFinder{Host: s.config.Host}).FunctionUses(options, functions...) {
		all = append(all, toWire(uses))
	}
	return all, nil
}

func (s *Server) podUses(q *wire.PodQuery) ([]wire.Use, error) {
	d, err := deviceOf(&q.Device)
	if err != nil {
		return nil, err
	}
	if q.Unlisted {
		return toWire(inuse.ByUnlistedPods(s.config.Host, d, q.Pods)), nil
	}
	return toWire(inuse.ByPods(s.config.Host, d, q.Pods)), nil
}

// deviceOf returns the device of a query.
func deviceOf(q *wire.Device) (d discovery.Device, err error) {
	if q.Source != "" && (!fs.ValidPath(q.Source) || !strings.HasPrefix(q.Source, "sys/devices/")) {
		return d, refuseRequest("%q is not the directory of a kernel device", q.Source)
	}
	d.Source = q.Source
	for _, n := range q.Nodes {
		kind := "c"
		if n.Block {
			kind = "b"
		}
		d.Edits.DeviceNodes = append(d.Edits.DeviceNodes, &specs.DeviceNode{Path: n.Path, HostPath: n.Path, Type: kind, Major: n.Major, Minor: n.Minor})
	}
	return d, nil
}

func toWire(uses inuse.Uses) []wire.Use {
	all := make([]wire.Use, 0, len(uses))
	for _, u := range uses {
		use := wire.Use{Object: u.Object, How: u.How, BlocksUnbind: u.BlocksUnbind}
		if u.ReadError != nil {
			use.ReadError, use.Forbidden = u.ReadError.Error(), errors.Is(u.ReadError, fs.ErrPermission)
		}
		all = append(all, use)
	}
	return all
}
