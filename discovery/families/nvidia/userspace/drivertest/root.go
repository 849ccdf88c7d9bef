// Package drivertest creates, for tests, directories in the layout of the NVIDIA installers. The
// driver has all kinds of libraries for containers; the libraries do nothing.
package drivertest

import (
	"cmp"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

// Version is the version of the driver.
const Version = "570.124.06"

// Library directories of distributions.
const (
	Debian = "usr/lib/x86_64-linux-gnu"
	RHEL   = "usr/lib64"
)

// RecordedHost returns a recorded host with one GPU under that driver, with more files in the form
// of package recorded.
func RecordedHost(more string) string {
	return `One GPU.

-- proc/driver/nvidia/gpus/0000:01:00.0/information --
Model: 		 NVIDIA L40S
GPU UUID: 	 GPU-5d2c1f01-8a41-4e0b-9c37-0b6f3d9ae401
Device Minor: 	 0
GPU Excluded:	 No
-- sys/module/nvidia/version --
` + Version + `
-- sys/bus/pci/devices/0000:01:00.0 -> ../../../devices/pci0000:00/0000:01:00.0 --
-- sys/devices/pci0000:00/0000:01:00.0/vendor --
0x10de
-- sys/devices/pci0000:00/0000:01:00.0/device --
0x26b9
-- sys/devices/pci0000:00/0000:01:00.0/class --
0x030200
-- sys/devices/pci0000:00/0000:01:00.0/driver -> ../../../bus/pci/drivers/nvidia --
` + more + `-- end --
`
}

// libraries maps some of the driver's libraries to their sonames. VERSION stands for the driver
// version.
var libraries = map[string]string{
	"libcuda.so.VERSION":                         "libcuda.so.1",
	"libcudadebugger.so.VERSION":                 "libcudadebugger.so.1",
	"libnvidia-ml.so.VERSION":                    "libnvidia-ml.so.1",
	"libnvidia-nvvm.so.VERSION":                  "libnvidia-nvvm.so.4",
	"libnvidia-nvvm70.so.4":                      "libnvidia-nvvm70.so.4",
	"libnvidia-ptxjitcompiler.so.VERSION":        "libnvidia-ptxjitcompiler.so.1",
	"libnvidia-opticalflow.so.VERSION":           "libnvidia-opticalflow.so.1",
	"libnvidia-glcore.so.VERSION":                "libnvidia-glcore.so.VERSION",
	"libnvidia-allocator.so.VERSION":             "libnvidia-allocator.so.1",
	"libnvidia-vulkan-producer.so.VERSION":       "libnvidia-vulkan-producer.so.VERSION",
	"libnvidia-egl-gbm.so.1.1.2":                 "libnvidia-egl-gbm.so.1",
	"libnvidia-egl-wayland.so.1.1.17":            "libnvidia-egl-wayland.so.1",
	"libGLX_nvidia.so.VERSION":                   "libGLX_nvidia.so.0",
	"libEGL_nvidia.so.VERSION":                   "libEGL_nvidia.so.0",
	"vdpau/libvdpau_nvidia.so.VERSION":           "libvdpau_nvidia.so.1",
	"nvidia/xorg/libglxserver_nvidia.so.VERSION": "libglxserver_nvidia.so",
	"nvidia/xorg/nvidia_drv.so":                  "nvidia_drv.so",
	"libnvidia-old.so.470.57.02":                 "libnvidia-old.so.1", // of an earlier driver
}

// links are further links beside the libraries. InstallDriver also creates links for the sonames.
var links = map[string]string{
	"libcuda.so":                         "libcuda.so.1",
	"libnvidia-ml.so":                    "libnvidia-ml.so.1",
	"libnvidia-allocator.so":             "libnvidia-allocator.so.1",
	"libnvidia-vulkan-producer.so":       "libnvidia-vulkan-producer.so.VERSION",
	"libGLX_indirect.so.0":               "libGLX_nvidia.so.VERSION",
	"gbm/nvidia-drm_gbm.so":              "../libnvidia-allocator.so.1",
	"nvidia/xorg/libglxserver_nvidia.so": "libglxserver_nvidia.so.VERSION",
}

// others are empty files. Programs end with an asterisk.
var others = []string{
	"usr/bin/nvidia-smi*", "usr/bin/nvidia-debugdump*", "usr/bin/nvidia-persistenced*", "usr/bin/nvidia-cuda-mps-control*",
	"usr/bin/nvidia-cuda-mps-server*", "usr/bin/nvidia-imex*", "usr/bin/nvidia-imex-ctl*", "usr/bin/nvidia-xconfig*", "usr/bin/bash*",
	"lib/firmware/nvidia/VERSION/gsp_ga10x.bin", "lib/firmware/nvidia/VERSION/gsp_tu10x.bin", "lib/firmware/nvidia/470.57.02/gsp.bin",
	"etc/OpenCL/vendors/nvidia.icd", "etc/vulkan/icd.d/nvidia_icd.json", "etc/vulkan/implicit_layer.d/nvidia_layers.json",
	"usr/share/glvnd/egl_vendor.d/10_nvidia.json", "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
	"usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json", "usr/share/nvidia/nvoptix.bin",
	"usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf", "etc/passwd",
	"run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket", "tmp/nvidia-mps/control",
}

// InstallDriver creates the driver below root, with the libraries in libraryDir.
func InstallDriver(t testing.TB, root, libraryDir string) {
	t.Helper()
	named := func(name string) string { return strings.ReplaceAll(name, "VERSION", Version) }
	lay := func(name string, data []byte, mode os.FileMode) {
		name = filepath.Join(root, named(name))
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, data, mode); err != nil {
			t.Fatal(err)
		}
	}
	link := func(target, name string) {
		name = filepath.Join(root, libraryDir, named(name))
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(named(target), name); err != nil {
			t.Fatal(err)
		}
	}
	for name, soname := range libraries {
		data, err := BuildLibrary(named(soname))
		if err != nil {
			t.Skip(err)
		}
		lay(path.Join(libraryDir, name), data, 0o644)
		if soname != path.Base(name) && links[path.Join(path.Dir(name), soname)] == "" {
			link(path.Base(name), path.Join(path.Dir(name), soname))
		}
	}
	for name, target := range links {
		link(target, name)
	}
	for _, name := range others {
		file, program := strings.CutSuffix(name, "*")
		mode := os.FileMode(0o644)
		if program {
			mode = 0o755
		}
		lay(cmp.Or(file, name), nil, mode)
	}
}
