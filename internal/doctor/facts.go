package doctor

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pciids"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/doctor/codes"
	"chandler.dev/internal/doctor/report"
)

// Answer is a fact, or the reason why the fact is unknown.
type Answer[T any] struct {
	Value      T
	Unknown    string // the reason why the fact is unknown, "" for a known fact
	isAnswered bool
}

// KnownAnswer returns a known fact.
func KnownAnswer[T any](value T) Answer[T] { return Answer[T]{Value: value, isAnswered: true} }

// UnknownAnswer returns an unknown fact with the reason.
func UnknownAnswer[T any](why string) Answer[T] { return Answer[T]{Unknown: why, isAnswered: true} }

// AnswerOf returns a known fact if err is nil, and an unknown fact otherwise.
func AnswerOf[T any](value T, err error) Answer[T] {
	if err != nil {
		return UnknownAnswer[T](discovery.ErrorText(err))
	}
	return KnownAnswer(value)
}

// get returns the fact and whether it is known.
func (a Answer[T]) get() (T, bool) { return a.Value, a.isAnswered && a.Unknown == "" }

// unknownReason returns the reason why the fact is unknown.
func (a Answer[T]) unknownReason() string {
	if !a.isAnswered {
		return "it was not checked"
	}
	return a.Unknown
}

// UnknownVersion stands for an unknown version of Kubernetes.
const UnknownVersion = "of unknown version"

// Facts are the input of the checks. The zero value of each fact means that it was not
// gathered.
type Facts struct {
	report.Head

	// NoKubelet is the reason why the node has no kubelet, and NoCluster the reason why no API
	// server is available; both are "" otherwise.
	NoKubelet string
	NoCluster string

	Devices DeviceFacts
	Host    HostFacts
	Kubelet KubeletFacts
	Runtime RuntimeFacts
	Cluster ClusterFacts
	Agent   AgentFacts
}

// uncheckedReason returns the reason why a category cannot be checked, or "". mention is false if
// the finding of another category already states the same reason.
func (f *Facts) uncheckedReason(c codes.Category) (why string, mention bool) {
	switch {
	case c == codes.Devices || c == codes.Host:
		return "", true
	case f.Source != "":
		return "the " + f.Source + " has no information about the kubelet, the container runtime, the cluster and the agent", true
	case f.NoKubelet != "" && f.NoCluster != "":
		if c == codes.Kubelet {
			return f.NoKubelet + ": kubelet, container runtime, cluster and agent are not checked", true
		}
		return f.NoKubelet, false
	case c == codes.Cluster:
		return f.NoCluster, true
	case c == codes.APIs:
		return "", true
	}
	return f.NoKubelet, true
}

// DeviceFacts are the facts from device discovery.
type DeviceFacts struct {
	// Snapshot holds the offered devices with their settled health states.
	Snapshot Answer[*rules.Snapshot]

	// Found holds all devices of the host, without regard to the configuration.
	Found *discovery.Snapshot

	// Products are the names of products in the host's list of PCI IDs.
	Products pciids.Names

	// Holders are the consumers of each device, by device name.
	Holders map[string][]Holder

	// MakeNodes maps families to the commands that create their device nodes. For other families,
	// udev creates the nodes.
	MakeNodes map[string]string

	// MissingNodes maps families to the missing device nodes that their devices share.
	MissingNodes map[string][]string

	// Recovered contains the devices that the last scan found healthy. Such a device may have to stay
	// healthy for some time before it is allocated again.
	Recovered map[string]bool

	// Waits are the devices that wait to move to the other API.
	Waits Answer[[]Wait]

	// API maps each physical device to the API that offers it, as recorded by the agent.
	API Answer[map[string]discovery.Mode]
}

// Holder is the consumer of a device.
type Holder struct {
	Namespace, Pod string // "" if the pod is unknown
	Owner          string // a description of the consumer
	API            discovery.Mode
}

// String returns the name of the pod, or else the description of the consumer.
func (h Holder) String() string {
	if h.Pod != "" {
		return h.Namespace + "/" + h.Pod
	}
	return h.Owner
}

// Wait is a device that waits to move to another API.
type Wait struct {
	Device   string
	From, To discovery.Mode
	Reason   string
}

// HostFacts are the facts from the host, except those about devices.
type HostFacts struct {
	Functions Answer[[]Function]
	Modules   map[string]bool // modules in /sys/module; nil if unreadable
	Virtual   bool            // the processors support virtual machines
	Proc      Answer[bool]    // whether the host's /proc is a mount of the kernel's own proc, like its /sys
	SELinux   Answer[SELinux]
	Space     Answer[[]Space]
	State     Answer[string] // "" if the agent's directory is writable, otherwise the reason
	Skew      Answer[time.Duration]
}

// Function is a PCI function.
type Function struct {
	Address        string
	Class          string // six hexadecimal digits
	Vendor, Device string
	Driver         string // the bound driver, "" for none
	Override       string // driver_override, "" for none
	Group          string // IOMMU group, "" for none
	Virtual        bool   // an SR-IOV virtual function, which may have to wait for a driver
}

// SELinux is the state of SELinux.
type SELinux struct {
	Enforcing bool
	Agent     string // the agent's context, "" if unknown
}

// Space is the free space of a file system.
type Space struct {
	Path           string
	Size, Free     uint64 // bytes
	Inodes, INFree uint64 // Inodes is 0 on file systems without a fixed number of inodes
}

// KubeletFacts are facts from the kubelet and about it.
type KubeletFacts struct {
	Root, PluginDir string
	Dir             Answer[string]                              // "" if the device-plugins directory is writable, otherwise the reason
	Answers         Answer[string]                              // "" if the registration socket accepts connections, otherwise the error
	Pods            Answer[[]*podresourcesapi.PodResources]     // the pods with their devices
	Allocatable     Answer[[]*podresourcesapi.ContainerDevices] // healthy devices of the device plugin API
	Ours            map[string][]string                         // device plugin IDs that the agent may list, by resource
	Flags           Answer[map[string]string]                   // command-line flags of the kubelet's process
	Config          Answer[KubeletConfig]
	Registration    Answer[bool] // the agent's socket is in the kubelet's plugins_registry directory
	PluginPods      []string     // pods that mount the device-plugins directory, as namespace/name
}

// KubeletConfig is the relevant part of the kubelet's configuration.
type KubeletConfig struct {
	FeatureGates   map[string]bool
	TopologyPolicy string
}

// RuntimeFacts are facts from the container runtime and its files.
type RuntimeFacts struct {
	Name, Version string // such as "containerd", "2.1.4"; "" if unknown
	Config        Answer[RuntimeConfig]
	Dir           string         // the directory of the agent's CDI specs
	Writable      Answer[string] // "" if Dir is writable, otherwise the reason
	Specs         Answer[[]Spec]
	Errors        map[string][]string // errors in CDI specs of any vendor, by file
}

// RuntimeConfig is the relevant part of the runtime's configuration.
type RuntimeConfig struct {
	Files    []string // the files read
	CDI      bool
	SpecDirs []string
	Changed  time.Time // the newest modification time of the files
	Started  time.Time // start of the runtime's process; zero if unknown
}

// Spec is a CDI spec of a claim.
type Spec struct {
	File string
	UID  string // the UID of the claim
}

// ClusterFacts are facts from the API server.
type ClusterFacts struct {
	Server   Answer[string] // the version of the API server
	DRA      Answer[string] // the served version of resource.k8s.io, "" if the driver supports none of the served versions
	Node     Answer[*corev1.Node]
	Slices   Answer[[]resourceapi.ResourceSlice] // ResourceSlices of all drivers
	OwnOnly  string                              // why Slices and Claims have only those of this node, "" if they have all
	Classes  Answer[[]resourceapi.DeviceClass]
	Claims   Answer[[]resourceapi.ResourceClaim] // of the node's pods, or of the whole cluster
	Pods     Answer[[]corev1.Pod]                // the pods on the node
	Policies Answer[[]string]                    // the names of missing ValidatingAdmissionPolicies
	Rights   Answer[[]string]                    // permissions that the agent lacks
}

// ServerName is the prefix of the Server header in an agent's health checks. The agent's
// version follows.
const ServerName = "chandler/"

// UnreadyHeader is the header with the UnreadyReason in the response of an agent that is not ready.
const UnreadyHeader = "Chandler-Unready"

// UnreadyReason is the reason why an agent is not ready, "" for a reason without a finding of its
// own. Agents of older versions send none: doctor then prints their response with CH0701.
type UnreadyReason string

// The reasons with findings of their own.
const (
	UnreadyConfig       UnreadyReason = "InvalidConfiguration" // CH0703
	UnreadyRegistration UnreadyReason = "NotRegistered"        // CH0103
)

// AgentFacts are facts from the agent and its records.
type AgentFacts struct {
	Pod         Answer[*corev1.Pod] // nil if the node has no agent pod
	OtherAgents []OtherAgent        // other agents on the node
	Running     Answer[bool]        // whether a process of the agent exists

	// Installations are the DaemonSets of the agent processes on the node, as namespace/name.
	// Agents without namespace and name in their environment are omitted.
	Installations []string

	Removed         []string       // directories that were removed from the node while the agent has them mounted
	Ready           Answer[string] // "" if the agent is ready, otherwise its response
	Unready         UnreadyReason  // "" if the agent is ready
	Local           bool           // the agent was probed on the local host, without a network between
	Live            Answer[string] // "" if the agent is live, otherwise its response
	Version         string         // the version of the agent's process, "" if unknown
	Config          Answer[string] // "" if the configuration is valid, otherwise the error
	Refused         bool           // the configuration that the agent read last is invalid
	Outdated        bool           // a configuration change takes effect at the agent's next start
	ModeUnwanted    bool           // the API server rejects the agent's ResourceSlices
	Features        Answer[map[string]bool]
	Records         Answer[Records]
	NeedsVisibility []string       // the parts of the configuration that require a view of open device files
	Visibility      Answer[string] // "" if the agent sees the open files of the pods' processes, otherwise the reason
	VisibilityAll   Answer[string] // "" if the agent sees the open files of all processes, otherwise the reason
	Mode            discovery.Mode // the mode of devices without a mode of their own
	ReportOnly      bool           // the agent only reports devices, and offers none
}

// OtherAgent is an agent on the node in addition to AgentFacts.Pod. During an update, an
// agent of the same installation waits to take over.
type OtherAgent struct {
	Pod     *corev1.Pod
	Why     string        // the agent's reason for not being ready, "" if unknown
	Unready UnreadyReason // as in AgentFacts
	Foreign bool          // the agent belongs to another installation
}

// Records are the allocation records of the agent.
type Records struct {
	Claims   []Record
	Grants   int
	SetAside []string // files that were set aside
	Newer    []string // files that only a newer agent may act on
	Unread   []string // read errors
}

// Record is the record of a claim.
type Record struct {
	UID, Namespace, Name string
	Past                 bool // from an earlier boot
}
