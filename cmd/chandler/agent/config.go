package agent

import (
	"context"
	"io/fs"
	"net/http"
	"time"

	"go.opentelemetry.io/otel/trace"
	"k8s.io/apimachinery/pkg/types"
	kubediscovery "k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"

	"chandler.dev/cdi"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/driver"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/handover"
	"chandler.dev/internal/hostfile"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/removal"
	"chandler.dev/legacy"
)

// Config is everything that an agent works with.
type Config struct {
	Version  string
	NodeName string

	// PodUID is that of the agent's own pod. Without it no two agents can run
	// while one takes over. Optional.
	PodUID types.UID

	// Pod is the agent's own pod as "namespace/name", "" if it is none. A kubelet
	// that does not list it is not believed about other pods either.
	Pod string

	// BootID is the kernel's. Claims that were prepared in another boot hold
	// nothing.
	BootID string

	FS       fs.FS               // the root of the host, with what informants say laid over it
	Families []*discovery.Family // what to look for on it
	Settings Settings            // what the administrator wants
	Changes  <-chan Change       // of that, while the agent runs; optional

	// Orders are those to remove Chandler, the first if there is one when the agent starts,
	// and then each other. Optional.
	Orders <-chan removal.Order

	// Wrong is why the configuration is wrong, so that the Settings are those of an
	// earlier one. Optional.
	Wrong error

	// RescanInterval is the time between scans while the kernel reports nothing.
	RescanInterval time.Duration

	// Uevents sends changes of the host's devices to events when it begins to hear the
	// kernel, and whenever the kernel reports some, until the context ends. Nil
	// means that nothing does; see [discovery.Listen].
	Uevents func(ctx context.Context, events chan discovery.Changes) error

	// Recoveries are what Uevents hears of recoveries from errors. Optional.
	Recoveries *discovery.Recoveries

	// HearsAll says that these are all events of the host, so that a scan reads only what
	// they name; see [discovery.Watch].
	HearsAll bool

	Informants []Informant

	// Programs run the programs of families, by their names, to change devices where the
	// administrator allows it; see [discovery.Tools].
	Programs map[string]func(ctx context.Context, args ...string) ([]byte, error)

	// Write writes an attribute of the host, as of fs.FS. It rebinds and makes devices where
	// the administrator allows it. Nil means that the agent may not change the host.
	Write func(name, value string) error

	Client kubernetes.Interface

	// StatusClient writes Events and the status of claims. It should have a limit
	// of its own, so that nothing else waits for it.
	StatusClient kubernetes.Interface

	// Groups is asked whether the API server serves resource.k8s.io.
	Groups kubediscovery.ServerGroupsInterfaceWithContext

	Kubelet Kubelet
	Lock    Lock

	Disk        disk.FS         // where files are written, that of the operating system if nil
	KubeletRoot string          // the kubelet's data directory
	StateDir    string          // where the agent keeps what must outlive it
	RunDir      string          // directory on tmpfs for state that lasts until the next reboot
	CDI         cdi.Dir         // where the specs of claims go
	HostFiles   hostfile.Writer // writes files of the host that go with devices

	// FeatureDir is the directory in which Node Feature Discovery finds files with labels
	// of the node, "" for no labels. None are written while it does not exist.
	FeatureDir string

	// NoMetadata leaves out the files in which containers read the attributes of
	// their devices.
	NoMetadata bool

	// ReadParameters decodes what claims say to the driver.
	ReadParameters func(raw []byte) (discovery.Parameters, error)

	// Tracer makes traces of the kubelet's calls. Nil means none.
	Tracer trace.Tracer

	// HookProgram is as [discovery.Host.Hooks].
	HookProgram string

	// KeepHooks has that program installed until the context ends, which it does before the
	// agent removes what it has on the node. Optional.
	KeepHooks func(ctx context.Context)

	// Serve answers HTTP requests for /healthz, /readyz and /metrics with the
	// handler until the context ends. Optional.
	Serve func(ctx context.Context, handler http.Handler) error

	// ServePage shows the node's inventory, less what only others know of it, until the
	// context ends. There is none before devices are placed. Optional.
	ServePage func(ctx context.Context, facts func() (inventory.Facts, bool))
}

// Settings are what the administrator wants, compiled.
type Settings struct {
	Rules    *rules.Rules
	Severity discovery.Severity       // of conditions of devices
	Roots    map[string]string        // as in [discovery.Host]
	Paths    []discovery.PathResource // likewise
	Pools    bool                     // likewise
	NoHooks  bool                     // container runtimes are to call none
	Rebind   []discovery.Rebinding    // likewise
	Handover []handover.Rule          // what is done to devices between two owners

	// VirtualFunctions and Partition are as in [discovery.Host].
	VirtualFunctions []discovery.VirtualFunctions
	Partition        []discovery.Partitioning

	// Upkeep is as in [discovery.Host].
	Upkeep []discovery.Upkeep

	// KeepMade is how long what was made on request stays when nobody has it any more.
	KeepMade time.Duration

	// Text is the configuration that they were compiled from. It is kept as
	// [KeptConfig]. Optional.
	Text []byte

	// Labels are those of the node by which they were chosen, kept as [KeptLabels]. Nil
	// if they are not known.
	Labels map[string]string
}

// Host returns a host as the settings want it to be looked at.
func (s *Settings) Host(fsys fs.FS) *discovery.Host {
	return &discovery.Host{
		FS: fsys, Roots: s.Roots, Paths: s.Paths, Pools: s.Pools,
		Rebind: s.Rebind, VirtualFunctions: s.VirtualFunctions, Partition: s.Partition, Upkeep: s.Upkeep,
	}
}

// Change is a change of the configuration.
type Change struct {
	Settings Settings

	// Err is why the new configuration is wrong. The old one stays in force then.
	Err error
}

// Kubelet is how the agent and the kubelet reach each other.
type Kubelet struct {
	// StartDRA registers the DRA driver with the kubelet. The plugin is a
	// [driver.Driver]; see [driver.StartHelper].
	StartDRA driver.Starter

	// DevicePlugins takes the servers of classic resources.
	DevicePlugins legacy.Kubelet

	// Pods asks the PodResources API which containers have what. Whether the answer
	// is whole is for the agent to find out.
	Pods func(ctx context.Context) (*kubeletapi.Listing, error)

	// Allocated returns the classic IDs that the kubelet has written down as those of
	// containers, by resource; see [legacy.Allocated].
	Allocated func() (map[string][]string, error)

	// Written returns what containers have by the kubelet's checkpoint, for a kubelet
	// without a PodResources API, and for IDs that the host does not tell of; see
	// [legacy.Written]. Optional.
	Written func() ([]kubeletapi.Holding, error)
}

// Lock is held by one agent of a node at a time. While an upgrade surges two run at
// once, and only the holder may write records, specs and slices.
type Lock interface {
	// Acquire waits until this agent holds the lock or the context ends.
	Acquire(ctx context.Context) (release func(), err error)

	// Awaited reports whether another agent waits for the lock.
	Awaited() bool
}

// Informant tells, by means of the file system of the host, something about
// devices that no file of the kernel says.
type Informant interface {
	// Run keeps telling until the context ends. It calls changed whenever it has
	// told something new.
	Run(ctx context.Context, changed func())

	// Ready is closed when it has told something, or has nothing to tell yet.
	Ready() <-chan struct{}
}
