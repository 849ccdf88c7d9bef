package codes

var deviceCodes = []Code{
	{
		ID: "CH0301", Says: "a device is unhealthy", Result: Failed, Symptoms: []Symptom{DeviceMissing, DeviceSlow},
		Looks: "Doctor reads the health of the device, as reported by its driver or, if available, by the vendor's library.",
		Comes: "The hardware or its firmware has failed, or the driver requires a reset. The cause that doctor prints is the driver's own message.",
		Why:   "No new pod gets the device. The pod that uses the device has an Event, and the device has a taint if it is offered by DRA.",
		Fixes: []Fix{
			{"kubectl -n NAMESPACE delete pod POD", "Ends the pod, which releases the device. A device can be reset only while no process uses it."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/devices/ADDRESS/reset"`, "Resets the PCI function, if it supports a reset. Vendor tools do more: nvidia-smi --gpu-reset, amd-smi reset --gpureset, hl-smi -r."},
			{"sudo dmesg | grep ADDRESS", "Shows the kernel's messages about the device."},
		},
	},
	{
		ID: "CH0302", Says: "a device cannot be read", Result: Failed, Symptoms: []Symptom{DeviceMissing},
		Looks: "Doctor checks that all files that identify a device in /sys and /proc can be read.",
		Comes: "The driver has lost the device or is being loaded, or its module is loaded but its helper files are missing. Reads of a device that has fallen off the bus fail with an input/output error.",
		Why:   "Chandler cannot determine whether the device works. No new pod gets it until it can be read again.",
		Fixes: []Fix{
			{"sudo dmesg | grep ADDRESS", "Shows the kernel's messages about the device."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/devices/ADDRESS/remove"`, "Removes the device from the bus."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/rescan"`, "Finds the device again, and binds its driver again."},
		},
	},
	{
		ID: "CH0303", Says: "an allocated device is missing from the host", Result: Failed, Symptoms: []Symptom{DeviceMissing, Terminating},
		Looks: "Doctor checks that each device that is allocated to a claim or a container still exists on the host.",
		Comes: "The device was unplugged or fell off the bus, or its partitions or virtual functions were changed while a pod used it.",
		Why:   "The pod continues without its device. Most programs then hang or fail.",
		Fixes: []Fix{
			{"kubectl -n NAMESPACE delete pod POD", "Ends the pod, which releases the missing device."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/rescan"`, "Searches the bus for the device."},
		},
	},
	{
		ID: "CH0304", Says: "a device has no kernel driver", Result: Failed, Symptoms: []Symptom{DeviceMissing, AfterARestart},
		Looks: "Doctor checks that each accelerator on the PCI bus has a kernel driver.",
		Comes: "The driver's module is not installed or not loaded, is for another kernel after an upgrade, or was unbound manually.",
		Why:   "Without a driver there is no device node, so the device cannot be allocated.",
		Fixes: []Fix{
			{`sudo modprobe "$(cat /sys/bus/pci/devices/ADDRESS/modalias)"`, "Loads the module that the kernel selects for the device."},
			{`sudo sh -c "echo ADDRESS > /sys/bus/pci/drivers_probe"`, "Binds a loaded driver."},
		},
	},
	{
		ID: "CH0305", Says: "a device node is missing or has different numbers", Result: Failed, Symptoms: []Symptom{DeviceMissing, WithoutDevice},
		Looks: "Doctor checks that each device node of the kernel exists in /dev, with the kernel's major and minor numbers.",
		Comes: "udev did not run, the node was removed or created manually, the vendor's tool that creates it did not run, or the driver failed before it created the node. For NVIDIA, the tool is nvidia-modprobe.",
		Why:   "A container would get no device, or a different device.",
		Fixes: []Fix{
			{"sudo udevadm trigger --action=add", "Makes udev create the nodes again."},
			{`sudo sh -c "echo ADDRESS > /sys/bus/pci/devices/ADDRESS/driver/unbind; echo ADDRESS > /sys/bus/pci/drivers_probe"`, "If the driver has created no node, binds the driver again. First read the kernel's messages about the device."},
			{"sudo nvidia-modprobe -u -c=0", "Creates the nodes of NVIDIA GPUs. Run it once for each GPU number."},
		},
	},
	{
		ID: "CH0306", Says: "a device is too hot", Result: Failed, Symptoms: []Symptom{DeviceSlow},
		Looks: "Doctor checks whether a temperature sensor of the device has reached its critical limit.",
		Comes: "A fan, its control or the air conditioning of the room has failed.",
		Why:   "The device slows down or switches off. No new pod gets it until it has cooled down.",
		Fixes: []Fix{{"grep . /sys/bus/pci/devices/ADDRESS/hwmon/hwmon*/temp*_input", "Shows the temperatures of the device in thousandths of a degree."}},
	},
	{
		ID: "CH0307", Says: "the PCIe link of a device is degraded", Result: Warning, Symptoms: []Symptom{DeviceSlow},
		Looks: "Doctor checks that the link has the lanes that both ends support and, for network adapters, the speed.",
		Comes: "The link was established with fewer lanes or a lower speed than possible: a dirty or loose contact, a riser, or a faulty cable.",
		Why:   "The device works with less bandwidth. It is still allocated, unless you configure another severity for the condition link-degraded.",
		Fixes: []Fix{
			{`sudo sh -c "echo 1 > /sys/bus/pci/devices/ADDRESS/remove"`, "Removes the device from the bus. Do this only while no pod uses it."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/rescan"`, "Trains the link again. If it is still degraded, reseat the card."},
		},
	},
	{
		ID: "CH0308", Says: "the kernel has counted fatal PCIe errors", Result: Warning, Symptoms: []Symptom{DeviceSlow},
		Looks: "Doctor reads the kernel's counts of fatal errors since it found the device and the ports above it: those of the device (aer_dev_fatal), those of the port above it, and those that were reported to the root port (aer_rootport_total_err_fatal) and that no device has.",
		Comes: "The link was lost or reset at least once since the machine started. Before Linux 6.16, the kernel counts a fatal error of a device at the root port only, so all devices below that port are listed.",
		Why:   "The error may happen again. The count of a device starts at zero when the device is found again, and the count of a root port when the machine starts.",
		Fixes: []Fix{{"sudo dmesg | grep -i aer", "Shows when the errors occurred, and which errors."}},
	},
	{
		ID: "CH0309", Says: "some facts about a device cannot be read", Result: Warning, Symptoms: []Symptom{DeviceMissing},
		Looks: "Doctor prints the problems that discovery reports. chandler discover prints the same problems on standard error.",
		Comes: "A file of the driver is missing, empty or not in the documented form, or an expression of the configuration cannot be evaluated for the device.",
		Why:   "The device is offered without the attribute, or is left out if it cannot be identified. Selectors that read the attribute do not match the device.",
		Fixes: []Fix{{"sudo dmesg | grep ADDRESS", "Shows the kernel's messages about the device."}, {"chandler record -o node.host", "Records the files that discovery reads, for a bug report."}},
	},
	{
		ID: "CH0310", Says: "a device hangs", Result: Failed, Symptoms: []Symptom{DeviceMissing, WrongEverybody},
		Looks: "Doctor checks that reads of /sys and /proc return within ten seconds.",
		Comes: "The driver waits for hardware that does not respond, and holds a lock meanwhile.",
		Why:   "Chandler does not use the device. Programs that call its driver hang too, such as the vendor's command-line tool.",
		Fixes: []Fix{
			{`sudo sh -c "echo 1 > /sys/bus/pci/devices/ADDRESS/reset"`, "Resets the function. This may hang as well."},
			{"sudo reboot", "Restarts the machine, if a reset does not help."},
		},
	},
	{
		ID: "CH0311", Says: "two devices have the same identity", Result: Warning, Symptoms: []Symptom{DeviceMissing, NoEffect},
		Looks: "Doctor checks that serial numbers, UUIDs and device plugin IDs are unique on the host, and that only one family describes each device.",
		Comes: "Cards have a placeholder as serial number, or paths in the configuration name a node that a family describes.",
		Why:   "A value that two devices share identifies neither. Chandler identifies such devices by their position on the bus only.",
		Fixes: []Fix{{"chandler record -o node.host", "Records the files that discovery reads, for a bug report."}},
	},
	{
		ID: "CH0312", Says: "a function is bound to vfio but cannot be opened", Result: Warning, Symptoms: []Symptom{DeviceMissing, WithoutDevice},
		Looks: "Doctor checks for the nodes through which the function can be used: /dev/vfio/GROUP and /dev/vfio/vfio, or /dev/vfio/devices/vfioN and /dev/iommu.",
		Comes: "The IOMMU is off, or the kernel was built or started without this VFIO interface.",
		Why:   "A virtual machine or a user-space driver cannot open the function, so it is not offered.",
		Fixes: []Fix{
			{"grep -e CONFIG_VFIO_GROUP -e CONFIG_VFIO_DEVICE_CDEV /boot/config-$(uname -r)", "Shows whether the kernel was built with an interface of VFIO. It requires one of these settings."},
			{"cat /proc/cmdline", "Shows whether the kernel command line turns the IOMMU on: intel_iommu=on or amd_iommu=on."},
		},
	},
	{
		ID: "CH0313", Says: "the configuration excludes all devices", Result: Warning, Symptoms: []Symptom{DeviceMissing, NoEffect},
		Looks: "Doctor checks whether devices exist, but none remain after the entries exclude and resources.",
		Comes: "A selector matches more devices than intended, such as an exclude expression that is true for every device.",
		Why:   "The node offers no devices.",
		Fixes: []Fix{{"chandler discover --config config.yaml", "Prints the devices that remain with a configuration, before you apply it."}},
	},
	{
		ID: "CH0314", Says: "a device does not respond on the bus", Result: Failed, Symptoms: []Symptom{DeviceMissing, DeviceSlow},
		Looks: "Doctor checks whether the configuration space of an active function reads as all ones, which means that no device responds. It reads the space if the link reports 63 lanes. For a virtual function, it also checks the physical function.",
		Comes: "The device has fallen off the bus, has no power, or was not reset after a fatal error. The kernel still lists it, because it was not notified of the removal.",
		Why:   "Programs that use the device hang or read invalid data. No new pod gets the device.",
		Fixes: []Fix{
			{"sudo dmesg | grep ADDRESS", "Shows the kernel's messages about the device."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/devices/ADDRESS/remove"`, "Removes the device from the bus. Do this once no pod uses it."},
			{`sudo sh -c "echo 1 > /sys/bus/pci/rescan"`, "Finds the device again if it responds. Otherwise, power-cycle the machine."},
		},
	},
	{
		ID: "CH0315", Says: "an expression of the configuration fails for devices", Result: Warning, Symptoms: []Symptom{NoEffect, DeviceMissing},
		Looks: "Doctor evaluates the expressions of the configuration for each device.",
		Comes: "The expression reads an attribute that the device does not have: the name is misspelled, or the attribute exists only for some devices.",
		Why:   "The entry does not apply to the device. For example, an exclude entry does not exclude it.",
		Fixes: []Fix{
			{"kubectl chandler validate config.yaml", "Warns of names that no device has, with the nearest name."},
			{GetValues, "Writes the values of the chart to a file. Correct the expression in its section `config`: `device.attributes[\"chandler.dev\"].?NAME.orValue(\"\")` has a value for devices without the attribute."},
			{SetValues, "Applies the file."},
			{EditConfig, "Opens the configuration of an installation by the plain manifests."},
		},
	},
}
