package legacy

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// Held returns which containers have which of the devices, by the devices'
// names, as files of the host say: the grants of the agent in stateDir, and what
// the kubelet, in its root, wrote down of every device plugin. It is for those
// who are not the agent, and only reads.
func Held(host fs.FS, stateDir, kubeletRoot string, known []discovery.Device) (map[string]string, error) {
	held := make(map[string]string)
	grants, err := readIfThere(host, path.Join(stateDir, grantsFile))
	if err == nil {
		err = addGrants(held, grants)
	}
	if err != nil {
		err = fmt.Errorf("read grants: %w", err)
	}
	data, checkpointErr := readIfThere(host, path.Join(kubeletRoot, "device-plugins/kubelet_internal_checkpoint"))
	if checkpointErr == nil {
		checkpointErr = addCheckpoint(held, data, known, func(uid string) bool {
			_, err := fs.Stat(host, path.Join(kubeletRoot, "pods", uid))
			return err == nil || !errors.Is(err, fs.ErrNotExist)
		})
	}
	if checkpointErr != nil {
		checkpointErr = fmt.Errorf("read the kubelet's checkpoint of devices: %w", checkpointErr)
	}
	return held, errors.Join(err, checkpointErr)
}

// readIfThere reads a file, and nothing where there is none.
func readIfThere(host fs.FS, name string) ([]byte, error) {
	data, err := fs.ReadFile(host, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return data, err
}

func addGrants(held map[string]string, data []byte) error {
	var saved []*holding
	if len(data) == 0 {
		return nil
	}
	if err := json.Unmarshal(data, &saved); err != nil {
		return err
	}
	for _, one := range saved {
		if one == nil {
			continue
		}
		for _, name := range one.Devices {
			held[name] = one.who()
		}
	}
	return nil
}

// checkpoint is what the kubelet keeps of what it handed out
// (pkg/kubelet/cm/devicemanager/checkpoint in Kubernetes).
type checkpoint struct {
	Data struct {
		PodDeviceEntries []struct {
			PodUID        string
			ContainerName string
			ResourceName  string
			DeviceIDs     map[string][]string // by NUMA node
		}
	}
}

// addCheckpoint adds what containers have by the kubelet's checkpoint. It keeps
// entries of pods that have ended until it hands out something else; those pods
// have no directory any more.
func addCheckpoint(held map[string]string, data []byte, known []discovery.Device, exists func(uid string) bool) error {
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
			for _, name := range named(known, entry.ResourceName, ids) {
				held[name] = who
			}
		}
	}
	return nil
}

// named returns the devices that IDs of a resource stand for. A PCI address
// stands for that function whatever the resource and whoever offers it.
func named(known []discovery.Device, resource string, ids []string) (names []string) {
	for _, id := range ids {
		if sysfs.IsPCIAddress(id) {
			names = append(names, discovery.DeviceName(sysfs.Device{Path: id}))
		}
		for _, d := range known {
			if slices.ContainsFunc(d.Offers, func(offer discovery.Offer) bool {
				return (offer.Resource == "" || offer.Resource == resource) && slices.Contains(offer.IDs, id)
			}) {
				names = append(names, d.Name)
			}
		}
	}
	return names
}
