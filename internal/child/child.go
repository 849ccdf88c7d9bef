// Package child runs programs that print lines until their standard input is closed, or that print
// once.
package child

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a running program. Read reads its standard output, and Write writes to its standard
// input.
type Process struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout io.Reader
	said   head
}

// Start starts a program. The caller must read the output to its end, and then call Wait.
func Start(path string, args ...string) (*Process, error) {
	p := &Process{cmd: exec.Command(path, args...)}
	p.cmd.Stderr = &p.said
	p.cmd.WaitDelay = time.Second // a child process of the program can keep standard error open
	var err error
	if p.stdin, err = p.cmd.StdinPipe(); err != nil { // the program ends when this is closed, even if this process is killed
		return nil, err
	}
	if p.stdout, err = p.cmd.StdoutPipe(); err != nil {
		p.stdin.Close()
		return nil, err
	}
	return p, p.cmd.Start()
}

// Read implements [io.Reader].
func (p *Process) Read(b []byte) (int, error) { return p.stdout.Read(b) }

// Write implements [io.Writer].
func (p *Process) Write(b []byte) (int, error) { return p.stdin.Write(b) }

// Kill kills the program, and closes its standard input. A program that hangs in the kernel ends
// when the kernel returns.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // the program may have ended
	p.stdin.Close()
}

// Wait waits for the end of the program, and returns its reason.
func (p *Process) Wait() error { return p.said.endReason(p.cmd.Path, p.cmd.Wait()) }

// maxOutput limits the output of Run, in bytes.
const maxOutput = 64 << 10

// Run runs a program to its end, and returns its output, at most 64 KiB. A program that succeeds with
// a warning has written it to standard error. If the context ends, the program is killed; Run then
// returns when the program has ended. The kernel kills the program if this process is killed.
//
// The program inherits the held files. So a held connection or lock remains until the program has
// ended, even if this process is killed while the program hangs in the kernel.
func Run(ctx context.Context, held []*os.File, path string, args ...string) (output []byte, warning string, err error) {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = 10 * time.Second // on a busy machine, reading what an ended program wrote may take seconds
	said, answer := &head{}, &bounded{}
	cmd.Stderr, cmd.Stdout = said, answer
	runtime.LockOSThread() // Pdeathsig is sent at the end of the thread that starts the program
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err = startHolding(cmd, held); err == nil {
		err = cmd.Wait()
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, "", context.Cause(ctx)
	case err != nil:
		return nil, "", said.endReason(path, err)
	case answer.Len() > maxOutput:
		return nil, "", errors.New("its answer is too long")
	}
	return answer.Bytes(), said.firstLine(path), nil
}

// startHolding starts a program that inherits the held files. Package exec makes inherited files blocking,
// and with them a connection that this process uses, so startHolding restores their flags.
func startHolding(cmd *exec.Cmd, held []*os.File) error {
	flags := make([]int, len(held))
	control := func(i int, do func(fd int) error) error {
		conn, err := held[i].SyscallConn()
		if err != nil {
			return err
		}
		var failed error
		err = conn.Control(func(fd uintptr) { failed = do(int(fd)) })
		return errors.Join(err, failed)
	}
	for i := range held {
		err := control(i, func(fd int) (err error) {
			flags[i], err = unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
			return err
		})
		if err != nil {
			return fmt.Errorf("read flags of %s: %w", held[i].Name(), err)
		}
	}
	cmd.ExtraFiles = held
	err := cmd.Start()
	for i := range held {
		_ = control(i, func(fd int) error { // the flags were read before
			_, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags[i])
			return err
		})
	}
	return err
}

// bounded keeps at most one byte more than maxOutput.
type bounded struct{ bytes.Buffer }

// Write implements [io.Writer].
func (b *bounded) Write(p []byte) (int, error) {
	b.Buffer.Write(p[:min(len(p), maxOutput+1-b.Len())])
	return len(p), nil
}

// head is the beginning of a program's standard error.
type head struct{ text []byte }

// Write implements [io.Writer]. It keeps at most 512 bytes.
func (h *head) Write(p []byte) (int, error) {
	const enough = 512
	h.text = append(h.text, p[:min(len(p), enough-len(h.text))]...)
	return len(p), nil
}

// firstLine returns the first line, without the name of the program.
func (h *head) firstLine(path string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(h.text)), "\n")
	return strings.TrimPrefix(line, filepath.Base(path)+": ")
}

// endReason returns the reason for the end of a program with an exit status: the status, and the
// first line of standard error.
func (h *head) endReason(path string, status error) error {
	if status == nil {
		return errors.New("it ended: " + h.firstLine(path))
	}
	return fmt.Errorf("it ended: %w: %s", status, h.firstLine(path))
}
