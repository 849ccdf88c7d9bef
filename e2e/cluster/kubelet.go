package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// StartKubelet starts the kubelet and returns when the node is Ready by its word.
func (c *Cluster) StartKubelet(ctx context.Context) error {
	c.mu.Lock()
	running := c.components["kubelet"] != nil
	c.mu.Unlock()
	if running {
		return errors.New("kubelet runs already")
	}
	begin := time.Now()
	if err := c.launch("kubelet", c.kubeletArgs()); err != nil {
		return err
	}
	return c.until(ctx, "node "+c.cfg.NodeName, c.nodeIsReady(begin))
}

// StopKubelet ends the kubelet; pods go on without it.
func (c *Cluster) StopKubelet(ctx context.Context) error { return c.terminate(ctx, "kubelet") }

// RestartKubelet is StopKubelet and StartKubelet.
func (c *Cluster) RestartKubelet(ctx context.Context) error {
	if err := c.StopKubelet(ctx); err != nil {
		return err
	}
	return c.StartKubelet(ctx)
}

// readiness returns what keeps pods from a node, nil if nothing does. The API server keeps whole seconds.
func readiness(node *corev1.Node, since time.Time) error {
	for _, taint := range node.Spec.Taints {
		if taint.Key == corev1.TaintNodeNotReady || taint.Key == corev1.TaintNodeUnreachable {
			return fmt.Errorf("taint %s", taint.Key)
		}
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type != corev1.NodeReady {
			continue
		}
		if condition.Status != corev1.ConditionTrue {
			return errors.New(condition.Message)
		}
		if condition.LastHeartbeatTime.Time.Before(since.Truncate(time.Second)) {
			return errors.New("no report yet")
		}
		return nil
	}
	return errors.New("no condition Ready")
}
