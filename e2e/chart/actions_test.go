package chart

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
)

// until calls the function is repeatedly until the function returns no error. After patience, it
// logs the agent's output and fails the test.
func (p *privileged) until(what string, is func(context.Context) error) {
	p.t.Helper()
	if err := p.kube.Until(within(p.t), what, is); err != nil {
		p.tell(p.t)
		p.t.Fatal(err)
	}
}

func (p *privileged) apply(manifest string) {
	p.t.Helper()
	if err := p.kube.Apply(within(p.t), manifest); err != nil {
		p.t.Fatal(err)
	}
}

// upgrade upgrades the chart with values and further settings, and waits for the new agent.
func (p *privileged) upgrade(values string, set ...string) {
	p.t.Helper()
	p.run(values, append([]string{"upgrade", "chandler", p.project.Chart(), "--values=-"}, set...)...)
	if err := chandler.WaitForAgent(within(p.t), p.kube); err != nil {
		p.t.Fatal(err)
	}
	p.until("one agent to run", func(ctx context.Context) error {
		_, err := chandler.AgentPod(ctx, p.kube)
		return err
	})
	p.hasHostService()
}

// hasHostService waits until the host service runs as the chart describes it, if it does.
func (p *privileged) hasHostService() {
	p.t.Helper()
	p.until("the host service to run", func(ctx context.Context) error {
		set, err := p.kube.AppsV1().DaemonSets(chandler.Namespace).Get(ctx, "chandler-host", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if now := set.Status; err == nil && (now.ObservedGeneration != set.Generation || now.UpdatedNumberScheduled == 0 || now.NumberReady != now.UpdatedNumberScheduled) {
			err = fmt.Errorf("its status is %+v", now)
		}
		return err
	})
}

// uninstall runs the command of the chart's hook, which orders the agents to leave.
func (p *privileged) uninstall() (string, error) {
	out, err := exec.CommandContext(within(p.t), p.project.Agent, "uninstall", "--timeout=5s", "--kubeconfig", p.node.Kubeconfig()).CombinedOutput()
	return string(out), err
}

// doctor returns the output of doctor in the agent's pod.
func (p *privileged) doctor() string {
	p.t.Helper()
	out, err := p.node.Kubectl(within(p.t), "exec", "-n", chandler.Namespace, "daemonset/"+chandler.DaemonSet, "--", "/chandler", "doctor").CombinedOutput()
	if failed := (*exec.ExitError)(nil); err != nil && !errors.As(err, &failed) {
		p.t.Fatal(err)
	}
	return string(out)
}

// healthy waits until the devices are in slices and have no taints.
func (p *privileged) healthy(devices ...string) {
	p.t.Helper()
	p.until(fmt.Sprintf("%q to be healthy", devices), func(ctx context.Context) error {
		offered, err := chandler.Devices(ctx, p.kube)
		if err != nil {
			return err
		}
		for _, name := range devices {
			if d, there := offered[name]; !there || len(d.Taints) > 0 {
				return fmt.Errorf("%s is in slices: %t, with taints %v", name, there, d.Taints)
			}
		}
		return nil
	})
}

// has waits until a pod runs, and checks that it has exactly the given device nodes.
func (p *privileged) has(pod string, nodes ...string) {
	p.t.Helper()
	if _, err := p.kube.WaitForPod(within(p.t), metav1.NamespaceDefault, pod, corev1.PodRunning); err != nil {
		p.tell(p.t)
		p.t.Fatal(err)
	}
	var said string
	p.until("pod "+pod+" to say what it has", func(ctx context.Context) (err error) {
		if said, err = p.kube.Logs(ctx, metav1.NamespaceDefault, pod, ""); err == nil && !strings.Contains(said, "device ") {
			err = errors.New("it has said nothing")
		}
		return err
	})
	var has []string
	for line := range strings.Lines(said) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] == "device" {
			has = append(has, fields[len(fields)-1])
		}
	}
	if strings.Join(has, " ") != strings.Join(nodes, " ") {
		p.t.Errorf("pod %s has %q, want %q", pod, has, nodes)
	}
}

// driver waits until the given driver is bound to the disk.
func (p *privileged) driver(want string) {
	p.t.Helper()
	p.until("the disk to have driver "+want, func(context.Context) error {
		if now := p.kernel.Driver(diskAddress); now != want {
			return fmt.Errorf("its driver is %q", now)
		}
		return nil
	})
}

// log waits until a line of the agent's log contains all words.
func (p *privileged) log(words ...string) {
	p.t.Helper()
	p.until(fmt.Sprintf("the agent to log %q", words), func(ctx context.Context) error {
		agent, err := chandler.AgentPod(ctx, p.kube)
		if err != nil {
			return err
		}
		said, err := p.kube.Logs(ctx, chandler.Namespace, agent.Name, "")
		if err != nil {
			return err
		}
	lines:
		for line := range strings.Lines(said) {
			for _, word := range words {
				if !strings.Contains(line, word) {
					continue lines
				}
			}
			return nil
		}
		return errors.New("it has not")
	})
}

// killAgent kills the agent's process and waits until the kubelet has started another one. The
// kubelet waits longer each time.
func (p *privileged) killAgent() {
	p.t.Helper()
	agent, err := chandler.AgentPod(within(p.t), p.kube)
	if err != nil {
		p.t.Fatal(err)
	}
	before := agent.Status.ContainerStatuses[0].RestartCount
	killed := false
	for process, line := range p.processes() {
		if strings.HasPrefix(line, "/chandler\x00run\x00") {
			if out, err := p.node.Command(within(p.t), "kill", "-9", process).CombinedOutput(); err != nil {
				p.t.Fatalf("kill: %v: %s", err, out)
			}
			killed = true
		}
	}
	if !killed {
		p.t.Fatal("there is no process of the agent")
	}
	p.until("the agent to be restarted", func(ctx context.Context) error {
		now, err := chandler.AgentPod(ctx, p.kube)
		if err == nil && (now.Status.ContainerStatuses[0].RestartCount == before || !now.Status.ContainerStatuses[0].Ready) {
			err = errors.New("it is not")
		}
		return err
	})
}

// processes returns the command lines of the node's processes, by their PIDs on the node.
func (p *privileged) processes() map[string]string {
	found := make(map[string]string)
	lines, _ := filepath.Glob(p.node.NodePath("/proc") + "/[0-9]*/cmdline")
	for _, file := range lines {
		if line, err := os.ReadFile(file); err == nil {
			found[filepath.Base(filepath.Dir(file))] = string(line)
		}
	}
	return found
}

// stuck starts a process that has a file open and hangs in the kernel. It returns the process's PID
// on the node, and a function that ends the process.
func (p *privileged) stuck(file string) (process string, end func()) {
	p.t.Helper()
	builder := build.Builder{Progress: os.Stderr}
	program, err := builder.Static(p.t.Context(), filepath.Join(p.project.Dir, "e2e"), "chandler.dev/e2e/cmd/stuck")
	if err != nil {
		p.t.Fatal(err)
	}
	cmd := p.node.Command(p.t.Context(), program, file)
	out, in := io.Pipe()
	cmd.Stdout, cmd.Stderr = in, os.Stderr
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	if _, err := fmt.Fscan(out, &process); err != nil {
		p.t.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, out) }()
	ended := false
	end = func() {
		if !ended {
			ended = true
			_ = cmd.Process.Signal(syscall.SIGTERM)
			_ = cmd.Wait()
		}
	}
	p.t.Cleanup(end)
	return process, end
}

// join moves a process of the node into the cgroups of a pod's container.
func (p *privileged) join(process, pod string) {
	p.t.Helper()
	now, err := p.kube.CoreV1().Pods(metav1.NamespaceDefault).Get(within(p.t), pod, metav1.GetOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	script := `
for group in $(find /sys/fs/cgroup -type d -path "*$1/*" ! -path "*$1/*/*"); do echo $2 > $group/cgroup.procs && joined=yes; done
test "$joined"`
	if out, err := p.node.Command(within(p.t), "sh", "-c", script, "sh", "pod"+string(now.UID), process).CombinedOutput(); err != nil {
		p.t.Fatalf("join the control group of pod %s: %v: %s", pod, err, out)
	}
}
