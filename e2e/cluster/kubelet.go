package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// StartKubelet starts the kubelet and waits until the kubelet reports the node as Ready.
func (n *Node) StartKubelet(ctx context.Context) error {
	n.mu.Lock()
	running := n.components["kubelet"] != nil
	n.mu.Unlock()
	if running {
		return errors.New("kubelet runs already")
	}
	begin := time.Now()
	if err := n.launch("kubelet", n.kubeletArgs()); err != nil {
		return err
	}
	return n.until(ctx, "node "+n.name, n.nodeIsReady(begin))
}

// StopKubelet ends the kubelet. Pods continue to run.
func (n *Node) StopKubelet(ctx context.Context) error { return n.terminate(ctx, "kubelet") }

// RestartKubelet calls StopKubelet and StartKubelet.
func (n *Node) RestartKubelet(ctx context.Context) error {
	if err := n.StopKubelet(ctx); err != nil {
		return err
	}
	return n.StartKubelet(ctx)
}

// readiness returns the reason why pods cannot run on a node, or nil. Timestamps from the API
// server have a resolution of one second.
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
