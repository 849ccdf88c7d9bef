package hostservice

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/internal/hostservice/wire"
)

// Program is a running program. Read reads its output, and each line that is written requests a new
// scan. The caller reads the output to its end, and then calls Wait.
type Program interface {
	io.ReadWriter

	// Kill ends the program, if possible.
	Kill()

	// Wait waits for the end of the program, and returns its reason.
	Wait() error
}

const (
	// maxPrograms limits the running processes of a program. The agents before and after an upgrade
	// have one each, and a command in the agent's pod may have another one.
	maxPrograms = 4

	// endPatience limits the wait for the end of a killed program. It ends within milliseconds, unless
	// it hangs in the kernel.
	endPatience = 2 * time.Second

	// maxReason limits the reason for the end of a program, in bytes.
	maxReason = 1 << 10
)

// runProgram runs a program until the request's body ends or the service ends.
func (s *Server) runProgram(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	start := s.config.Programs[name]
	if start == nil {
		s.reply(w, nil, refuseRequest("program %.64q is not one that the host service runs on this node", name))
		return
	}
	if err := s.enterProgram(r.Context(), name); err != nil {
		s.reply(w, nil, err)
		return
	}
	program, err := start()
	if err != nil {
		s.leaveProgram(name, false)
		s.reply(w, nil, fmt.Errorf("start program %s: %w", name, err))
		return
	}
	kill := sync.OnceFunc(func() {
		s.noteKill(name)
		program.Kill()
	})
	answered := make(chan struct{})
	defer close(answered)
	go func() {
		select {
		case <-s.ending:
			kill()
		case <-answered:
		}
	}()
	control := http.NewResponseController(w)
	_ = control.EnableFullDuplex() // net/http supports it in HTTP/1, which is the only version of HTTP on the socket
	w.Header().Set("Trailer", wire.EndHeader)
	w.WriteHeader(http.StatusOK)
	_ = control.Flush() // the next write reports that the agent is gone
	refusal := make(chan error, 1)
	go func() {
		err := passRequests(program, r.Body)
		kill()
		refusal <- err
	}()
	if _, err := io.Copy(flushed{w, control}, program); err != nil {
		kill() // the agent is gone
		_, _ = io.Copy(io.Discard, program)
	}
	reason := program.Wait()
	kill() // it does nothing, except that the program is noted as killed
	s.leaveProgram(name, true)
	_ = control.SetReadDeadline(time.Unix(1, 0)) // ends passRequests
	if refused := <-refusal; refused != nil {
		reason = refused
		s.config.Log.Printf("refused: %v", refused)
	}
	w.Header().Set(wire.EndHeader, reason.Error())
}

// passRequests passes requests for scans to a program until there are no more. It returns an error
// if the input is more than empty lines. Requests that the program has not read yet count as one.
func passRequests(program io.Writer, input io.Reader) error {
	requests := make(chan struct{}, 1)
	defer close(requests)
	go func() {
		for range requests {
			_, _ = program.Write([]byte("\n")) // it fails if the program has ended
		}
	}()
	buffer := make([]byte, 512)
	for {
		n, err := input.Read(buffer)
		if len(bytes.Trim(buffer[:n], "\n")) > 0 {
			return refuseRequest("the input of a program has more than empty lines")
		}
		if n > 0 {
			select {
			case requests <- struct{}{}:
			default:
			}
		}
		if err != nil {
			return nil //nolint:nilerr // the agent is gone, or the program has ended
		}
	}
}

// flushed sends each write at once.
type flushed struct {
	io.Writer

	control *http.ResponseController
}

// Write implements [io.Writer].
func (f flushed) Write(p []byte) (int, error) {
	n, err := f.Writer.Write(p)
	return n, errors.Join(err, f.control.Flush())
}

// enterProgram reserves a place for a program. It waits for the end of killed processes of the
// program, so that none starts beside one that hangs in the kernel.
func (s *Server) enterProgram(ctx context.Context, name string) error {
	limit := time.After(endPatience)
	for {
		s.mu.Lock()
		ended, killed, running := s.ended, s.killed[name], s.running[name]
		if killed == 0 && running < maxPrograms {
			s.running[name]++
			s.mu.Unlock()
			return nil
		}
		s.mu.Unlock()
		select {
		case <-ended:
		case <-ctx.Done():
			return ctx.Err()
		case <-limit:
			if killed > 0 {
				return &answer{status: statusBusy, text: fmt.Sprintf("a killed program %s of the host service has not ended: it hangs in the kernel", name)}
			}
			return &answer{status: statusBusy, text: fmt.Sprintf("the host service runs program %s for %d agents already", name, running)}
		}
	}
}

func (s *Server) noteKill(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.killed[name]++
}

// leaveProgram ends a reservation, of a program that was noted as killed or of one that did not
// start.
func (s *Server) leaveProgram(name string, killed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[name]--
	if killed {
		s.killed[name]--
	}
	s.noteEnd()
}

// listPrograms returns the names of the programs that the service runs, sorted.
func (s *Server) listPrograms() []string { return slices.Sorted(maps.Keys(s.config.Programs)) }

// HasProgram reports whether a service answers within a limit and runs a program.
func (c *Client) HasProgram(ctx context.Context, name string, limit time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	service, err := c.describeCompatible(ctx)
	return err == nil && slices.Contains(service.Programs, name)
}

// StartProgram starts a program in the service, which has to answer within a limit. The program ends
// with the context. A read of its output returns an error that wraps [ErrAway] if the service is
// gone.
func (c *Client) StartProgram(ctx context.Context, name string, limit time.Duration) (Program, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(limit, func() { cancel(c.awayError(fmt.Errorf("no answer within %s", limit))) })
	defer timer.Stop()
	program, err := c.startProgram(ctx, name, func() { cancel(nil) })
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		cancel(nil)
		return nil, err
	}
	return program, nil
}

func (c *Client) startProgram(ctx context.Context, name string, cancel func()) (Program, error) {
	service, err := c.describeCompatible(ctx)
	if err != nil {
		return nil, err
	}
	if !slices.Contains(service.Programs, name) {
		return nil, fmt.Errorf("the host service at %s does not run program %q on this node: see chandler-host --help", filepath.Join(c.dir, wire.Socket), name)
	}
	body, input := io.Pipe()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://host"+wire.ProgramsPath+"/"+name, body)
	if err != nil {
		return nil, err
	}
	response, err := c.transport.RoundTrip(request)
	if err != nil {
		return nil, c.awayError(err)
	}
	if response.StatusCode != http.StatusOK {
		defer response.Body.Close()
		text, err := io.ReadAll(io.LimitReader(response.Body, maxReason))
		if err != nil {
			return nil, c.awayError(err)
		}
		return nil, (&Response{status: response.StatusCode, text: text}).Decode(nil)
	}
	return &remoteProgram{client: c, response: response, input: input, cancel: cancel}, nil
}

// remoteProgram is a program that the service runs.
type remoteProgram struct {
	client   *Client
	response *http.Response
	input    *io.PipeWriter
	cancel   func()
}

// Read implements [io.Reader].
func (p *remoteProgram) Read(b []byte) (int, error) {
	n, err := p.response.Body.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		err = p.client.awayError(err)
	}
	return n, err
}

// Write implements [io.Writer].
func (p *remoteProgram) Write(b []byte) (int, error) { return p.input.Write(b) }

// Kill implements [Program].
func (p *remoteProgram) Kill() {
	p.input.Close()
	p.cancel()
}

// Wait implements [Program].
func (p *remoteProgram) Wait() error {
	p.Kill()
	p.response.Body.Close()
	if reason := p.response.Trailer.Get(wire.EndHeader); reason != "" {
		return errors.New(strings.ToValidUTF8(reason[:min(len(reason), maxReason)], "?"))
	}
	return errors.New("the host service reports no reason for the end of its program")
}

// awayError returns the error of a request that the service has not answered.
func (c *Client) awayError(err error) error {
	return discovery.TransientError(fmt.Errorf("%w at %s: %w; chandler-host --host-service must run on this node", ErrAway, filepath.Join(c.dir, wire.Socket), err))
}
