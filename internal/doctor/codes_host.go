package doctor

var hostCodes = []Code{
	{
		ID: "CH0401", Says: "the IOMMU is off, and a device is bound to vfio", Result: Failed, Symptoms: []Symptom{DeviceMissing, WithoutDevice},
		Looks: "Whether the host has IOMMU groups while functions are bound to a vfio driver.",
		Comes: "VT-d or AMD-Vi is off in the firmware, or the kernel was started without intel_iommu=on or amd_iommu=on.",
		Why:   "Without an IOMMU a device could reach all memory of the host, so vfio gives it to nobody.",
		Fixes: []Fix{{"cat /proc/cmdline", "Shows the kernel's command line. Add the option to your boot loader's configuration."}, {"sudo reboot", "Starts the kernel with it."}},
	},
	{
		ID: "CH0402", Says: "an IOMMU group spans devices that are offered apart", Result: Warning, Symptoms: []Symptom{WithoutDevice},
		Looks: "Whether a group has both functions that are bound to vfio and functions that the host drives.",
		Comes: "The functions share an IOMMU group because the bridge above them lacks ACS, and only some of them were bound to vfio.",
		Why:   "The kernel opens a group only when all of its functions are bound to vfio or to nothing: the group is not viable.",
		Fixes: []Fix{{`sudo sh -c "echo vfio-pci > /sys/bus/pci/devices/ADDRESS/driver_override"`, "Has vfio-pci take the other function, once it is unbound and probed again."}},
	},
	{
		ID: "CH0403", Says: "a module that a device needs is not loaded", Result: Warning, Symptoms: []Symptom{DeviceMissing, AfterARestart},
		Looks: "Whether the driver that a function is to have by driver_override is loaded, and kvm where the processors can run virtual machines.",
		Comes: "The module is loaded by hand and not at each start, or is not installed for the running kernel.",
		Why:   "Without it the function has no driver, and /dev/kvm is missing.",
		Fixes: []Fix{{"sudo modprobe MODULE", "Loads it now."}, {"echo MODULE | sudo tee /etc/modules-load.d/MODULE.conf", "Loads it at each start."}},
	},
	{
		ID: "CH0404", Says: "SELinux confines the agent as any container", Result: Failed, Symptoms: []Symptom{AgentDown},
		Looks: "Whether SELinux is enforcing, and the type that the agent's process has.",
		Comes: "The agent's pod has no SELinux type, so the runtime gives it container_t.",
		Why:   "container_t may not connect to the kubelet's sockets. The type container_device_plugin_t of the package container-selinux may.",
		Fixes: []Fix{
			{`kubectl -n chandler patch daemonset chandler --type=merge -p '{"spec":{"template":{"spec":{"securityContext":{"seLinuxOptions":{"type":"container_device_plugin_t"}}}}}}'`, "Gives the agent that type."},
			{"sudo ausearch -m avc -ts recent", "Shows what SELinux refused."},
		},
	},
	{
		ID: "CH0405", Says: "the clock differs from the API server's", Result: Warning, Symptoms: []Symptom{WrongEverybody, AgentDown},
		Looks: "The node's clock against the time in the API server's answer. More than 30 seconds count.",
		Comes: "No time service runs on the node, or it cannot reach its servers.",
		Why:   "Certificates and tokens count as not valid yet or as expired, and taints and Events have times that mislead.",
		Fixes: []Fix{{"timedatectl status", "Shows whether the clock is synchronised."}, {"sudo systemctl restart systemd-timesyncd || sudo systemctl restart chronyd", "Synchronises it."}},
	},
	{
		ID: "CH0406", Says: "the disk of the agent's records is full", Result: Failed, Symptoms: []Symptom{Creating, Terminating, WrongEverybody},
		Looks: "The room that is left where records and CDI specs are written. Less than 64 MiB counts.",
		Comes: "Images, logs or emptyDir volumes have filled the disk.",
		Why:   "The agent writes down who has what before it gives a device out. It gives nothing out that it cannot write down.",
		Fixes: []Fix{{"sudo crictl rmi --prune", "Removes images that nobody uses."}, {"sudo journalctl --vacuum-size=200M", "Removes old logs."}},
	},
	{
		ID: "CH0407", Says: "the disk of the agent's records has no inodes left", Result: Failed, Symptoms: []Symptom{Creating, Terminating, WrongEverybody},
		Looks: "The inodes that are left where records and CDI specs are written. Fewer than 1000 count.",
		Comes: "Very many small files.",
		Why:   "No more files can be made, although df shows room.",
		Fixes: []Fix{{"sudo du --inodes -xd1 / | sort -n | tail", "Shows where they are."}},
	},
	{
		ID: "CH0408", Says: "the agent's directory cannot be written to", Result: Failed, Symptoms: []Symptom{Creating, AgentDown},
		Looks: "Whether the agent's directory below the kubelet's is on a file system that is writable. Nothing is written to find that out.",
		Comes: "The file system was mounted read-only, by the kernel after errors or by an image of the host.",
		Why:   "No claim can be prepared, and no device allocated.",
		Fixes: []Fix{{"findmnt -T /var/lib/kubelet", "Shows the file system and how it is mounted."}, {"sudo dmesg | grep -i 'remounting filesystem read-only'", "Shows whether the kernel made it so."}},
	},
	{
		ID: "CH0409", Says: "--host-root does not name the root of a host", Result: Failed, Symptoms: []Symptom{DeviceMissing},
		Looks: "Whether the kernel's own /proc is below the directory that --host-root names.",
		Comes: "The option names a wrong directory, or the volume of the agent's pod is not the host's /proc.",
		Why:   "The files that are read there say nothing of this machine.",
		Fixes: []Fix{{"chandler doctor --host-root=/", "Looks at this machine."}},
	},
}
