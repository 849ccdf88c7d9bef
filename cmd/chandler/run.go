package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	kubediscovery "k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/driver"
	"chandler.dev/internal/hostfile"
	"chandler.dev/legacy"
)

type runOptions struct {
	kubeconfig      string
	kubeQPS         float32
	kubeBurst       int
	nodeName        string
	podUID          string
	pod             string
	kubeletRoot     string
	devicePluginDir string
	hostRoot        string
	runtimeRoot     string
	cdiRoot         string
	filesRoot       string
	metadata        bool
	config          string
	rescanInterval  time.Duration
	healthAddress   string
	logging         *logsapi.LoggingConfiguration
}

func newRunCommand() *cobra.Command {
	o := runOptions{logging: logsapi.NewLoggingConfiguration()}
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the agent of a node",
		Long: `Run the agent of a node: find its accelerators, keep watching them, and offer
them to the kubelet and the API server. One agent runs on each node, as the
DaemonSet in deployments/ does it. It ends with SIGTERM and leaves what pods
hold to the next one.`,
		Example: `  chandler run --kubeconfig ~/.kube/config --node-name worker-1 -v 2`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := logsapi.ValidateAndApply(o.logging, nil); err != nil {
				return fmt.Errorf("logging: %w", err)
			}
			collectOften()
			return o.run(cmd.Context())
		},
	}
	o.addFlags(cmd)
	return cmd
}

func (o *runOptions) addFlags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&o.kubeconfig, "kubeconfig", "", "`file` that says how to reach the API server; in a pod it may be left out")
	flags.Float32Var(&o.kubeQPS, "kube-api-qps", 100, "requests to the API server per second")
	flags.IntVar(&o.kubeBurst, "kube-api-burst", 200, "requests to the API server at once")
	flags.StringVar(&o.nodeName, "node-name", os.Getenv("NODE_NAME"), "name of this `node` in Kubernetes; $NODE_NAME, else the host's name")
	flags.StringVar(&o.podUID, "pod-uid", os.Getenv("POD_UID"), "UID of the agent's own pod, $POD_UID; without it no two agents can run while one takes over")
	flags.StringVar(&o.pod, "pod", os.Getenv("POD"), "namespace/name of the agent's own pod, $POD; a kubelet that does not list it is not believed about others either")
	flags.StringVar(&o.kubeletRoot, "kubelet-root", "/var/lib/kubelet", "the kubelet's `directory`, its --root-dir")
	flags.StringVar(&o.devicePluginDir, "device-plugin-dir", pluginapi.DevicePluginPath, "the kubelet's device-plugins `directory`, which is here whatever its --root-dir")
	flags.StringVar(&o.hostRoot, "host-root", "/", "`directory` in which the agent sees the host's /sys, /proc and /dev")
	flags.StringVar(&o.runtimeRoot, "runtime-root", "/", "`directory` in which the container runtime sees the host's /dev; another than / for a simulated host")
	flags.StringVar(&o.cdiRoot, "cdi-root", "/var/run/cdi", "`directory` from which the container runtime reads CDI specs")
	flags.StringVar(&o.filesRoot, "host-files-root", "/", "`directory` below which the agent sees the directories for host files, "+strings.Join(discovery.FileDirs(families.All), ", ")+"; one that is not there gets none")
	flags.BoolVar(&o.metadata, "device-metadata", true, "give containers files with the attributes of the devices of their claims")
	flags.StringVar(&o.config, "config", "", "DriverConfig `file`")
	flags.DurationVar(&o.rescanInterval, "rescan-interval", 30*time.Second, "time between looks at the host while the kernel reports no change")
	flags.StringVar(&o.healthAddress, "healthz-bind-address", "", "`address` at which /healthz, /readyz and /metrics are answered, such as :8080; nowhere if empty")
	logsapi.AddFlags(o.logging, flags)
}

// collectOften has garbage collected when the heap is half as large again as what
// is in use, not twice as large, unless GOGC says otherwise. The agent makes
// little garbage, so that this costs next to no time, and runs on every node.
func collectOften() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
}

// lingerLimit is how long an agent that has ended waits at most for the next one
// to offer what it did through the device-plugin API.
const lingerLimit = 10 * time.Second

// run builds the parts and runs them until the context ends or one of them
// fails.
func (o *runOptions) run(ctx context.Context) error {
	p, err := o.build(ctx)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Chandler starts", "version", buildVersion(), "node", o.nodeName, "hostRoot", o.hostRoot)
	lock := make(chan *os.File, 1)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		file, err := activate(ctx, p.stateDir)
		if err != nil {
			return ignoreEnd(ctx, err)
		}
		lock <- file
		close(p.active)
		return nil
	})
	for _, n := range p.informants {
		group.Go(func() error { n.run(ctx); return nil })
	}
	group.Go(func() error { return p.watch(ctx, group) })
	group.Go(func() error { return p.runDRA(ctx) })
	group.Go(func() error { p.classic.Run(ctx); return nil })
	group.Go(func() error { return p.runAgent(ctx) })
	group.Go(func() error { p.checkClasses(ctx); return nil })
	group.Go(func() error { p.tellPods(ctx); return nil })
	if o.healthAddress != "" {
		mux := healthMux(p.checkLive, p.checkReady)
		mux.Handle("GET /metrics", p.metrics.handler(agentState{p.driver.Features, p.driver.Prepared, p.offered.Load}))
		group.Go(func() error { return serveHealth(ctx, o.healthAddress, mux) })
	}
	err = group.Wait()
	select {
	case file := <-lock: // the next instance may begin, now that nothing of this one writes
		file.Close()
	default:
	}
	lingering, cancel := context.WithTimeout(context.WithoutCancel(ctx), lingerLimit)
	defer cancel()
	p.classic.Linger(lingering)
	klog.FromContext(ctx).Info("Chandler ends", "reason", context.Cause(ctx))
	return err
}

// check completes the options and reports what cannot be right about them.
func (o *runOptions) check() error {
	if o.nodeName == "" {
		name, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("node name: %w", err)
		}
		o.nodeName = strings.ToLower(name)
	}
	if messages := validation.IsDNS1123Subdomain(o.nodeName); len(messages) > 0 {
		return fmt.Errorf("node name %q: %s", o.nodeName, strings.Join(messages, "; "))
	}
	if o.rescanInterval <= 0 {
		return fmt.Errorf("rescan interval %s: must be more than nothing", o.rescanInterval)
	}
	return nil
}

// build makes the parts. What is wrong with the options is found here.
func (o *runOptions) build(ctx context.Context) (*parts, error) {
	config, rules, err := loadConfig(o.config)
	if err != nil {
		return nil, err
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("boot ID: %w", err)
	}
	hostFS, err := hostfs.Open(o.hostRoot)
	if err != nil {
		return nil, err
	}
	p := &parts{
		options:   *o,
		rules:     rules,
		severity:  severityOf(config.Health.Severity),
		host:      configuredHost(hostFS, config),
		active:    make(chan struct{}),
		stateDir:  filepath.Join(o.kubeletRoot, "plugins", discovery.Domain),
		metrics:   newAgentMetrics(),
		events:    make(chan struct{}, 1),
		snapshots: make(chan *discovery.Snapshot, 1),
		resaid:    make(chan struct{}, 1),
	}
	p.informants = overlayInformants(p.host, families.All, o.hostRoot)
	for _, n := range p.informants {
		n.changed = func() { notify(p.events) }
	}
	if err := p.connect(); err != nil {
		return nil, fmt.Errorf("API server: %w", err)
	}
	if err := o.checkDirectories(ctx, p.stateDir); err != nil {
		return nil, err
	}
	hostFiles := hostfile.Writer{Root: o.filesRoot, Dirs: discovery.FileDirs(families.All)}
	p.classic = legacy.New(legacy.Config{
		Dir:          o.devicePluginDir,
		PodResources: p.podResources(),
		StateDir:     filepath.Join(p.stateDir, "grants"),
		RuntimeRoot:  o.runtimeRoot,
		OwnPod:       o.pod,
		Grant:        discovery.Granters(families.All),
		HostFiles:    hostFiles,
		Elsewhere:    draHolder{p},
		Active:       p.active,
		Succeeded:    func() bool { return awaited(p.stateDir) },
		Pending:      initContainers{p.client, o.nodeName}.Pending,
	})
	p.driver, err = driver.New(driver.Config{
		NodeName:       o.nodeName,
		PodUID:         types.UID(o.podUID),
		KubeClient:     p.client,
		StatusClient:   p.statuses,
		KubeletRoot:    o.kubeletRoot,
		CDI:            cdi.Dir{Path: o.cdiRoot, RuntimeRoot: o.runtimeRoot},
		Records:        p.recordDir(),
		HostFiles:      hostFiles,
		HostFS:         p.host.FS,
		BootID:         strings.TrimSpace(string(bootID)),
		Granter:        discovery.Granters(families.All),
		Elsewhere:      p.classic,
		Scanned:        p.lastScan,
		Observe:        p.metrics.observe,
		NoMetadata:     !o.metadata,
		Active:         p.active,
		ReadParameters: readParameters,
		Accept:         discovery.Acceptors(families.All),
		Gone:           severityOf(config.Health.Severity).Effect(discovery.ConditionGone),
		Abandoned: references{
			client: p.client, claims: draclient.New(p.client), node: o.nodeName, ownPod: o.pod, socket: p.podResources(),
		}.Abandoned,
		Configure: discovery.Configurers(p.host, families.All),
		Rescan:    func() { notify(p.events) },
	})
	return p, err
}

// podResources is the kubelet's socket of the PodResources API.
func (p *parts) podResources() string {
	return filepath.Join(p.options.kubeletRoot, "pod-resources/kubelet.sock")
}

// How many requests per second, and at once, the status of claims and the Events
// of pods may take.
const (
	statusQPS   = 10
	statusBurst = 20
)

// connect makes the clients of the API server; it does not ask it yet. They do
// not make a burst of claims wait: by default they may ask twice as often as a
// kubelet may by default, which reads each claim as well. They speak protobuf,
// which costs both ends less than JSON.
func (p *parts) connect() error {
	config, err := p.options.clientConfig()
	if err != nil {
		return err
	}
	config = rest.AddUserAgent(config, "chandler/"+buildVersion())
	config.QPS, config.Burst = p.options.kubeQPS, p.options.kubeBurst
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = config.ContentType + ",application/json"
	if p.client, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	// The status of claims and Events have a limit of their own, for which nothing
	// else waits.
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = statusQPS, statusBurst
	if p.statuses, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	p.discovery, err = kubediscovery.NewDiscoveryClientForConfig(config)
	return err
}

func (o *runOptions) clientConfig() (*rest.Config, error) {
	if o.kubeconfig != "" {
		return clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	}
	config, err := rest.InClusterConfig()
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, errors.New("this is not a pod, so --kubeconfig must say how to reach it")
	}
	return config, err
}

// checkDirectories reports at once what would fail at the first claim. The
// agent cannot work without the kubelet's directory; without that for CDI
// specs it still offers what the device-plugin API serves.
func (o *runOptions) checkDirectories(ctx context.Context, stateDir string) error {
	if err := writable(stateDir); err != nil {
		return fmt.Errorf("kubelet root %s: %w", o.kubeletRoot, err)
	}
	if err := writable(o.cdiRoot); err != nil {
		klog.FromContext(ctx).Error(err, "CDI specs cannot be written: claims will not be prepared until they can", "cdiRoot", o.cdiRoot)
	}
	return nil
}

// writable makes the directory if it is missing, and a file in it.
func writable(dir string) error {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	file, err := os.CreateTemp(dir, ".writable-")
	if err != nil {
		return fmt.Errorf("write to directory: %w", err)
	}
	file.Close()
	return os.Remove(file.Name())
}
