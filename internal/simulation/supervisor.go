package simulation

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	files "chandler.dev/internal/disk"
	"chandler.dev/internal/hostservice/wire"
)

// supervisor models the program that runs MPS daemons for claims, with the compute modes of the
// GPUs; see cmd/chandler-host/sharing. Like the program, the model writes a record of each claim,
// and continues from the records after a restart.
type supervisor struct {
	world *World
	calls sync.WaitGroup

	mu      sync.Mutex
	ended   chan struct{} // closed when the present process ends; nil while none runs
	claims  map[string]*served
	modes   map[string]string // by UUID of a GPU in exclusive mode: the UID of the claim
	refuses bool              // the modes of GPUs cannot be changed
}

// served is a claim. A call holds busy while it works on the claim.
type served struct {
	wire.Claim
	busy       chan struct{}
	restarting bool // its daemon ended or failed, and is being started again
}

// asMPS is the parameter of claims that request an MPS daemon.
const asMPS = `{"mps":"true"}`

// supervisorDir is the directory of the program.
const supervisorDir = stateDir + "/sharing-daemons/nvidia"

func newSupervisor(w *World) *supervisor {
	return &supervisor{world: w, modes: make(map[string]string)}
}

// specifyDaemon makes some claims request an MPS daemon. A daemon needs whole devices.
func (w *World) specifyDaemon(claim *resourceapi.ResourceClaim) {
	if w.machine.daemons && len(w.settings.Rules.Sharing) == 0 && w.random.IntN(2) == 0 {
		claim.Spec.Devices.Config = configWith(asMPS)
	}
}

// requestsMPS reports whether a claim requests a daemon.
func requestsMPS(claim *resourceapi.ResourceClaim) bool {
	config := claim.Spec.Devices.Config
	return len(config) > 0 && string(config[0].Opaque.Parameters.Raw) == asMPS
}

// allowDaemons returns the setting that allows daemons for all GPUs of the machine.
func (m *machine) allowDaemons() map[discovery.SharingDaemonKind][]discovery.Selection[struct{}] {
	if !m.daemons {
		return nil
	}
	every := discovery.Selection[struct{}]{Expression: "true", Selects: func(discovery.Device) (bool, error) { return true, nil }}
	return map[discovery.SharingDaemonKind][]discovery.Selection[struct{}]{discovery.SharingDaemonMPS: {every}}
}

// RoundTrip implements [http.RoundTripper]. The work goes on if the caller gives up.
func (s *supervisor) RoundTrip(r *http.Request) (*http.Response, error) {
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
func (s *supervisor) serve(ended chan struct{}, r *http.Request) *http.Response {
	if s.world.oneChanceIn(4) { // the order of two requests may change
		time.Sleep(s.world.upTo(4 * time.Second))
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
		s.world.log("supervisor: %s %s: %v", r.Method, uid, err)
	}
	return &http.Response{StatusCode: status, Body: io.NopCloser(bytes.NewReader(body)), Request: r}
}

func (s *supervisor) list() (all []wire.Claim) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, uid := range slices.Sorted(maps.Keys(s.claims)) {
		all = append(all, s.claims[uid].Claim)
	}
	return all
}

// do takes time, and then makes a change, unless the process has ended.
func (s *supervisor) do(ended chan struct{}, longest time.Duration, change func() error) error {
	time.Sleep(s.world.upTo(longest))
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != ended {
		return errCrashed
	}
	return change()
}

// enter returns a claim whose busy channel the caller holds, nil if there is none. With how, enter
// adds a missing claim, and refuses GPUs that another claim has.
func (s *supervisor) enter(ended chan struct{}, uid string, how map[string]string) (c *served, err error) {
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
func (s *supervisor) begin(ctx context.Context, ended chan struct{}, uid string, how map[string]string) error {
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

func (s *supervisor) start(ended chan struct{}, c *served, how map[string]string) error {
	err := s.do(ended, 50*time.Millisecond, func() error {
		c.restarting = c.Broken != ""
		c.Claim = wire.Claim{UID: c.UID, How: how, Changed: true, Boot: s.world.boot}
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
			if other := s.modes[gpu]; other != "" && other != c.UID && !s.world.wiped { // without its records, a claim cannot be ended
				s.world.fail("claim %s gets a daemon on GPU %s, which is in exclusive mode for claim %s", c.UID, gpu, other)
			}
			s.modes[gpu] = c.UID
			return nil
		})
		if err != nil {
			return err
		}
	}
	err = s.do(ended, time.Second, func() error {
		pid := s.world.host.StartProcess("nvidia-cuda-mps", "/kubepods.slice/supervisor.scope")
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
func (s *supervisor) end(ended chan struct{}, uid string) error {
	c, err := s.enter(ended, uid, nil)
	if err != nil || c == nil {
		return err
	}
	defer func() { <-c.busy }()
	if err := s.undo(ended, c); err != nil {
		return err
	}
	if err := s.files().RemoveAll(path.Join(supervisorDir, uid)); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		c.Broken = fmt.Sprintf("it could not be ended: %v", err)
		return err
	}
	return s.do(ended, time.Millisecond, func() error { delete(s.claims, uid); return nil })
}

// undo ends the daemon of a claim, and restores the modes of the GPUs. A daemon in order goes on if
// a mode cannot be restored. A missing GPU counts as restored.
func (s *supervisor) undo(ended chan struct{}, c *served) error {
	s.mu.Lock()
	inOrder := c.Begun && c.Broken == ""
	s.mu.Unlock()
	if inOrder {
		if err := s.restore(ended, c); err != nil {
			return err
		}
	}
	err := s.do(ended, 3*time.Second, func() error {
		s.world.host.Exit(c.Process.PID)
		c.Process = wire.Process{}
		return nil
	})
	if err != nil {
		return err
	}
	return s.restore(ended, c)
}

// restore restores the modes of a claim's GPUs.
func (s *supervisor) restore(ended chan struct{}, c *served) (err error) {
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

func (s *supervisor) files() files.Files { return files.Files{FS: s.world.disk.View(nil)} }

// save writes the record of a claim.
func (s *supervisor) save(c *served) error {
	s.mu.Lock()
	data, err := json.Marshal(c.Claim)
	s.mu.Unlock()
	dir := path.Join(supervisorDir, c.UID)
	if err = errors.Join(err, s.files().MakeDir(dir, 0o700)); err != nil {
		return err
	}
	_, err = s.files().Write(path.Join(dir, wire.Record), data, 0o600)
	return err
}

// kill ends the process. Without its parent, all daemons end too.
func (s *supervisor) kill(withDaemons bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		close(s.ended)
		s.ended = nil
	}
	for _, uid := range slices.Sorted(maps.Keys(s.claims)) {
		if withDaemons {
			s.world.host.Exit(s.claims[uid].Process.PID)
		}
	}
}

// restart starts a process, which continues from the records. A daemon without a record does not
// exist: the record is written first.
func (s *supervisor) restart() {
	s.kill(false)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended, s.claims = make(chan struct{}), make(map[string]*served)
	if s.world.machine.daemons {
		s.world.disk.AddFile(path.Join(supervisorDir, wire.Socket))
	}
	for _, name := range s.world.disk.Files(supervisorDir) {
		if path.Base(name) != wire.Record {
			continue
		}
		c := &served{busy: make(chan struct{}, 1)}
		data, _ := s.world.disk.FileContent(name)
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

func (s *supervisor) isAlive(p wire.Process) bool {
	_, err := s.world.host.Stat(fmt.Sprintf("proc/%d", p.PID))
	return p.PID > 0 && err == nil
}

// reboot forgets the modes, and starts a process.
func (s *supervisor) reboot() {
	s.mu.Lock()
	clear(s.modes)
	s.mu.Unlock()
	s.restart()
}

// isWrong returns an error text if the mode of a GPU does not fit the claim that has the GPU, "" if
// it fits. claim is "" for a container without a claim.
func (s *supervisor) isWrong(gpu string, claim types.UID) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if mode := s.modes[gpu]; mode != "" && mode != string(claim) {
		return fmt.Sprintf("GPU %s is in exclusive mode for claim %s", gpu, mode)
	}
	return ""
}

// lacksDaemon returns an error text if a claim that is about to be used has no daemon, "" if it has
// one, or had one that has ended and is to be started again: kubelets restart containers without a
// call of the driver.
func (s *supervisor) lacksDaemon(claim types.UID) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.claims[string(claim)]; c == nil || c.Process.PID == 0 && c.Broken == "" && !c.restarting {
		return "it has no daemon"
	}
	return ""
}

// remainingDaemon returns an error text if the work for a claim remains.
func (w *World) remainingDaemon() string {
	s := w.supervisor
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.claims)+len(s.modes) > 0 && !w.wiped {
		return fmt.Sprintf("the supervisor has claims %v, and GPUs in exclusive mode %v", slices.Sorted(maps.Keys(s.claims)), s.modes)
	}
	return ""
}

// killSupervisor kills the supervisor, alone or with its daemons.
func (w *World) killSupervisor() bool {
	if !w.machine.daemons || w.goesOn("supervisorKilled") {
		return false
	}
	withDaemons := w.random.IntN(2) == 0
	w.log("the supervisor is killed, with its daemons: %v", withDaemons)
	w.supervisor.kill(withDaemons)
	w.startFault("supervisorKilled", time.Minute, w.supervisor.restart)
	w.countFault("supervisorKilled")
	return true
}

// killDaemon ends the daemon of a claim.
func (w *World) killDaemon() bool {
	s := w.supervisor
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
	c := pickOne(w.random, alive...)
	w.log("the daemon of claim %s dies", c.UID)
	w.host.Exit(c.Process.PID)
	if s.ended != nil {
		c.Process, c.Broken = wire.Process{}, "its daemon has ended by itself"
	}
	w.countFault("daemonDies")
	return true
}

// modesRefused makes changes of the modes of GPUs fail for a while.
func (w *World) modesRefused() bool {
	if !w.machine.daemons || w.goesOn("modesRefused") {
		return false
	}
	w.supervisor.setRefuses(true)
	w.startFault("modesRefused", time.Minute, func() { w.supervisor.setRefuses(false) })
	w.countFault("modesRefused")
	return true
}

func (s *supervisor) setRefuses(refuses bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuses = refuses
}

// checkMode returns an error text if the mode of a container's GPU does not fit, "" if it fits.
func (w *World) checkMode(u *use) string {
	if !w.machine.daemons || w.wiped || w.swapped || u.open || u.back || u.forgotten {
		return ""
	}
	d := w.machine.devices[u.device]
	return w.supervisor.isWrong(d.Identity, u.claim)
}

var _ http.RoundTripper = (*supervisor)(nil)
