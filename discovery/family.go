package discovery

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery/sysfs"
)

// Family recognises one kind of accelerator and describes what it finds. A
// family is a value in a list: see package families.
//
// Its functions only read the host that they are given. They may not run
// commands, write, log or keep state, and must give the same answer for the
// same host.
type Family struct {
	Name  string  // a DNS label; published as the attribute "family"
	Doc   string  // one line: what the family covers
	Match []Match // the kernel devices that belong to the family

	// Describe returns the devices that the matched kernel devices make up. It
	// gets all matches at once, in path order, because one device may consist
	// of several functions: a card, an IOMMU group, a pool. It is not called if
	// nothing matches.
	//
	// If an attribute cannot be read, Describe returns the device without it,
	// and a Problem that names the device by its Device.Name. It leaves a
	// device out only if the device cannot be described at all. One device's
	// Problem must not hide another device.
	Describe func(host *Host, found []sysfs.Device) ([]Device, []Problem)

	// FromConfig says that the family describes what the administrator names in
	// Host.Paths. Match may be empty, and Describe is called even if nothing
	// matches. Where another family describes the same node, that family's
	// device is offered unless the administrator excludes it.
	FromConfig bool

	// Always says that Describe is called even if nothing matches.
	Always bool

	// Leftovers families run last. They see only matches that no other family
	// described or failed to read, such as vfio functions that nobody
	// recognises.
	Leftovers bool

	// An Unclaimed family of leftovers does not even see what another family
	// matched and then left out, such as a physical function that has virtual
	// functions.
	Unclaimed bool

	// Provision returns the attributes to write, in order, to give a PCI function
	// the settings that are wanted, which are of a type that the family has for
	// them. It returns none if the function has them already. Like Describe, it only
	// reads. It returns an error if the function cannot have the settings, or if
	// somebody uses what they would take away. If the function is not the family's,
	// or the type is another family's, the error wraps [errors.ErrUnsupported]. Nil
	// means that nothing can be set.
	Provision func(host *Host, function sysfs.Device, want any) ([]Write, error)

	// Grant returns what a container needs because of the set of devices it
	// was given, beyond their own Edits: joined, numbered or JSON variables.
	// It is pure. Nil means nothing.
	Grant func(given []Device, grant Grant) specs.ContainerEdits

	// Parameters lists what a claim may ask of the family's devices. Grant gets
	// the values that the claim chose.
	Parameters []Parameter

	// Variables lists the environment variables that a claim may set, in order:
	// the vendor's documented tuning variables. It leaves out those that Grant
	// or Edits set, that select devices, or that load code.
	Variables []string

	// Configure returns the present description of a device, and the work that
	// makes the device what the parameters want. The work is nil if there is
	// nothing to do. Configure only reads; the work changes the host, and
	// afterwards Configure is called again. Changing the host is a privilege:
	// unless the administrator has granted it, for example by naming a root, a
	// device that needs work is an error. Nil means that no parameter needs work.
	Configure func(host *Host, d Device, want Parameters) (Device, Work, error)

	// Make returns the work that makes a unit of devices which are described with a
	// [Making], and Unmake the work that undoes what an agent has made. The work is nil if
	// there is nothing to do: the unit is there, or is not there any more, or is not as it
	// was made, since somebody else has changed it. Both only read; the work changes the
	// host with the tools, goes on from whatever a killed agent has left, and may be done
	// again. It need not wait until the devices can be seen. Unmake must refuse a unit that
	// somebody uses without having got it from the agent. Nil means that the family makes
	// nothing.
	Make, Unmake func(host *Host, tools Tools, m Making) (Work, error)

	// Order returns what the family's program is to do for a claim for as long as it has the
	// devices of a request, nil if nothing. It is pure, and only of parameters that were
	// accepted. Nil means that there is no such program.
	Order func(given []Device, parameters Parameters) map[string]string

	// Accept returns an error if the devices of a request cannot be given with
	// these parameters. It is pure. Nil accepts all.
	Accept func(given []Device, parameters Parameters) error

	// Programs ask the vendor's code for facts that no file of the kernel has.
	Programs []*Program

	// CommonNodes are the device nodes that several devices of the family may
	// have although they are different silicon, since the node alone gives
	// access to none of them: "/dev/kfd", "/dev/vfio/vfio". Any other node in
	// the Edits of a device belongs to its silicon alone, unless the device is
	// Open.
	CommonNodes []string

	// MakeNodes is the command by which an administrator has missing device nodes made,
	// with a remark. Empty means that udev makes them.
	MakeNodes string

	// Roots lists the keys under which the administrator names directories of the
	// host for the family: the family's name, or the name with a suffix.
	Roots []string

	// FileDirs lists the directories of the host that hold the Files of the
	// family's devices, as clean and absolute paths.
	FileDirs []string

	// Rebinds says that Grant serves devices of other families too, which were given to
	// vfio for somebody; see [Rebound].
	Rebinds bool

	// Labels are the labels of nodes by which pods find the family's devices, as the
	// vendor's labeller names and writes them. Chandler has labels of its own for all
	// families.
	Labels []Labels
}

// Grant says to whom, and by which API, a set of devices is given.
type Grant struct {
	API      Mode   // ModeDRA or ModeDevicePlugin
	Resource string // the classic resource name, "" in DRA if the devices have none or several
	All      bool   // they are all devices of the resource; false in DRA
	Claim    string // the claim's name in the pod, "" in the classic API
	Request  string // the request's name in the claim, "" in the classic API

	// Parameters are what the claim asks of the devices of the request, none
	// in the classic API.
	Parameters Parameters

	// UID is the claim's, and Upkeep the directory in which programs of families keep up what
	// claims want; see [Grant.UpkeepDir]. Both are empty in the classic API.
	UID    string
	Upkeep string

	// Consumed is how much of each shared device is given. A family passes it on
	// if the vendor's software enforces it.
	Consumed Consumed

	// Naming is how the vendor's container runtime is told which devices it is to
	// bring, where there is one.
	Naming Naming
}

// Naming is how a vendor's container runtime is told of devices.
type Naming struct {
	None   bool // not at all: the devices come by CDI
	Mounts bool // by mounts beside a variable, which a container cannot make for itself
	Index  bool // by the devices' numbers in place of their UUIDs, where these are known
}

// Match selects kernel devices. All fields that are set must hold; either Bus
// or Class is.
type Match struct {
	Bus   string // "pci": devices of /sys/bus/pci/devices
	Class string // "misc": devices of /sys/class/misc

	Name     string // a pattern of [path.Match] for the kernel's name: "kvm", "amdgpu_xcp_*"
	Driver   string // the bound driver: "amdgpu"
	Unbound  bool   // no driver is bound, and it is no virtual function, which may have to wait for one
	Vendor   string // PCI vendor ID, four lower-case digits: "10de"
	Device   string // PCI device ID, likewise: "6240"
	PCIClass string // how the PCI class code begins, lower-case digits: "03", "0302"

	// Hardware leaves out devices that are not below another device, such as bridges and
	// veth interfaces of class "net".
	Hardware bool

	// Rebindable says that the match is for hosts where the administrator lets devices
	// be given to vfio, and selects nothing on others.
	Rebindable bool
}

// Host is what a family may look at.
type Host struct {
	// FS is the host's file system, rooted at its "/". Paths have no leading
	// slash: "proc/devices".
	FS fs.FS

	// Roots are directories of the host that the administrator named, by the keys
	// of [Family.Roots]: for example, where a vendor's driver libraries lie.
	Roots map[string]string

	// Paths are the device nodes, files and USB devices that the administrator
	// named, in the order of the configuration.
	Paths []PathResource

	// Hooks is the path of the program that container runtimes call as a hook, as they
	// see it: the agent's own, with the arguments of "chandler hook". It is empty where
	// there are to be no hooks.
	Hooks string

	// Pools says that the administrator has pools of the SR-IOV network device plugin.
	// Families then look at what only such pools have, too.
	Pools bool

	// VirtualFunctions is which physical functions the administrator lets have virtual ones
	// when somebody gets one, the first that selects a function first; see [Host.Unmade].
	VirtualFunctions []VirtualFunctions

	// Rebind is which devices the administrator lets be given to a vfio driver, the
	// first that selects a device first.
	Rebind []Rebinding

	// Partition is which devices the administrator lets be divided for those who ask for
	// partitions.
	Partition []Partitioning

	// Upkeep is which devices the administrator lets programs of families keep up something for.
	Upkeep []Upkeep

	// Made reports whether an agent has made a unit, or was about to, and will undo it, with what was
	// written down of it; see [Making]. It changes no more often than what the host shows of
	// the unit. Nil means that nothing was made.
	Made func(unit string) (how map[string]string, made bool)

	// Recoveries are how the kernel's recoveries of PCI functions ended, as [Listen] has heard. Nil means
	// that this is not known. No family looks at it.
	Recoveries *Recoveries
}

// ReadText returns a file of the host without the white space around it; it
// may be up to 64 KiB long. The path begins with a slash.
func (h *Host) ReadText(name string) (string, error) {
	return sysfs.ReadText(h.FS, strings.TrimPrefix(path.Clean(name), "/"), 64<<10)
}

// Exists reports whether the host has a file of that path, which begins with
// a slash.
func (h *Host) Exists(name string) bool {
	_, err := fs.Stat(h.FS, strings.TrimPrefix(path.Clean(name), "/"))
	return err == nil
}

// Validate reports what is wrong with a list of families, nil if nothing is.
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

// ownVariables begins the names of what containers are told whatever the family.
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
	if (f.Make == nil) != (f.Unmake == nil) {
		errs = append(errs, errors.New("make and unmake: either both or none"))
	}
	for i := range f.Labels {
		errs = append(errs, f.Labels[i].validate()...)
	}
	return errs
}

// selects reports whether a device of the match's bus or class belongs to the
// family.
func (m Match) selects(d sysfs.Device) (bool, error) {
	if m.Name != "" {
		if ok, _ := path.Match(m.Name, d.Name()); !ok {
			return false, nil
		}
	}
	if m.Hardware && isVirtual(d.Path) {
		return false, nil
	}
	if m.Vendor != "" || m.Device != "" || m.PCIClass != "" {
		id, err := d.PCIID()
		switch {
		case m.Vendor != "" && id.Vendor != m.Vendor:
			return false, unknown(id.Vendor, err)
		case m.Device != "" && id.Device != m.Device:
			return false, unknown(id.Device, err)
		case !strings.HasPrefix(id.Class, m.PCIClass):
			return false, unknown(id.Class, err)
		}
	}
	if m.Driver != "" && d.Driver() != m.Driver || m.Unbound && (d.Bound() || d.Exists("physfn")) {
		return false, nil
	}
	// A link in a class may lead to a device that is gone.
	return m.Vendor != "" || m.Device != "" || m.PCIClass != "" || d.Exists("."), nil
}

// unknown returns err if it is why a value is not known.
func unknown(value string, err error) error {
	if value != "" {
		return nil
	}
	return err
}

// matched returns the kernel devices that belong to the family, each once, in
// path order, and what could not be read to decide.
func (f *Family) matched(kernel *kernel) ([]sysfs.Device, []Problem) {
	var found []sysfs.Device
	var problems []Problem
	seen := make(map[string]bool)
	for _, m := range f.Match {
		if m.Rebindable && !kernel.rebinds {
			continue
		}
		for _, d := range kernel.candidates(m) {
			if seen[d.Path] {
				continue
			}
			ok, err := m.selects(d)
			if err != nil {
				problems = append(problems, Problem{DeviceName(d), err})
			}
			if ok {
				seen[d.Path] = true
				found = append(found, d)
			}
		}
	}
	slices.SortFunc(found, func(a, b sysfs.Device) int { return strings.Compare(a.Path, b.Path) })
	return found, problems
}
