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

// Service is the name of the Server's methods in net/rpc.
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

// serve answers in JSON. Each message is independent, because the host may reconnect in the middle
// of a message.
func (s *Server) serve(p *port) error {
	server := rpc.NewServer()
	if err := server.RegisterName(Service, s); err != nil {
		return err
	}
	for {
		server.ServeCodec(jsonrpc.NewServerCodec(&session{port: p}))
	}
}

// Nothing is the empty argument or result of a call.
type Nothing struct{}

// A Greeting identifies the boot and the kernel, and lists the modules that could not be loaded.
type Greeting struct {
	Boot     string
	Kernel   string
	Problems []string
}

// Hello shows that the guest answers.
func (s *Server) Hello(_ Nothing, reply *Greeting) error {
	*reply = s.hello
	return nil
}

// A Command is a program to start.
type Command struct {
	Args  []string
	Env   []string // in addition to PATH and HOME
	Dir   string
	Stdin []byte
}

// Started is a started process: its number for later calls, and its PID in the guest.
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

// A Position is the amount of a process's output that the host already has.
type Position struct {
	Process, Stdout, Stderr int
}

// News is the new output of a process, and its exit code if the process has ended.
type News struct {
	Stdout, Stderr []byte
	Ended          bool
	Code           int // -1 after a signal
}

// Follow returns when the process has new output or has ended, at the latest after a second.
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

// A Signal is a signal for a process.
type Signal struct {
	Process int
	Signal  syscall.Signal
}

// Signal sends a signal to a process. An ended process is not an error.
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
	Mode os.FileMode // 0 keeps the mode of an existing file, and does not create a file
}

// Write writes a file. A short text is written by one call of write(2), as sysfs attributes
// require.
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

// Mount creates a directory and mounts a file system there.
func (s *Server) Mount(m Mount, _ *Nothing) error {
	if err := os.MkdirAll(m.Target, 0o755); err != nil {
		return err
	}
	return unix.Mount(m.Source, m.Target, m.Type, m.Flags, m.Options)
}

// A process is a process that the host started.
type process struct {
	cmd *exec.Cmd

	mu             sync.Mutex
	news           chan struct{} // closed and replaced on each change
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

// tell wakes the followers. The caller holds the lock.
func (p *process) tell() {
	close(p.news)
	p.news = make(chan struct{})
}

// An output is the standard output or standard error of a process.
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
