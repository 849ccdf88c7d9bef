package amdgpu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// currentMode is the attribute with the compute partition mode. Writing it partitions the GPU.
const currentMode = "current_compute_partition"

// makePart returns the work that switches a GPU to the mode of the wanted partition, or to a whole
// GPU. The partitions of the present mode disappear. They are not allocated, because they take the
// same counters.
//
// The kernel refuses to change the mode while a process computes, but does not check other users of
// the GPU, for example for graphics or video. So makePart returns an error if any process has a
// node of the GPU open.
func makePart(host *discovery.Host, tools discovery.Tools, m discovery.Creation) (discovery.Work, error) {
	function := sysfs.At(host.FS, m.Of)
	want, from := m.How[newMode], m.How[oldMode]
	if driver := function.Driver(); driver != "amdgpu" {
		return nil, fmt.Errorf("GPU %s has no driver that divides it", function.Name())
	}
	now, err := modeOf(function)
	switch {
	case err != nil:
		return nil, err
	case now == want:
		return nil, nil // the partitions may appear later
	case now != from && now != wholeMode:
		return nil, fmt.Errorf("GPU %s is in mode %s, which another program has set meanwhile", function.Name(), strings.ToUpper(now))
	}
	return divideGPU(host, tools, function, want)
}

// unmakePart returns the work that switches a GPU back to a whole GPU. A GPU in a mode that no
// agent set remains unchanged, because an administrator changed the mode.
func unmakePart(host *discovery.Host, tools discovery.Tools, m discovery.Creation) (discovery.Work, error) {
	function := sysfs.At(host.FS, m.Of)
	if function.Driver() != "amdgpu" {
		return nil, nil // the GPU is gone, or its present driver has reset it
	}
	now, err := modeOf(function)
	if err != nil {
		return nil, err
	}
	switch {
	case now == "unknown":
		return nil, fmt.Errorf("GPU %s does not tell its mode", function.Name())
	case now == wholeMode, !setByAgent(m.How, now):
		return nil, nil
	}
	return divideGPU(host, tools, function, wholeMode)
}

// setByAgent reports whether a mode is the mode of a whole GPU, the mode that an agent recorded
// before setting it, or the recorded earlier mode. Any other mode was set by an administrator
// since.
func setByAgent(how map[string]string, mode string) bool {
	return mode == wholeMode || mode == how[newMode] || mode == how[oldMode]
}

// modeOf returns the present mode of a GPU. The read blocks while the kernel changes the mode.
func modeOf(function sysfs.Device) (string, error) {
	text, err := function.Text(currentMode)
	if err != nil {
		return "", fmt.Errorf("GPU %s: %w", function.Name(), err)
	}
	return strings.ToLower(text), nil
}

// divideGPU returns the work that sets a mode, or an error if a process uses the GPU or a
// partition.
func divideGPU(host *discovery.Host, tools discovery.Tools, function sysfs.Device, mode string) (discovery.Work, error) {
	parts, err := drmOf(host, function)
	if err != nil {
		return nil, err
	}
	if err := tools.CheckBusy(true, parts...); err != nil {
		return nil, err
	}
	return func(context.Context) error {
		if err := tools.Write(function.Child(currentMode).Path, strings.ToUpper(mode)); err != nil {
			return fmt.Errorf("%w%s", err, explainError(err))
		}
		return nil
	}, nil
}

// drmOf returns the kernel devices with the nodes of a GPU's partitions, the GPU first.
func drmOf(host *discovery.Host, function sysfs.Device) ([]sysfs.Device, error) {
	kfd := readKFD(host, []sysfs.Device{function})
	if kfd.partial {
		return nil, errors.New("KFD does not let it be told whose the parts of the GPU are")
	}
	xcps, err := sysfs.BusDevices(host.FS, "platform")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the parts of GPU %s: %w", function.Name(), err)
	}
	found := []sysfs.Device{function}
	for _, node := range kfd.of[function.Name()] {
		for _, xcp := range xcps {
			if node.index > 0 && strings.HasPrefix(xcp.Name(), "amdgpu_xcp") && xcp.HasEntry(fmt.Sprintf("drm/renderD%d", node.renderMinor)) {
				found = append(found, xcp)
			}
		}
	}
	return found, nil
}

// explainError returns the known cause and the remedy for a kernel error from a write of the mode,
// in parentheses, or "" (amdgpu_gfx_set_compute_partition in
// drivers/gpu/drm/amd/amdgpu/amdgpu_gfx.c of Linux 6.8 to 6.16 and its callees, down to
// kgd2kfd_check_and_lock_kfd; a patch of May 2025 restricts the latter to a single GPU).
func explainError(err error) string {
	switch sysfs.ErrnoName(err) {
	case "EBUSY":
		return " (a process has /dev/kfd open: a container that computes, or a monitor; in kernels up to about 6.16 none on the node may have it open, in later ones none that may use this GPU)"
	case "EINVAL":
		return " (the GPU has no such mode as its memory is divided now; available_compute_partition says which it has)"
	case "EPERM":
		return " (the GPU is being reset)"
	case "EIO":
		return " (the GPU was divided, and KFD did not start on it; the kernel's log may say why)"
	}
	return ""
}
