// Package cluster runs a real Kubernetes with one node or more on this host, for tests and demonstrations: etcd, API server,
// scheduler, controller manager, containerd and kubelet, in a machine of their own (see package machine) for each node, so
// that any number of clusters run side by side and nothing is left of one that has ended, however it ended.
//
// In the machine everything is where it is on any node: /var/lib/kubelet, /var/run/cdi, /etc/cni/net.d and so on, the
// node's own; /dev is the host's. There is no way out of the machine: images come from LoadImage, never from a
// registry, and no name servers are there. Unlike an ordinary cluster it has no kube-proxy; one Service works,
// the API server's.
//
// The package builds nothing; package build does. Package kubectl does with a cluster's RESTConfig what you would do
// with kubectl in a shell.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"chandler.dev/e2e/build"
)

// Addresses in a cluster, the same in each.
const (
	NodeIP         = "192.0.2.1" // of the first node
	serviceIP      = "10.96.0.1"
	serviceNetwork = "10.96.0.0/16"
	// APIServer is where the node itself reaches the API server.
	APIServer = "127.0.0.1:6443"
)

// Config describes a cluster. Only Programs must be set.
type Config struct {
	// Programs are what build.Builder's Cluster returns.
	Programs build.Programs
	// Dir holds the cluster's state; Stop leaves only logs in it. Unless given it is a temporary directory, of which
	// nothing is left.
	Dir string
	// NodeName is "node" unless given.
	NodeName string
	// FeatureGates are switched on or off in all components; others are as Kubernetes has them by default.
	FeatureGates map[string]bool
	// RuntimeConfig switches API groups and versions on or off, such as "resource.k8s.io/v1alpha3".
	RuntimeConfig map[string]bool
	// PodSecurity is the Pod Security Standard that namespaces without a label enforce, such as "baseline"; "privileged"
	// unless given, which is none.
	PodSecurity string
	// Kubelet holds fields of the KubeletConfiguration that are to be other than they would be.
	Kubelet map[string]any
	// Progress is told each step of the start; nothing is written if it is nil.
	Progress io.Writer
}

// A Cluster runs until Stop is called or this process ends. Its methods may be called by several goroutines at once.
type Cluster struct {
	*Node // the first one, which has the control plane
	rest  *rest.Config
	ca    *authority

	nodesMu sync.Mutex
	nodes   []*Node // the others
}

// Start returns when the node is Ready and pods can be created. The context bounds the start, not the cluster.
func Start(ctx context.Context, cfg Config) (*Cluster, error) {
	if os.Getuid() != 0 {
		return nil, errors.New("start cluster: needs root, for namespaces, mounts and cgroups")
	}
	if cfg.NodeName == "" {
		cfg.NodeName = "node"
	}
	c := &Cluster{Node: newNode(cfg, cfg.NodeName, 1)}
	c.forward = map[string]string{serviceIP + ":443": APIServer} // in place of kube-proxy
	if err := c.startMachine(ctx, APIServer); err != nil {
		return nil, fmt.Errorf("start cluster: %w", err)
	}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start cluster: %w", err), c.Stop())
	}
	return c, nil
}

// start brings the components up, each as soon as what it needs is there.
func (c *Cluster) start(ctx context.Context) error {
	if err := c.configure(); err != nil {
		return fmt.Errorf("configure: %w", err)
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.startControlPlane(groupCtx) })
	group.Go(func() error { return c.startRuntime(groupCtx) })
	if err := group.Wait(); err != nil {
		return err
	}
	if err := c.StartKubelet(ctx); err != nil {
		return err
	}
	if err := c.until(ctx, "default service account", c.hasDefaultAccount); err != nil {
		return err
	}
	c.say("the cluster is ready")
	return nil
}

func (c *Cluster) startControlPlane(ctx context.Context) error {
	if err := c.launch("etcd", etcdArgs()); err != nil {
		return err
	}
	if err := c.StartAPIServer(ctx); err != nil {
		return err
	}
	if err := c.launch("kube-controller-manager", c.controllerManagerArgs()); err != nil {
		return err
	}
	return c.launch("kube-scheduler", c.schedulerArgs())
}

// Stop ends everything and returns when nothing is left but, in a Dir that was given, logs. A second call does
// nothing.
func (c *Cluster) Stop() error {
	c.nodesMu.Lock()
	nodes := c.nodes
	c.nodes = nil
	c.nodesMu.Unlock()
	var err error
	for _, n := range append(nodes, c.Node) {
		err = errors.Join(err, n.stop())
	}
	return errors.Join(err, c.removeKubeconfig())
}

// Kubeconfig is the path of a kubeconfig of an administrator, for use on the host.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.dir, "kubeconfig") }

// RESTConfig is what Kubeconfig says, for clients; they are not slowed down. The caller may change it.
func (c *Cluster) RESTConfig() *rest.Config { return rest.CopyConfig(c.rest) }

// Kubectl returns a command that runs kubectl on the host, as an administrator.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) *exec.Cmd {
	args = append([]string{"kubectl", "--kubeconfig", c.Kubeconfig()}, args...)
	cmd := exec.CommandContext(ctx, c.cfg.Programs.Program(c.cfg.Programs.Kube), args...)
	cmd.Env = append(os.Environ(), "KUBECACHEDIR="+filepath.Join(c.dir, "var/lib/kubectl")) // goes with the node's
	return cmd
}
