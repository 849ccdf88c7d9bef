package simulation

import (
	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
)

// equipAgent sets the disk and the kubelet in an agent's configuration.
func (w *World) equipAgent(config *agent.Config, i *incarnation) {
	config.Disk = w.disk.View(i.diskGate)
	config.HostFiles.Dirs = discovery.FileDirs(w.machine.families)
	i.process.Succeeded = config.Lock.Awaited
	config.Kubelet.DevicePlugins = i.process
	config.Kubelet.Pods = i.process.Pods
	config.Kubelet.Allocated = i.process.AllocatedIDs
}
