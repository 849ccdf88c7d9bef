// Package supervisor models the program that runs MPS daemons for claims, with the compute modes of
// the GPUs; see cmd/chandler-host/sharing. Like the program, the model writes a record of each claim,
// and continues from the records after a restart. The model can be killed, and its daemons may end.
package supervisor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"

	files "chandler.dev/internal/disk"
	"chandler.dev/internal/hostservice/wire"
	"chandler.dev/internal/simulation/chance"
	"chandler.dev/internal/simulation/disk"
	"chandler.dev/internal/simulation/history"
	"chandler.dev/internal/simulation/kernel"
)

// Config holds what a supervisor needs.
type Config struct {
	History *history.History
	Chance  *chance.Chance
	Host    *kernel.Host
	Disk    *disk.Disk

	Dir    string        // the directory of the program
	Serves bool          // the machine has GPUs for daemons
	Boot   func() string // returns the ID of the present boot

	// Wiped reports whether records were removed or damaged. Without its record, a claim cannot be
	// ended.
	Wiped func() bool
}

// Supervisor is a model of the program.
type Supervisor struct {
	config Config
	calls  sync.WaitGroup

	mu      sync.Mutex
	ended   chan struct{} // closed when the present process ends; nil while none runs
	claims  map[string]*served
	modes   map[string]string // by UUID of a GPU in exclusive mode: the UID of the claim
	refuses bool              // the modes of GPUs cannot be changed
	delayed string            // the claim whose next order is delayed
}

// New returns a supervisor without a process.
func New(config Config) *Supervisor {
	return &Supervisor{config: config, modes: make(map[string]string)}
}

// served is a claim. A call holds busy while it works on the claim.
type served struct {
	wire.Claim
	busy       chan struct{}
	restarting bool // its daemon ended or failed, and is being started again
}

// RoundTrip implements [http.RoundTripper]. The work goes on if the caller gives up.
func (s *Supervisor) RoundTrip(r *http.Request) (*http.Response, error) {
	s.mu.Lock()
	ended := s.ended
	s.mu.Unlock()
	if ended == nil {
		return nil, syscall.ECONNREFUSED
	}
	answer := make(chan *http.Response, 1)
	s.calls.Go(func() {
		if a := s.serve(ended, r); a != nil {
			answer <- a
		}
	})
	select {
	case a := <-answer:
		return a, nil
	case <-ended:
		return nil, io.ErrUnexpectedEOF
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}

// errCrashed is the error of work whose process has ended.
var errCrashed = errors.New("the supervisor has ended")

// serve answers a request. It returns nil if the process ends first.
func (s *Supervisor) serve(ended chan struct{}, r *http.Request) *http.Response {
	if r.Method == http.MethodPut && s.isDelayed(path.Base(r.URL.Path)) {
		time.Sleep(time.Second + s.config.Chance.UpTo(3*time.Second))
	} else if s.config.Chance.OneIn(4) { // the order of two requests may change
		time.Sleep(s.config.Chance.UpTo(4 * time.Second))
	}
	uid, body, err := path.Base(r.URL.Path), []byte(nil), error(nil)
	switch r.Method {
	case http.MethodGet:
		body, err = json.Marshal(s.list())
	case http.MethodPut:
		var order wire.Order
		if err = json.NewDecoder(r.Body).Decode(&order); err == nil {
			err = s.begin(r.Context(), ended, uid, order.How)
		}
	case http.MethodDelete:
		err = s.end(ended, uid)
	}
	status := http.StatusOK
	switch {
	case errors.Is(err, errCrashed):
		return nil
	case err != nil:
		status, body = http.StatusInternalServerError, []byte(err.Error())
	}
	if r.Method != http.MethodGet {
		s.config.History.Log("supervisor: %s %s: %v", r.Method, uid, err)
	}
	return &http.Response{StatusCode: status, Body: io.NopCloser(bytes.NewReader(body)), Request: r}
}

// DelayOrder delays the next order to start the daemon of a claim.
func (s *Supervisor) DelayOrder(claim types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.delayed = string(claim)
}

// HasDelayed reports whether the order to be delayed has arrived.
func (s *Supervisor) HasDelayed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.delayed == ""
}

// isDelayed reports whether an order is to be delayed, and forgets it.
func (s *Supervisor) isDelayed(uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.delayed != uid {
		return false
	}
	s.delayed = ""
	return true
}

func (s *Supervisor) list() (all []wire.Claim) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, uid := range slices.Sorted(maps.Keys(s.claims)) {
		all = append(all, s.claims[uid].Claim)
	}
	return all
}

// do takes time, and then makes a change, unless the process has ended.
func (s *Supervisor) do(ended chan struct{}, longest time.Duration, change func() error) error {
	time.Sleep(s.config.Chance.UpTo(longest))
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != ended {
		return errCrashed
	}
	return change()
}

// enter returns a claim whose busy channel the caller holds, nil if there is none. With how, enter
// adds a missing claim, and refuses GPUs that another claim has.
func (s *Supervisor) enter(ended chan struct{}, uid string, how map[string]string) (c *served, err error) {
	for {
		err := s.do(ended, time.Millisecond, func() error {
			for _, other := range slices.Sorted(maps.Keys(s.claims)) {
				for _, gpu := range gpusOf(s.claims[other].How) {
					if other != uid && slices.Contains(gpusOf(how), gpu) {
						return fmt.Errorf("GPU %s: claim %s has it still", gpu, other)
					}
				}
			}
			if c = s.claims[uid]; c == nil && how != nil {
				c = &served{Claim: wire.Claim{UID: uid, How: how}, busy: make(chan struct{}, 1)}
				s.claims[uid] = c
			}
			return nil
		})
		if err != nil || c == nil {
			return nil, err
		}
		select {
		case c.busy <- struct{}{}:
		case <-ended:
			return nil, errCrashed
		}
		s.mu.Lock()
		present := s.claims[uid] == c
		s.mu.Unlock()
		if present {
			return c, nil
		}
		<-c.busy // the claim ended while this call waited
	}
}

func gpusOf(how map[string]string) []string {
	if how["gpus"] == "" {
		return nil
	}
	return strings.Split(how["gpus"], ",")
}

// begin starts the daemon of a claim, unless the client has given up before.
func (s *Supervisor) begin(ctx context.Context, ended chan struct{}, uid string, how map[string]string) error {
	if len(how) == 0 {
		return errors.New("the order makes no sense: no GPU")
	}
	c, err := s.enter(ended, uid, how)
	if err != nil {
		return err
	}
	defer func() { <-c.busy }()
	s.mu.Lock()
	done, touched := c.Begun && c.Broken == "", c.Changed
	if !done && ctx.Err() != nil && !c.Begun && !touched {
		delete(s.claims, uid)
	}
	s.mu.Unlock()
	if done || ctx.Err() != nil {
		return ctx.Err()
	}
	if touched {
		if err := s.undo(ended, c); err != nil {
			return err
		}
	}
	if err = s.start(ended, c, how); err != nil && !errors.Is(err, errCrashed) {
		err = errors.Join(err, s.undo(ended, c))
		s.mu.Lock()
		c.Broken = err.Error()
		s.mu.Unlock()
	}
	return err
}

func (s *Supervisor) start(ended chan struct{}, c *served, how map[string]string) error {
	err := s.do(ended, 50*time.Millisecond, func() error {
		c.restarting = c.Broken != ""
		c.Claim = wire.Claim{UID: c.UID, How: how, Changed: true, Boot: s.config.Boot()}
		return nil
	})
	if err = errors.Join(err, s.save(c)); err != nil {
		return err
	}
	for _, gpu := range gpusOf(how) {
		err := s.do(ended, 2*time.Second, func() error {
			if s.refuses {
				return fmt.Errorf("compute mode of GPU %s: refused", gpu)
			}
			if other := s.modes[gpu]; other != "" && other != c.UID && !s.config.Wiped() { // without its records, a claim cannot be ended
				s.config.History.Fail("claim %s gets a daemon on GPU %s, which is in exclusive mode for claim %s", c.UID, gpu, other)
			}
			s.modes[gpu] = c.UID
			return nil
		})
		if err != nil {
			return err
		}
	}
	err = s.do(ended, time.Second, func() error {
		pid := s.config.Host.StartProcess("nvidia-cuda-mps", "/kubepods.slice/supervisor.scope")
		c.Process, c.restarting = wire.Process{PID: pid, Start: strconv.Itoa(pid)}, false
		return nil
	})
	if err = errors.Join(err, s.save(c)); err != nil {
		return err
	}
	if err := s.do(ended, time.Second, func() error { c.Begun = true; return nil }); err != nil {
		return err
	}
	return s.save(c)
}

// end ends the daemon of a claim, and removes the claim.
func (s *Supervisor) end(ended chan struct{}, uid string) error {
	c, err := s.enter(ended, uid, nil)
	if err != nil || c == nil {
		return err
	}
	defer func() { <-c.busy }()
	if err := s.undo(ended, c); err != nil {
		return err
	}
	if err := s.files().RemoveAll(path.Join(s.config.Dir, uid)); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		c.Broken = fmt.Sprintf("it could not be ended: %v", err)
		return err
	}
	return s.do(ended, time.Millisecond, func() error { delete(s.claims, uid); return nil })
}

// undo ends the daemon of a claim, and restores the modes of the GPUs. A daemon in order goes on if
// a mode cannot be restored. A missing GPU counts as restored.
func (s *Supervisor) undo(ended chan struct{}, c *served) error {
	s.mu.Lock()
	inOrder := c.Begun && c.Broken == ""
	s.mu.Unlock()
	if inOrder {
		if err := s.restore(ended, c); err != nil {
			return err
		}
	}
	err := s.do(ended, 3*time.Second, func() error {
		s.config.Host.Exit(c.Process.PID)
		c.Process = wire.Process{}
		return nil
	})
	if err != nil {
		return err
	}
	return s.restore(ended, c)
}

// restore restores the modes of a claim's GPUs.
func (s *Supervisor) restore(ended chan struct{}, c *served) (err error) {
	for _, gpu := range gpusOf(c.How) {
		err = errors.Join(err, s.do(ended, time.Second, func() error {
			switch {
			case s.modes[gpu] != c.UID:
				return nil
			case s.refuses:
				return fmt.Errorf("compute mode of GPU %s: refused", gpu)
			}
			delete(s.modes, gpu)
			return nil
		}))
	}
	if err == nil {
		s.mu.Lock()
		c.Begun, c.Changed = false, false
		s.mu.Unlock()
	}
	return err
}

func (s *Supervisor) files() files.Files { return files.Files{FS: s.config.Disk.View(nil)} }

// save writes the record of a claim.
func (s *Supervisor) save(c *served) error {
	s.mu.Lock()
	data, err := json.Marshal(c.Claim)
	s.mu.Unlock()
	dir := path.Join(s.config.Dir, c.UID)
	if err = errors.Join(err, s.files().MakeDir(dir, 0o700)); err != nil {
		return err
	}
	_, err = s.files().Write(path.Join(dir, wire.Record), data, 0o600)
	return err
}

// Wait returns when no call is in progress.
func (s *Supervisor) Wait() { s.calls.Wait() }

// Kill ends the process. Without its parent, all daemons end too.
func (s *Supervisor) Kill(withDaemons bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		close(s.ended)
		s.ended = nil
	}
	for _, uid := range slices.Sorted(maps.Keys(s.claims)) {
		if withDaemons {
			s.config.Host.Exit(s.claims[uid].Process.PID)
		}
	}
}

// RestartProcess starts a process, which continues from the records. A daemon without a record does not
// exist: the record is written first.
func (s *Supervisor) RestartProcess() {
	s.Kill(false)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended, s.claims = make(chan struct{}), make(map[string]*served)
	if s.config.Serves {
		s.config.Disk.AddFile(path.Join(s.config.Dir, wire.Socket))
	}
	for _, name := range s.config.Disk.Files(s.config.Dir) {
		if path.Base(name) != wire.Record {
			continue
		}
		c := &served{busy: make(chan struct{}, 1)}
		data, _ := s.config.Disk.FileContent(name)
		err := json.Unmarshal(data, &c.Claim)
		c.UID = path.Base(path.Dir(name))
		switch {
		case err != nil:
			c.Broken = fmt.Sprintf("its record cannot be read: %v", err)
		case !c.Begun:
			c.Broken = "an earlier process ended before all was done"
		case !s.isAlive(c.Process):
			c.Broken = "its daemon ended while the supervisor was not running"
		}
		c.Changed = true // undo restores the modes once more
		s.claims[c.UID] = c
	}
}

func (s *Supervisor) isAlive(p wire.Process) bool {
	_, err := s.config.Host.Stat(fmt.Sprintf("proc/%d", p.PID))
	return p.PID > 0 && err == nil
}

// RebootHost forgets the modes, and starts a process.
func (s *Supervisor) RebootHost() {
	s.mu.Lock()
	clear(s.modes)
	s.mu.Unlock()
	s.RestartProcess()
}

// WrongMode returns an error text if the mode of a GPU does not fit the claim that has the GPU, "" if
// it fits. claim is "" for a container without a claim.
func (s *Supervisor) WrongMode(gpu string, claim types.UID) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if mode := s.modes[gpu]; mode != "" && mode != string(claim) {
		return fmt.Sprintf("GPU %s is in exclusive mode for claim %s", gpu, mode)
	}
	return ""
}

// LacksDaemon returns an error text if a claim that is about to be used has no daemon, "" if it has
// one, or had one that has ended and is to be started again: kubelets restart containers without a
// call of the driver.
func (s *Supervisor) LacksDaemon(claim types.UID) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.claims[string(claim)]; c == nil || c.Process.PID == 0 && c.Broken == "" && !c.restarting {
		return "it has no daemon"
	}
	return ""
}

// RefuseModes sets whether changes of the modes of GPUs fail.
func (s *Supervisor) RefuseModes(refuses bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuses = refuses
}

// KillDaemon ends the daemon of the given claim or, if it has none, of any claim. It reports whether
// there was a daemon.
func (s *Supervisor) KillDaemon(random *rand.Rand, claim types.UID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var alive []*served
	for _, uid := range slices.Sorted(maps.Keys(s.claims)) {
		if c := s.claims[uid]; c.Begun && s.isAlive(c.Process) {
			alive = append(alive, c)
		}
	}
	if len(alive) == 0 {
		return false
	}
	c := chance.PickOne(random, alive...)
	if i := slices.IndexFunc(alive, func(c *served) bool { return c.UID == string(claim) }); i >= 0 {
		c = alive[i]
	}
	s.config.History.Log("the daemon of claim %s dies", c.UID)
	s.config.Host.Exit(c.Process.PID)
	if s.ended != nil {
		c.Process, c.Broken = wire.Process{}, "its daemon has ended by itself"
	}
	return true
}

// RemainingWork returns an error text if the work for a claim remains, "" if none remains or records were
// wiped.
func (s *Supervisor) RemainingWork() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.claims)+len(s.modes) > 0 && !s.config.Wiped() {
		return fmt.Sprintf("the supervisor has claims %v, and GPUs in exclusive mode %v", slices.Sorted(maps.Keys(s.claims)), s.modes)
	}
	return ""
}

var _ http.RoundTripper = (*Supervisor)(nil)
