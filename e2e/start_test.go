package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"chandler.dev/e2e/chandler"
)

// TestAgentStartsWithoutAPIServer starts an agent without an API server. The agent must log the
// reason for which it waits, and end at once on SIGTERM. When the API server is back, the agent
// must publish the same slices as before.
func TestAgentStartsWithoutAPIServer(t *testing.T) {
	agent := renewAgent(t)
	unharmed := holders(t)
	before := generations(t)
	if err := node.KillAPIServer(); err != nil {
		t.Fatal(err)
	}
	back := func() {
		if err := node.StartAPIServer(within(t)); err != nil {
			t.Error(err)
		}
	}
	defer func() { back() }()
	signalAgent(t, "-KILL")
	logged(t, agent, 1, "Publishing ResourceSlices waits for the API server")
	signalAgent(t, "-TERM")
	logged(t, agent, 2, "Publishing ResourceSlices waits for the API server")
	back()
	back = func() {}
	if err := chandler.WaitForAgent(within(t), kube); err != nil {
		t.Fatal(err)
	}
	until(t, "the kubelet to tell of both restarts", func(ctx context.Context) error {
		now, err := chandler.AgentPod(ctx, kube)
		if err != nil {
			return err
		}
		status := now.Status.ContainerStatuses[0]
		if status.RestartCount != 2 {
			return fmt.Errorf("it tells of %d", status.RestartCount)
		}
		if last := status.LastTerminationState.Terminated; last == nil || last.ExitCode != 0 {
			t.Errorf("with SIGTERM it ended as %+v", last)
		}
		return nil
	})
	offers(t)
	unharmed(t)
	works(t)
	if after := generations(t); after != before {
		t.Errorf("the slices are %s; were %s", after, before)
	}
}

// signalAgent sends a signal to the agent's process and waits until another process has replaced
// it. It works without an API server.
func signalAgent(t *testing.T, signal string) {
	t.Helper()
	before := agentPIDs(t)
	if len(before) != 1 {
		t.Fatalf("processes of the agent: %q; want one", before)
	}
	if out, err := node.Command(within(t), "kill", signal, before[0]).CombinedOutput(); err != nil {
		t.Fatalf("kill %s %s: %v: %s", signal, before[0], err, out)
	}
	until(t, "the kubelet to restart the agent", func(context.Context) error {
		if now := agentPIDs(t); len(now) != 1 || now[0] == before[0] {
			return fmt.Errorf("processes are %q; was %q", now, before)
		}
		return nil
	})
}

// logged waits until the agent has logged a text after its n-th restart. It reads the container
// runtime's log file.
func logged(t *testing.T, agent *corev1.Pod, n int, text string) {
	t.Helper()
	file := fmt.Sprintf("/var/log/pods/%s_%s_%s/chandler/%d.log", agent.Namespace, agent.Name, agent.UID, n)
	until(t, fmt.Sprintf("the agent to log %q", text), func(context.Context) error {
		data, err := os.ReadFile(node.NodePath(file))
		if err == nil && !strings.Contains(string(data), text) {
			err = fmt.Errorf("it logged:\n%s", data)
		}
		return err
	})
}

// TestAgentWithoutItsSocket removes a socket of the agent. The kubelet must restart the agent
// before the kubelet deletes the slices.
func TestAgentWithoutItsSocket(t *testing.T) {
	for name, pattern := range map[string]string{
		"registration": "/var/lib/kubelet/plugins_registry/" + chandler.Driver + "-%s-reg.sock",
		"calls":        chandler.StateDir + "/dra-%s.sock",
	} {
		t.Run(name, func(t *testing.T) {
			agent := renewAgent(t)
			unharmed := holders(t)
			unchanged := slicesStay(t)
			socket := fmt.Sprintf(pattern, agent.UID)
			if err := os.Remove(node.NodePath(socket)); err != nil {
				t.Fatal(err)
			}
			until(t, "the kubelet to restart the agent and to have the driver again", func(ctx context.Context) error {
				now, err := chandler.AgentPod(ctx, kube)
				if err != nil {
					return err
				}
				if status := now.Status.ContainerStatuses[0]; status.RestartCount == 0 || !status.Ready {
					return fmt.Errorf("restarted %d times; ready: %t", status.RestartCount, status.Ready)
				}
				return nil
			})
			logged(t, agent, 0, filepath.Base(socket))
			if err := chandler.WaitForAgent(within(t), kube); err != nil {
				t.Fatal(err)
			}
			unchanged(t)
			unharmed(t)
			works(t)
		})
	}
}
