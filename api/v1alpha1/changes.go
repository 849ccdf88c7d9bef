package v1alpha1

// Passthrough allows VFIO passthrough of the selected devices: they are bound to a vfio driver when
// a claim needs this. All functions of an IOMMU group must be selected, except bridges and
// functions without a driver. The functions of a group are allocated together.
type Passthrough struct {
	Selector `json:",inline"`

	// Driver is the vfio driver, which must be loaded: vfio-pci (the default), or a driver with
	// more features for the device, such as mlx5_vfio_pci.
	Driver string `json:"driver,omitempty"`
}

// Reclaim withholds the selected devices from their next consumer until every process of the
// previous pods has closed them. If the agent cannot see these processes, it withholds a device
// only until the pods' termination grace periods are over. Devices with unlimited sharing are
// excluded.
type Reclaim struct {
	Selector `json:",inline"`

	// Reset selects the reset of a device between two consumers: None (the default), or Function
	// for the reset of its PCI function. Shares and partitions of a device are not reset.
	Reset Reset `json:"reset,omitempty"`

	// ResetMethods are the permitted reset methods of the kernel, in order: flr, bus and others
	// from the function's attribute reset_method. The agent writes them to that attribute, where
	// they remain. By default, the kernel chooses the method.
	ResetMethods []string `json:"resetMethods,omitempty"`
}

// Reset determines how a device is reset.
type Reset string

// The resets.
const (
	// ResetNone resets nothing.
	ResetNone Reset = "None"

	// ResetFunction resets the PCI function of the device.
	ResetFunction Reset = "Function"
)

// OnDemand configures devices that are created on demand.
type OnDemand struct {
	// KeepSeconds is how long an unused device is kept before it is removed. The default is 300.
	KeepSeconds *int `json:"keepSeconds,omitempty"`

	// VirtualFunctions are physical functions whose virtual functions are created when the first
	// one is needed. For each physical function, the first matching entry applies.
	VirtualFunctions []OnDemandVirtualFunctions `json:"virtualFunctions,omitempty"`

	// Partitions are devices that can be partitioned when a partition is needed: NVIDIA GPUs in MIG
	// mode, and AMD GPUs with compute partitions.
	Partitions []Selector `json:"partitions,omitempty"`

	// MPS selects NVIDIA GPUs that claims can use with a control daemon of their own, and
	// TimeSlices selects NVIDIA GPUs whose time slice claims can set. chandler-host --sharing-daemons
	// must run on the node.
	MPS        []Selector `json:"mps,omitempty"`
	TimeSlices []Selector `json:"timeSlices,omitempty"`
}

// OnDemandVirtualFunctions allows the creation of virtual functions for the selected physical
// functions of network adapters. An adapter that already has virtual functions is not changed.
type OnDemandVirtualFunctions struct {
	Selector `json:",inline"`

	// Count is the number of virtual functions for each physical function, all created at once. The
	// default, and the upper limit, is the adapter's maximum.
	Count int `json:"count,omitempty"`
}
