package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/machine"
)

// A component is a process of the cluster.
type component struct {
	name   string
	log    string
	cmd    *exec.Cmd
	exited chan struct{} // closed after the end of cmd
}

// fileOf returns the path of a program's file on the node. One file contains all programs of
// Kubernetes, and another one contains their dependencies.
func (n *Node) fileOf(program string) string {
	switch program {
	case "containerd", "ctr", "etcd":
		return machine.ProgramDir + "/base"
	}
	return machine.ProgramDir + "/" + n.cfg.Programs.Kube
}

// launch starts a program on the node, and appends its output to a log.
func (n *Node) launch(name string, args []string) error {
	p := &component{name: name, log: filepath.Join(n.LogDir(), name+".log"), exited: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("log of %s: %w", name, err)
	}
	defer log.Close()
	p.cmd = n.machine.Command(context.Background(), n.fileOf(name), append([]string{name}, args...)...)
	p.cmd.Env = n.environment()
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a Ctrl-C should reach the test only, which then calls Stop
	if err := p.cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = p.cmd.Wait() // the log and ProcessState contain the reason
		close(p.exited)
	}()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.components[name] = p
	n.say("started %s", name)
	return nil
}

// terminate sends SIGTERM to a component and waits for its end. If ctx ends first, the
// component is killed.
func (n *Node) terminate(ctx context.Context, name string) error {
	n.mu.Lock()
	p := n.components[name]
	delete(n.components, name)
	n.mu.Unlock()
	if p == nil {
		return fmt.Errorf("%s does not run", name)
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // fails only if the process has ended
	select {
	case <-p.exited:
		return nil
	case <-ctx.Done():
		_ = p.cmd.Process.Signal(machine.Kill)
		<-p.exited
		return fmt.Errorf("%s did not end: %w", name, context.Cause(ctx))
	}
}

// dead returns an error with the name and the last output of a component that has ended, or
// nil.
func (n *Node) dead() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, p := range n.components {
		select {
		case <-p.exited:
			return fmt.Errorf("%s ended: %s\n%s", p.name, p.cmd.ProcessState, p.lastWords())
		default:
		}
	}
	return nil
}

// lastWords returns the last lines of the log.
func (p *component) lastWords() []byte {
	const lines = 15
	log, err := os.ReadFile(p.log)
	if err != nil {
		return nil
	}
	log = bytes.TrimSpace(log)
	begin := len(log)
	for range lines {
		if begin = bytes.LastIndexByte(log[:begin], '\n'); begin < 0 {
			return log
		}
	}
	return log[begin+1:]
}

// until calls the function is repeatedly until the result is nil, as long as all components run.
// After a timeout, the error contains the last result.
func (n *Node) until(ctx context.Context, what string, is func(context.Context) error) error {
	const interval = 50 * time.Millisecond
	for {
		err := is(ctx)
		if err == nil {
			return nil
		}
		if dead := n.dead(); dead != nil {
			return dead
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w; last: %w", what, context.Cause(ctx), err)
		case <-time.After(interval):
		}
	}
}

func (n *Node) containerdListens(context.Context) error {
	conn, err := net.Dial("unix", n.NodePath(containerdSocket))
	if err != nil {
		return err
	}
	return conn.Close()
}

// apiserverIsReady disables the client's retries, which would take seconds each.
func (c *Cluster) apiserverIsReady(ctx context.Context) error {
	return c.client.Discovery().RESTClient().Get().AbsPath("/readyz").MaxRetries(0).Do(ctx).Error()
}

// hasDefaultAccount returns nil once the controller manager has created the default service
// account.
func (c *Cluster) hasDefaultAccount(ctx context.Context) error {
	_, err := c.client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
	return err
}

// nodeIsReady returns a function that returns nil once pods can be scheduled to the node and
// the kubelet has reported after since.
func (n *Node) nodeIsReady(since time.Time) func(context.Context) error {
	return func(ctx context.Context) error {
		node, err := n.client.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return errors.New("not registered")
		}
		if err != nil {
			return err
		}
		return readiness(node, since)
	}
}
