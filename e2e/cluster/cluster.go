// Package cluster runs a real Kubernetes with one node on this host, for tests and demonstrations: etcd, API server,
// scheduler, controller manager, containerd and kubelet, in a machine of their own (see package machine), so that any
// number of clusters run side by side and nothing is left of one that has ended, however it ended.
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
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/machine"
)

// Addresses in a cluster, the same in each.
const (
	NodeIP         = "192.0.2.1"
	serviceIP      = "10.96.0.1"
	serviceNetwork = "10.96.0.0/16"
	podNetwork     = "10.244.0.0/24"
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
	// Kubelet holds fields of the KubeletConfiguration that are to be other than they would be.
	Kubelet map[string]any
	// Progress is told each step of the start; nothing is written if it is nil.
	Progress io.Writer
}

// A Cluster runs until Stop is called or this process ends. Its methods may be called by several goroutines at once.
type Cluster struct {
	cfg     Config
	machine *machine.Machine
	rest    *rest.Config
	client  kubernetes.Interface
	begin   time.Time

	mu         sync.Mutex
	components map[string]*component // that are to run
}

// Start returns when the node is Ready and pods can be created. The context bounds the start, not the cluster.
func Start(ctx context.Context, cfg Config) (*Cluster, error) {
	if os.Getuid() != 0 {
		return nil, errors.New("start cluster: needs root, for namespaces, mounts and cgroups")
	}
	if cfg.NodeName == "" {
		cfg.NodeName = "node"
	}
	c := &Cluster{cfg: cfg, begin: time.Now(), components: map[string]*component{}}
	if err := c.startMachine(ctx); err != nil {
		return nil, fmt.Errorf("start cluster: %w", err)
	}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start cluster: %w", err), c.Stop())
	}
	return c, nil
}

// own are the directories that the node has to itself, and that are gone with it.
var own = []string{"/var/lib", "/var/log", "/etc/cdi", "/etc/cni", "/etc/containerd", "/etc/kubernetes"}

// tunables are settings of the whole host that a kubelet insists on. It reads that they are as it wants them.
var tunables = map[string]string{
	"/proc/sys/kernel/keys/root_maxbytes": "25000000\n",
	"/proc/sys/kernel/keys/root_maxkeys":  "1000000\n",
	"/proc/sys/kernel/panic":              "10\n",
	"/proc/sys/kernel/panic_on_oops":      "1\n",
	"/proc/sys/vm/overcommit_memory":      "1\n",
	"/proc/sys/vm/panic_on_oom":           "0\n",
}

func (c *Cluster) startMachine(ctx context.Context) error {
	temporary := c.cfg.Dir == ""
	if temporary {
		dir, err := os.MkdirTemp("", "chandler-e2e-")
		if err != nil {
			return err
		}
		c.cfg.Dir = dir
	}
	dir, err := filepath.Abs(c.cfg.Dir)
	if err != nil {
		return err
	}
	c.cfg.Dir = dir
	c.machine, err = machine.Start(ctx, machine.Config{
		Program:   c.cfg.Programs.Program("machine"),
		Dir:       dir,
		RemoveDir: temporary,
		Hostname:  c.cfg.NodeName,
		Own:       own,
		Files:     tunables,
		Addresses: []netip.Addr{netip.MustParseAddr(NodeIP), netip.MustParseAddr(serviceIP)},
		Forward:   map[string]string{serviceIP + ":443": APIServer}, // in place of kube-proxy
		Publish:   APIServer,
	})
	if err != nil && temporary {
		return errors.Join(err, os.RemoveAll(dir))
	}
	return err
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

func (c *Cluster) startRuntime(ctx context.Context) error {
	if err := c.launch("containerd", []string{"--config", containerdConfig}); err != nil {
		return err
	}
	if err := c.until(ctx, "containerd", c.containerdListens); err != nil {
		return err
	}
	return c.LoadImage(ctx, Image{
		Name:       PauseImage,
		Files:      map[string]string{"/pause": c.cfg.Programs.Program("pause")},
		Entrypoint: []string{"/pause"},
	})
}

// Stop ends everything and returns when nothing is left but, in a Dir that was given, logs. A second call does
// nothing.
func (c *Cluster) Stop() error {
	err := c.machine.Stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, component := range c.components {
		<-component.exited
		delete(c.components, name)
	}
	return errors.Join(err, c.removeKubeconfig())
}

// Kubeconfig is the path of a kubeconfig of an administrator, for use on the host.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.cfg.Dir, "kubeconfig") }

// RESTConfig is what Kubeconfig says, for clients; they are not slowed down. The caller may change it.
func (c *Cluster) RESTConfig() *rest.Config { return rest.CopyConfig(c.rest) }

// NodeName is the name of the node.
func (c *Cluster) NodeName() string { return c.cfg.NodeName }

// NodePath returns the path on the host that leads to path on the node, such as /var/run/cdi, while the node runs.
func (c *Cluster) NodePath(path string) string { return c.machine.Path(path) }

// LogDir is the directory, on the host, of the components' logs.
func (c *Cluster) LogDir() string { return filepath.Join(c.cfg.Dir, "log") }

// Command returns a command that runs on the node, in its namespaces. Programs and files are as the node sees them:
// the host's, but for what is the node's own. Signals sent to the command's process reach the program, and it is
// killed with the command.
func (c *Cluster) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return c.machine.Command(ctx, name, args...)
}

// Kubectl returns a command that runs kubectl on the host, as an administrator.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) *exec.Cmd {
	args = append([]string{"kubectl", "--kubeconfig", c.Kubeconfig()}, args...)
	cmd := exec.CommandContext(ctx, c.cfg.Programs.Program(c.cfg.Programs.Kube), args...)
	cmd.Env = append(os.Environ(), "KUBECACHEDIR="+filepath.Join(c.cfg.Dir, "var/lib/kubectl")) // goes with the node's
	return cmd
}

func (c *Cluster) say(format string, args ...any) {
	if c.cfg.Progress != nil {
		fmt.Fprintf(c.cfg.Progress, "%5.1fs  "+format+"\n", append([]any{time.Since(c.begin).Seconds()}, args...)...)
	}
}
