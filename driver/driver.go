package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/driver/outputs"
	"chandler.dev/driver/publish"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/ledger"
)

// Directories of metadata files below the driver's directory.
const (
	metadataDir        = "metadata"
	earlierMetadataDir = "dra-device-metadata" // of earlier agents
)

// Config is the configuration of a driver. All fields are required unless marked optional.
type Config struct {
	NodeName string

	// NodeUID returns the present UID of the Node, which owns the slices.
	NodeUID func(context.Context) (types.UID, error)

	// PodUID is the UID of the agent's pod. If it is set, two agents may run at once during an
	// update. Optional.
	PodUID types.UID

	// KubeClient should allow bursts, since the kubelet's calls wait while the driver reads each of
	// their claims.
	KubeClient kubernetes.Interface

	// StatusClient writes the state of devices to the status of their claims. It should have a rate
	// limit of its own, so that nothing else waits for it. Optional: without it the driver writes
	// no status.
	StatusClient kubernetes.Interface

	// StartHelper registers the driver with the kubelet, like [StartHelper].
	StartHelper Starter

	KubeletRoot string  // the kubelet's data directory
	CDI         cdi.Dir // directory of the claims' CDI specs

	// Disk is the file system for metadata files and CDI specs. Nil means the file system of the
	// operating system.
	Disk disk.FS

	// HostFS is the file system of the scanned host. The driver checks its device nodes before
	// containers get them.
	HostFS fs.FS

	// Ledger contains the allocations. The caller of [Driver.Run] opens the ledger once this
	// instance may write. Calls wait until then.
	Ledger *ledger.Ledger

	// Granter adds the edits that depend on all devices of a request.
	Granter discovery.Granter

	// NoMetadata disables the files with the attributes of the devices for containers.
	NoMetadata bool

	// ReadParameters strictly decodes the opaque parameters of a claim or device class for this
	// driver. It returns an error for invalid parameters.
	ReadParameters func(raw []byte) (discovery.Parameters, error)

	// AcceptParameters returns an error if the devices of a request do not support the valid
	// parameters of the request.
	AcceptParameters discovery.Acceptor

	// OrderDaemons returns the orders for the programs that must run for the devices of a request.
	// StartDaemons fulfils the orders of a claim and returns when the programs are ready; it may be
	// called repeatedly. SharingDir is the parent directory of the programs' files. Optional.
	OrderDaemons discovery.Orderer
	StartDaemons func(ctx context.Context, uid types.UID, orders []discovery.Order) error
	SharingDir   string

	// Configure configures devices for claims.
	Configure discovery.Configurer

	// Rescan is called after devices were configured, successfully or not, since they may now
	// differ from the last snapshot. It must not block.
	Rescan func()

	// OnPrepare is called with each claim to prepare. It must not block. Optional.
	OnPrepare func(*resourceapi.ResourceClaim)

	// ResourceOf returns the extended resource name of a DeviceClass, or "" if unknown. It must not
	// block. Optional.
	ResourceOf func(class string) string

	// OnClaimEnd is called when a claim has ended. It must not block. Optional.
	OnClaimEnd func()

	// Abandoned returns the claims that no longer have a consumer. It is called about every ten
	// minutes.
	Abandoned Abandoned

	// NodeClaims returns the claims of the pods that are bound to the node or about to be, from the
	// API server. It is called after a device was replaced.
	NodeClaims func(ctx context.Context) ([]*resourceapi.ResourceClaim, error)

	// StartedPods returns the names of the claim's pods on the node with a started container, from the
	// API server. It is called for a claim that was allocated again while it was prepared.
	StartedPods func(context.Context, *resourceapi.ResourceClaim) ([]string, error)

	// GoneEffect returns the present taint effect for devices of claims that have vanished.
	GoneEffect func() resourceapi.DeviceTaintEffect

	// Observe receives the durations of the kubelet's calls.
	Observe Observer

	// Tracer traces the kubelet's calls. Nil means no traces.
	Tracer trace.Tracer
}

// Registration is the kubelet's answer to the driver's registration.
type Registration string

// The answers of a kubelet.
const (
	Unanswered Registration = ""         // no answer yet
	Accepted   Registration = "Accepted" // the kubelet will call
	Refused    Registration = "Refused"
)

// Starter registers a plugin with the kubelet, like [kubeletplugin.Start]. The plugin is a
// [Driver].
type Starter func(context.Context, kubeletplugin.DRAPlugin, ...kubeletplugin.Option) (Helper, error)

// Helper is the part of [kubeletplugin.Helper] that the driver uses.
type Helper interface {
	publish.Helper
	Stop()
}

// Driver is the DRA driver of one node. Create it with [New] and run it with [Driver.Run].
type Driver struct {
	Publisher *publish.Publisher // publishes the node's slices

	config Config

	// Replaced in tests.
	files          disk.Files
	healthInterval time.Duration

	view          views
	registration  atomic.Pointer[Registration] // the kubelet's last answer
	claimPrepared chan struct{}                // receives a value when a claim was prepared
	claimRefused  chan struct{}                // receives a value when a claim was refused because its device is allocated

	calls    calls
	claims   claimHandler
	metadata *outputs.Metadata
	ledger   *ledger.Ledger
	serving  atomic.Bool             // the helper's sockets exist
	fail     context.CancelCauseFunc // set by Run
}

var _ kubeletplugin.DRAPlugin = &Driver{}

// New returns a driver. New has no side effects on the host.
func New(config Config) *Driver {
	config.CDI.Files.FS = config.Disk
	d := &Driver{
		config: config, ledger: config.Ledger, files: disk.Files{FS: config.Disk},
		healthInterval: healthInterval,
		claimPrepared:  make(chan struct{}, 1), claimRefused: make(chan struct{}, 1),
		calls: calls{ready: make(chan struct{}), stopping: make(chan struct{})},
	}
	d.metadata = &outputs.Metadata{
		SpecDir: config.CDI.Path, Dir: filepath.Join(d.dataDir(), metadataDir), EarlierDir: filepath.Join(d.dataDir(), earlierMetadataDir),
		Files: disk.Files{FS: config.Disk}, Ledger: d.ledger,
	}
	d.registration.Store(new(Unanswered))
	d.Publisher = publish.New(publish.Config{NodeName: config.NodeName, NodeUID: config.NodeUID, KubeClient: config.KubeClient, PoolInput: d.poolInput})
	d.view.Store(&view{next: make(chan struct{})})
	d.claims = claimHandler{
		config: &d.config, ledger: d.ledger, view: &d.view, calls: &d.calls, publisher: d.Publisher,
		jobs: jobs{rescan: config.Rescan}, termination: ledger.DefaultTermination,
	}
	return d
}

// LedgerOutputs returns the driver's outputs for the ledger, in the order in which they are written. The CDI
// specs come last: with its spec, a container may get the devices of a claim.
func (d *Driver) LedgerOutputs() []ledger.Output {
	return []ledger.Output{d.metadata, outputs.CDISpecs{Dir: d.config.CDI}}
}

// StartHelper starts the library's helper, which serves the kubelet's calls on sockets.
func StartHelper(ctx context.Context, plugin kubeletplugin.DRAPlugin, options ...kubeletplugin.Option) (Helper, error) {
	return kubeletplugin.Start(ctx, plugin, options...)
}

// Run serves the kubelet and publishes the snapshots given to [Driver.Publish], until the context
// ends. It may be called once. When Run returns, all served calls are finished and nothing is
// written anymore. The error is nil if the parent context has ended.
func (d *Driver) Run(parent context.Context) error {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	d.fail = cancel
	options, err := d.helperOptions()
	if err != nil {
		return fmt.Errorf("run driver: %w", err)
	}
	// The helper drops running calls when its context ends. Therefore it is stopped below, after
	// the calls.
	helper, err := d.config.StartHelper(context.WithoutCancel(ctx), d, options...)
	if err != nil {
		return fmt.Errorf("run driver: %w", err)
	}
	d.serving.Store(true)
	err = d.serve(ctx, helper)
	d.calls.drainCalls()
	d.claims.jobs.stop()
	d.serving.Store(false)
	helper.Stop()
	if parent.Err() != nil {
		return nil
	}
	if err == nil {
		err = context.Cause(ctx)
	}
	return fmt.Errorf("run driver: %w", err)
}

// serve does the work of the active instance, once the ledger is open.
func (d *Driver) serve(ctx context.Context, helper Helper) error {
	select {
	case <-d.ledger.WaitOpen():
	case <-ctx.Done():
		return nil
	}
	if err := d.sweepSockets(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Sockets are left over")
	}
	close(d.calls.ready)
	own, stop := context.WithCancel(ctx)
	var background sync.WaitGroup
	defer background.Wait()
	defer stop()
	background.Go(func() { d.sweepLoop(own) })
	background.Go(func() { d.swapLoop(own) })
	background.Go(func() { d.statusLoop(own) })
	return d.Publisher.Run(ctx, helper)
}

// dataDir is the directory of the socket for the kubelet's calls.
func (d *Driver) dataDir() string {
	return filepath.Join(d.config.KubeletRoot, "plugins", discovery.Domain)
}

// registryDir is the kubelet's directory for registration sockets.
func (d *Driver) registryDir() string { return filepath.Join(d.config.KubeletRoot, "plugins_registry") }

// helperOptions creates the kubelet's directories and returns the options for the helper.
func (d *Driver) helperOptions() ([]kubeletplugin.Option, error) {
	data, registry := d.dataDir(), d.registryDir()
	for _, dir := range []string{data, registry} {
		if err := d.files.MakeDir(dir, 0o750); err != nil {
			return nil, err
		}
	}
	options := []kubeletplugin.Option{
		kubeletplugin.DriverName(discovery.Domain),
		kubeletplugin.NodeName(d.config.NodeName),
		kubeletplugin.NodeUID(publish.SetOnCreate),
		kubeletplugin.KubeClient(aheadClient{d.Publisher.KubeClient()}),
		kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.RegistrarDirectoryPath(registry),
		kubeletplugin.RollingUpdate(d.config.PodUID),
		// The helper's lock would make unrelated claims wait for each other.
		kubeletplugin.Serialize(false),
		kubeletplugin.GRPCInterceptor(d.timeCalls),
		kubeletplugin.GRPCInterceptor(d.noteRegistration),
		kubeletplugin.GRPCInterceptor(getAhead),
	}
	if !d.config.NoMetadata {
		options = append(options, d.metadata.HelperOptions()...)
	}
	return options, nil
}

// noteRegistration is a gRPC interceptor that stores the kubelet's answer to the registration. The
// helper's RegistrationStatus is not safe to read while the helper runs.
func (d *Driver) noteRegistration(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if status, ok := request.(*registerapi.RegistrationStatus); ok {
		answer := Refused
		if status.GetPluginRegistered() {
			answer = Accepted
		}
		d.SetRegistration(answer)
	}
	return handler(ctx, request)
}

// SetRegistration stores the kubelet's answer to the registration. It is for a [Starter] that does
// not use the library's options.
func (d *Driver) SetRegistration(answer Registration) {
	d.registration.Store(&answer)
	if answer == Accepted {
		d.Publisher.NoteRegistration()
	}
}

// PreparedClaims returns the number of prepared claims. It is 0 until the records are read.
func (d *Driver) PreparedClaims() int { return len(d.ledger.Claims()) }

// Registration returns the kubelet's last answer to the registration.
func (d *Driver) Registration() Registration { return *d.registration.Load() }

// HandleError handles errors of the helper's background work. It implements
// [kubeletplugin.DRAPlugin] and is not for other callers.
func (d *Driver) HandleError(ctx context.Context, err error, message string) {
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		d.fail(fmt.Errorf("%s: %w", message, err))
		return
	}
	d.Publisher.HandleError(ctx, err, message)
}
