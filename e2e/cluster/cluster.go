// Package cluster runs a real Kubernetes with one or more nodes on this host, for tests and
// demonstrations: etcd, API server, scheduler, controller manager, containerd and kubelet.
// Each node is a separate machine (see package machine), so any number of clusters can run
// side by side, and a cluster is removed completely after any kind of end.
//
// In the machine, all files have their usual places, such as /var/lib/kubelet, /var/run/cdi
// and /etc/cni/net.d, and belong to the node; /dev is the host's. The machine has no route to
// other hosts. Images come from LoadImage, never from a registry, and there are no name
// servers. In contrast to an ordinary cluster, there is no kube-proxy, so the API server's
// Service is the only working Service.
//
// The package does not build programs; see package build. Package kubectl uses a cluster's
// RESTConfig for operations that a user would perform with kubectl.
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

// Addresses in a cluster, equal in all clusters.
const (
	NodeIP         = "192.0.2.1" // of the first node
	serviceIP      = "10.96.0.1"
	serviceNetwork = "10.96.0.0/16"
	// APIServer is the API server's address on the node.
	APIServer = "127.0.0.1:6443"
)

// Config describes a cluster. Only Programs is required.
type Config struct {
	// Programs is the result of build.Builder's Cluster.
	Programs build.Programs
	// Dir holds the cluster's state. Stop removes everything from Dir except logs. The default is
	// a temporary directory, which Stop removes.
	Dir string
	// NodeName is "node" by default.
	NodeName string
	// FeatureGates are set in all components. Other feature gates have the defaults of Kubernetes.
	FeatureGates map[string]bool
	// RuntimeConfig enables or disables API groups and versions, such as
	// "resource.k8s.io/v1alpha3".
	RuntimeConfig map[string]bool
	// PodSecurity is the Pod Security Standard for namespaces without a label, such as "baseline".
	// The default is "privileged", which enforces nothing.
	PodSecurity string
	// Audit lists users whose requests the API server records in AuditLog.
	Audit []string
	// Kubelet overrides fields of the KubeletConfiguration.
	Kubelet map[string]any
	// ControllerManager has further arguments of the controller manager.
	ControllerManager []string
	// Progress receives a message for each step of the start, unless it is nil.
	Progress io.Writer
}

// A Cluster runs until Stop is called or this process ends. Its methods are safe for
// concurrent use.
type Cluster struct {
	*Node // the first node, with the control plane
	rest  *rest.Config
	ca    *authority

	nodesMu sync.Mutex
	nodes   []*Node // the other nodes
}

// Start starts a cluster, and returns when the node is Ready and pods can be created. The
// context limits the start, not the cluster's lifetime.
func Start(ctx context.Context, cfg Config) (*Cluster, error) {
	if os.Getuid() != 0 {
		return nil, errors.New("start cluster: needs root, for namespaces, mounts and cgroups")
	}
	if cfg.NodeName == "" {
		cfg.NodeName = "node"
	}
	c := &Cluster{Node: newNode(cfg, cfg.NodeName, 1)}
	c.forward = map[string]string{serviceIP + ":443": APIServer} // replaces kube-proxy
	if err := c.startMachine(ctx, APIServer); err != nil {
		return nil, fmt.Errorf("start cluster: %w", err)
	}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start cluster: %w", err), c.Stop())
	}
	return c, nil
}

// start starts the components, each as soon as its dependencies are ready.
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

// Stop ends the cluster and removes everything except logs in a configured Dir. Further calls
// do nothing.
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

// Kubeconfig returns the path of an administrator's kubeconfig for use on the host.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.dir, "kubeconfig") }

// RESTConfig returns a copy of the configuration in Kubeconfig, without rate limits.
func (c *Cluster) RESTConfig() *rest.Config { return rest.CopyConfig(c.rest) }

// Kubectl returns a command that runs kubectl on the host as an administrator.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) *exec.Cmd {
	args = append([]string{"kubectl", "--kubeconfig", c.Kubeconfig()}, args...)
	cmd := exec.CommandContext(ctx, c.cfg.Programs.Program(c.cfg.Programs.Kube), args...)
	cmd.Env = append(os.Environ(), "KUBECACHEDIR="+filepath.Join(c.dir, "var/lib/kubectl")) // removed with the node
	return cmd
}
