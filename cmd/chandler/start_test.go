package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/internal/doctor"
	"chandler.dev/internal/kubeletapi"
)

// asProgram is the environment variable that makes the test binary run as the agent.
const asProgram = "CHANDLER_TEST_AS_PROGRAM"

// A station is the environment of an agent on a node: directories, and the addresses of an API
// server, which does not run at first, and of the agent itself.
type station struct {
	t                 *testing.T
	root              string
	apiserver, health string
}

func newStation(t *testing.T) *station {
	t.Helper()
	root, err := os.MkdirTemp("", "station-") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	s := &station{t: t, root: root, apiserver: freeAddress(t), health: freeAddress(t)}
	write(t, s.path("kubeconfig"), fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
		clusters: [{name: c, cluster: {server: "http://%s"}}], contexts: [{name: c, context: {cluster: c}}]}`, s.apiserver))
	for _, dir := range []string{"host/sys/bus/pci/devices", "host/sys/class", "host/proc", "host/dev", "device-plugins"} {
		s.mkdir(dir)
	}
	return s
}

// addresses counts the calls of freeAddress.
var addresses atomic.Uint32

// freeAddress returns an unused address. The kernel may assign a port of 127.0.0.1 to any
// connection of a test in the meantime, so the address is a loopback address that only this call
// uses, derived from the process ID.
func freeAddress(t *testing.T) string {
	t.Helper()
	pid := os.Getpid()
	host := netip.AddrFrom4([4]byte{127, byte(1 + pid>>8&0x7f), byte(pid), byte(1 + addresses.Add(1)%254)})
	listener, err := net.Listen("tcp", netip.AddrPortFrom(host, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

func (s *station) path(name string) string { return filepath.Join(s.root, name) }

func (s *station) mkdir(name string) {
	s.t.Helper()
	if err := os.MkdirAll(s.path(name), 0o755); err != nil {
		s.t.Fatal(err)
	}
}

func (s *station) registrar() string {
	return s.path("kubelet/plugins_registry/chandler.dev-pod-uid-reg.sock")
}

// process is a running agent.
type process struct {
	t   *testing.T
	cmd *exec.Cmd

	mu  sync.Mutex
	log bytes.Buffer
}

func (p *process) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(text)
}

func (p *process) said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

// start starts the agent with additional arguments. If the agent still runs when the test ends, it
// is killed.
func (s *station) start(args ...string) *process {
	s.t.Helper()
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	p := &process{t: s.t, cmd: exec.Command(self, "run", "--kubeconfig", s.path("kubeconfig"), "--node-name=node", "--pod-uid=pod-uid",
		"--kubelet-root", s.path("kubelet"), "--device-plugin-dir", s.path("device-plugins"), "--host-root", s.path("host"),
		"--cdi-root", s.path("cdi"), "--run-dir", s.path("run"), "--rescan-interval=50ms", "--healthz-bind-address", s.health, "-v=2")}
	p.cmd.Args = append(p.cmd.Args, args...)
	p.cmd.Env = append(os.Environ(), asProgram+"=1")
	p.cmd.Stdout, p.cmd.Stderr = p, p
	if err := p.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			_ = p.cmd.Process.Kill()
			_ = p.cmd.Wait()
		}
		if s.t.Failed() {
			s.t.Logf("the agent said:\n%s", p.said())
		}
	})
	return p
}

// says waits until the agent has logged a text.
func (p *process) says(text string) {
	p.t.Helper()
	p.until("the agent to say "+text, func() error {
		if !strings.Contains(p.said(), text) {
			return errors.New("it does not")
		}
		return nil
	})
}

func (p *process) until(what string, is func() error) {
	p.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := is()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("wait for %s: %v", what, err)
		}
	}
}

// answers waits until the agent answers a path with the given status and text. The reason in the
// header of an agent that is not ready precedes the text.
func (p *process) answers(s *station, path string, status int, text string) {
	p.t.Helper()
	p.until(path, func() error {
		response, err := http.Get("http://" + s.health + path)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		got := response.Header.Get(doctor.UnreadyHeader) + " " + string(body)
		if err == nil && (response.StatusCode != status || !strings.Contains(got, text)) {
			err = fmt.Errorf("%d %s", response.StatusCode, got)
		}
		return err
	})
}

// ends terminates the agent, and checks that it exits in time and without an error, even if it
// waits for an answer.
func (p *process) ends() {
	p.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		p.t.Fatal(err)
	}
	late := time.AfterFunc(8*time.Second, func() { _ = p.cmd.Process.Signal(syscall.SIGQUIT) }) // dumps all goroutines
	defer late.Stop()
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("with SIGTERM it ended with %v", err)
	}
}

// register registers the driver as the kubelet does.
func (s *station) register(p *process) (calls drapb.DRAPluginClient) {
	s.t.Helper()
	p.until("the registration", func() error {
		conn, err := kubeletapi.Dial(s.registrar())
		if err != nil {
			return err
		}
		defer conn.Close()
		client := registerapi.NewRegistrationClient(conn)
		info, err := client.GetInfo(s.t.Context(), &registerapi.InfoRequest{})
		if err != nil {
			return err
		}
		if _, err = client.NotifyRegistrationStatus(s.t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
			return err
		}
		endpoint, err := kubeletapi.Dial(info.Endpoint)
		if err != nil {
			return err
		}
		s.t.Cleanup(func() { endpoint.Close() })
		calls = drapb.NewDRAPluginClient(endpoint)
		return nil
	})
	return calls
}

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	if dir := os.Getenv(asAgent); dir != "" {
		log.Fatal(changePartition(dir))
	}
	m.Run()
}

// nodesByDRA publishes KVM and TUN by DRA on a host without accelerators.
const nodesByDRA = `
apiVersion: chandler.dev/v1alpha1
kind: DriverConfig
resources:
- {name: devices.kubevirt.io/kvm, mode: DRA, cel: 'device.attributes["chandler.dev"].?model.orValue("") == "kvm"'}
- {name: devices.kubevirt.io/tun, mode: DRA, cel: 'device.attributes["chandler.dev"].?model.orValue("") == "tun"'}
`

// An agent that starts before everything it needs waits and logs this: for the kubelet and its
// directories, the API server, and the directory for CDI specs. It offers the host's devices once
// they are there.
func TestStartBeforeEverythingElse(t *testing.T) {
	t.Parallel()
	s := newStation(t)
	write(t, s.path("cdi"), "no directory")
	pages := &station{t: t, health: freeAddress(t)}
	write(t, s.path("config.yaml"), nodesByDRA)
	agent := s.start("--web-ui-bind-address", pages.health, "--config", s.path("config.yaml"))
	agent.says("CDI specs cannot be written")
	agent.says("The API server does not answer whether it serves DRA")
	agent.answers(s, "/healthz", http.StatusOK, "ok")
	agent.answers(s, "/readyz", http.StatusServiceUnavailable, "NotRegistered the kubelet has not answered the registration")
	agent.says("This host has no accelerators at present")
	agent.says("Publishing ResourceSlices waits for the API server")

	calls := s.register(agent)
	agent.answers(s, "/readyz", http.StatusOK, "ok")
	agent.answers(s, "/healthz", http.StatusOK, "ok")
	agent.answers(pages, "/", http.StatusOK, "No accelerators.")
	// Unprepare of a claim from before the API server went away succeeds without it.
	unprepared, err := calls.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{{Namespace: "n", Name: "c", Uid: "u"}}})
	if err != nil || unprepared.Claims["u"].GetError() != "" {
		t.Errorf("unprepared: %v, %v", unprepared, err)
	}

	api := s.startAPIServer()
	offered := func(want int) {
		t.Helper()
		agent.until(fmt.Sprintf("a slice with %d devices", want), func() error {
			n, err := api.devices()
			if err == nil && n != want {
				err = fmt.Errorf("%d devices", n)
			}
			return err
		})
	}
	offered(0)
	mustRun(t, "simulate", "--device-nodes", s.path("host"), kvmHost)
	offered(2)            // KVM and TUN
	if os.Getuid() == 0 { // only root can create device nodes
		s.prepares(agent, calls)
	}
	agent.ends()
}

// prepares checks that a claim is prepared as soon as there is a directory for its CDI spec.
func (s *station) prepares(agent *process, calls drapb.DRAPluginClient) {
	s.t.Helper()
	request := &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{{Namespace: "n", Name: "kvm", Uid: "kvm-uid"}}}
	prepare := func() error {
		prepared, err := calls.NodePrepareResources(s.t.Context(), request)
		if text := prepared.GetClaims()["kvm-uid"].GetError(); err == nil && text != "" {
			err = errors.New(text)
		}
		return err
	}
	if err := prepare(); err == nil || !strings.Contains(err.Error(), s.path("cdi")) {
		s.t.Errorf("without a directory for CDI specs: %v", err)
	}
	if err := os.Remove(s.path("cdi")); err != nil {
		s.t.Fatal(err)
	}
	if err := prepare(); err != nil {
		s.t.Error(err)
	}
	agent.answers(s, "/healthz", http.StatusOK, "ok")
}

// An agent that waits for something exits at once and without an error on SIGTERM.
func TestEndsWhileItWaits(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		before func(s *station)
		waits  string
	}{
		"for the API server": {func(*station) {}, "Publishing ResourceSlices waits for the API server"},
		"for an API server that is silent": {func(s *station) {
			listener, err := net.Listen("tcp", s.apiserver) // no process accepts connections
			if err != nil {
				s.t.Fatal(err)
			}
			s.t.Cleanup(func() { listener.Close() })
		}, "Chandler starts"},
		"for another agent": {func(s *station) {
			s.mkdir("kubelet/plugins/chandler.dev")
			release, err := (&nodeLock{stateDir: s.path("kubelet/plugins/chandler.dev")}).Acquire(context.Background())
			if err != nil {
				s.t.Fatal(err)
			}
			s.t.Cleanup(release)
		}, "Chandler starts"},
		"for its first scan": {func(*station) {}, "Chandler starts"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStation(t)
			test.before(s)
			agent := s.start()
			agent.says(test.waits)
			agent.ends()
		})
	}
}

// A call that waits for the agent's turn fails when the agent ends, so that the kubelet repeats it.
// The call does not delay the agent.
func TestEndsWhileACallWaits(t *testing.T) {
	t.Parallel()
	s := newStation(t)
	s.mkdir("kubelet/plugins/chandler.dev")
	release, err := (&nodeLock{stateDir: s.path("kubelet/plugins/chandler.dev")}).Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	agent := s.start()
	calls := s.register(agent)
	agent.answers(s, "/readyz", http.StatusOK, "ok") // so that the other agent may end
	answer := make(chan error, 1)
	go func() {
		_, err := calls.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{{Uid: "u"}}})
		answer <- err
	}()
	select {
	case err := <-answer:
		t.Fatalf("the call did not wait: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	agent.ends()
	if err := <-answer; err == nil {
		t.Error("the call was answered as if it had been done")
	}
}

// A permanent fault ends the agent with a reason and an exit code.
func TestEndsWithAReason(t *testing.T) {
	t.Parallel()
	s := newStation(t)
	s.mkdir("kubelet")
	write(t, s.path("kubelet/plugins_registry"), "no directory")
	agent := s.start()
	err := agent.cmd.Wait()
	if code := agent.cmd.ProcessState.ExitCode(); err == nil || code != 1 {
		t.Errorf("exit code %d, %v; want 1", code, err)
	}
	agent.says("chandler: run driver: mkdir " + s.path("kubelet/plugins_registry"))
}

// A running agent reads a changed configuration, and logs its errors.
func TestReadsAChangedConfiguration(t *testing.T) {
	t.Parallel()
	s := newStation(t)
	file := s.path("config.yaml")
	write(t, file, header()+"mode: DRA\n")
	agent := s.start("--config", file)
	agent.answers(s, "/metrics", http.StatusOK, "chandler_config_last_reload_successful 1")
	write(t, file, header()+"mode: Sometimes\n")
	agent.says("The new configuration is invalid")
	agent.answers(s, "/metrics", http.StatusOK, "chandler_config_last_reload_successful 0")
	agent.ends()
}

// An agent that starts with an invalid configuration continues with the last valid one. It is not
// ready, so that an upgrade stops, and is alive, so that it is not restarted. An invalid command
// line ends the agent.
func TestStartsWithAnInvalidConfiguration(t *testing.T) {
	t.Parallel()
	s := newStation(t)
	file, kept := s.path("config.yaml"), s.path("kubelet/plugins/chandler.dev/config.yaml")
	write(t, file, header()+"mode: DRA\n")
	agent := s.start("--config", file)
	agent.until("the configuration to be kept", func() error {
		_, err := os.Stat(kept)
		return err
	})
	agent.ends()

	write(t, file, header()+"mode: Sometimes\n")
	agent = s.start("--config", file)
	s.register(agent)
	agent.answers(s, "/readyz", http.StatusServiceUnavailable, "InvalidConfiguration the configuration is invalid: config "+file)
	agent.answers(s, "/healthz", http.StatusOK, "ok")
	agent.answers(s, "/metrics", http.StatusOK, "chandler_config_last_reload_successful 0")
	write(t, file, header()+"mode: Auto\n")
	agent.answers(s, "/readyz", http.StatusOK, "ok")
	agent.ends()

	write(t, file, header()+"mode: Sometimes\n")
	agent = s.start("--config", file, "--node-name", "No!")
	if err := agent.cmd.Wait(); err == nil || agent.cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("with a wrong command line it ended with %v", err)
	}
	agent.says(`chandler: node name "No!"`)
}

// The program for hooks is installed if driver roots are configured, and remains for the containers
// that use it.
func TestInstallHooks(t *testing.T) {
	dir := t.TempDir()
	roots := map[string]string{"nvidia": "/run/nvidia/driver"}
	for _, without := range []agent.Settings{{}, {Roots: roots, NoHooks: true}} {
		if program := installHooks(without, dir); program != "" {
			t.Errorf("settings %+v: program %q", without, program)
		}
	}
	program := installHooks(agent.Settings{Roots: roots}, dir)
	if out, err := exec.CommandContext(t.Context(), program, "-test.list", "TestInstallHooks").CombinedOutput(); err != nil || !strings.Contains(string(out), "TestInstallHooks") {
		t.Errorf("program %q: %s, %v; want this one", program, out, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if program := installHooks(agent.Settings{Roots: roots}, filepath.Join(dir, "file")); program != "" {
		t.Errorf("program %q, though it cannot be installed", program)
	}
}
