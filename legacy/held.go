package legacy

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/kubeletapi"
	"chandler.dev/legacy/list"
)

// checkpointFile is the name of the checkpoint in the kubelet's device-plugins directory.
const checkpointFile = "kubelet_internal_checkpoint"

// ReadHoldings returns the allocations of containers in the kubelet's checkpoint. The argument is
// the kubelet's device-plugins directory. Some of the containers may have ended; see
// [AllocatedIDs].
func ReadHoldings(dir fs.FS) ([]kubeletapi.Holding, error) {
	c, err := readCheckpoint(dir)
	var holdings []kubeletapi.Holding
	for _, entry := range c.Data.PodDeviceEntries {
		h := kubeletapi.Holding{PodUID: entry.PodUID, Container: entry.ContainerName, Resource: entry.ResourceName}
		for _, some := range entry.DeviceIDs {
			h.IDs = append(h.IDs, some...)
		}
		h.Nodes = nodesIn(entry.AllocResp)
		holdings = append(holdings, h)
	}
	return holdings, err
}

// nodesIn returns the host paths of the device nodes in a plugin's answer. For an unreadable answer
// it returns none, like the kubelet.
func nodesIn(answer []byte) (paths []string) {
	var given pluginapi.ContainerAllocateResponse
	if proto.Unmarshal(answer, &given) != nil {
		return nil
	}
	for _, node := range given.Devices {
		paths = append(paths, node.HostPath)
	}
	return paths
}

// AllocatedIDs returns the IDs of containers in the kubelet's checkpoint, by resource. The argument
// is the kubelet's device-plugins directory. Some of the containers may have ended: the kubelet
// keeps their entries until its next allocation.
func AllocatedIDs(dir fs.FS) (map[string][]string, error) {
	holdings, err := ReadHoldings(dir)
	ids := make(map[string][]string)
	for _, h := range holdings {
		ids[h.Resource] = append(ids[h.Resource], h.IDs...)
	}
	return ids, err
}

// readCheckpoint returns the checkpoint in a directory. If there is none, it returns an empty
// checkpoint.
func readCheckpoint(dir fs.FS) (c checkpoint, err error) {
	data, err := fs.ReadFile(dir, checkpointFile)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &c)
	}
	if err != nil {
		return checkpoint{}, fmt.Errorf("read the kubelet's checkpoint of devices: %w", err)
	}
	return c, nil
}

// HeldDevices returns the containers that have the devices, by device name, for all device plugins.
// It reads the checkpoint in the device-plugins directory, which does not depend on the root of the
// kubelet (pkg/kubelet/cm/devicemanager/manager.go, NewManagerImpl, in 1.25 to 1.37), and the
// directories of pods below the root. It is for programs other than the agent, and only reads.
func HeldDevices(host fs.FS, kubeletRoot, devicePlugins string, known []discovery.Device) (map[string]string, error) {
	held := make(map[string]string)
	data, err := fs.ReadFile(host, path.Join(devicePlugins, checkpointFile))
	if errors.Is(err, fs.ErrNotExist) {
		return held, nil
	}
	if err == nil {
		err = addCheckpoint(held, data, list.CatalogueOf(known), func(uid string) bool {
			_, err := fs.Stat(host, path.Join(kubeletRoot, "pods", uid))
			return err == nil || !errors.Is(err, fs.ErrNotExist)
		})
	}
	if err != nil {
		err = fmt.Errorf("read the kubelet's checkpoint of devices: %w", err)
	}
	return held, err
}

// checkpoint is the kubelet's file of allocations
// (pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go, in 1.25 to 1.37). Kubelets up to 1.19
// wrote IDs without NUMA nodes, and kubelets up to 1.31 can read these.
type checkpoint struct {
	Data struct {
		PodDeviceEntries []struct {
			PodUID        string
			ContainerName string
			ResourceName  string
			DeviceIDs     map[string][]string // by NUMA node
			AllocResp     []byte              // the plugin's answer
		}
	}
}

// addCheckpoint adds the allocations in the kubelet's checkpoint. The kubelet keeps entries of
// ended pods until its next allocation; such pods no longer have a directory.
func addCheckpoint(held map[string]string, data []byte, known list.Catalogue, exists func(uid string) bool) error {
	if len(data) == 0 {
		return nil
	}
	var c checkpoint
	if err := json.Unmarshal(data, &c); err != nil {
		return err
	}
	for _, entry := range c.Data.PodDeviceEntries {
		if !exists(entry.PodUID) {
			continue
		}
		who := fmt.Sprintf("container %s of the pod with UID %s", entry.ContainerName, entry.PodUID)
		for _, ids := range entry.DeviceIDs {
			for _, id := range ids {
				for _, name := range namesOf(known, id, entry.AllocResp) {
					held[name] = who
				}
			}
		}
	}
	return nil
}

// namesOf returns the names of the devices of an ID, which may depend on the plugin's answer. A PCI
// address always stands for the function with the address, whatever the plugin.
func namesOf(known list.Catalogue, id string, answer []byte) (names []string) {
	if sysfs.IsPCIAddress(id) {
		names = append(names, discovery.DeviceName(sysfs.Device{Path: id}))
	}
	u, _ := known.Find(id)
	if u == nil {
		u = known.WithNodes(id, nodesIn(answer))
	}
	if u != nil {
		names = append(names, u.DeviceNames()...)
	}
	return names
}
