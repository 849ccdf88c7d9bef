package doctor

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
)

// Answer is a fact, or why it is not known.
type Answer[T any] struct {
	Value T
	Not   string // why it is not known, "" if it is
	asked bool
}

// Known is a fact.
func Known[T any](value T) Answer[T] { return Answer[T]{Value: value, asked: true} }

// Unknown is why a fact is not known.
func Unknown[T any](why string) Answer[T] { return Answer[T]{Not: why, asked: true} }

// Of is a fact unless there is an error.
func Of[T any](value T, err error) Answer[T] {
	if err != nil {
		return Unknown[T](err.Error())
	}
	return Known(value)
}

// get returns the fact and whether it is known.
func (a Answer[T]) get() (T, bool) { return a.Value, a.asked && a.Not == "" }

// why says why the fact is not known.
func (a Answer[T]) why() string {
	if !a.asked {
		return "nobody was asked"
	}
	return a.Not
}

// UnknownVersion stands for the version of a Kubernetes of which nobody says it.
const UnknownVersion = "of unknown version"

// Head is what a report is about.
type Head struct {
	Node       string
	Kubernetes string // the kubelet's version, or the server's, "" if there is no Kubernetes
	Version    string // of this program
	Time       time.Time
	Recorded   bool // it is a recorded host, of which nobody else can be asked
}

// Facts are all that checks look at. The zero value of each is that nobody was asked.
type Facts struct {
	Head

	// NoKubelet says why there is no kubelet here, and NoCluster why there is no API server
	// to ask; "" if there is one.
	NoKubelet string
	NoCluster string

	Devices DeviceFacts
	Host    HostFacts
	Kubelet KubeletFacts
	Runtime RuntimeFacts
	Cluster ClusterFacts
	Agent   AgentFacts
}

// unasked returns why nothing of a category is asked, "" if it is; and whether it need not even
// be mentioned, since what is said of another category says it too.
func (f *Facts) unasked(c Category) (why string, mention bool) {
	switch {
	case c == Devices || c == Host:
		return "", true
	case f.Recorded:
		return "a recorded host does not tell", true
	case f.NoKubelet != "" && f.NoCluster != "":
		if c == Kubelet {
			return f.NoKubelet + ": kubelet, cluster and agent are not asked", true
		}
		return f.NoKubelet, c == Runtime
	case c == Cluster:
		return f.NoCluster, true
	case c == APIs:
		return "", true
	}
	return f.NoKubelet, true
}

// DeviceFacts are what discovery says of the host.
type DeviceFacts struct {
	// Snapshot is what is offered, with the states that devices have settled in.
	Snapshot Answer[*rules.Snapshot]

	// Found is what the host has, whatever the administrator makes of it.
	Found *discovery.Snapshot

	// Holders are the pods or owners that have each device.
	Holders map[string][]Holder

	// MakeNodes are the commands that make device nodes, by family; udev makes those of the
	// others.
	MakeNodes map[string]string

	// Lacks are the device nodes that devices of such a family share, and that are not there.
	Lacks map[string][]string

	// Well are the devices that are well by what the host says now, though they may have to stay so before they are given out.
	Well map[string]bool

	// Waits are the devices that wait to move to the other API.
	Waits Answer[[]Wait]

	// API is which API offers each piece of silicon, as the agent wrote it down.
	API Answer[map[string]discovery.Mode]
}

// Holder is who has a device.
type Holder struct {
	Namespace, Pod string // "" if it is not known which pod it is
	Owner          string // in words
	API            discovery.Mode
}

// String names the holder.
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

// HostFacts are what the host says beside its devices.
type HostFacts struct {
	Functions Answer[[]Function]
	Modules   map[string]bool // in /sys/module; nil if it cannot be read
	Virtual   bool            // the processors can run virtual machines
	Proc      Answer[bool]    // the kernel's own proc is mounted where the host's is expected
	SELinux   Answer[SELinux]
	Space     Answer[[]Space]
	State     Answer[string] // the agent's directory: "" if it can be written to, else why not
	Skew      Answer[time.Duration]
}

// Function is a PCI function.
type Function struct {
	Address        string
	Class          string // six hexadecimal digits
	Vendor, Device string
	Driver         string // bound to it, "" for none
	Override       string // the driver that it is to have, "" for any
	Group          string // IOMMU group, "" for none
	Virtual        bool   // it is a virtual function, which may have to wait for a driver
}

// SELinux is how SELinux is.
type SELinux struct {
	Enforcing bool
	Agent     string // the context that the agent runs in, "" if it is not known
}

// Space is what is left of a file system.
type Space struct {
	Path           string
	Size, Free     uint64 // bytes
	Inodes, INFree uint64 // 0 inodes where the file system has no fixed number
}

// KubeletFacts are what the kubelet says, and what is said of it.
type KubeletFacts struct {
	Root, PluginDir string
	Dir             Answer[string]                              // the device-plugins directory: "" if it can be written to, else why not
	Answers         Answer[string]                              // at its registration socket: "" if it does, else why not
	Pods            Answer[[]*podresourcesapi.PodResources]     // who has what
	Allocatable     Answer[[]*podresourcesapi.ContainerDevices] // by the device-plugin API, healthy ones
	Ours            map[string][]string                         // classic IDs that the agent may list, by resource
	Flags           Answer[map[string]string]                   // of its process
	Config          Answer[KubeletConfig]
	Registration    Answer[bool] // the agent's socket is in the directory in which the kubelet looks
	PluginPods      []string     // pods that have the device-plugins directory mounted, as namespace/name
}

// KubeletConfig is what matters here of the kubelet's configuration.
type KubeletConfig struct {
	FeatureGates   map[string]bool
	TopologyPolicy string
}

// RuntimeFacts are what the container runtime and its files say.
type RuntimeFacts struct {
	Name, Version string // "containerd", "2.1.4"; "" if they are not known
	Config        Answer[RuntimeConfig]
	Dir           string         // of the agent's CDI specs
	Writable      Answer[string] // "" if it can be written to, else why not
	Specs         Answer[[]Spec]
	Errors        map[string][]string // what is wrong with specs of anybody, by file
}

// RuntimeConfig is what matters here of the runtime's configuration.
type RuntimeConfig struct {
	Files    []string // that it was read of
	CDI      bool
	SpecDirs []string
	Changed  time.Time // the newest of the files
	Started  time.Time // the process; zero if it is not known
}

// Spec is a CDI spec of a claim.
type Spec struct {
	File string
	UID  string // of the claim
}

// ClusterFacts are what the API server says.
type ClusterFacts struct {
	Server   Answer[string] // its version
	DRA      Answer[string] // the version of resource.k8s.io that it serves, "" if the driver speaks none of it
	Node     Answer[*corev1.Node]
	Slices   Answer[[]resourceapi.ResourceSlice] // of all drivers
	OwnOnly  bool                                // the slices are of this node alone, since those of others may not be seen
	Classes  Answer[[]resourceapi.DeviceClass]
	Claims   Answer[[]resourceapi.ResourceClaim]
	Pods     Answer[[]corev1.Pod] // of the node
	Policies Answer[[]string]     // the names of the ValidatingAdmissionPolicies that are missing
	Rights   Answer[[]string]     // what the agent may not do and must
}

// ServerName is how an agent begins its name, before the version, when it says how it is.
const ServerName = "chandler/"

// AgentFacts are what the agent says, and what it has written down.
type AgentFacts struct {
	Pod     Answer[*corev1.Pod] // nil if there is none
	Beside  []AgentBeside       // agents beside that one
	Running Answer[bool]        // a process of it was found

	// Installations are the DaemonSets that the node's processes of agents belong to, as
	// namespace/name. Agents that do not tell are left out.
	Installations []string

	Removed  []string       // directories of the node that were removed, and that it still has mounted
	Ready    Answer[string] // "" if it is, else what it answers
	Local    bool           // it was asked from where nothing is between
	Live     Answer[string] // likewise
	Version  string         // of the process, "" if it is not known
	Config   Answer[string] // "" if the configuration is right, else why not
	Refused  bool           // the agent says that the configuration which it read last is wrong
	Outdated bool           // the agent says that a change of the configuration waits for its next start
	Unwanted bool           // the agent says that the API server refuses its ResourceSlices
	Features Answer[map[string]bool]
	Records  Answer[Records]
	Looking  []string       // the parts of the configuration for which it must see that
	Sight    Answer[string] // "" if it sees what processes of pods have open, else why not
	SightAll Answer[string] // "" if it sees what all processes of the machine have open, likewise
	Mode     discovery.Mode // that is in force for devices without one of their own
}

// AgentBeside is an agent beside the one that works. An update has one of the same
// installation, which is to take over.
type AgentBeside struct {
	Pod     *corev1.Pod
	Why     string // it answers that it is not ready, "" if that is not known
	Foreign bool   // it is of another installation
}

// Records are the files of claims and grants.
type Records struct {
	Claims []Record
	Grants int
	Aside  []string // files that were set aside
	Newer  []string // files that only a newer agent may act on
	Unread []string // what cannot be read, with why
}

// Record is that of a claim.
type Record struct {
	UID, Namespace, Name string
	Past                 bool // of an earlier boot
}
