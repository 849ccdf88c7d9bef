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

// A Node is a machine with containerd and a kubelet. The first node of a cluster also has the
// control plane.
type Node struct {
	cfg     Config // of the cluster
	name    string
	number  int // counted from 1
	ip      string
	dir     string            // holds the node's state
	forward map[string]string // forwarded addresses
	machine *machine.Machine
	client  kubernetes.Interface
	begin   time.Time

	mu         sync.Mutex
	components map[string]*component // components that should run
}

func newNode(cfg Config, name string, number int) *Node {
	return &Node{
		cfg: cfg, name: name, number: number, ip: fmt.Sprintf("192.0.2.%d", number), dir: cfg.Dir,
		begin: time.Now(), components: map[string]*component{},
	}
}

// podNetwork returns the network of the node's pods.
func (n *Node) podNetwork() string { return fmt.Sprintf("10.244.%d.0/24", n.number-1) }

// own are the directories private to the node, which are removed with the node.
var own = []string{"/var/lib", "/var/log", "/etc/cdi", "/etc/cni", "/etc/containerd", "/etc/kubernetes"}

// tunables are kernel settings of the host that a kubelet requires. The kubelet reads these
// values instead of the real ones.
var tunables = map[string]string{
	"/proc/sys/kernel/keys/root_maxbytes": "25000000\n",
	"/proc/sys/kernel/keys/root_maxkeys":  "1000000\n",
	"/proc/sys/kernel/panic":              "10\n",
	"/proc/sys/kernel/panic_on_oops":      "1\n",
	"/proc/sys/vm/overcommit_memory":      "1\n",
	"/proc/sys/vm/panic_on_oom":           "0\n",
}

// startMachine starts the node's machine. publish is an address in the machine to publish on
// the host, or "".
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

// stop ends all processes on the node.
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

// NodeName returns the name of the node.
func (n *Node) NodeName() string { return n.name }

// NodePath returns the path on the host for a path on the running node, such as /var/run/cdi.
func (n *Node) NodePath(path string) string { return n.machine.Path(path) }

// LogDir returns the directory of the components' logs on the host.
func (n *Node) LogDir() string { return filepath.Join(n.dir, "log") }

// Command returns a command that runs on the node, in its namespaces. Programs and files are
// the host's, except for the node's own directories. Signals to the command's process reach
// the program, which is killed with the command.
func (n *Node) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return n.machine.Command(ctx, name, args...)
}

func (n *Node) say(format string, args ...any) {
	if n.cfg.Progress != nil {
		fmt.Fprintf(n.cfg.Progress, "%5.1fs  "+format+"\n", append([]any{time.Since(n.begin).Seconds()}, args...)...)
	}
}

// AddNode adds a node to the cluster and waits until the node is Ready. RemoveNode or Stop
// removes the node.
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
	// The API server has the same addresses as on the first node.
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

// join connects the node's machine with the others, and starts containerd and the kubelet.
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

// RemoveNode ends a node added by AddNode, and deletes the node and its pods from the API
// server.
func (c *Cluster) RemoveNode(ctx context.Context, n *Node) error {
	c.nodesMu.Lock()
	c.nodes = slices.DeleteFunc(c.nodes, func(other *Node) bool { return other == n })
	c.nodesMu.Unlock()
	err := errors.Join(n.stop(), c.client.CoreV1().Nodes().Delete(ctx, n.name, metav1.DeleteOptions{}))
	pods, listErr := c.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + n.name})
	if err = errors.Join(err, listErr); err != nil {
		return fmt.Errorf("remove node %s: %w", n.name, err)
	}
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64)} // no kubelet is left to confirm the end of the pods
	for _, pod := range pods.Items {
		if err := c.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, now); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("remove node %s: pod %s: %w", n.name, pod.Name, err)
		}
	}
	return nil
}

// connect connects the networks of two nodes and their pods by a pair of interfaces, which the
// kernel removes with either machine.
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

// routeTo enables the interface to another node, and adds the routes to that node and its
// pods.
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
		if network != other.ip+"/32" { // through the node, which answers ARP requests for its own address only
			route.Scope, route.Gw = netlink.SCOPE_UNIVERSE, net.ParseIP(other.ip)
		}
		if err := inside.RouteAdd(&route); err != nil {
			return fmt.Errorf("route to %s: %w", network, err)
		}
	}
	return nil
}
