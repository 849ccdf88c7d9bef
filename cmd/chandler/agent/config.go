package agent

import (
	"context"
	"io/fs"
	"net/http"
	"path/filepath"
	"time"

	"go.opentelemetry.io/otel/trace"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"chandler.dev/cdi"
	"chandler.dev/cmd/chandler/agent/changes"
	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/driver"
	"chandler.dev/internal/disk"
	"chandler.dev/internal/hostfile"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/journal"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/internal/reclaim"
	"chandler.dev/internal/removal"
	"chandler.dev/legacy"
)

// Config holds the settings and dependencies of an agent.
type Config struct {
	Version  string
	NodeName string

	// PodUID is the UID of the agent's own pod. Two agents can run during a takeover only if PodUID
	// is set. Optional.
	PodUID types.UID

	// Pod is the agent's own pod as "namespace/name", "" if the agent runs outside of a pod. Pod
	// lists that omit the agent's own pod are treated as incomplete.
	Pod string

	// BootID identifies the kernel's boot. Claims that were prepared in an earlier boot hold no
	// devices.
	BootID string

	FS       fs.FS               // the root of the host, overlaid with the files of informants
	Families []*discovery.Family // the families to scan for
	Settings Settings            // the administrator's settings
	Changes  <-chan Change       // changes of the settings while the agent runs; optional

	// Orders receives the orders to remove Chandler: first the order that exists at the start, if
	// any, and then each other order. Optional.
	Orders <-chan removal.Order

	// ConfigError is the error in the configuration at the start. The Settings are then those of an
	// earlier configuration. Optional.
	ConfigError error

	// RescanInterval is the time between scans without kernel events.
	RescanInterval time.Duration

	// Uevents sends changes of the host's devices to events, first when the subscription to the
	// kernel's events begins and then for each event, until the context ends. Nil means that the
	// agent receives no events; see [scan.Listen].
	Uevents func(ctx context.Context, events chan scan.Changes) error

	// RecoveryFailure is that of [discovery.Host], from the events that Uevents receives. Optional.
	RecoveryFailure func(function sysfs.Device) string

	// AllEvents reports that Uevents receives all events of the host, so that a scan reads only the
	// families that an event concerns; see [scan.Watch].
	AllEvents bool

	Informants []Informant

	// Programs run the programs of families, by family name, to change devices where the
	// administrator allows changes; see [discovery.Tools].
	Programs map[string]func(context.Context, discovery.PartitionChange) ([]byte, error)

	// SharingPrograms sends requests to the families' programs that run sharing daemons; see
	// [sharing.Config]. Nil means the sockets of the programs.
	SharingPrograms http.RoundTripper

	// Write writes an attribute of the host. The name is a path as in fs.FS. With Write, the agent
	// binds functions to drivers and creates devices where the administrator allows it. Nil means
	// that the agent may not change the host.
	Write func(name, value string) error

	// HostService writes attributes and finds the users of devices instead of this process, which
	// then needs no privilege; see package hostservice. Optional.
	HostService changes.HostService

	Client kubernetes.Interface

	// StatusClient writes Events and the status of claims. It should have a separate rate limit, so
	// that other requests do not wait for these writes.
	StatusClient kubernetes.Interface

	// ServedVersions returns the versions of resource.k8s.io that the API server serves, none if it
	// does not serve the group.
	ServedVersions func(ctx context.Context) ([]string, error)

	Kubelet Kubelet
	Lock    Lock

	Disk        disk.FS         // the file system for the agent's own files, that of the operating system if nil
	KubeletRoot string          // the kubelet's data directory
	StateDir    string          // directory for state that must outlive the agent
	RunDir      string          // directory on tmpfs for state that lasts until the next reboot
	CDI         cdi.Dir         // directory for the CDI specs of claims
	HostFiles   hostfile.Writer // writes the host files that belong to devices

	// FeatureDir is the directory for Node Feature Discovery files with node labels, "" for no
	// labels. The agent writes no labels while the directory does not exist.
	FeatureDir string

	// NoMetadata disables the files with the attributes of the devices for containers.
	NoMetadata bool

	// CDIEnabled reports whether a container runtime reads CDI specs, given its name and version in
	// the node's status. An error means that the answer is not known. Optional.
	CDIEnabled func(runtime string) (bool, error)

	// ReadParameters decodes the opaque parameters of claims.
	ReadParameters func(raw []byte) (discovery.Parameters, error)

	// Tracer traces the kubelet's calls. Nil disables tracing.
	Tracer trace.Tracer

	// HookProgram has the same meaning as [discovery.Host.Hooks].
	HookProgram string

	// KeepHooks keeps that program installed until the context ends. The context ends before the
	// agent removes its files from the node. Optional.
	KeepHooks func(ctx context.Context)

	// Serve answers HTTP requests for /healthz, /readyz and /metrics with the
	// handler until the context ends. Optional.
	Serve func(ctx context.Context, handler http.Handler) error

	// ServePage serves the web UI with the node's inventory until the context ends. facts reports
	// false before devices are placed. Optional.
	ServePage func(ctx context.Context, facts func() (inventory.Facts, bool))
}

func (c *Config) files() disk.Files { return disk.Files{FS: c.Disk} }

// journal returns the configuration of the journal, whose records last until the next reboot.
func (c *Config) journal() journal.Config {
	return journal.Config{Files: c.files(), Dir: filepath.Join(c.RunDir, "journal"), Boot: c.BootID}
}

// sharingDir returns the directory for the daemons of family programs.
func (c *Config) sharingDir() string { return filepath.Join(c.StateDir, "sharing-daemons") }

// recordDir returns the directory of the claims' files.
func (c *Config) recordDir() string { return filepath.Join(c.StateDir, "claims") }

// Settings are the administrator's settings in compiled form.
type Settings struct {
	Rules       *rules.Rules
	Severity    discovery.Severity                  // severity of the conditions of devices
	Roots       map[string]string                   // as in [discovery.Host]
	Paths       []discovery.PathResource            // as in [discovery.Host]
	Pools       bool                                // as in [discovery.Host]
	NoHooks     bool                                // container runtimes call no hooks
	Passthrough []discovery.Selection[string]       // as in [discovery.Host]
	Reclaim     []discovery.Selection[reclaim.Rule] // reclaim steps between two consumers of a device

	// VirtualFunctions and Partition have the same meaning as in [discovery.Host].
	VirtualFunctions []discovery.Selection[int]
	Partition        []discovery.Selection[struct{}]

	// SharingDaemons has the same meaning as in [discovery.Host].
	SharingDaemons map[discovery.SharingDaemonKind][]discovery.Selection[struct{}]

	// IdleTime is how long devices created on demand remain without a consumer.
	IdleTime time.Duration

	// Text is the source of the settings. The agent saves Text as [KeptConfig]. Optional.
	Text []byte

	// Labels are the node labels that selected the settings. The agent saves Labels as
	// [KeptLabels]. Nil means unknown.
	Labels map[string]string

	// LeftAlone reports that a label excludes the node from the agents' DaemonSets.
	LeftAlone bool
}

// ScanHost returns the host with the settings that scans use.
func (s *Settings) ScanHost(fsys fs.FS) *discovery.Host {
	return &discovery.Host{
		FS: fsys, Roots: s.Roots, Paths: s.Paths, Pools: s.Pools,
		Passthroughs: s.Passthrough, VirtualFunctions: s.VirtualFunctions, Partitionings: s.Partition, SharingDaemons: s.SharingDaemons,
	}
}

// Change is a change of the configuration.
type Change struct {
	Settings Settings

	// Err is the error in the new configuration. The previous configuration then stays in force.
	Err error
}

// Kubelet holds the interfaces between the agent and the kubelet.
type Kubelet struct {
	// StartDRA registers the DRA driver with the kubelet. The plugin is a
	// [driver.Driver]; see [driver.StartHelper].
	StartDRA driver.Starter

	// DevicePlugins registers the servers of extended resources.
	DevicePlugins legacy.Kubelet

	// Pods queries the PodResources API for the devices of containers. The agent checks whether the
	// answer is complete.
	Pods func(ctx context.Context) (*kubeletapi.Listing, error)

	// Allocated returns the device plugin IDs in the kubelet's checkpoint, by resource; see
	// [legacy.AllocatedIDs].
	Allocated func() (map[string][]string, error)

	// Written returns the allocations of containers in the kubelet's checkpoint, for a kubelet
	// without a PodResources API and for IDs that no file of the host contains; see
	// [legacy.ReadHoldings]. Optional.
	Written func() ([]kubeletapi.Holding, error)
}

// Lock is held by one agent of a node at a time. While an upgrade surges, two agents run at once,
// and only the holder may write records, specs and slices.
type Lock interface {
	// Acquire waits until this agent holds the lock or the context ends.
	Acquire(ctx context.Context) (release func(), err error)

	// Awaited reports whether another agent waits for the lock.
	Awaited() bool
}

// Informant supplies facts about devices that no kernel file has, through the host file system in
// Config.FS.
type Informant interface {
	// Run supplies facts until the context ends, and calls changed after each new fact.
	Run(ctx context.Context, changed func())

	// Ready is closed when the first facts are available, or when no facts are expected yet.
	Ready() <-chan struct{}
}
