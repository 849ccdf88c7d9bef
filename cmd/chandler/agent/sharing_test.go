package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"chandler.dev/cmd/chandler-host/sharing"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/hostservice/wire"
)

// keeping is a node with an A100 and an L40S, and with MPS daemons for claims: real processes of a
// program that replaces NVIDIA's.
type keeping struct {
	*node

	root string
}

const a100 = "pci-0000-01-00-0"

func newKeeping(t *testing.T) *keeping {
	t.Helper()
	k := &keeping{node: newNode(t)}
	var err error
	if k.dir, err = os.MkdirTemp("", "k"); err != nil { // short, because names of sockets are limited
		t.Fatal(err)
	}
	k.root = filepath.Join(k.dir, "driver")
	program := filepath.Join(k.root, "usr/bin/nvidia-cuda-mps-control")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../../chandler-host/sharing/testdata/fake")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.Link(program, filepath.Join(k.root, "usr/bin/nvidia-smi")); err != nil {
		t.Fatal(err)
	}
	k.behaves("")
	t.Cleanup(func() { os.RemoveAll(k.dir) })
	return k
}

// behaves sets how daemons behave from now on.
func (k *keeping) behaves(how string) {
	k.t.Helper()
	if err := os.WriteFile(filepath.Join(k.root, "behaviour"), []byte(how+"\n"), 0o600); err != nil {
		k.t.Fatal(err)
	}
}

func (k *keeping) daemons() string {
	return filepath.Join(k.dir, "plugins/chandler.dev/sharing-daemons/nvidia")
}

// supervise runs the supervisor of chandler-host.
func (k *keeping) supervise() (stop func()) {
	k.t.Helper()
	ctx, cancel := context.WithCancel(k.t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- sharing.Serve(ctx, sharing.Config{Dir: k.daemons(), Root: k.root, Begin: 10 * time.Second, Quit: time.Second})
	}()
	k.comes(func() bool { // the socket file exists before the supervisor listens
		conn, err := new(net.Dialer).DialContext(ctx, "unix", filepath.Join(k.daemons(), wire.Socket))
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
	return func() {
		k.t.Helper()
		cancel()
		if err := <-ended; err != nil {
			k.t.Error(err)
		}
	}
}

// agent runs an agent, and waits until it offers the GPU.
func (k *keeping) agent() (stop func()) { return k.agentOn(nil) }

// agentOn runs an agent that writes to the given disk.
func (k *keeping) agentOn(on disk.FS) (stop func()) {
	k.t.Helper()
	config := k.config(&rules.Rules{Mode: discovery.ModeDRA})
	config.Disk = on
	config.FS, config.Families = recordedHost(k.t, "nvidia/testdata/mps.host"), []*discovery.Family{nvidia.Family}
	config.Settings.SharingDaemons = map[discovery.SharingDaemonKind][]discovery.Selection[struct{}]{
		discovery.SharingDaemonMPS: {{Selects: func(d discovery.Device) (bool, error) { return d.Name == a100, nil }}},
	}
	config.ReadParameters = func(raw []byte) (p discovery.Parameters, err error) { return p, json.Unmarshal(raw, &p) }
	k.mu.Lock()
	k.published = nil
	k.mu.Unlock()
	stop = k.run(config)
	k.comes(func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		return strings.Contains(strings.Join(k.published, " "), a100)
	})
	return stop
}

func (k *keeping) comes(so func() bool) {
	k.t.Helper()
	for limit := time.Now().Add(30 * time.Second); !so(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(limit) {
			k.t.Fatal("it did not come to be so")
		}
	}
}

// claim creates a claim for a GPU, with parameters.
func (k *keeping) claim(name, device string, parameters discovery.Parameters) *resourceapi.ResourceClaim {
	k.t.Helper()
	raw, err := json.Marshal(parameters)
	if err != nil {
		k.t.Fatal(err)
	}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)}}
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{{Request: "r", Driver: discovery.Domain, Pool: "node", Device: device}},
		Config: []resourceapi.DeviceAllocationConfiguration{{
			Source: resourceapi.AllocationConfigSourceClaim,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: discovery.Domain, Parameters: runtime.RawExtension{Raw: raw},
			}},
		}},
	}}
	if _, err := k.client.ResourceV1().ResourceClaims("default").Create(k.t.Context(), claim, metav1.CreateOptions{}); err != nil {
		k.t.Fatal(err)
	}
	return claim
}

// daemon returns the PID of a claim's daemon, or 0.
func (k *keeping) daemon(claim string) int {
	data, err := os.ReadFile(filepath.Join(k.daemons(), claim, wire.Record))
	var record wire.Claim
	if err != nil || json.Unmarshal(data, &record) != nil || record.Process.PID == 0 || syscall.Kill(record.Process.PID, 0) != nil {
		return 0
	}
	return record.Process.PID
}

// A claim has a daemon from before its containers start until the claim ends. The daemon outlives
// the agent, and is restarted if it dies.
func TestAgentRunsMPSDaemons(t *testing.T) {
	t.Parallel()
	k := newKeeping(t)
	stopSupervisor := k.supervise()
	stopAgent := k.agent()
	claim := k.claim("train", a100, discovery.Parameters{nvidia.MPS: "true", nvidia.ComputePercentage: "40", nvidia.MPSMemory: "4096"})
	if err := k.prepareAgain(claim); err != nil {
		t.Fatal(err)
	}
	pid := k.daemon("train")
	spec, err := os.ReadFile(filepath.Join(k.dir, "cdi/chandler.dev-claim_train.json"))
	if err != nil || pid == 0 {
		t.Fatal(pid, err)
	}
	for _, want := range []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", k.daemons() + "/train/pipe", k.daemons() + "/train/shm", `"/dev/shm"`} {
		if !strings.Contains(string(spec), want) {
			t.Errorf("the spec has no %s:\n%s", want, spec)
		}
	}
	stopAgent()
	stopAgent = k.agent()
	if err := k.prepareAgain(claim); err != nil || k.daemon("train") != pid { // as for another pod
		t.Errorf("%v; daemon %d, which was %d", err, k.daemon("train"), pid)
	}

	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	k.comes(func() bool { now := k.daemon("train"); return now != 0 && now != pid })
	pid = k.daemon("train")
	stopSupervisor()                                            // as for an update
	k.comes(func() bool { return syscall.Kill(pid, 0) != nil }) // delayed until the parent has waited for the process
	stopSupervisor = k.supervise()
	k.comes(func() bool { return k.daemon("train") != 0 })

	k.unprepare(claim)
	k.gone("train")
	stopAgent()
	stopSupervisor()
}

// gone checks that no file of a claim is left.
func (k *keeping) gone(claim string) {
	k.t.Helper()
	if _, err := os.Stat(filepath.Join(k.daemons(), claim)); !os.IsNotExist(err) {
		k.t.Errorf("claim %s: something is left: %v", claim, err)
	}
}

// A claim is not prepared if its daemon cannot start. The claim is prepared once the daemon can
// start, and can always be unprepared.
func TestAgentCannotKeepUpMPS(t *testing.T) {
	t.Parallel()
	k := newKeeping(t)
	stopAgent := k.agent()
	mps := discovery.Parameters{nvidia.MPS: "true"}
	claim := k.claim("infer", a100, mps)
	refuses := func(claim *resourceapi.ResourceClaim, want string) {
		t.Helper()
		if err := k.prepareAgain(claim); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	refuses(claim, "no program answers at "+k.daemons()+"/socket: chandler-host --sharing-daemons does not run on this node; in the chart, sharingDaemons.enabled runs it")
	k.unprepare(claim)
	stopSupervisor := k.supervise()
	k.behaves("dies")
	refuses(claim, "ended at once; its log ends with \"cannot load libcuda.so.1\"")
	k.unprepare(claim)
	k.gone("infer")
	refuses(claim, "ended at once")
	k.behaves("")
	if err := k.prepareAgain(claim); err != nil || k.daemon("infer") == 0 {
		t.Error(err)
	}
	refuses(k.claim("other", "pci-0000-41-00-0", mps), "is not a whole GPU that the configuration selects by onDemand.mps")

	// A supervisor that ended together with its daemons does not block the GPU.
	stopSupervisor()
	if err := os.Remove(filepath.Join(k.daemons(), wire.Socket)); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	k.unprepare(claim)
	stopSupervisor = k.supervise()
	k.comes(func() bool { _, err := os.Stat(filepath.Join(k.daemons(), "infer")); return os.IsNotExist(err) })
	stopAgent()
	stopSupervisor()
}

// mortal is a disk that kills its agent before or after one of the writes: every later write fails,
// and the agent can no longer connect to the supervisor.
type mortal struct {
	disk.OS

	socket string

	mu      sync.Mutex
	moments int // steps before the agent is killed, two for each write; -1 for never
	dead    bool
}

var errKilled = errors.New("the agent was killed")

// write calls write, unless the agent is dead.
func (m *mortal) write(write func() error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.passes(); m.dead {
		return errKilled
	}
	err := write()
	if m.passes(); m.dead {
		return errKilled
	}
	return err
}

// passes counts a step, and kills the agent at the last one.
func (m *mortal) passes() {
	if m.moments == 0 && !m.dead {
		m.dead = true
		_ = os.Rename(m.socket, m.socket+".of-others") // if this fails, bury fails too
	}
	m.moments--
}

func (m *mortal) CreateTemp(dir, pattern string) (file disk.File, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return nil, errKilled
	}
	return m.OS.CreateTemp(dir, pattern)
}

func (m *mortal) Rename(from, to string) error {
	return m.write(func() error { return m.OS.Rename(from, to) })
}

func (m *mortal) Remove(name string) error {
	return m.write(func() error { return m.OS.Remove(name) })
}

func (m *mortal) RemoveAll(dir string) error {
	return m.write(func() error { return m.OS.RemoveAll(dir) })
}

func (m *mortal) dies(after int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.moments = after
}

// bury reports whether the agent was killed, and makes the socket available to the next agent.
func (m *mortal) bury(t *testing.T) bool {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		if err := os.Rename(m.socket+".of-others", m.socket); err != nil {
			t.Fatal(err)
		}
	}
	return m.dead
}

// An agent that is killed before or after any write, while the daemon of a claim starts or ends,
// leaves a state that the next agent can continue, whether the claim is still needed or not. Each
// claim has one daemon, and no file is left in the end.
func TestAgentIsKilledWhileADaemonStartsOrEnds(t *testing.T) {
	t.Parallel()
	k := newKeeping(t)
	stopSupervisor := k.supervise()
	for _, when := range []string{"begins", "begins-and-is-wanted", "ends"} {
		ends := when == "ends"
		killed := 0
		for step := 0; step == killed; step++ {
			name := fmt.Sprintf("%s-%d", when, step)
			mortal := &mortal{socket: filepath.Join(k.daemons(), wire.Socket), moments: -1}
			stop := k.agentOn(mortal)
			claim := k.claim(name, a100, discovery.Parameters{nvidia.MPS: "true", nvidia.ComputePercentage: "40"})
			if ends {
				if err := k.prepareAgain(claim); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}
			mortal.dies(step)
			if ends {
				_, _ = k.dra().UnprepareResourceClaims(t.Context(), []kubeletplugin.NamespacedObject{{NamespacedName: types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}, UID: claim.UID}})
			} else {
				_ = k.prepareAgain(claim)
			}
			stop()
			if mortal.bury(t) {
				killed++
			}
			stop = k.agent()
			if when == "begins-and-is-wanted" {
				if err := k.prepareAgain(claim); err != nil || k.daemon(name) == 0 {
					t.Errorf("%s: %v, daemon %d", name, err, k.daemon(name))
				}
			}
			k.unprepare(claim)
			k.gone(name)
			stop()
			if t.Failed() {
				t.FailNow()
			}
		}
		if killed < 4 {
			t.Errorf("%s: killed at %d moments", when, killed)
		}
		t.Logf("%s: killed at %d moments", when, killed)
	}
	stopSupervisor()
}

// The agent ends the daemon of an unknown claim.
func TestAgentEndsUnusedDaemons(t *testing.T) {
	t.Parallel()
	k := newKeeping(t)
	stopSupervisor := k.supervise()
	order, err := json.Marshal(wire.Order{How: map[string]string{"gpus": "GPU-00000000-0000-0000-0000-00000000000a", "mps": "true"}})
	if err != nil {
		t.Fatal(err)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(k.daemons(), wire.Socket))
	}}}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://x"+wire.ClaimsPath+"/stranger", bytes.NewReader(order))
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Do(request)
	if err != nil || response.StatusCode != http.StatusNoContent {
		t.Fatal(response, err)
	}
	response.Body.Close()
	if k.daemon("stranger") == 0 {
		t.Fatal("there is no daemon")
	}
	stopAgent := k.agent()
	k.comes(func() bool { _, err := os.Stat(filepath.Join(k.daemons(), "stranger")); return os.IsNotExist(err) })
	stopAgent()
	stopSupervisor()
}
