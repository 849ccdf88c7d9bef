package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // --logging-format=json
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/api/v1alpha1"
	"chandler.dev/cdi"
	"chandler.dev/cdi/hook"
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/cmd/chandler/agent/cluster"
	"chandler.dev/cmd/chandler/informant"
	"chandler.dev/cmd/chandler/settings"
	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/scan"
	"chandler.dev/driver"
	"chandler.dev/internal/command"
	"chandler.dev/internal/compile"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/doctor/gather"
	"chandler.dev/internal/hostfile"
	"chandler.dev/internal/hostservice"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/provision"
	"chandler.dev/internal/removal"
	"chandler.dev/internal/reviewed"
	"chandler.dev/legacy"
	"chandler.dev/legacy/sockets"
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
	runDir          string
	hostServiceDir  string
	filesRoot       string
	featureDir      string
	metadata        bool
	config          string
	rescanInterval  time.Duration
	healthAddress   string
	metricsAddress  string
	// The certificate and key files of the metrics server.
	metricsCertificate, metricsKey string
	pageAddress                    string
	logging                        *logsapi.LoggingConfiguration
}

func newRunCommand() *cobra.Command {
	o := runOptions{logging: logsapi.NewLoggingConfiguration()}
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the agent of a node",
		Long: `Run the agent of a node: find and watch its accelerators, and offer them to the
kubelet and the API server. One agent runs on each node, as in the DaemonSet of
deployments/. The agent ends on SIGTERM. Devices of pods remain allocated for the next
agent.`,
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
	flags.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig `file` for the API server; optional in a pod")
	flags.Float32Var(&o.kubeQPS, "kube-api-qps", 100, "requests to the API server per second")
	flags.IntVar(&o.kubeBurst, "kube-api-burst", 200, "burst of requests to the API server")
	flags.StringVar(&o.nodeName, "node-name", os.Getenv("NODE_NAME"), "name of this `node` in Kubernetes; by default $NODE_NAME, or else the host's name")
	flags.StringVar(&o.podUID, "pod-uid", os.Getenv("POD_UID"), "UID of the agent's own pod, by default $POD_UID; without it, two agents cannot run at the same time during an upgrade")
	flags.StringVar(&o.pod, "pod", os.Getenv("POD"), "namespace/name of the agent's own pod, by default $POD; pod lists of the kubelet that omit this pod are treated as incomplete; without it, the agent reads pods from the API server")
	flags.StringVar(&o.kubeletRoot, "kubelet-root", "/var/lib/kubelet", "the kubelet's `directory`, its --root-dir")
	flags.StringVar(&o.devicePluginDir, "device-plugin-dir", pluginapi.DevicePluginPath, "the kubelet's device-plugins `directory`, which does not depend on the kubelet's --root-dir")
	flags.StringVar(&o.hostRoot, "host-root", "/", "`directory` with the host's /sys, /proc and /dev")
	flags.StringVar(&o.runtimeRoot, "runtime-root", "/", "`directory` of the host's /dev for the container runtime; not / for a simulated host")
	flags.StringVar(&o.cdiRoot, "cdi-root", "/var/run/cdi", "`directory` of CDI specs for the container runtime")
	flags.StringVar(&o.runDir, "run-dir", "/run/chandler", "`directory` on tmpfs for state that lasts until the next reboot")
	flags.StringVar(&o.hostServiceDir, "host-service-dir", "", "`directory` with the socket of the host service, which changes and examines the host for the agent, so that the agent needs no privilege; empty for no host service")
	flags.StringVar(&o.filesRoot, "host-files-root", "/", "`directory` with the directories for host files, "+strings.Join(discovery.FileDirs(families.All), ", ")+"; no files are written to a missing directory")
	flags.StringVar(&o.featureDir, "feature-dir", featureDir, "`directory` of node labels for Node Feature Discovery; if it is missing or empty, no labels are written")
	flags.BoolVar(&o.metadata, "device-metadata", true, "provide containers with files of the attributes of their claims' devices")
	flags.StringVar(&o.config, "config", "", "DriverConfig `file`")
	flags.DurationVar(&o.rescanInterval, "rescan-interval", 30*time.Second, "time between scans of the host while the kernel reports no change")
	flags.StringVar(&o.healthAddress, "healthz-bind-address", "", "`address` of /healthz, /readyz and /metrics, such as :8080; empty for none")
	flags.StringVar(&o.metricsAddress, "metrics-bind-address", "", "`address` of /metrics with TLS and authorization by the API server, such as :8443; if it is empty, /metrics is at --healthz-bind-address without authorization")
	flags.StringVar(&o.metricsCertificate, "metrics-tls-cert-file", "", "`file` with the certificate of --metrics-bind-address; by default, the agent creates a self-signed one")
	flags.StringVar(&o.metricsKey, "metrics-tls-key-file", "", "`file` with the key of that certificate")
	flags.StringVar(&o.pageAddress, "web-ui-bind-address", pageAddress, "`address` of the web UI, which shows the devices of the node and their pods; it has no authentication, so restrict access to the address; empty for no web UI")
	renamedFlag(flags, "page-bind-address", "web-ui-bind-address")
	logsapi.AddFlags(o.logging, flags)
}

// renamedFlag makes the previous name of a flag an error that contains the present name.
func renamedFlag(flags *pflag.FlagSet, previous, name string) {
	flags.Func(previous, "renamed to --"+name, func(string) error { return fmt.Errorf("the flag was renamed to --%s", name) })
	if err := flags.MarkHidden(previous); err != nil {
		panic(err) // the flag was just added
	}
}

// featureDir is the directory of feature files for Node Feature Discovery's worker.
const featureDir = "/etc/kubernetes/node-feature-discovery/features.d"

// collectOften runs the garbage collector when the heap has grown by half instead of doubled,
// unless GOGC is set. The agent runs on every node and produces little garbage, so this saves
// memory at almost no cost.
func collectOften() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50)
	}
}

// run runs the agent until the context ends or a part of the agent fails.
func (o *runOptions) run(ctx context.Context) error {
	if err := o.check(); err != nil {
		return err
	}
	clients, err := o.connect()
	if err != nil {
		return fmt.Errorf("API server: %w", err)
	}
	following, end := context.WithCancel(ctx)
	var followers sync.WaitGroup
	defer followers.Wait()
	defer end()
	labels := make(chan map[string]string)
	followers.Go(func() {
		cluster.FollowLabels(following, clients.metadata, o.nodeName, func(l map[string]string) {
			select {
			case labels <- l:
			case <-following.Done():
			}
		})
	})
	file := &settings.File{Name: o.config, Node: v1alpha1.Node{Name: o.nodeName}, NewLabels: labels}
	config, err := o.agentConfig(ctx, file, clients)
	if err != nil {
		return err
	}
	if config.HookProgram = installHooks(config.Settings, config.StateDir); config.HookProgram != "" {
		config.KeepHooks = func(ctx context.Context) {
			hook.KeepInstalled(ctx, ownProgram, config.HookProgram, hooksInterval, func(err error) { klog.FromContext(ctx).Error(err, "Containers that call it cannot start") })
		}
	}
	stop, err := trace(ctx, &config)
	if err != nil {
		return err
	}
	defer stop()
	changes := make(chan agent.Change)
	config.Changes = changes
	if namespace, _, isPod := strings.Cut(o.pod, "/"); isPod {
		orders := make(chan removal.Order)
		config.Orders = orders
		followers.Go(func() {
			cluster.FollowOrders(following, clients.metadata, namespace, func(order removal.Order) {
				select {
				case orders <- order:
				case <-following.Done():
				}
			})
		})
	}
	go file.FollowChanges(following, changes)
	return agent.Run(ctx, config)
}

const (
	ownProgram    = "/proc/self/exe"
	hooksInterval = 30 * time.Second
)

// installHooks installs this program where container runtimes can run it, and returns the path, ""
// if containers get no hooks. Hooks serve the files that are mounted from driver roots, so that
// without driver roots there are none.
func installHooks(settings agent.Settings, stateDir string) string {
	name := filepath.Join(stateDir, "bin", "chandler")
	if settings.NoHooks || len(settings.Roots) == 0 {
		return "" // an installed program remains, for the containers that use it
	}
	if err := hook.InstallProgram(ownProgram, name); err != nil {
		if _, missing := os.Stat(name); missing != nil {
			klog.Background().Error(err, "Containers get no hooks, since their program cannot be installed", "program", name)
			return ""
		}
		klog.Background().Error(err, "The program for hooks stays that of an earlier agent", "program", name)
	}
	return name
}

// check completes the options and reports errors in them.
func (o *runOptions) check() error {
	name, err := settings.HostOf(nil, "/").NodeName(o.nodeName)
	if err != nil {
		return err
	}
	o.nodeName = name
	if o.rescanInterval <= 0 {
		return command.UsageError(fmt.Errorf("--rescan-interval %s: want a positive time", o.rescanInterval))
	}
	return nil
}

// agentConfig returns the configuration of an agent. It returns an error for invalid options, but
// not for an invalid configuration file: claims must be unprepared in any case.
func (o *runOptions) agentConfig(ctx context.Context, file *settings.File, clients clients) (agent.Config, error) {
	var none agent.Config
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return none, fmt.Errorf("boot ID: %w", err)
	}
	hostFS, err := hostfs.Open(o.hostRoot)
	if err != nil {
		return none, err
	}
	stateDir := filepath.Join(o.kubeletRoot, "plugins", discovery.Domain)
	if err := o.checkDirectories(ctx, stateDir); err != nil {
		return none, err
	}
	settings, wrong := file.Begin(ctx, stateDir)
	recoveries := new(scan.Recoveries)
	host, lock := settings.ScanHost(hostFS), &nodeLock{stateDir: stateDir}
	var informants []agent.Informant
	programs := make(map[string]func(context.Context, discovery.PartitionChange) ([]byte, error))
	var service *hostservice.Client
	if o.hostServiceDir != "" {
		service = hostservice.NewClient(o.hostServiceDir, nil)
	}
	for _, n := range informant.OverlayInformants(host, families.All, o.hostRoot, service) {
		informants = append(informants, n)
		n.HeldFiles = lock.lockedFiles
		if n.ChangeArgs != nil {
			programs[n.Family] = n.ChangePartition
		}
	}
	write, err := provision.Writer(o.hostRoot)
	if err != nil {
		return none, err
	}
	serve, err := o.server(clients.review)
	if err != nil {
		return none, err
	}
	config := agent.Config{
		Version:         buildVersion(),
		NodeName:        o.nodeName,
		PodUID:          types.UID(o.podUID),
		Pod:             o.pod,
		BootID:          strings.TrimSpace(string(bootID)),
		FS:              host.FS,
		Families:        families.All,
		Settings:        settings,
		ConfigError:     wrong,
		RescanInterval:  o.rescanInterval,
		Uevents:         receiveEvents(hostFS, recoveries),
		RecoveryFailure: recoveries.FailureReason,
		AllEvents:       hostfs.HasSys(hostFS),
		Informants:      informants,
		Programs:        programs,
		Write:           write,
		Client:          clients.main,
		StatusClient:    clients.status,
		ServedVersions:  func(ctx context.Context) ([]string, error) { return servedVersions(ctx, clients.main) },
		Kubelet: agent.Kubelet{
			StartDRA:      driver.StartHelper,
			DevicePlugins: sockets.New(o.devicePluginDir, lock.Awaited),
			Pods: func(ctx context.Context) (*kubeletapi.Listing, error) {
				return kubeletapi.ListPods(ctx, filepath.Join(o.kubeletRoot, "pod-resources/kubelet.sock"))
			},
			Written: func() ([]kubeletapi.Holding, error) {
				return legacy.ReadHoldings(os.DirFS(o.devicePluginDir))
			},
			Allocated: func() (map[string][]string, error) {
				return legacy.AllocatedIDs(os.DirFS(o.devicePluginDir))
			},
		},
		Lock:        lock,
		KubeletRoot: o.kubeletRoot,
		StateDir:    stateDir,
		RunDir:      o.runDir,
		CDI:         cdi.Dir{Path: o.cdiRoot, RuntimeRoot: o.runtimeRoot},
		HostFiles:   hostfile.Writer{Root: o.filesRoot, Dirs: discovery.FileDirs(families.All)},
		FeatureDir:  o.featureDir,
		NoMetadata:  !o.metadata,
		CDIEnabled: func(runtime string) (bool, error) {
			return gather.CDIEnabled(o.hostRoot, filepath.Join(o.hostRoot, "proc"), runtime)
		},
		ReadParameters: compile.Parameters,
		Serve:          serve,
		ServePage:      o.pageServer(clients.main),
	}
	if service != nil {
		config.HostService, config.Write, config.Lock = service, nil, sessionLock{lock, service}
	}
	return config, nil
}

// Rate limits for claim statuses and pod Events: requests per second, and at once.
const (
	statusQPS   = 10
	statusBurst = 20
)

// clients are the clients of the API server.
type clients struct {
	main, status kubernetes.Interface
	review       reviewed.Clients
	metadata     metadata.Interface
}

// connect creates the clients of the API server without sending a request. The kubelet also reads
// each claim, so the default limit is twice the kubelet's, and a burst of claims does not wait.
// Protobuf costs both sides less than JSON.
func (o *runOptions) connect() (clients, error) {
	config, err := o.clientConfig()
	if err != nil {
		return clients{}, err
	}
	config = rest.AddUserAgent(config, "chandler/"+buildVersion())
	config.QPS, config.Burst = o.kubeQPS, o.kubeBurst
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = config.ContentType + ",application/json"
	var c clients
	if c.main, err = kubernetes.NewForConfig(config); err != nil {
		return clients{}, err
	}
	// Claim statuses and Events have their own limit, to delay nothing else.
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = statusQPS, statusBurst
	if c.status, err = kubernetes.NewForConfig(config); err != nil {
		return clients{}, err
	}
	// Requests for metrics with invalid tokens must not delay claim statuses.
	asking, err := kubernetes.NewForConfig(config)
	if err != nil {
		return clients{}, err
	}
	c.review = reviewed.Clients{Tokens: asking.AuthenticationV1().TokenReviews(), Access: asking.AuthorizationV1().SubjectAccessReviews()}
	c.metadata, err = metadata.NewForConfig(config)
	return c, err
}

// servedVersions returns the versions of resource.k8s.io that an API server serves, none if it does
// not serve the group. The answer is small, unlike the document with all groups and resources that
// the discovery client requests.
func servedVersions(ctx context.Context, client kubernetes.Interface) (versions []string, err error) {
	var group metav1.APIGroup
	err = client.Discovery().RESTClient().Get().AbsPath("/apis", resourceapi.GroupName).Do(ctx).Into(&group)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, version := range group.Versions {
		versions = append(versions, version.Version)
	}
	return versions, nil
}

func (o *runOptions) clientConfig() (*rest.Config, error) {
	if o.kubeconfig != "" {
		return loadKubeconfig(o.kubeconfig)
	}
	config, err := rest.InClusterConfig()
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, errors.New("the agent does not run in a pod, so --kubeconfig is required")
	}
	return config, err
}

// loadKubeconfig returns the client configuration of a kubeconfig file.
func loadKubeconfig(file string) (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", file)
	return config, command.KubeconfigError(err)
}

// checkDirectories finds problems before the first claim fails. The agent cannot work without the
// kubelet's directory. Without the directory for CDI specs, it still serves the device plugin API.
func (o *runOptions) checkDirectories(ctx context.Context, stateDir string) error {
	if err := checkWritable(stateDir); err != nil {
		return fmt.Errorf("kubelet root %s: %w", o.kubeletRoot, err)
	}
	if err := checkWritable(o.cdiRoot); err != nil {
		klog.FromContext(ctx).Error(err, "CDI specs cannot be written: claims will not be prepared until they can", "cdiRoot", o.cdiRoot)
	}
	return nil
}

// checkWritable creates a directory if it is missing, and checks that files can be created there.
func checkWritable(dir string) error {
	if err := (disk.Files{}).MakeDir(dir, 0o750); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	if err := (disk.Files{}).CheckWritable(dir); err != nil {
		return fmt.Errorf("write to directory: %w", err)
	}
	return nil
}
