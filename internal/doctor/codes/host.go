package codes

var hostCodes = []Code{
	{
		ID: "CH0401", Says: "the IOMMU is off, but a device is bound to vfio", Result: Failed, Symptoms: []Symptom{DeviceMissing, WithoutDevice},
		Looks: "Doctor checks whether functions are bound to a VFIO driver while the host has no IOMMU groups.",
		Comes: "VT-d or AMD-Vi is off in the firmware, or the kernel was started without intel_iommu=on or amd_iommu=on.",
		Why:   "Without an IOMMU, a device could access all memory of the host, so VFIO does not allow its use.",
		Fixes: []Fix{{"cat /proc/cmdline", "Shows the kernel command line. Add the option to the configuration of your boot loader."}, {"sudo reboot", "Starts the kernel with the option."}},
	},
	{
		ID: "CH0402", Says: "an IOMMU group contains both VFIO devices and devices of the host", Result: Warning, Symptoms: []Symptom{WithoutDevice},
		Looks: "Doctor checks whether a group has both functions that are bound to vfio and functions with a driver of the host.",
		Comes: "The functions share an IOMMU group because the bridge above them lacks ACS, and only some of them were bound to vfio.",
		Why:   "The kernel opens a group only if all of its functions are bound to vfio or have no driver. Otherwise, the group is not viable.",
		Fixes: []Fix{{`sudo sh -c "echo vfio-pci > /sys/bus/pci/devices/ADDRESS/driver_override"`, "Makes vfio-pci take the other function, after you unbind and probe it."}},
	},
	{
		ID: "CH0403", Says: "a required kernel module is not loaded", Result: Warning, Symptoms: []Symptom{DeviceMissing, AfterARestart},
		Looks: "Doctor checks that the driver in driver_override of a function is loaded, and that kvm is loaded if the processors support virtualization.",
		Comes: "The module was loaded manually and is not loaded at boot, or is not installed for the running kernel.",
		Why:   "The function has no driver, or /dev/kvm is missing.",
		Fixes: []Fix{{"sudo modprobe MODULE", "Loads the module now."}, {"echo MODULE | sudo tee /etc/modules-load.d/MODULE.conf", "Loads the module at each boot."}},
	},
	{
		ID: "CH0404", Says: "SELinux blocks the agent", Result: Failed, Symptoms: []Symptom{AgentDown},
		Looks: "Doctor checks whether SELinux is enforcing, and the SELinux type of the agent's process.",
		Comes: "The agent's pod has no SELinux type, so the runtime uses container_t.",
		Why:   "container_t cannot connect to the kubelet's sockets. container_device_plugin_t, from the package container-selinux, can.",
		Fixes: []Fix{
			{HelmSet + " --set seLinux.type=container_device_plugin_t", "Gives the agent this type."},
			{SELinuxPatch, "Does the same with the plain manifests."},
			{"sudo ausearch -m avc -ts recent", "Shows what SELinux denied."},
		},
	},
	{
		ID: "CH0405", Says: "the clock differs from the API server's", Result: Warning, Symptoms: []Symptom{WrongEverybody, AgentDown},
		Looks: "Doctor compares the node's clock with the time in the API server's response. A difference above 30 seconds is reported.",
		Comes: "No time service runs on the node, or it cannot reach its servers.",
		Why:   "Certificates and tokens appear to be expired or not yet valid, and taints and Events have misleading times.",
		Fixes: []Fix{{"timedatectl status", "Shows whether the clock is synchronized."}, {"sudo systemctl restart systemd-timesyncd || sudo systemctl restart chronyd", "Synchronizes the clock."}},
	},
	{
		ID: "CH0406", Says: "the disk of the agent's records is full", Result: Failed, Symptoms: []Symptom{Creating, Terminating, WrongEverybody},
		Looks: "Doctor checks the free space where records and CDI specs are written. Less than 64 MiB is reported.",
		Comes: "Images, logs or emptyDir volumes have filled the disk.",
		Why:   "The agent records each allocation before it allocates a device. If it cannot write the record, it does not allocate the device.",
		Fixes: []Fix{{"sudo crictl rmi --prune", "Removes unused images."}, {"sudo journalctl --vacuum-size=200M", "Removes old logs."}},
	},
	{
		ID: "CH0407", Says: "the disk of the agent's records has no free inodes", Result: Failed, Symptoms: []Symptom{Creating, Terminating, WrongEverybody},
		Looks: "Doctor checks the free inodes where records and CDI specs are written. Fewer than 1000 are reported.",
		Comes: "The disk has a very large number of small files.",
		Why:   "No files can be created, although df shows free space.",
		Fixes: []Fix{{"sudo du --inodes -xd1 / | sort -n | tail", "Shows the directories with the most files."}},
	},
	{
		ID: "CH0408", Says: "the agent's directory is not writable", Result: Failed, Symptoms: []Symptom{Creating, AgentDown},
		Looks: "Doctor checks whether the file system of the agent's directory below the kubelet's is writable. It writes nothing to find out.",
		Comes: "The file system is mounted read-only, by the kernel after errors or by the image of the host.",
		Why:   "No claim can be prepared, and no device can be allocated.",
		Fixes: []Fix{{"findmnt -T /var/lib/kubelet", "Shows the file system and its mount options."}, {"sudo dmesg | grep -i 'remounting filesystem read-only'", "Shows whether the kernel remounted it read-only."}},
	},
	{
		ID: "CH0409", Says: "--host-root is not the root directory of a host", Result: Failed, Symptoms: []Symptom{DeviceMissing},
		Looks: "Doctor checks that the kernel's /proc exists below the directory that --host-root names, if the directory has the kernel's /sys. A copy of a host has neither, and is not checked.",
		Comes: "The option names another directory, or the volume of the agent's pod is not the host's /proc.",
		Why:   "Files below that directory do not describe this machine.",
		Fixes: []Fix{{"chandler doctor --host-root=/", "Checks this machine."}},
	},
}
