package legacy

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/legacy/list"
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
		checkpointErr = addCheckpoint(held, data, list.CatalogueOf(known), func(uid string) bool {
			_, err := fs.Stat(host, path.Join(kubeletRoot, "pods", uid))
			return err == nil || !errors.Is(err, fs.ErrNotExist)
		})
	}
	if checkpointErr != nil {
		checkpointErr = fmt.Errorf("read the kubelet's checkpoint of devices: %w", checkpointErr)
	}
	return held, errors.Join(err, checkpointErr)
}

// InUse returns which pods have devices, by the devices' names, in order: by IDs
// that were handed out here, and by those that the kubelet lists and that stand
// for devices which Know named. Grants that PodResources does not show are left
// out, since nobody knows whose they are.
func (p *Plugin) InUse() map[string][]types.NamespacedName {
	used := make(map[string][]types.NamespacedName)
	all, _ := p.holdings.all()
	for _, one := range all {
		name, _, _ := strings.Cut(one.Container, " ")
		namespace, pod, listed := strings.Cut(name, "/")
		if !listed {
			continue
		}
		of := types.NamespacedName{Namespace: namespace, Name: pod}
		for _, device := range one.Devices {
			if !slices.Contains(used[device], of) {
				used[device] = append(used[device], of)
			}
		}
	}
	return used
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
			DeviceIDs     map[string][]string // by NUMA node
		}
	}
}

// addCheckpoint adds what containers have by the kubelet's checkpoint. It keeps
// entries of pods that have ended until it hands out something else; those pods
// have no directory any more.
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
				for _, name := range namesOf(known, id) {
					held[name] = who
				}
			}
		}
	}
	return nil
}

// namesOf returns the devices that an ID stands for. A PCI address stands for
// that function, whoever offers it.
func namesOf(known list.Catalogue, id string) (names []string) {
	if sysfs.IsPCIAddress(id) {
		names = append(names, discovery.DeviceName(sysfs.Device{Path: id}))
	}
	if u, _ := known.Find(id); u != nil {
		names = append(names, u.DeviceNames()...)
	}
	return names
}
