package discovery

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery/sysfs"
)

// Family recognises one kind of accelerator and describes the devices found. A family is a value in
// a list: see package families.
//
// The functions of a family only read the host in their arguments. These functions must not run
// commands, write, log or keep state, and must return the same result for the same host.
type Family struct {
	Name  string  // a DNS label; published as the attribute "family"
	Doc   string  // one line: what the family covers
	Match []Match // the kernel devices that belong to the family

	// Describe returns the devices that the matched kernel devices make up. Describe gets all
	// matches at once, in path order, because a device may consist of several functions, as a
	// card, an IOMMU group or a pool does. Describe is not called if nothing matches.
	//
	// If an attribute cannot be read, Describe returns the device without it,
	// and a Problem that names the device by its Device.Name. It leaves a
	// device out only if the device cannot be described at all. One device's
	// Problem must not hide another device.
	Describe func(host *Host, found []sysfs.Device) ([]Device, []Problem)

	// FromConfig marks a family that describes the administrator's paths in Host.Paths. Match may
	// be empty, and Describe is called even if nothing matches. If another family describes the
	// same node, the other family's device is offered unless the administrator excludes that
	// device.
	FromConfig bool

	// Always makes a scan call Describe even if nothing matches.
	Always bool

	// Leftovers families run last. Leftovers families see only matches that no other family
	// described or failed to read, such as vfio functions that no family recognises.
	Leftovers bool

	// An Unclaimed family of leftovers does not even see what another family
	// matched and then left out, such as a physical function that has virtual
	// functions.
	Unclaimed bool

	// Provision returns the attributes to write, in order, so that a PCI function gets the
	// wanted settings. The type of the settings is specific to the family. Provision returns no
	// writes if the function has the settings already. Like Describe, Provision only reads.
	// Provision returns an error if the function cannot have the settings, or if parts that the
	// settings would remove are in use. If the function belongs to another family, or the type
	// of the settings does, the error wraps [errors.ErrUnsupported]. A nil Provision means that
	// the family has no settings.
	Provision func(host *Host, function sysfs.Device, want any) ([]Write, error)

	// Grant returns the container edits for the whole set of allocated devices, beyond the
	// Edits of each: joined, numbered or JSON variables. Grant is pure. A nil Grant adds
	// nothing.
	Grant func(given []Device, grant Grant) specs.ContainerEdits

	// Parameters lists the parameters that a claim may set for the family's devices. Grant gets
	// the values in the claim.
	Parameters []Parameter

	// Variables lists, in order, the environment variables that a claim may set: the vendor's
	// documented tuning variables. Variables leaves out variables that Grant or Edits set, that
	// select devices, or that load code.
	Variables []string

	// Configure returns the present description of a device, and the work that applies the
	// wanted parameters to the device. The work is nil if the parameters are already in effect.
	// Configure only reads. The work changes the host, and Configure is called again
	// afterwards. Changing the host needs the administrator's permission, for example a named
	// root; without permission, a device that needs work is an error. A nil Configure means
	// that no parameter needs work.
	Configure func(host *Host, d Device, want Parameters) (Device, Work, error)

	// Create returns the work that creates a unit of devices whose description has a
	// [Creation]. Remove returns the work that removes a unit that an agent created. The work
	// is nil if nothing is to be done: the unit already exists, is already gone, or was changed
	// by another program since its creation. Create and Remove only read. The work changes the
	// host with the tools, continues after an interruption at any point, and may be repeated.
	// The work need not wait until the devices are visible. Remove must refuse a unit that is
	// in use without an allocation by the agent. Nil functions mean that the family creates no
	// devices.
	Create, Remove func(host *Host, tools Tools, m Creation) (Work, error)

	// Order returns the instructions to the family's program for a claim that has the devices
	// of a request, nil if none. The instructions hold as long as the allocation. Order is
	// pure, and is called only with accepted parameters. A nil Order means that the family has
	// no such program.
	Order func(given []Device, parameters Parameters) map[string]string

	// Accept returns an error if the devices of a request cannot be allocated with these
	// parameters. Accept is pure. A nil Accept accepts all parameters.
	Accept func(given []Device, parameters Parameters) error

	// Programs query the vendor's code for facts that no kernel file has.
	Programs []*Program

	// CommonNodes lists the device nodes that several physical devices of the family may share,
	// because such a node alone gives access to none of the devices: "/dev/kfd",
	// "/dev/vfio/vfio". Any other node in the Edits of a device belongs to one physical device
	// alone, unless the device is Shareable.
	CommonNodes []string

	// MakeNodes is a command that an administrator can run to create missing device nodes, with a
	// remark. Empty means that udev creates the nodes.
	MakeNodes string

	// Roots lists the configuration keys for host directories of the family: the family's name,
	// or the name with a suffix.
	Roots []string

	// FileDirs lists the directories of the host that hold the Files of the
	// family's devices, as clean and absolute paths.
	FileDirs []string

	// AllowsPassthrough marks a family whose Grant also serves devices of other families under
	// VFIO passthrough; see DescribePassthrough of package pci.
	AllowsPassthrough bool

	// Labels are the node labels for the family's devices, with the names and values of the
	// vendor's labeller. Chandler also has labels of its own for all families.
	Labels []Labels
}

// Grant describes the allocation of a set of devices: the API, the resource or the claim.
type Grant struct {
	API      Mode   // ModeDRA or ModeDevicePlugin
	Resource string // the extended resource name, "" in DRA if the devices have no name or several names
	All      bool   // the devices are all devices of the resource; false in DRA
	Claim    string // the claim's name in the pod, "" in the device plugin API
	Request  string // the request's name in the claim, "" in the device plugin API

	// Parameters are the claim's parameters for the devices of the request, empty in the device
	// plugin API.
	Parameters Parameters

	// UID is the claim's UID. SharingDir is the directory that programs of families use for the
	// daemons that claims need; see [Grant.DaemonDir]. Both are empty in the device plugin API.
	UID        string
	SharingDir string

	// Consumed is the consumed capacity of each shared device. A family passes Consumed on if the
	// vendor's software enforces limits.
	Consumed Consumed

	// Naming selects how the vendor's container runtime, if installed, gets the list of devices.
	Naming Naming
}

// Naming selects how a vendor's container runtime gets the list of devices.
type Naming struct {
	None   bool // the runtime gets no list: CDI injects the devices
	Mounts bool // by mounts beside a variable, which a container cannot forge
	Index  bool // by device indexes in place of UUIDs, if known
}

// Match selects kernel devices. All fields that are set must hold. Exactly one of Bus and Class is
// set.
type Match struct {
	Bus   string // "pci": devices of /sys/bus/pci/devices
	Class string // "misc": devices of /sys/class/misc

	Name     string // a pattern of [path.Match] for the kernel's name: "kvm", "amdgpu_xcp_*"
	Driver   string // the bound driver: "amdgpu"
	Unbound  bool   // no driver is bound, and the function is not a virtual function, which may have to wait for a driver
	Vendor   string // PCI vendor ID, four lower-case digits: "10de"
	Device   string // PCI device ID, four lower-case digits: "6240"
	PCIClass string // prefix of the PCI class code, lower-case digits: "03", "0302"

	// Hardware excludes devices without a parent device, such as bridges and veth interfaces of
	// class "net".
	Hardware bool

	// Passthrough restricts the match to hosts whose administrator allows VFIO passthrough.
	Passthrough bool
}

// Host is a family's view of the host.
type Host struct {
	// FS is the host's file system, rooted at its "/". Paths have no leading
	// slash: "proc/devices".
	FS fs.FS

	// Roots are host directories that the administrator named, keyed by [Family.Roots]: for
	// example, the directory of a vendor's driver libraries.
	Roots map[string]string

	// Paths are the device nodes, files and USB devices that the administrator
	// named, in the order of the configuration.
	Paths []PathResource

	// Hooks is the path of the hook program in the container runtime's view: the agent's own
	// program, run with the arguments of "chandler hook". Hooks is empty if hooks are disabled.
	Hooks string

	// Pools reports whether the configuration has pools of the SR-IOV network device plugin.
	// Families then also describe devices that only such pools use.
	Pools bool

	// VirtualFunctions selects the physical functions that may get virtual functions on demand.
	// The value is the maximum number for a physical function, 0 for the hardware's maximum.
	// See UncreatedFunctions of package pci.
	VirtualFunctions []Selection[int]

	// Passthroughs selects the devices that may be bound to a vfio driver. The value is the
	// name of the driver.
	Passthroughs []Selection[string]

	// Partitionings selects the devices that may be partitioned for claims.
	Partitionings []Selection[struct{}]

	// SharingDaemons selects the devices that family programs may run daemons for.
	SharingDaemons map[SharingDaemonKind][]Selection[struct{}]

	// CreatedUnit reports whether an agent has created a unit, or was about to, and will remove
	// the unit, and returns the recorded details; see [Creation]. The result changes no more
	// often than the unit's state on the host. A nil CreatedUnit means that no unit was
	// created.
	CreatedUnit func(unit string) (how map[string]string, made bool)

	// RecoveryFailure returns the reason if the kernel could not recover a PCI function from an
	// error, or "". Nil means unknown. No family calls RecoveryFailure.
	RecoveryFailure func(function sysfs.Device) string
}

// ReadText returns the content of a host file of at most 64 KiB without surrounding white space.
// The path begins with a slash.
func (h *Host) ReadText(name string) (string, error) {
	return sysfs.ReadText(h.FS, strings.TrimPrefix(path.Clean(name), "/"), 64<<10)
}

// FileExists reports whether the host has a file at the path, which begins with a slash.
func (h *Host) FileExists(name string) bool {
	_, err := fs.Stat(h.FS, strings.TrimPrefix(path.Clean(name), "/"))
	return err == nil
}

// Validate returns the errors in a list of families, or nil.
func Validate(families []*Family) error {
	var errs []error
	seen := make(map[string]bool)
	for _, f := range families {
		if seen[f.Name] {
			errs = append(errs, fmt.Errorf("family %s: listed twice", f.Name))
		}
		seen[f.Name] = true
		for _, err := range f.validate() {
			errs = append(errs, fmt.Errorf("family %s: %w", f.Name, err))
		}
	}
	return errors.Join(errs...)
}

// ownVariables is the prefix of the variables that Chandler sets for all families.
const ownVariables = "CHANDLER_"

func (f *Family) validate() []error {
	var errs []error
	for _, message := range validation.IsDNS1123Label(f.Name) {
		errs = append(errs, fmt.Errorf("name: %s", message))
	}
	if f.Doc == "" || strings.Contains(f.Doc, "\n") {
		errs = append(errs, errors.New("doc: must be one line"))
	}
	if len(f.Match) == 0 && !f.FromConfig {
		errs = append(errs, errors.New("match: must not be empty"))
	}
	for i, m := range f.Match {
		if (m.Bus == "") == (m.Class == "") {
			errs = append(errs, fmt.Errorf("match %d: either a bus or a class", i))
		}
		if _, err := path.Match(m.Name, ""); err != nil {
			errs = append(errs, fmt.Errorf("match %d: name %q: %w", i, m.Name, err))
		}
		if m.Bus != "pci" && (m.Vendor != "" || m.Device != "" || m.PCIClass != "") {
			errs = append(errs, fmt.Errorf("match %d: vendor, device and PCI class are of bus pci", i))
		}
		if m.Unbound && m.Driver != "" {
			errs = append(errs, fmt.Errorf("match %d: an unbound function has no driver; it needs a match of its own", i))
		}
	}
	for _, root := range f.Roots {
		if root != f.Name && !strings.HasPrefix(root, f.Name+"-") {
			errs = append(errs, fmt.Errorf("root %q: want the family's name, and a suffix", root))
		}
	}
	for _, dir := range f.FileDirs {
		if !path.IsAbs(dir) || path.Clean(dir) != dir || dir == "/" {
			errs = append(errs, fmt.Errorf("directory of files %q: want a clean and absolute path", dir))
		}
	}
	for i, name := range f.Variables {
		if len(validation.IsCIdentifier(name)) > 0 || strings.HasPrefix(name, ownVariables) {
			errs = append(errs, fmt.Errorf("variable %q: want a C identifier that does not begin with %s", name, ownVariables))
		}
		if i > 0 && f.Variables[i-1] >= name {
			errs = append(errs, fmt.Errorf("variable %s: is not after %s", name, f.Variables[i-1]))
		}
	}
	if f.Describe == nil {
		errs = append(errs, errors.New("describe: missing"))
	}
	if (f.Create == nil) != (f.Remove == nil) {
		errs = append(errs, errors.New("make and unmake: either both or none"))
	}
	for i := range f.Labels {
		errs = append(errs, f.Labels[i].validate()...)
	}
	return errs
}
