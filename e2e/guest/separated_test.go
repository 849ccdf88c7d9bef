package guest_test

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"chandler.dev/e2e/guest"
)

// separated is a node whose agent runs in the DaemonSet's container, without privilege, beside the
// real host service. Both are processes that kill ends.
type separated struct {
	*node

	pod         corev1.PodSpec // of the agent
	serviceArgs []string

	agent, service *guest.Process
	container      string // name of the agent's container
	stopped        bool
}

// victims are processes to kill.
type victims int

const (
	theAgent victims = 1 << iota
	theService
	agentAndService = theAgent | theService
)

// withHostService adds chandler-host to programs, with a mock in place of NVML, which the host
// service does not load in these tests.
func withHostService(t *testing.T, programs map[string]string) map[string]string {
	t.Helper()
	if guest.HasCompiler() {
		programs["chandler-host"] = guest.Build(t, "chandler.dev/cmd/chandler-host")
	}
	return programs
}

// separate starts the host service and the agent, with the arguments of the manifests.
func (n *node) separate(t *testing.T) *separated {
	t.Helper()
	if !guest.HasCompiler() {
		t.Skip("there is no C compiler to build chandler-host with")
	}
	n.WriteFile(t, "/etc/chandler/kubeconfig", n.ReadFile(t, "/run/kubeconfig"), 0o600)
	s := &separated{node: n, pod: daemonSet(t)}
	s.pod.HostNetwork = true // the stand-in for the API server listens on localhost
	s.pod.Containers[0].Args = append(containerOf(t, "host-service-patch.yaml").Args, "--kubeconfig=/etc/chandler/kubeconfig", "--web-ui-bind-address=", "-v=2")
	for _, arg := range containerOf(t, "host-service.yaml").Args {
		if strings.HasPrefix(arg, "--host-service=") || strings.HasPrefix(arg, "--allow=") {
			s.serviceArgs = append(s.serviceArgs, arg)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the agent said:\n%s\nthe host service said:\n%s", s.agent.Output(), s.service.Output())
		}
	})
	s.startService(t)
	s.startAgent(t)
	return s
}

// containerOf returns the container of the DaemonSet in a manifest of the host service.
func containerOf(t *testing.T, manifest string) corev1.Container {
	t.Helper()
	data, err := os.ReadFile("../../deployments/examples/" + manifest)
	if err != nil {
		t.Fatal(err)
	}
	for document := range strings.SplitSeq(string(data), "\n---\n") {
		var set appsv1.DaemonSet
		if err := yaml.Unmarshal([]byte(document), &set); err != nil {
			t.Fatal(err)
		}
		if set.Kind == "DaemonSet" {
			return set.Spec.Template.Spec.Containers[0]
		}
	}
	t.Fatalf("%s has no DaemonSet", manifest)
	return corev1.Container{}
}

func (s *separated) startService(t *testing.T) {
	t.Helper()
	s.service = s.Start(t, append([]string{"chandler-host"}, s.serviceArgs...)...)
}

func (s *separated) startAgent(t *testing.T) {
	t.Helper()
	command := contained(t, s.Guest, s.pod, s.pod.Containers[0].Args...)
	s.agent, s.container = s.Start(t, command...), command[len(command)-1]
}

// kill kills processes, and starts them again.
func (s *separated) kill(t *testing.T, v victims) {
	t.Helper()
	if v&theService != 0 {
		s.service.Signal(t, syscall.SIGKILL)
	}
	if v&theAgent != 0 {
		for deadline := time.Now().Add(settleTime); ; time.Sleep(50 * time.Millisecond) {
			got := s.Run(t, "runc", "kill", s.container, "KILL")
			if got.Code == 0 {
				break
			}
			if time.Now().After(deadline) { // runc needs a moment to create a container
				t.Fatalf("kill the agent: %s\n%s", got.Stderr, s.agent.Output())
			}
		}
		s.agent.Wait(t)
		s.startAgent(t)
	}
	if v&theService != 0 {
		s.service.Wait(t)
		s.startService(t)
	}
}

// stop ends the agent and the host service. A container has no handler of signals before its program
// starts, and ignores them.
func (s *separated) stop(t *testing.T) {
	t.Helper()
	s.stopped = true
	s.agent.Until(t, "Chandler starts")
	s.agent.Stop(t)
	s.service.Stop(t)
}

// dump makes processes that a failed test has left write their goroutines. It is deferred, because the
// guest does not answer to the cleanup of a test.
func (s *separated) dump(t *testing.T) {
	if !t.Failed() || s.stopped {
		return
	}
	s.Run(t, "runc", "kill", s.container, "QUIT")
	s.service.Signal(t, syscall.SIGQUIT)
	s.agent.Wait(t)
	s.service.Wait(t)
}

// wrote waits until the present host service has written an attribute below a directory of sysfs.
func (s *separated) wrote(t *testing.T, value, attribute string) {
	t.Helper()
	written := regexp.MustCompile(`wrote "` + value + `" to /sys/\S*` + regexp.QuoteMeta(attribute) + `, lease "[^"]+": <nil>`)
	for deadline := time.Now().Add(settleTime); !written.MatchString(s.service.Output()); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the host service has not written %q to %s:\n%s", value, attribute, s.service.Output())
		}
	}
}

// confined checks that the kernel gives the agent's process no capability, no device node except the
// container runtime's own, and no way to open the host's device nodes or to write to the host's files.
func (s *separated) confined(t *testing.T, node string) {
	t.Helper()
	var state struct{ PID int }
	if err := json.Unmarshal([]byte(s.Must(t, "runc", "state", s.container)), &state); err != nil {
		t.Fatal(err)
	}
	proc := fmt.Sprintf("/proc/%d", state.PID)
	if name := s.ReadFile(t, proc+"/comm"); name != "chandler\n" {
		t.Fatalf("process %d is %q", state.PID, name)
	}
	status := s.ReadFile(t, proc+"/status")
	for _, line := range []string{"CapInh:\t0+", "CapPrm:\t0+", "CapEff:\t0+", "CapBnd:\t0+", "CapAmb:\t0+", "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !regexp.MustCompile(`(?m)^` + line + `$`).MatchString(status) {
			t.Errorf("the agent's status lacks %s:\n%s", line, status)
		}
	}
	nodes := strings.Fields(s.Sh(t, "cd "+proc+"/root/dev; find . -type b -o -type c | sort"))
	if diff := cmp.Diff(strings.Fields("./full ./null ./pts/ptmx ./random ./tty ./urandom ./zero"), nodes); diff != "" {
		t.Errorf("device nodes in the agent's /dev (-want +got):\n%s", diff)
	}
	if open := s.Sh(t, "readlink "+proc+"/fd/* | grep /dev/ | grep -v ^/dev/null || true"); open != "" {
		t.Errorf("the agent has open:\n%s", open)
	}
	mounts := regexp.MustCompile(`(?m)^(?:\S+ ){4}(\S+) (\S+) .*- (sysfs|devtmpfs) `).FindAllStringSubmatch(s.ReadFile(t, proc+"/mountinfo"), -1)
	for _, m := range mounts {
		if !strings.HasPrefix(m[2], "ro,") {
			t.Errorf("%s at %s is mounted for the agent with %s", m[3], m[1], m[2])
		}
	}
	if len(mounts) != 3 {
		t.Errorf("mounts of /sys, /host/sys and /host/dev: %q", mounts)
	}
	group := "/sys/fs/cgroup" + strings.TrimSpace(strings.TrimPrefix(s.ReadFile(t, proc+"/cgroup"), "0::"))
	s.Sh(t, "exec 3<"+node) // with root's privilege
	got := s.Run(t, "sh", "-euc", "echo $$ > "+group+"/cgroup.procs; echo moved; exec 3<"+node)
	if got.Code == 0 || got.Stdout != "moved\n" || !strings.Contains(got.Stderr, "Operation not permitted") {
		t.Errorf("%s in the agent's control group: %+v", node, got)
	}
}
