package doctor

var deviceCodes = []Code{
	{
		ID: "CH0301", Says: "a device is unhealthy", Result: Failed, Symptoms: []Symptom{DeviceMissing, DeviceSlow},
		Looks: "The health of the device, as its driver says it, or the vendor's library where there is one.",
		Comes: "The hardware or its firmware has failed, or its driver asks for a reset. The cause that doctor prints is the driver's own word.",
		Why:   "No new pod gets the device. A pod that has it was told so by an Event, and by a taint where DRA offers the device.",
		Fixes: []Fix{
			{"kubectl -n NAMESPACE delete pod POD", "Ends the pod, which releases the device. A device can only be reset while no process uses it."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/devices/ADDRESS/reset"`, "Resets the PCI function, if it can do that. Vendors' tools do more: nvidia-smi --gpu-reset, amd-smi reset, hl-smi."},
			{"sudo dmesg | grep ADDRESS", "Shows what the kernel says of the device."},
		},
	},
	{
		ID: "CH0302", Says: "a device cannot be read", Result: Failed, Symptoms: []Symptom{DeviceMissing},
		Looks: "Whether everything that identifies a device can be read in /sys and /proc.",
		Comes: "The driver has lost the device, is being loaded, or its module is loaded and its helper files are not there. Reads of a device that has fallen off the bus fail with an input/output error.",
		Why:   "Nobody knows whether the device works, so no new pod gets it until it can be read again.",
		Fixes: []Fix{
			{"sudo dmesg | grep ADDRESS", "Shows what the kernel says of the device."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/devices/ADDRESS/remove"`, "Takes the device off the bus."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/rescan"`, "Finds it again, and binds its driver anew."},
		},
	},
	{
		ID: "CH0303", Says: "a device that somebody has is gone", Result: Failed, Symptoms: []Symptom{DeviceMissing, Terminating},
		Looks: "Whether each device that a claim or a container has is still on the host.",
		Comes: "It was unplugged, fell off the bus, or somebody changed its partitions or virtual functions while a pod had it.",
		Why:   "The pod goes on without its device, and most programs hang or fail then.",
		Fixes: []Fix{
			{"kubectl -n NAMESPACE delete pod POD", "Lets go of what is gone."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/rescan"`, "Looks for it on the bus."},
		},
	},
	{
		ID: "CH0304", Says: "no driver is bound to a device", Result: Failed, Symptoms: []Symptom{DeviceMissing, AfterARestart},
		Looks: "Whether each accelerator on the PCI bus has a kernel driver.",
		Comes: "The driver's module is not installed or not loaded, is for another kernel after an upgrade, or was unbound by hand.",
		Why:   "Without a driver there is no device node, so the device can be given to nobody.",
		Fixes: []Fix{
			{`sudo modprobe "$(cat /sys/bus/pci/devices/ADDRESS/modalias)"`, "Loads the module that the kernel knows for it."},
			{`sudo sh -c "echo ADDRESS > /sys/bus/pci/drivers_probe"`, "Binds a driver that is loaded."},
		},
	},
	{
		ID: "CH0305", Says: "a device node is missing, or has other numbers", Result: Failed, Symptoms: []Symptom{DeviceMissing, WithoutDevice},
		Looks: "Whether each device node that the kernel names is in /dev, with the numbers that the kernel says.",
		Comes: "udev did not run, somebody removed or made the node by hand, or the vendor's tool that makes it did not run: NVIDIA's nodes are made by nvidia-modprobe.",
		Why:   "A container would get no device, or another one.",
		Fixes: []Fix{
			{"sudo udevadm trigger --action=add", "Has udev make the nodes again."},
			{"sudo nvidia-modprobe -u -c=0", "Makes those of NVIDIA's GPUs, once for each number."},
		},
	},
	{
		ID: "CH0306", Says: "a device is too hot", Result: Failed, Symptoms: []Symptom{DeviceSlow},
		Looks: "Whether a sensor of the device is at its critical limit.",
		Comes: "A fan, its control or the air in the room has failed.",
		Why:   "The device slows down or switches itself off. No new pod gets it before it has cooled.",
		Fixes: []Fix{{"grep . /sys/bus/pci/devices/ADDRESS/hwmon/hwmon*/temp*_input", "Shows its temperatures in thousandths of a degree."}},
	},
	{
		ID: "CH0307", Says: "the PCIe link is degraded", Result: Warning, Symptoms: []Symptom{DeviceSlow},
		Looks: "Whether the link has the lanes, and for network adapters the speed, that both ends can do.",
		Comes: "The link came up narrower or slower than it could: a dirty or loose contact, a riser, or a bad cable.",
		Why:   "The device works and has less bandwidth. It is still given out, unless you give the condition link-degraded another severity.",
		Fixes: []Fix{
			{`sudo sh -c "echo 1 > /sys/bus/pci/devices/ADDRESS/remove"`, "Takes the device off the bus while nobody has it."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/rescan"`, "Trains the link anew. If it stays so, reseat the card."},
		},
	},
	{
		ID: "CH0308", Says: "fatal PCIe errors were counted", Result: Warning, Symptoms: []Symptom{DeviceSlow},
		Looks: "The kernel's counts of fatal errors since it found the device and the ports above it: those of the device (aer_dev_fatal), of the port above it, and those that the root port was told of (aer_rootport_total_err_fatal) and no device has.",
		Comes: "The link was lost or reset at least once since the machine started. Before 6.16 the kernel counts a fatal error of a device at the root port only, so all devices below that port are named.",
		Why:   "It may happen again. A count begins anew when the device is found anew, that of a root port when the machine starts.",
		Fixes: []Fix{{"sudo dmesg | grep -i aer", "Shows when, and which errors."}},
	},
	{
		ID: "CH0309", Says: "something of a device could not be read or described", Result: Warning, Symptoms: []Symptom{DeviceMissing},
		Looks: "The problems that discovery reports, the same as chandler discover prints on standard error.",
		Comes: "A file of the driver is missing, empty or not as its documentation says, or an expression of the configuration cannot be evaluated for the device.",
		Why:   "The device is offered without that attribute, or left out if it cannot be told what it is. Selectors that read the attribute do not match it.",
		Fixes: []Fix{{"chandler discover -o json", "Prints the device and the problem."}, {"chandler record -o HOST.host", "Records the host for a bug report."}},
	},
	{
		ID: "CH0310", Says: "a device hangs", Result: Failed, Symptoms: []Symptom{DeviceMissing, WrongEverybody},
		Looks: "Whether reads of /sys and /proc return within ten seconds.",
		Comes: "The driver waits for hardware that does not answer, and holds a lock meanwhile.",
		Why:   "The device is left alone. Programs that ask its driver hang too, such as the vendor's command-line tool.",
		Fixes: []Fix{
			{`sudo sh -c "echo 1 > /sys/bus/pci/devices/ADDRESS/reset"`, "Resets the function. This may hang as well."},
			{"sudo reboot", "Helps if a reset does not."},
		},
	},
	{
		ID: "CH0311", Says: "two devices say that they are the same", Result: Warning, Symptoms: []Symptom{DeviceMissing, NoEffect},
		Looks: "Whether serial numbers, UUIDs and classic IDs are unique on the host, and whether one family alone describes a device.",
		Comes: "Cards with a made-up serial number, or paths in the configuration that name a node which a family describes.",
		Why:   "A value that two devices share identifies neither. They are known by their place on the bus alone.",
		Fixes: []Fix{{"chandler discover -o json", "Shows both devices."}},
	},
	{
		ID: "CH0312", Says: "a function is bound to vfio and cannot be opened", Result: Warning, Symptoms: []Symptom{DeviceMissing, WithoutDevice},
		Looks: "Whether the kernel has a node for the function, or for its IOMMU group, and one through which it is used: /dev/vfio/GROUP and /dev/vfio/vfio, or /dev/vfio/devices/vfioN and /dev/iommu.",
		Comes: "The IOMMU is off, or the kernel was built or booted without that way to use vfio.",
		Why:   "A virtual machine or a user-space driver cannot open the function, so it is not offered.",
		Fixes: []Fix{
			{"sudo modprobe vfio-pci", "Loads vfio and its nodes."},
			{"cat /proc/cmdline", "Shows whether the IOMMU is asked for: intel_iommu=on or amd_iommu=on."},
		},
	},
	{
		ID: "CH0313", Says: "the configuration leaves out all devices", Result: Warning, Symptoms: []Symptom{DeviceMissing, NoEffect},
		Looks: "Whether there are devices, and the entries exclude and resources leave none of them.",
		Comes: "A selector says more than was meant, such as exclude with an expression that is true of every device.",
		Why:   "The node offers nothing.",
		Fixes: []Fix{{"chandler discover --config config.yaml", "Prints what is left with a configuration, before you apply it."}},
	},
	{
		ID: "CH0314", Says: "a device does not answer on the bus", Result: Failed, Symptoms: []Symptom{DeviceMissing, DeviceSlow},
		Looks: "Whether the configuration space of a function that is awake reads as all ones, as it does when nothing answers. It is looked at if the link seems to have 63 lanes. Of a virtual function, its physical function is looked at too.",
		Comes: "The device has fallen off the bus, is without power, or was not reset after a fatal error. The kernel still has it, since nothing told it that the device is gone.",
		Why:   "Programs that use the device hang or read nonsense. No new pod gets it.",
		Fixes: []Fix{
			{"sudo dmesg | grep ADDRESS", "Shows what the kernel says of the device."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/devices/ADDRESS/remove"`, "Takes the device off the bus, when nobody has it any more."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/rescan"`, "Finds it again if it answers. If it does not, only a power cycle of the machine helps."},
		},
	},
}
