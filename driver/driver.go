// Package driver implements Dynamic Resource Allocation: it publishes the snapshot of a host's
// devices in ResourceSlices, prepares and unprepares claims for the kubelet, and reports device
// health to the kubelet. The package contains no vendor-specific code. Of the host it reads only
// the device nodes and network interfaces that it gives to containers.
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
	"k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/driver/features"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/ledger"
)

// Config says where and for whom a driver works. All of it must be set but what is
// said to be optional.
type Config struct {
	NodeName string // also the name of the pool

	// PodUID is that of the agent's pod. If it is set, two agents may run at
	// once while one takes over from the other. Optional.
	PodUID types.UID

	// KubeClient should allow for bursts: the kubelet's calls wait while each
	// of their claims is read with it.
	KubeClient kubernetes.Interface

	// StatusClient writes what becomes of the devices of claims into the status
	// of these. It should have a limit of its own, so that nothing else waits
	// for it. Optional: without it the status is left alone.
	StatusClient kubernetes.Interface

	// Start registers the driver with the kubelet, as [StartHelper] does.
	Start Starter

	KubeletRoot string  // the kubelet's data directory
	CDI         cdi.Dir // where the specs of claims go

	// Disk is what metadata of devices and CDI specs are written to and read
	// from, the operating system's if nil.
	Disk disk.FS

	// HostFS is the file system of the scanned host, in which device nodes are
	// looked at before they are handed out.
	HostFS fs.FS

	// Ledger says who has what. The caller of [Driver.Run] opens it once
	// this instance may write. Calls wait until then.
	Ledger *ledger.Ledger

	// Granter adds what depends on the set of devices of a request.
	Granter discovery.Granter

	// NoMetadata leaves out the files in which containers read the attributes
	// of their devices.
	NoMetadata bool

	// ReadParameters strictly decodes the opaque parameters that a claim or a
	// device class has for this driver, and returns why they are not
	// understood.
	ReadParameters func(raw []byte) (discovery.Parameters, error)

	// Accept reports why the devices of a request cannot be given with
	// parameters that were understood.
	Accept discovery.Acceptor

	// Order returns what programs of families are to keep up for the devices of a request, and
	// Upkeep has them do so for a claim, and returns once it is so, however often it is called.
	// UpkeepDir is the directory below which they do. Optional.
	Order     discovery.Orderer
	Upkeep    func(ctx context.Context, uid types.UID, orders []discovery.Order) error
	UpkeepDir string

	// Configure makes devices what claims want of them.
	Configure discovery.Configurer

	// Rescan is called when devices were configured, or when that failed: they
	// may be other than the last snapshot has them. It must not block.
	Rescan func()

	// Preparing is called with each claim that is to be prepared. It must not block. Optional.
	Preparing func(*resourceapi.ResourceClaim)

	// ResourceOf returns the name by which pods ask in their limits for devices of a
	// DeviceClass, "" if that is not known. It must not block. Optional.
	ResourceOf func(class string) string

	// Ended is called when a claim has ended. It must not block. Optional.
	Ended func()

	// Abandoned is asked about every ten minutes which claims nobody has any more.
	Abandoned Abandoned

	// Gone returns what it means at present that a device is gone which a claim
	// holds.
	Gone func() resourceapi.DeviceTaintEffect

	// Observe is told how long the kubelet's calls take.
	Observe Observer

	// Tracer makes traces of the kubelet's calls. Nil means none.
	Tracer trace.Tracer
}

// Registration is what the kubelet has said to the driver's registration.
type Registration string

// The answers of a kubelet.
const (
	Unanswered Registration = ""         // nothing yet
	Accepted   Registration = "Accepted" // it will call
	Refused    Registration = "Refused"
)

// registered is what the kubelet said to the registration, and when.
type registered struct {
	answer Registration
	at     time.Time
}

// Starter registers a plugin with the kubelet, as [kubeletplugin.Start] does. The
// plugin is a [Driver].
type Starter func(context.Context, kubeletplugin.DRAPlugin, ...kubeletplugin.Option) (Helper, error)

// Helper is the part of [kubeletplugin.Helper] that the driver uses.
type Helper interface {
	PublishResources(context.Context, resourceslice.DriverResources) error
	Stop()
}

// Driver is the DRA driver of one node. It is made with [New] and works while
// [Driver.Run] does.
type Driver struct {
	config Config

	// Replaced in tests.
	files          disk.Files
	healthInterval time.Duration
	termination    time.Duration // how long containers of a pod that was deleted by force may go on
	askInterval    time.Duration // about how long until the API server is asked again what it keeps

	view         atomic.Pointer[view]
	publishing   sync.Mutex // of views
	registration atomic.Pointer[registered]
	features     atomic.Pointer[features.Set]       // what the API server is known to keep, nil before it has said so
	doubted      atomic.Bool                        // it may be another server by now
	failed       atomic.Pointer[time.Time]          // when slices could not be written, nil if the publisher knows
	refusal      atomic.Pointer[string]             // why it takes no slices, nil if it does
	published    atomic.Pointer[resourceslice.Pool] // last, nil before the first time
	wake         chan struct{}                      // has one when the publisher is to look again
	prepared     chan struct{}                      // has one when a claim was prepared
	refused      chan struct{}                      // has one when a claim was refused, since somebody has its device

	calls    calls
	jobs     jobs
	anew     sync.Map // by UID of a claim that was allocated anew: when that was first seen
	metadata metadata
	ledger   *ledger.Ledger
	serving  atomic.Bool             // the helper's sockets are there
	fatal    context.CancelCauseFunc // set by Run
}

var _ kubeletplugin.DRAPlugin = &Driver{}

// New returns a driver. It touches nothing yet.
func New(config Config) *Driver {
	config.CDI.Files.FS = config.Disk
	d := &Driver{
		config: config, ledger: config.Ledger, files: disk.Files{FS: config.Disk},
		healthInterval: healthInterval, askInterval: askInterval, termination: ledger.Termination,
		wake: make(chan struct{}, 1), prepared: make(chan struct{}, 1), refused: make(chan struct{}, 1),
		calls: calls{ready: make(chan struct{}), stopping: make(chan struct{})},
		jobs:  jobs{rescan: config.Rescan},
	}
	d.metadata.specs, d.metadata.dir = config.CDI.Path, filepath.Join(d.dataDir(), metadataDir)
	d.metadata.before = filepath.Join(d.dataDir(), metadataBefore)
	d.metadata.files, d.metadata.ledger = disk.Files{FS: config.Disk}, d.ledger
	d.ledger.AddOutput(&d.metadata)
	d.ledger.AddOutput(cdiSpecs{config.CDI})
	d.registration.Store(&registered{})
	d.view.Store(&view{next: make(chan struct{})})
	return d
}

// StartHelper starts the library's helper, which the kubelet calls at sockets.
func StartHelper(ctx context.Context, plugin kubeletplugin.DRAPlugin, options ...kubeletplugin.Option) (Helper, error) {
	return kubeletplugin.Start(ctx, plugin, options...)
}

// Run serves the kubelet and publishes what [Driver.Publish] was given, until
// the context ends. It may be called once. When it returns, the calls that it
// served are finished and nothing is written any more; the error is nil unless
// something else than the context ended it.
func (d *Driver) Run(parent context.Context) error {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	d.fatal = cancel
	options, err := d.options()
	if err != nil {
		return fmt.Errorf("run driver: %w", err)
	}
	// The helper drops calls in progress when its context ends, so it is
	// stopped below, after them.
	helper, err := d.config.Start(context.WithoutCancel(ctx), d, options...)
	if err != nil {
		return fmt.Errorf("run driver: %w", err)
	}
	d.serving.Store(true)
	err = d.serve(ctx, helper)
	d.calls.drain()
	d.jobs.stop()
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

// serve does what the active instance does, once it is.
func (d *Driver) serve(ctx context.Context, helper Helper) error {
	select {
	case <-d.ledger.Opened():
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
	return d.publishLoop(ctx, helper)
}

// dataDir is where the driver has the socket that the kubelet calls.
func (d *Driver) dataDir() string {
	return filepath.Join(d.config.KubeletRoot, "plugins", discovery.Domain)
}

// registryDir is the kubelet's directory for registration sockets.
func (d *Driver) registryDir() string { return filepath.Join(d.config.KubeletRoot, "plugins_registry") }

// options makes the kubelet's directories and says to the helper where it is.
func (d *Driver) options() ([]kubeletplugin.Option, error) {
	data, registry := d.dataDir(), d.registryDir()
	for _, dir := range []string{data, registry} {
		if err := d.files.MakeDir(dir, 0o750); err != nil {
			return nil, err
		}
	}
	options := []kubeletplugin.Option{
		kubeletplugin.DriverName(discovery.Domain),
		kubeletplugin.NodeName(d.config.NodeName),
		kubeletplugin.NodeUID(setOnCreate),
		kubeletplugin.KubeClient(client{d.config.KubeClient, &nodeUID{name: d.config.NodeName}}),
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
		options = append(options, d.metadata.options()...)
	}
	return options, nil
}

// noteRegistration notes what the kubelet says to the registration. The
// helper's RegistrationStatus is not safe to read while it runs.
func (d *Driver) noteRegistration(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if status, ok := request.(*registerapi.RegistrationStatus); ok {
		answer := Refused
		if status.GetPluginRegistered() {
			answer = Accepted
		}
		d.Registered(answer)
	}
	return handler(ctx, request)
}

// Registered notes what the kubelet says to the registration. It is for a [Starter]
// that does without the options of the library.
func (d *Driver) Registered(answer Registration) {
	d.registration.Store(&registered{answer, time.Now()})
	notify(d.wake)
}

// Prepared returns how many claims are prepared, 0 until the records are read.
func (d *Driver) Prepared() int { return len(d.ledger.Claims()) }

// Registration returns what the kubelet last said to the registration.
func (d *Driver) Registration() Registration { return d.registration.Load().answer }

// HandleError takes errors from the helper's background work. It implements
// [kubeletplugin.DRAPlugin] and is not for other callers.
func (d *Driver) HandleError(ctx context.Context, err error, message string) {
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		d.fatal(fmt.Errorf("%s: %w", message, err))
		return
	}
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case errors.As(err, &dropped) && d.learn(dropped.DisabledFeatures()):
		klog.FromContext(ctx).Info("The API server drops fields of ResourceSlices; publishing without them", "without", d.kept().Missing())
		notify(d.wake)
		return
	case dropped != nil || refused(err) && !overtaken(err):
		d.doubted.Store(true)
		notify(d.wake)
	}
	if dropped == nil && !overtaken(err) {
		now := time.Now()
		d.failed.Store(&now)
		notify(d.wake)
	}
	runtime.HandleErrorWithContext(ctx, err, message)
}
