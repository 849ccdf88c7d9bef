package cluster

import (
	"context"
	"errors"

	"chandler.dev/e2e/machine"
)

// KillAPIServer kills the API server, as in a crash. A regular termination takes a minute
// while there are watches. The node continues to run.
func (c *Cluster) KillAPIServer() error {
	c.mu.Lock()
	p := c.components["kube-apiserver"]
	delete(c.components, "kube-apiserver")
	c.mu.Unlock()
	if p == nil {
		return errors.New("kube-apiserver does not run")
	}
	err := p.cmd.Process.Signal(machine.Kill)
	<-p.exited
	return err
}

// StartAPIServer starts the API server and waits until it is ready.
func (c *Cluster) StartAPIServer(ctx context.Context) error {
	if err := c.launch("kube-apiserver", c.apiserverArgs()); err != nil {
		return err
	}
	return c.until(ctx, "API server", c.apiserverIsReady)
}
