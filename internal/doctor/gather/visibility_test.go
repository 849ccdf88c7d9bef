package gather

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/internal/doctor"
	"chandler.dev/internal/hostservice"
)

// An agent sees the open files of other processes if it has CAP_SYS_PTRACE and the host's own
// /proc.
func TestVisibility(t *testing.T) {
	const all, most = "CapEff:\t000001ffffffffff\n", "CapEff:\t000001fffff7ffff\n"
	for name, test := range map[string]struct {
		status, first string
		want          string // "?" if unknown
	}{
		"privileged":        {all, "proc/1/fd/3", ""},
		"without privilege": {most, "proc/1/fd/3", "lacks the capability CAP_SYS_PTRACE"},
		"another proc":      {all, "proc/47/fd/3", "not all processes are visible"},
		"no status":         {"Name:\tchandler\n", "proc/1/fd/3", "?"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newMadeUp(t)
			n.options.Simulated = false
			n.process(agentPID, "/chandler", "run", "--kubelet-root="+n.options.KubeletRoot, "--host-root=/host")
			n.write("proc/"+agentPID+"/status", test.status)
			n.write("proc/"+agentPID+"/root/host/"+test.first, "")
			agent := n.facts().Agent
			compareVisibility(t, agent.Visibility, test.want)
			compareVisibility(t, agent.VisibilityAll, test.want)
		})
	}
	t.Run("a node that is a container", func(t *testing.T) {
		n := newMadeUp(t)
		n.options.Simulated = false
		n.process(agentPID, "/chandler", "run", "--kubelet-root="+n.options.KubeletRoot, "--host-root=/host")
		n.write("proc/"+agentPID+"/status", all)
		proc := "proc/" + agentPID + "/root/host/proc/"
		n.write(proc+"1/fd/3", "")
		for process, namespace := range map[string]string{"1": "4026532000", agentPID: "4026532111", "self": "4026532000"} {
			n.write(proc+process+"/ns/mnt", "")
			if err := os.Symlink("pid:["+namespace+"]", filepath.Join(n.root, proc, process, "ns/pid")); err != nil {
				t.Fatal(err)
			}
		}
		agent := n.facts().Agent
		compareVisibility(t, agent.Visibility, "")
		compareVisibility(t, agent.VisibilityAll, "the processes in /proc are those of a container")
	})
	t.Run("simulated", func(t *testing.T) {
		n := newMadeUp(t)
		n.write("proc/"+agentPID+"/status", most)
		ofPods, ofAll := visibility(t.Context(), n.options, findAgents(n.options))
		compareVisibility(t, ofPods, "?")
		compareVisibility(t, ofAll, "?")
	})
}

// In the agent's pod, doctor has the same permissions as the agent and tries to look.
func TestVisibilityInThePod(t *testing.T) {
	for want, first := range map[string]string{"": "proc/1/fd/3", "not all processes are visible": "proc/47/fd/3"} {
		n := newMadeUp(t)
		n.options.Simulated = false
		n.write("self/1/cmdline", strings.Join([]string{"/chandler", "run", "--kubelet-root=" + n.options.KubeletRoot}, "\x00")+"\x00")
		n.write("h/"+first, "")
		var err error
		if n.options.HostFS, err = hostfs.Open(filepath.Join(n.root, "h")); err != nil {
			t.Fatal(err)
		}
		ofPods, ofAll := visibility(t.Context(), n.options, findAgents(n.options))
		compareVisibility(t, ofPods, want)
		compareVisibility(t, ofAll, want)
	}
}

// An agent with a host service sees what the service sees, and nothing while the service is missing.
func TestVisibilityOfHostService(t *testing.T) {
	n := newMadeUp(t)
	n.options.Simulated = false
	n.process(agentPID, "/chandler", "run", "--kubelet-root="+n.options.KubeletRoot, "--host-service-dir=/run/h")
	n.write("proc/"+agentPID+"/status", "CapEff:\t0000000000000000\n")
	agent := n.facts().Agent
	compareVisibility(t, agent.Visibility, "the host service does not answer")
	compareVisibility(t, agent.VisibilityAll, "the host service does not answer")
	n.write("h/proc/1/fd/3", "")
	host, err := hostfs.Open(filepath.Join(n.root, "h"))
	if err != nil {
		t.Fatal(err)
	}
	n.write("proc/"+agentPID+"/root/run/h/lock", "")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	dir := filepath.Join(n.root, "proc", agentPID, "root/run/h")
	go func() {
		ended <- hostservice.Run(ctx, dir, hostservice.NewServer(hostservice.Config{Host: &discovery.Host{FS: host}}))
	}()
	for range 100 {
		if _, err := hostservice.NewClient(dir, nil).DescribeService(t.Context()); err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	agent = n.facts().Agent
	compareVisibility(t, agent.Visibility, "")
	compareVisibility(t, agent.VisibilityAll, "")
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func compareVisibility(t *testing.T, got doctor.Answer[string], want string) {
	t.Helper()
	switch unknown := got.Unknown != ""; {
	case unknown != (want == "?"), !unknown && want == "" && got.Value != "", !unknown && !strings.Contains(got.Value, want):
		t.Errorf("%+v, want %q", got, want)
	}
}
