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

	// Describe returns what the matched kernel devices offer. It is given all
	// of them at once, in path order, since one unit may be several functions:
	// a card by its serial number, an IOMMU group, a pool. It is not called
	// where nothing matches.
	//
	// What cannot be read is a Problem that names the device by its
	// Device.Name and hides no other. The device is returned besides, without
	// what could not be read, unless it cannot be described at all.
	Describe func(host *Host, found []sysfs.Device) ([]Device, []Problem)

	// Configured says that the administrator names what the family describes,
	// in Host.Paths: Describe is called though nothing matches, and Match may be
	// empty. What it describes gives way to what other families do; see
	// [Rules.Apply].
	Configured bool

	// Leftovers says that the family is asked after all others, and given only
	// such matches as no device of theirs consists of and none of them could not
	// read: whatever is bound to vfio and nobody knows more of.
	Leftovers bool

	// Unclaimed says of a family of leftovers that it is not given either what
	// any other family so much as matched: what those know and leave out on
	// purpose, such as a physical function that has virtual ones, stays so.
	Unclaimed bool

	// Provision returns what is to be written, in this order, to make a PCI
	// function of the family as it is wanted, nothing if it is so already. Like
	// Describe it only reads. It refuses, in words, what the function cannot be
	// made, and what would take something from somebody who uses it. A function
	// that is none of the family's, or a setting that the family has not, is an
	// error that wraps [errors.ErrUnsupported]. Nil means that nothing can be set.
	Provision Provision

	// Grant returns what a container needs because of the set of devices it
	// was given, beyond their own Edits: joined, numbered or JSON variables.
	// It is pure. Nil means nothing.
	Grant func(given []Device, grant Grant) specs.ContainerEdits

	// Parameters are what a claim may ask of the family's devices. Grant is
	// told what it asked for.
	Parameters []Parameter

	// Variables are what a claim may set in the environment of the containers
	// that get the family's devices: those by which the vendor documents that its
	// libraries are tuned, in order. None is one that Grant or a device's Edits
	// set, none chooses devices, and none loads code.
	Variables []string

	// Configure returns the device as it is described now, and the work that
	// makes it what the parameters want, nil if it is so already. It only reads;
	// the work alone changes the host, and after it Configure is asked again.
	// It is a privilege: without something that the administrator said, such as
	// a root, a device that is not as wanted is an error. Nil means that no
	// parameter needs work on the host.
	Configure func(host *Host, d Device, want Parameters) (Device, Work, error)

	// Accept reports why the devices of a request cannot be given with
	// parameters that are among the family's, nil if they can. It is pure. Nil
	// accepts all.
	Accept func(given []Device, parameters Parameters) error

	// Program says what only the vendor's library knows. Nil means that there is
	// no such program.
	Program *Program

	// CommonNodes are the device nodes that several devices of the family may
	// have although they are different silicon, since the node alone gives
	// access to none of them: "/dev/kfd", "/dev/vfio/vfio". Any other node in
	// the Edits of a device belongs to its silicon alone, unless the device is
	// Shareable.
	CommonNodes []string

	// Roots are the names under which the administrator names directories of the
	// host for the family: its own, and that with a suffix for each further one.
	Roots []string

	// FileDirs are the directories of the host in which the Files of the
	// family's devices are: clean and absolute paths.
	FileDirs []string
}

// Grant says to whom, and by which API, a set of devices is given.
type Grant struct {
	API      Mode   // ModeDRA or ModeDevicePlugin
	Resource string // the classic resource name, "" in DRA
	Claim    string // the claim's name in the pod, "" in the classic API
	Request  string // the request's name in the claim, "" in the classic API

	// Parameters are what the claim asks of the devices of the request, none
	// in the classic API.
	Parameters Parameters

	// Consumed is how much is given of the devices that are shared. A family says
	// it to the vendor's software where that keeps to it.
	Consumed Consumed
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
}

// Host is what a family may look at.
type Host struct {
	// FS is the host's file system, rooted at its "/". Paths have no leading
	// slash: "proc/devices".
	FS fs.FS

	// Roots are directories of the host that the administrator named for
	// families, by the families' [Family.Roots]: where a vendor's driver libraries
	// lie.
	Roots map[string]string

	// Paths are the device nodes, files and USB devices that the administrator
	// named, in the order of the configuration.
	Paths []PathResource
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
	if len(f.Match) == 0 && !f.Configured {
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
