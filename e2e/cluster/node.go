package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"chandler.dev/e2e/machine"
)

// A Node is a machine with a containerd and a kubelet. The first one of a cluster has the control plane besides.
type Node struct {
	cfg     Config // of the cluster
	name    string
	number  int // from 1
	ip      string
	dir     string            // holds its state
	forward map[string]string // addresses that lead to others
	machine *machine.Machine
	client  kubernetes.Interface
	begin   time.Time

	mu         sync.Mutex
	components map[string]*component // that are to run
}

func newNode(cfg Config, name string, number int) *Node {
	return &Node{
		cfg: cfg, name: name, number: number, ip: fmt.Sprintf("192.0.2.%d", number), dir: cfg.Dir,
		begin: time.Now(), components: map[string]*component{},
	}
}

// podNetwork is the network of the node's pods.
func (n *Node) podNetwork() string { return fmt.Sprintf("10.244.%d.0/24", n.number-1) }

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

// startMachine starts the node's machine. If publish is given, it is an address in it that can be reached from the host.
func (n *Node) startMachine(ctx context.Context, publish string) error {
	temporary := n.dir == ""
	if temporary {
		dir, err := os.MkdirTemp("", "chandler-e2e-")
		if err != nil {
			return err
		}
		n.dir = dir
	}
	dir, err := filepath.Abs(n.dir)
	if err != nil {
		return err
	}
	n.dir = dir
	n.machine, err = machine.Start(ctx, machine.Config{
		Program:   n.cfg.Programs.Program("machine"),
		Dir:       dir,
		RemoveDir: temporary,
		Hostname:  n.name,
		Own:       own,
		Files:     tunables,
		Addresses: []netip.Addr{netip.MustParseAddr(n.ip), netip.MustParseAddr(serviceIP)},
		Forward:   n.forward,
		Publish:   publish,
	})
	if err != nil && temporary {
		return errors.Join(err, os.RemoveAll(dir))
	}
	return err
}

func (n *Node) startRuntime(ctx context.Context) error {
	if err := n.launch("containerd", []string{"--config", containerdConfig}); err != nil {
		return err
	}
	if err := n.until(ctx, "containerd", n.containerdListens); err != nil {
		return err
	}
	return n.LoadImage(ctx, Image{
		Name:       PauseImage,
		Files:      map[string]string{"/pause": n.cfg.Programs.Program("pause")},
		Entrypoint: []string{"/pause"},
	})
}

// stop ends everything on the node.
func (n *Node) stop() error {
	err := n.machine.Stop()
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, component := range n.components {
		<-component.exited
		delete(n.components, name)
	}
	return err
}

// NodeName is the name of the node.
func (n *Node) NodeName() string { return n.name }

// NodePath returns the path on the host that leads to path on the node, such as /var/run/cdi, while the node runs.
func (n *Node) NodePath(path string) string { return n.machine.Path(path) }

// LogDir is the directory, on the host, of the components' logs.
func (n *Node) LogDir() string { return filepath.Join(n.dir, "log") }

// Command returns a command that runs on the node, in its namespaces. Programs and files are as the node sees them:
// the host's, but for what is the node's own. Signals sent to the command's process reach the program, and it is
// killed with the command.
func (n *Node) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return n.machine.Command(ctx, name, args...)
}

func (n *Node) say(format string, args ...any) {
	if n.cfg.Progress != nil {
		fmt.Fprintf(n.cfg.Progress, "%5.1fs  "+format+"\n", append([]any{time.Since(n.begin).Seconds()}, args...)...)
	}
}

// AddNode adds a node to the cluster and returns when it is Ready. RemoveNode removes it, or Stop with all others.
func (c *Cluster) AddNode(ctx context.Context, name string) (*Node, error) {
	n, err := c.addNode(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("add node %s: %w", name, err)
	}
	return n, nil
}

func (c *Cluster) addNode(ctx context.Context, name string) (*Node, error) {
	c.nodesMu.Lock()
	defer c.nodesMu.Unlock()
	number := 2
	for slices.ContainsFunc(c.nodes, func(n *Node) bool { return n.number == number }) {
		number++
	}
	cfg := c.cfg
	if cfg.Dir != "" {
		cfg.Dir = filepath.Join(cfg.Dir, name)
	}
	n := newNode(cfg, name, number)
	n.client = c.client
	// The API server is at the same addresses as on the first node.
	n.forward = map[string]string{serviceIP + ":443": NodeIP + ":6443", APIServer: NodeIP + ":6443"}
	if err := n.startMachine(ctx, ""); err != nil {
		return nil, err
	}
	if err := n.join(ctx, c); err != nil {
		return nil, errors.Join(err, n.stop())
	}
	c.nodes = append(c.nodes, n)
	return n, nil
}

// join connects the node's machine with the others, and starts what makes it a node.
func (n *Node) join(ctx context.Context, c *Cluster) error {
	for _, other := range append([]*Node{c.Node}, c.nodes...) {
		if err := connect(n, other); err != nil {
			return fmt.Errorf("connect it with node %s: %w", other.name, err)
		}
	}
	if err := n.configure(c.ca); err != nil {
		return fmt.Errorf("configure: %w", err)
	}
	if err := n.startRuntime(ctx); err != nil {
		return err
	}
	return n.StartKubelet(ctx)
}

// RemoveNode ends a node that was added, and deletes it from the API server. Its pods go with it.
func (c *Cluster) RemoveNode(ctx context.Context, n *Node) error {
	c.nodesMu.Lock()
	c.nodes = slices.DeleteFunc(c.nodes, func(other *Node) bool { return other == n })
	c.nodesMu.Unlock()
	err := errors.Join(n.stop(), c.client.CoreV1().Nodes().Delete(ctx, n.name, metav1.DeleteOptions{}))
	pods, listErr := c.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.name})
	if err = errors.Join(err, listErr); err != nil {
		return fmt.Errorf("remove node %s: %w", n.name, err)
	}
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64)} // nobody is left who would confirm their end
	for _, pod := range pods.Items {
		if err := c.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, now); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("remove node %s: pod %s: %w", n.name, pod.Name, err)
		}
	}
	return nil
}

// connect joins the networks of two nodes and of their pods by a pair of interfaces, which go with either machine.
func connect(a, b *Node) error {
	cable := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: "to-" + strconv.Itoa(b.number), Namespace: netlink.NsPid(a.machine.PID())},
		PeerName:      "to-" + strconv.Itoa(a.number),
		PeerNamespace: netlink.NsPid(b.machine.PID()),
	}
	if err := netlink.LinkAdd(cable); err != nil {
		return err
	}
	return errors.Join(a.routeTo(b), b.routeTo(a))
}

// routeTo has the interface that leads to another node lead to its pods too.
func (n *Node) routeTo(other *Node) error {
	ns, err := netns.GetFromPid(n.machine.PID())
	if err != nil {
		return err
	}
	defer ns.Close()
	inside, err := netlink.NewHandleAt(ns)
	if err != nil {
		return err
	}
	defer inside.Close()
	link, err := inside.LinkByName("to-" + strconv.Itoa(other.number))
	if err != nil {
		return err
	}
	if err := inside.LinkSetUp(link); err != nil {
		return err
	}
	for _, network := range []string{other.ip + "/32", other.podNetwork()} {
		to, err := netlink.ParseIPNet(network)
		if err != nil {
			return err
		}
		route := netlink.Route{LinkIndex: link.Attrs().Index, Dst: to, Src: net.ParseIP(n.ip), Scope: netlink.SCOPE_LINK}
		if network != other.ip+"/32" { // through the node, which answers for its own address only
			route.Scope, route.Gw = netlink.SCOPE_UNIVERSE, net.ParseIP(other.ip)
		}
		if err := inside.RouteAdd(&route); err != nil {
			return fmt.Errorf("route to %s: %w", network, err)
		}
	}
	return nil
}
