package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/amdgpu"
	"chandler.dev/discovery/families/amdgpu/parttest"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/families/nvidia/migtest"
	"chandler.dev/discovery/families/rdma"
	"chandler.dev/discovery/families/sriovnet"
	"chandler.dev/discovery/families/vfio"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/disk/disktest"
	"chandler.dev/internal/hostservice"
	"chandler.dev/internal/hostservice/wire"
	"chandler.dev/internal/passthrough/passthroughtest"
	"chandler.dev/internal/reclaim"
)

// Environment variables of a process that serves as a host service: the root of its host, the
// moment of a kill, such as "before write 2", and what is killed then.
const (
	serviceRoot    = "CHANDLER_TEST_HOST_ROOT"
	serviceMoment  = "CHANDLER_TEST_MOMENT"
	serviceVictims = "CHANDLER_TEST_VICTIMS"
)

func TestMain(m *testing.M) {
	if root := os.Getenv(serviceRoot); root != "" {
		log.Fatal(serveHost(root))
	}
	m.Run()
}

func serviceDir(root string) string { return filepath.Join(root, "run/host") }

// kernelCall is a change of the simulated host by the service's process. It is empty for the kill of
// the agent.
type kernelCall struct {
	Name, Value string
	Partition   *discovery.PartitionChange
}

// kernelAnswer is the result of a change.
type kernelAnswer struct {
	Output []byte
	Errno  syscall.Errno
	Error  string
}

// callKernel makes a change in the process of the test.
func callKernel(root string, c kernelCall) ([]byte, error) {
	response, err := hostservice.Send(context.Background(), hostservice.SocketTransport(filepath.Join(root, "kernel")), "http://kernel/", http.MethodPost, c)
	var answer kernelAnswer
	if err == nil {
		err = response.Decode(&answer)
	}
	switch {
	case err != nil:
		return nil, err
	case answer.Errno != 0:
		return nil, answer.Errno
	case answer.Error != "":
		return nil, errors.New(answer.Error)
	}
	return answer.Output, nil
}

// serveHost is the host service in a process of its own. It passes a moment before it begins each
// request, and another one before it answers.
func serveHost(root string) error {
	passMoment := func(moment string) {
		if moment != os.Getenv(serviceMoment) {
			return
		}
		victims := os.Getenv(serviceVictims)
		if err := os.WriteFile(filepath.Join(root, "killed"), nil, 0o600); err != nil {
			log.Fatal(err)
		}
		if strings.Contains(victims, "agent") {
			if _, err := callKernel(root, kernelCall{}); err != nil {
				log.Fatal(err)
			}
		}
		if strings.Contains(victims, "service") {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL) // it does not return
			select {}
		}
	}
	host, err := passthroughtest.Open(root)
	if err != nil {
		return err
	}
	write := func(name, value string) error {
		_, err := callKernel(root, kernelCall{Name: name, Value: value})
		return err
	}
	server := hostservice.NewServer(hostservice.Config{
		Host: &discovery.Host{FS: host}, Allowed: hostservice.ListAttributes(), Write: write, Families: []*discovery.Family{boards(write)},
		Partitions: map[string]hostservice.PartitionProgram{facts.Program: {
			Args: func(c discovery.PartitionChange) ([]string, error) {
				if _, err := facts.ChangeArgs(c); err != nil {
					return nil, err
				}
				text, err := json.Marshal(c)
				return []string{string(text)}, err
			},
			Run: func(args []string, _ []*os.File) (*wire.Output, error) {
				var c discovery.PartitionChange
				if err := json.Unmarshal([]byte(args[0]), &c); err != nil {
					return nil, err
				}
				output, err := callKernel(root, kernelCall{Partition: &c})
				return &wire.Output{Text: string(output)}, err
			},
		}},
	}).Handler()
	dir := serviceDir(root)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	listener, lock, err := hostservice.Listen(context.Background(), dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	requests := make(map[string]*atomic.Int64)
	for _, request := range []string{"sessions", "users", "write", "partitions", "configure"} {
		requests[request] = new(atomic.Int64)
	}
	return hostservice.Serve(context.Background(), listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			server.ServeHTTP(w, r)
			return
		}
		request := strings.Split(r.URL.Path, "/")[1]
		request = fmt.Sprint(request, " ", requests[request].Add(1))
		passMoment("before " + request)
		recorder := httptest.NewRecorder()
		server.ServeHTTP(recorder, r)
		passMoment("after " + request)
		maps.Copy(w.Header(), recorder.Header())
		w.WriteHeader(recorder.Code)
		_, _ = w.Write(recorder.Body.Bytes()) // the agent may be dead
	}), 0)
}

// boards is a family whose devices are configured by a write.
func boards(write func(name, value string) error) *discovery.Family {
	const parameter discovery.Parameter = "acceleratorFunction"
	return &discovery.Family{
		Name: "boards", Doc: "boards, for tests", Parameters: []discovery.Parameter{parameter},
		Match: []discovery.Match{{Bus: "pci", Driver: "board"}}, Describe: disks.Describe,
		Configure: func(host *discovery.Host, d discovery.Device, want discovery.Parameters) (discovery.Device, discovery.Work, error) {
			name := d.Source + "/accelerator"
			if has, err := host.ReadText(name); err != nil || strings.TrimSpace(has) == want[parameter] {
				return d, nil, err
			}
			return d, func(context.Context) error { return write(name, want[parameter]) }, nil
		},
	}
}

// wished is a device that a claim requests, and the value of the claim's parameter.
type wished struct{ device, value string }

// killedHost is a host with a feature that needs the host service.
type killedHost struct {
	fs        fs.FS  // for the agent, the kernel's if nil
	change    string // the request that changes the device, "" for none
	families  []*discovery.Family
	settings  Settings
	parameter discovery.Parameter

	// Two claims request the same physical device one after the other. The claim plain needs no
	// privilege.
	first, next, plain wished

	write     func(name, value string) error // the kernel's if nil
	partition func(context.Context, discovery.PartitionChange) ([]byte, error)

	open, close func()                  // make a process of the first pod open the device, and end it; optional
	check       func(has wished) string // what is wrong while a claim is prepared, or without a claim
}

// killedHosts are hosts with each feature.
var killedHosts = map[string]func(k *passthroughtest.Kernel) *killedHost{
	"passthrough": func(k *passthroughtest.Kernel) *killedHost {
		k.Add(diskFunction, "nvme", "3")
		h := &killedHost{change: "write", families: []*discovery.Family{disks, vfio.Family}, first: wished{diskName, "vfio"}, next: wished{diskName, ""}, parameter: discovery.Driver}
		h.settings.Passthrough = everything
		h.check = func(has wished) string {
			if driver := k.Driver(diskFunction); (driver == "vfio-pci") != (has == h.first) || driver == "" {
				return "driver " + driver
			}
			return ""
		}
		return h
	},
	"reclaim": func(k *passthroughtest.Kernel) *killedHost { return reclaimedHost(k, false) },
	"reset":   func(k *passthroughtest.Kernel) *killedHost { return reclaimedHost(k, true) },
	"virtual functions": func(k *passthroughtest.Kernel) *killedHost {
		k.AddPhysical(&passthroughtest.Physical{Address: physicalFunction, Total: 7})
		h := &killedHost{change: "write", families: []*discovery.Family{rdma.Family, sriovnet.Family, vfio.Family, disks}, first: wished{virtual(1), ""}, next: wished{virtual(1), ""}}
		h.settings.VirtualFunctions = []discovery.Selection[int]{{Expression: "nics", Value: 4, Selects: func(d discovery.Device) (bool, error) {
			return d.Attributes.String("kind") == "nic", nil
		}}}
		h.check = func(has wished) string {
			if count := k.VirtualCount(physicalFunction); count != map[bool]int{true: 4}[has != wished{}] {
				return fmt.Sprintf("%d virtual functions", count)
			}
			return ""
		}
		return h
	},
	"AMD partitions": func(k *passthroughtest.Kernel) *killedHost {
		gpus := parttest.New(2)
		function := "sys/devices/pci0000:00/0000:00:02.0/" + parttest.Address
		k.File(function+"/current_compute_partition", "SPX\n")
		k.Link("sys/bus/pci/devices/"+parttest.Address, "../../../"+strings.TrimPrefix(function, "sys/"))
		h := &killedHost{fs: gpus, change: "write", families: []*discovery.Family{amdgpu.Family}, write: gpus.Write,
			first: wished{parttest.Device + "-cpx-3", ""}, next: wished{parttest.Device + "-qpx-3", ""}, plain: wished{"pci-0000-06-00-0", ""}}
		h.settings.Partition = partitionAll
		h.check = func(has wished) string {
			want := map[wished]string{h.first: "CPX", h.next: "QPX", {}: "SPX"}[has]
			if mode := gpus.Mode(0); mode != want {
				return fmt.Sprintf("mode %s, want %s", mode, want)
			}
			return ""
		}
		return h
	},
	"MIG": func(k *passthroughtest.Kernel) *killedHost {
		gpu := &migtest.GPU{Profiles: migtest.Layouts["H100"]}
		function := "sys/devices/pci0000:00/0000:00:01.0/" + migtest.Address
		k.File(function+"/vendor", "0x10de\n")
		k.Link("sys/bus/pci/devices/"+migtest.Address, "../../../"+strings.TrimPrefix(function, "sys/"))
		_ = gpu.CreateInstance("1g.10gb@6") // by an administrator; it is checked
		h := &killedHost{fs: gpu, change: "partitions", families: []*discovery.Family{nvidia.Family}, partition: gpu.ChangePartition,
			first: wished{migtest.Device + "-mig-2g-20gb-at-2", ""}, next: wished{migtest.Device + "-mig-1g-10gb-at-2", ""}, plain: wished{migtest.Device + "-mig-1g-10gb-at-6", ""}}
		h.settings.Partition = partitionAll
		h.check = func(has wished) string {
			want := map[wished][]string{h.first: {"1g.10gb@6", "2g.20gb@2"}, h.next: {"1g.10gb@2", "1g.10gb@6"}, {}: {"1g.10gb@6"}}[has]
			if got := gpu.Instances(); !slices.Equal(got, want) {
				return fmt.Sprintf("instances %q, want %q", got, want)
			}
			return ""
		}
		return h
	},
	"configuration": func(k *passthroughtest.Kernel) *killedHost {
		k.Add(diskFunction, "board", "3")
		file := passthroughtest.Source(diskFunction) + "/accelerator"
		k.File(file, "none\n")
		own := boards(func(string, string) error { return errors.New("the agent configures the device itself") })
		h := &killedHost{change: "configure", families: []*discovery.Family{own, disks}, first: wished{diskName, "0f"}, next: wished{diskName, "1f"}, parameter: own.Parameters[0]}
		h.write = func(name, value string) error { k.File(name, value+"\n"); return nil }
		h.check = func(has wished) string {
			if text, err := k.Host().ReadText(file); err != nil || has.value != "" && strings.TrimSpace(text) != has.value {
				return fmt.Sprintf("configured as %q, %v", text, err)
			}
			return ""
		}
		return h
	},
}

var partitionAll = []discovery.Selection[struct{}]{{Expression: "all", Selects: func(discovery.Device) (bool, error) { return true, nil }}}

// reclaimedHost is a host with a disk that a process of the first pod keeps open.
func reclaimedHost(k *passthroughtest.Kernel, reset bool) *killedHost {
	k.Add(diskFunction, "nvme", "3")
	h := &killedHost{families: []*discovery.Family{disks}, first: wished{diskName, ""}, next: wished{diskName, ""}}
	h.settings.Reclaim = []discovery.Selection[reclaim.Rule]{{Expression: "disk", Value: reclaim.Rule{Reset: reset}, Selects: func(d discovery.Device) (bool, error) { return d.Name == diskName, nil }}}
	if reset {
		h.change = "write"
	}
	h.open = func() {
		k.File("proc/47/cgroup", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podfirst.slice/cri-containerd-0.scope\n")
		k.OpenNode("47", "train", diskNode)
	}
	closed := false
	h.close = func() { closed = true; k.EndProcess("47") }
	h.check = func(wished) string {
		if resets := len(k.ListWrites()); (resets > 0) != (reset && closed) {
			return fmt.Sprintf("%d resets", resets)
		}
		return ""
	}
	return h
}

// functionInodes is a host in memory whose PCI functions have the inode numbers of directories of
// the service's host.
type functionInodes struct {
	blind

	root string
}

// Stat implements [fs.StatFS].
func (f functionInodes) Stat(name string) (fs.FileInfo, error) {
	if sysfs.IsPCIAddress(path.Base(name)) {
		if info, err := os.Stat(filepath.Join(f.root, name)); err == nil {
			return info, nil
		}
	}
	return f.blind.Stat(name)
}

// killing is a node whose host service is another process, and whose agent, host service or both are
// killed at one moment.
type killing struct {
	*rebinding

	host    *killedHost
	victims string

	// Functions that outside passes to do run outside of the bubble with the fake clock.
	do, done chan func()
	process  *exec.Cmd     // used outside only
	exited   chan struct{} // closed when the process has ended; used outside only

	dead    atomic.Pointer[atomic.Bool] // whether the present agent is dead
	stop    func()                      // ends the present agent
	revived bool
}

func (k *killing) outside(f func()) {
	k.do <- f
	<-k.done
}

// runOutside runs functions for outside, and the simulated kernel for the process, until the test
// ends.
func (k *killing) runOutside(t *testing.T) {
	k.do, k.done = make(chan func()), make(chan func())
	go func() {
		runtime.LockOSThread() // so that the kernel ends processes with the test, not with one of its threads
		for f := range k.do {
			f()
			k.done <- nil
		}
	}()
	listener, err := net.Listen("unix", filepath.Join(k.Dir, "kernel"))
	if err != nil {
		t.Fatal(err)
	}
	write := k.Write
	if k.host.write != nil {
		write = k.host.write
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var c kernelCall
		var answer kernelAnswer
		err := json.NewDecoder(r.Body).Decode(&c)
		switch {
		case err != nil:
		case c.Partition != nil:
			answer.Output, err = k.host.partition(context.Background(), *c.Partition)
		case c.Name != "":
			err = write(c.Name, c.Value)
		default:
			k.dead.Load().Store(true)
		}
		if err != nil && !errors.As(err, &answer.Errno) {
			answer.Error = err.Error()
		}
		_ = json.NewEncoder(w).Encode(answer) // the process may be dead
	})}
	go func() { _ = server.Serve(listener) }() // until it is closed
	t.Cleanup(func() {
		if k.process != nil {
			_ = k.process.Process.Kill()
			<-k.exited
		}
		_ = server.Close()
		close(k.do)
	})
}

// startService starts a process that kills the victims at a moment, "" for never.
func (k *killing) startService(moment string) {
	var problem error
	k.outside(func() {
		k.process = exec.Command(os.Args[0])
		k.process.Env = append(os.Environ(), serviceRoot+"="+k.Dir, serviceMoment+"="+moment, serviceVictims+"="+k.victims)
		k.process.Stderr, k.process.SysProcAttr = os.Stderr, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if problem = k.process.Start(); problem != nil {
			k.process = nil
			return
		}
		exited := make(chan struct{})
		k.exited = exited
		go func(process *exec.Cmd) { _ = process.Wait(); close(exited) }(k.process)
		client := hostservice.NewClient(serviceDir(k.Dir), nil)
		for limit := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			if _, problem = client.DescribeService(context.Background()); problem == nil || time.Now().After(limit) {
				return
			}
		}
	})
	if problem != nil {
		k.t.Fatal(problem)
	}
}

// isKilled reports whether the moment of the kill has been.
func (k *killing) isKilled() bool {
	_, err := os.Stat(filepath.Join(k.Dir, "killed"))
	return err == nil
}

// killedAgent is the transport of an agent, without answers once the agent is dead.
type killedAgent struct {
	http.RoundTripper

	dead *atomic.Bool
}

// RoundTrip implements [http.RoundTripper].
func (m killedAgent) RoundTrip(r *http.Request) (*http.Response, error) {
	if m.dead.Load() {
		return nil, errKilled
	}
	response, err := m.RoundTripper.RoundTrip(r)
	if m.dead.Load() {
		if err == nil {
			response.Body.Close()
		}
		return nil, errKilled
	}
	return response, err
}

// startAgent runs an agent, which changes nothing once it is dead, and waits for its first scans.
func (k *killing) startAgent() {
	dead := new(atomic.Bool)
	k.dead.Store(dead)
	client := hostservice.NewClient(serviceDir(k.Dir), killedAgent{hostservice.SocketTransport(filepath.Join(serviceDir(k.Dir), wire.Socket)), dead})
	config := k.config(&rules.Rules{Mode: discovery.ModeDRA})
	wanted := config.Settings.Rules
	config.Settings = k.host.settings
	config.Settings.Rules, config.Settings.IdleTime = wanted, time.Minute
	config.HostService, config.Write, config.Families, config.FS = client, nil, k.host.families, blind{k.FS()}
	if k.host.fs != nil {
		config.FS = functionInodes{blind{k.host.fs}, k.Dir}
	}
	config.ReadParameters = func(raw []byte) (discovery.Parameters, error) {
		return discovery.Parameters{k.host.parameter: strings.Trim(string(raw), `"`)}, nil
	}
	config.Programs = map[string]func(context.Context, discovery.PartitionChange) ([]byte, error){"nvidia": func(ctx context.Context, change discovery.PartitionChange) ([]byte, error) {
		output, _, err := client.ChangePartition(ctx, facts.Program, change)
		return output, err
	}}
	config.Disk = &disktest.Disk{Before: func(disktest.Op, string) error {
		if dead.Load() {
			return errKilled
		}
		return nil
	}}
	_ = client.BeginSession(k.t.Context()) // as with the node's lock; a missing service has no write in progress
	ctx, cancel := context.WithCancel(k.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, config) }()
	k.stop = func() {
		cancel()
		if err := <-ended; err != nil && !dead.Load() {
			k.t.Error(err)
		}
	}
	time.Sleep(time.Minute)
}

// try repeats a step, as the kubelet does, until it succeeds, and restarts the victims when they
// were killed.
func (k *killing) try(step func() error) error {
	var err error
	for range 30 {
		err = step()
		if !k.revived && k.isKilled() {
			k.revive(step)
			continue
		}
		if err == nil {
			return nil
		}
		time.Sleep(5 * time.Second)
	}
	return err
}

// revive starts the victims again. While the service is missing, the claim that needs no privilege is
// prepared, and a step that fails names the service.
func (k *killing) revive(step func() error) {
	k.revived = true
	if strings.Contains(k.victims, "agent") {
		k.stop()
	}
	if !strings.Contains(k.victims, "service") {
		k.startAgent()
		return
	}
	k.outside(func() { <-k.exited })
	if strings.Contains(k.victims, "agent") {
		k.startAgent()
	}
	plain := k.claimOf(k.host.plain, "plain")
	if err := k.prepareAgain(plain); err != nil {
		k.t.Errorf("without the service: a claim that needs no privilege: %v", err)
	}
	k.unprepare(plain)
	if err := step(); err != nil && !strings.Contains(err.Error(), "the host service does not answer at "+serviceDir(k.Dir)) {
		k.t.Errorf("without the service: %v", err)
	}
	k.startService("")
}

// claimOf returns a claim for a device that is reserved for the pod with the same name.
func (k *killing) claimOf(w wished, name string) *resourceapi.ResourceClaim {
	claim := k.claimFor(w.device, name, w.value)
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: types.UID(name)}}
	return claim
}

// unprepareAgain unprepares a claim if the agent lives.
func (k *killing) unprepareAgain(claim *resourceapi.ResourceClaim) func() error {
	return func() error {
		unprepared, err := k.dra().UnprepareResourceClaims(k.t.Context(), claimNames(claim))
		return errors.Join(err, unprepared[claim.UID])
	}
}

// records returns the files of the journals.
func (k *killing) records() []string {
	records, _ := filepath.Glob(filepath.Join(k.dir, "run/chandler/journal/*/*")) // the pattern is well-formed
	return records
}

// live prepares two claims for one physical device one after the other, and then waits until the
// host is as before.
func (k *killing) live() {
	h, t := k.host, k.t
	first, next := k.claimOf(h.first, "first"), k.claimOf(h.next, "next")
	refused := func(claim *resourceapi.ResourceClaim, while string) {
		if err := k.prepareAgain(claim); err == nil {
			t.Errorf("claim %s is prepared while %s", claim.Name, while)
		}
	}
	check := func(has wished, while string) {
		if problem := h.check(has); problem != "" {
			t.Errorf("while %s: %s", while, problem)
		}
	}
	if err := k.try(func() error { return k.prepareAgain(first) }); err != nil {
		t.Errorf("first claim: %v", err)
	}
	if h.open != nil {
		h.open()
	}
	check(h.first, "the first claim is prepared")
	refused(next, "the first one is")
	if err := k.try(k.unprepareAgain(first)); err != nil {
		t.Errorf("unprepare the first claim: %v", err)
	}
	if h.open != nil {
		refused(next, "a process of the first pod has the device open")
		time.Sleep(2 * time.Second)
		h.close()
	}
	if err := k.try(func() error { return k.prepareAgain(next) }); err != nil {
		t.Errorf("next claim: %v", err)
	}
	check(h.next, "the next claim is prepared")
	refused(first, "the next one is")
	if err := k.try(k.unprepareAgain(next)); err != nil {
		t.Errorf("unprepare the next claim: %v", err)
	}
	err := k.try(func() error {
		synctest.Wait()
		problem := h.check(wished{})
		if left := k.records(); problem == "" && len(left) > 0 {
			problem = fmt.Sprintf("written down %q", left)
		}
		if problem != "" {
			return errors.New("the host service does not answer at " + serviceDir(k.Dir) + ", or " + problem)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// The host service, the agent, or both are killed before and after each request to the service, for
// each feature that changes devices. Requests pass a real socket, and the service is a real process,
// which ends by SIGKILL. Each claim is prepared in the end, no physical device is in two claims, a
// claim that needs no privilege does not wait, and the host is restored.
func TestKilledAtEachRequest(t *testing.T) {
	for name, lay := range killedHosts {
		for _, victims := range []string{"service", "agent", "agent and service"} {
			t.Run(name+"/"+victims, func(t *testing.T) {
				t.Parallel()
				moments := make(map[string]int)
				requests, change := []string{"sessions", "users"}, lay(passthroughtest.New(t)).change
				if change != "" {
					requests = append(requests, change)
				}
				for _, request := range requests {
					for n := 1; (request == change || n <= searches) && !t.Failed(); n++ {
						if !killAt(t, lay, victims, fmt.Sprint("before ", request, " ", n)) {
							break
						}
						killAt(t, lay, victims, fmt.Sprint("after ", request, " ", n))
						moments[request] = n
					}
				}
				if change != "" && moments[change] < 2 {
					t.Errorf("the agent has requested %v", moments)
				}
				t.Logf("killed before and after %v", moments)
			})
		}
	}
}

// searches is the number of requests for the users of a device at which the victims are killed: the
// agent repeats these requests while a process has the device open.
const searches = 3

// killAt runs an agent on a host, and kills the victims at a moment. It reports whether there was
// such a moment.
func killAt(t *testing.T, lay func(*passthroughtest.Kernel) *killedHost, victims, moment string) bool {
	kernel := passthroughtest.New(t)
	host := lay(kernel)
	if host.plain.device == "" {
		kernel.Add("0000:04:00.1", "nvme", "4")
		kernel.File("dev/nvme1", "c 240:1")
		host.plain.device = "pci-0000-04-00-1"
	}
	kernel.File(strings.TrimPrefix(diskNode, "/"), "c 240:0")
	k := &killing{rebinding: &rebinding{Kernel: kernel, boot: "first"}, host: host, victims: victims}
	k.runOutside(t)
	synctest.Test(t, func(t *testing.T) {
		k.node = newNode(t)
		k.startService(moment)
		k.startAgent()
		k.live()
		k.stop()
		if t.Failed() {
			t.Logf("killed %s; writes: %q", moment, k.ListWrites())
		}
	})
	return k.isKilled()
}
