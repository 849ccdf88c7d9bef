package inside

import (
	"bytes"
	"errors"
	"net/rpc"
	"net/rpc/jsonrpc"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Service is the name by which net/rpc knows the calls of a Server.
const Service = "Guest"

// A Server answers the host.
type Server struct {
	hello Greeting

	mu        sync.Mutex
	processes []*process
}

func newServer(problems []string) *Server {
	s := &Server{hello: Greeting{Problems: problems}}
	if id, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		s.hello.Boot = strings.TrimSpace(string(id))
	}
	if release, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		s.hello.Kernel = strings.TrimSpace(string(release))
	}
	return s
}

// serve answers in JSON, of which each message stands for itself: the host may come again in the midst.
func (s *Server) serve(p *port) error {
	server := rpc.NewServer()
	if err := server.RegisterName(Service, s); err != nil {
		return err
	}
	for {
		server.ServeCodec(jsonrpc.NewServerCodec(&session{port: p}))
	}
}

// Nothing is what a call is given, or answers, that needs no more.
type Nothing struct{}

// A Greeting says which boot of which kernel this is, and the modules that could not be loaded.
type Greeting struct {
	Boot     string
	Kernel   string
	Problems []string
}

// Hello tells that the guest is alive.
func (s *Server) Hello(_ Nothing, reply *Greeting) error {
	*reply = s.hello
	return nil
}

// A Command is a program to start.
type Command struct {
	Args  []string
	Env   []string // beside PATH and HOME
	Dir   string
	Stdin []byte
}

// Started is a process: its number in later calls, and its PID in the guest.
type Started struct {
	Process int
	PID     int
}

// Start starts a program.
func (s *Server) Start(c Command, reply *Started) error {
	p := &process{news: make(chan struct{})}
	p.cmd = exec.Command(c.Args[0], c.Args[1:]...)
	p.cmd.Env = append([]string{"PATH=" + Path, "HOME=/root"}, c.Env...)
	p.cmd.Dir = c.Dir
	p.cmd.Stdin = bytes.NewReader(c.Stdin)
	p.cmd.Stdout = &output{p: p, to: &p.stdout}
	p.cmd.Stderr = &output{p: p, to: &p.stderr}
	p.cmd.WaitDelay = time.Second // for children that keep the output open
	if err := p.cmd.Start(); err != nil {
		return err
	}
	go p.wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.processes = append(s.processes, p)
	*reply = Started{Process: len(s.processes) - 1, PID: p.cmd.Process.Pid}
	return nil
}

func (s *Server) process(number int) *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.processes[number]
}

// A Position is how much of a process' output the host has already.
type Position struct {
	Process, Stdout, Stderr int
}

// News is what a process wrote since, and how it ended if it did.
type News struct {
	Stdout, Stderr []byte
	Ended          bool
	Code           int // -1 after a signal
}

// Follow answers when the process has written something or ended, and after a second at the latest.
func (s *Server) Follow(at Position, reply *News) error {
	p := s.process(at.Process)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stdout.Len() == at.Stdout && p.stderr.Len() == at.Stderr && !p.ended {
		news := p.news
		p.mu.Unlock()
		select {
		case <-news:
		case <-time.After(time.Second):
		}
		p.mu.Lock()
	}
	*reply = News{
		Stdout: bytes.Clone(p.stdout.Bytes()[at.Stdout:]), Stderr: bytes.Clone(p.stderr.Bytes()[at.Stderr:]),
		Ended: p.ended, Code: p.code,
	}
	return nil
}

// A Signal goes to a process.
type Signal struct {
	Process int
	Signal  syscall.Signal
}

// Signal sends a process a signal; one that ended is left alone.
func (s *Server) Signal(to Signal, _ *Nothing) error {
	err := s.process(to.Process).cmd.Process.Signal(to.Signal)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// Read reads a whole file.
func (s *Server) Read(path string, reply *[]byte) error {
	data, err := os.ReadFile(path)
	*reply = data
	return err
}

// A File is a file to write.
type File struct {
	Path string
	Data []byte
	Mode os.FileMode // 0 leaves the mode of a file that exists, and creates none
}

// Write writes a file by one call of write(2) where it is short, as attributes in sysfs want it.
func (s *Server) Write(f File, _ *Nothing) error {
	flags := os.O_WRONLY | os.O_TRUNC
	if f.Mode != 0 {
		flags |= os.O_CREATE
		if err := os.MkdirAll(filepath.Dir(f.Path), 0o755); err != nil {
			return err
		}
	}
	file, err := os.OpenFile(f.Path, flags, f.Mode)
	if err != nil {
		return err
	}
	_, err = file.Write(f.Data)
	return errors.Join(err, file.Close())
}

// A Mount is a file system to mount.
type Mount struct {
	Source, Target, Type string
	Flags                uintptr
	Options              string
}

// Mount mounts a file system on a directory, which it makes.
func (s *Server) Mount(m Mount, _ *Nothing) error {
	if err := os.MkdirAll(m.Target, 0o755); err != nil {
		return err
	}
	return unix.Mount(m.Source, m.Target, m.Type, m.Flags, m.Options)
}

// A process is one that the host started.
type process struct {
	cmd *exec.Cmd

	mu             sync.Mutex
	news           chan struct{} // closed, and made anew, when there is something to tell
	stdout, stderr bytes.Buffer
	ended          bool
	code           int
}

func (p *process) wait() {
	_ = p.cmd.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended, p.code = true, p.cmd.ProcessState.ExitCode()
	p.tell()
}

// tell wakes those that follow. The caller has the lock.
func (p *process) tell() {
	close(p.news)
	p.news = make(chan struct{})
}

// An output is one of a process' two.
type output struct {
	p  *process
	to *bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.p.mu.Lock()
	defer o.p.mu.Unlock()
	defer o.p.tell()
	return o.to.Write(b)
}
