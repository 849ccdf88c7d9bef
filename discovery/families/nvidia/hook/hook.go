// Package hook implements hooks that prepare a new container for the NVIDIA user space. The names
// are those of the hooks in NVIDIA CDI specs (nvidia-container-toolkit v1.20, cmd/nvidia-cdi-hook).
package hook

import (
	"bytes"
	"fmt"
	"io/fs"
	"regexp"
	"strings"

	"errors"

	"golang.org/x/sys/unix"

	"chandler.dev/cdi/hook"
)

// All returns the NVIDIA hooks. The common hooks are not included.
func All() []hook.Hook {
	return []hook.Hook{enableCUDACompat, disableDeviceNodeModification, updateApplicationProfile}
}

// paramsFile contains the driver's settings in the container's /proc. If a setting allows it, the
// user space creates missing device nodes itself.
const paramsFile = "/proc/driver/nvidia/params"

// maxParams exceeds the size of the driver's file, in bytes.
const maxParams = 1 << 20

// disableDeviceNodeModification covers the driver's settings with a file that forbids the
// container's user space to create device nodes.
var disableDeviceNodeModification = hook.Hook{
	Name:  "disable-device-node-modification",
	Short: "prevent the driver's libraries from creating device nodes",
	Run:   func(c *hook.Container, _ map[string][]string) error { return coverParams(c, paramsFile) },
}

func coverParams(c *hook.Container, name string) error {
	data, err := c.Read(name, maxParams)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	forbidding, ok := forbidNodes(data)
	if !ok {
		return nil
	}
	if kind, err := c.FileSystem(name); err != nil {
		return err
	} else if kind != unix.PROC_SUPER_MAGIC {
		return fmt.Errorf("%s in the container: not of the kernel, but of the image", name)
	}
	return c.CoverFile(name, forbidding)
}

// forbidNodes returns the settings with ModifyDeviceFiles set to 0, and whether they changed.
func forbidNodes(params []byte) ([]byte, bool) {
	var changed bytes.Buffer
	for line := range bytes.Lines(params) {
		if name, _, ok := strings.Cut(string(line), ":"); ok && name == "ModifyDeviceFiles" {
			line = []byte("ModifyDeviceFiles: 0\n")
		}
		changed.Write(line)
	}
	return changed.Bytes(), !bytes.Equal(changed.Bytes(), params)
}

// gpuNode is the name of a GPU's device node.
var gpuNode = regexp.MustCompile(`^nvidia[0-9]+$`)

// updateApplicationProfile restricts EGL and Vulkan to the GPUs whose nodes the container has.
// Other GPUs would make them fail.
var updateApplicationProfile = hook.Hook{
	Name:  "update-application-profile",
	Short: "limit EGL and Vulkan to the container's GPUs",
	Run: func(c *hook.Container, _ map[string][]string) error {
		entries, err := c.ListDir("/dev")
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		var mask uint64
		for _, entry := range entries {
			if !gpuNode.MatchString(entry.Name()) {
				continue
			}
			// The setting has 64 bits.
			if _, minor, ok := c.DeviceNumbers("/dev/" + entry.Name()); ok && minor < 64 {
				mask |= 1 << minor
			}
		}
		if mask == 0 {
			return nil
		}
		err = c.Write("/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf", profile(mask))
		if errors.Is(err, unix.EROFS) {
			return nil // without the profile, some programs only start more slowly
		}
		return err
	},
}

func profile(minors uint64) []byte {
	const rule = `{"profiles":[{"name":"_container_","settings":["EGLVisibleDGPUDevices",0x%x]}],` +
		`"rules":[{"pattern":[],"profile":"_container_"}]}`
	return fmt.Appendf(nil, rule, minors)
}
