package v1alpha1

import (
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"chandler.dev/internal/pattern"
)

// ProvisionConfig is the desired state of a host's PCI functions. The flag --config of "chandler
// provision" names its file.
type ProvisionConfig struct {
	metav1.TypeMeta `json:",inline"`

	// Functions are rules for PCI functions. For each function, the first matching rule applies. A
	// function without a matching rule is not changed.
	Functions []Function `json:"functions,omitempty"`
}

// Function is the desired state of the selected PCI functions: either a driver, or settings of the
// function's own driver.
type Function struct {
	// CEL is an expression over all PCI functions. It can use the attributes of every function:
	// pciVendor, pciDevice, pciClass, driver, function and the standard attributes, and those of a
	// device that discovery finds on the function.
	CEL string `json:"cel"`

	// Driver is the kernel driver for the function, such as vfio-pci. It must be loaded.
	Driver string `json:"driver,omitempty"`

	// VirtualFunctions are the function's virtual functions. By default, they are not changed.
	VirtualFunctions *VirtualFunctions `json:"virtualFunctions,omitempty"`

	// Services are the services of an Intel QAT function: sym, asym, dc, dcc, decomp. Their order
	// does not matter.
	Services []string `json:"services,omitempty"`

	// WorkQueueGroups are the groups 0, 1, … of an Intel DSA or IAA function. Work queues and
	// engines are numbered across all groups.
	WorkQueueGroups []WorkQueueGroup `json:"workQueueGroups,omitempty"`
}

// VirtualFunctions are the SR-IOV virtual functions of a physical function.
type VirtualFunctions struct {
	// Count is the number of virtual functions, at least one.
	Count int `json:"count"`

	// Driver is the kernel driver for each virtual function. By default, the kernel chooses the
	// driver.
	Driver string `json:"driver,omitempty"`
}

// WorkQueueGroup is a group of work queues and of the engines that do their work.
type WorkQueueGroup struct {
	// Engines is the number of the device's engines in the group, at least one.
	Engines int `json:"engines"`

	// WorkQueues are the queues of the group, in order.
	WorkQueues []WorkQueue `json:"workQueues"`
}

// WorkQueue is a work queue for user space programs; see
// Documentation/ABI/stable/sysfs-driver-dma-idxd in the kernel's source.
type WorkQueue struct {
	// Name identifies the queue for programs.
	Name string `json:"name"`

	// Mode is dedicated, for one process at a time, or shared.
	Mode string `json:"mode"`

	// Size is the number of entries. All queues of a device share the device's entries.
	Size int `json:"size"`

	// Priority is from 1 to 15, the highest. The default is 10.
	Priority int `json:"priority,omitempty"`

	// Threshold is the number of entries of a shared queue that unprivileged programs can fill. By
	// default, they can fill all entries.
	Threshold int `json:"threshold,omitempty"`
}

// The modes of work queues.
const (
	WorkQueueDedicated = "dedicated"
	WorkQueueShared    = "shared"
)

// defaultPriority is the priority in Intel's own configurations.
const defaultPriority = 10

func (c *ProvisionConfig) setDefaults() {
	for _, f := range c.Functions {
		for _, group := range f.WorkQueueGroups {
			for i := range group.WorkQueues {
				queue := &group.WorkQueues[i]
				if queue.Priority == 0 {
					queue.Priority = defaultPriority
				}
				if queue.Mode == WorkQueueShared && queue.Threshold == 0 {
					queue.Threshold = queue.Size
				}
			}
		}
	}
}

// Validate returns all errors of the configuration. It does not compile expressions, and does not
// check properties of the functions, such as the maximum number of virtual functions.
func (c *ProvisionConfig) Validate() field.ErrorList {
	return validateEntries(c.Functions, field.NewPath("functions"), (*Function).validate)
}

func (f *Function) validate(at *field.Path) field.ErrorList {
	errs := validateCEL(f.CEL, at.Child("cel"))
	others := f.VirtualFunctions != nil || len(f.Services) > 0 || len(f.WorkQueueGroups) > 0
	switch {
	case f.Driver == "" && !others:
		errs = append(errs, InvalidField(at, "has no setting; want driver, virtualFunctions, services or workQueueGroups")...)
	case len(f.Services) > 0 && len(f.WorkQueueGroups) > 0:
		errs = append(errs, InvalidField(at.Child("services"), "no function has both services and workQueueGroups")...)
	case f.Driver != "" && others:
		errs = append(errs, InvalidField(at.Child("driver"), "cannot be combined with other settings; for the driver of virtual functions, set virtualFunctions.driver")...)
	}
	return slices.Concat(
		errs,
		validateDriver(f.Driver, at.Child("driver")),
		f.VirtualFunctions.validate(at.Child("virtualFunctions")),
		validateServices(f.Services, at.Child("services")),
		validateEntries(f.WorkQueueGroups, at.Child("workQueueGroups"), (*WorkQueueGroup).validate),
	)
}

func (v *VirtualFunctions) validate(at *field.Path) field.ErrorList {
	if v == nil {
		return nil
	}
	return append(validateRange(&v.Count, 1, 0xffff, at.Child("count")), validateDriver(v.Driver, at.Child("driver"))...)
}

// driverName matches the name of a driver, which becomes part of a path.
var driverName = pattern.Lazy(`^[A-Za-z0-9_][A-Za-z0-9_. -]{0,62}$`)

func validateDriver(name string, at *field.Path) field.ErrorList {
	if name == "" || driverName().MatchString(name) && !strings.HasSuffix(name, " ") {
		return nil
	}
	return InvalidField(at, "is %q; want the name of a kernel driver, such as vfio-pci", name)
}

// services are the services of Intel QAT (Documentation/ABI/testing/sysfs-driver-qat in the
// kernel's source).
var services = []string{"sym", "asym", "dc", "dcc", "decomp"}

func validateServices(named []string, at *field.Path) (errs field.ErrorList) {
	for i, name := range named {
		errs = append(errs, validateSetEnum(name, at.Index(i), services...)...)
		if slices.Contains(named[:i], name) {
			errs = append(errs, InvalidField(at.Index(i), "is %q, as an earlier one is", name)...)
		}
	}
	return errs
}

func (g *WorkQueueGroup) validate(at *field.Path) (errs field.ErrorList) {
	if g.Engines < 1 {
		errs = InvalidField(at.Child("engines"), "is %d; want at least 1", g.Engines)
	}
	if len(g.WorkQueues) == 0 {
		errs = append(errs, InvalidField(at.Child("workQueues"), "must not be empty")...)
	}
	return append(errs, validateEntries(g.WorkQueues, at.Child("workQueues"), (*WorkQueue).validate)...)
}

// queueName matches names that are valid as an attribute of a ResourceSlice.
var queueName = pattern.Lazy(`^[!-~]([ -~]{0,62}[!-~])?$`)

func (q *WorkQueue) validate(at *field.Path) (errs field.ErrorList) {
	if !queueName().MatchString(q.Name) {
		errs = InvalidField(at.Child("name"), "is %q; want 1 to 64 printable ASCII characters", q.Name)
	}
	errs = append(errs, validateSetEnum(q.Mode, at.Child("mode"), WorkQueueDedicated, WorkQueueShared)...)
	if q.Size < 1 {
		errs = append(errs, InvalidField(at.Child("size"), "is %d; want at least 1", q.Size)...)
	}
	errs = append(errs, validateRange(&q.Priority, 1, 15, at.Child("priority"))...)
	threshold := at.Child("threshold")
	switch {
	case q.Mode == WorkQueueDedicated && q.Threshold != 0:
		errs = append(errs, InvalidField(threshold, "is for shared queues")...)
	case q.Mode == WorkQueueShared && q.Size > 0 && (q.Threshold < 1 || q.Threshold > q.Size):
		errs = append(errs, InvalidField(threshold, "is %d; want 1 to %d, the queue's size", q.Threshold, q.Size)...)
	}
	return errs
}
