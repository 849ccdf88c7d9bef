package cluster

import (
	"context"
	"errors"
)

// KillAPIServer ends the API server as a crash would, at once: one that is asked to end waits for a minute while it is
// watched. The node goes on without it.
func (c *Cluster) KillAPIServer() error {
	c.mu.Lock()
	p := c.components["kube-apiserver"]
	delete(c.components, "kube-apiserver")
	c.mu.Unlock()
	if p == nil {
		return errors.New("kube-apiserver does not run")
	}
	err := p.cmd.Process.Kill()
	<-p.exited
	return err
}

// StartAPIServer starts the API server and returns when it is ready.
func (c *Cluster) StartAPIServer(ctx context.Context) error {
	if err := c.launch("kube-apiserver", c.apiserverArgs()); err != nil {
		return err
	}
	return c.until(ctx, "API server", c.apiserverIsReady)
}
