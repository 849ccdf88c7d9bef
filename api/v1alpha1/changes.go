package v1alpha1

// Rebinding lets the selected devices be given to a vfio driver for those who ask for it.
// All functions of an IOMMU group must be selected, but for bridges and those without a
// driver; they are then given out together.
type Rebinding struct {
	Selector `json:",inline"`

	// Driver is the vfio driver, which must be loaded: vfio-pci (the default), or one that
	// can do more for the device, such as mlx5_vfio_pci.
	Driver string `json:"driver,omitempty"`
}

// Handover keeps the selected devices from their next owner until no process of the pods that
// had them has them open. A process that the agent cannot see keeps nothing. Open devices, which any number of
// containers may have, are left out.
type Handover struct {
	Selector `json:",inline"`

	// Reset says how a device is reset then: None (the default), or Function for the reset of
	// its PCI function. Shares and partitions of a device are not reset.
	Reset Reset `json:"reset,omitempty"`

	// ResetMethods are the kernel's ways to reset the function that may be taken, in this
	// order: flr, bus and others that the function's attribute reset_method lists, where they
	// are written and stay. The kernel chooses if they are left out.
	ResetMethods []string `json:"resetMethods,omitempty"`
}

// Reset is how a device is reset.
type Reset string

// The resets.
const (
	// ResetNone resets nothing.
	ResetNone Reset = "None"

	// ResetFunction has the kernel reset the PCI function of the device.
	ResetFunction Reset = "Function"
)

// OnRequest are devices that are made when somebody gets them.
type OnRequest struct {
	// KeepSeconds is how long what was made stays when nobody has it any more, 300 if it is
	// left out.
	KeepSeconds *int `json:"keepSeconds,omitempty"`

	// VirtualFunctions are physical functions that get virtual ones when somebody gets one.
	// The first that selects a physical function counts.
	VirtualFunctions []OnRequestVirtualFunctions `json:"virtualFunctions,omitempty"`

	// Partitions are devices that may be divided when somebody gets a partition of one: GPUs
	// of NVIDIA in MIG mode, and GPUs of AMD that have compute partitions.
	Partitions []Selector `json:"partitions,omitempty"`

	// MPS are GPUs of NVIDIA for which claims may have an MPS daemon of their own, and TimeSlices
	// those of which claims may set the time slice. chandler-nvml --upkeep must run on the node.
	MPS        []Selector `json:"mps,omitempty"`
	TimeSlices []Selector `json:"timeSlices,omitempty"`
}

// OnRequestVirtualFunctions lets the selected physical functions of network adapters have
// virtual ones on request. An adapter that has virtual functions already stays as it is.
type OnRequestVirtualFunctions struct {
	Selector `json:",inline"`

	// Count is how many virtual functions each of them gets, all at once; as many as it can
	// have if it is left out, or can have fewer.
	Count int `json:"count,omitempty"`
}
