//go:build cgo

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// makeNodes creates the missing device nodes that open a GPU instance and its compute instance:
// udev does not create them. NVIDIA's setuid program nvidia-modprobe creates them in the /dev of
// its caller, which may be a container's.
func (c *partitioner) makeNodes(gi, ci int) error {
	minor, ret := c.device.GetMinorNumber()
	if ret != nvml.SUCCESS {
		return fmt.Errorf("number of the GPU: %s", describeReturn(ret))
	}
	major, err := c.major("nvidia-caps")
	if err != nil {
		return err
	}
	dir := filepath.Join(c.proc, fmt.Sprintf("driver/nvidia/capabilities/gpu%d/mig/gi%d", minor, gi))
	return errors.Join(
		c.makeNode(major, filepath.Join(dir, "access")),
		c.makeNode(major, filepath.Join(dir, fmt.Sprintf("ci%d", ci), "access")))
}

// makeNode creates the device node of a capability. The capability's file has the node's minor
// number and mode, in lines such as "DeviceFileMinor: 12". The line "DeviceFileModify: 0" reserves
// the creation for the administrator, as for nvidia-modprobe.
func (c *partitioner) makeNode(major uint32, access string) error {
	text, err := os.ReadFile(access)
	if err != nil {
		return err
	}
	minor, mode, modify := -1, uint64(0o444), true
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(name) {
		case "DeviceFileMinor":
			if n, err := strconv.ParseUint(value, 10, 20); err == nil {
				minor = int(n)
			}
		case "DeviceFileMode":
			if n, err := strconv.ParseUint(value, 10, 9); err == nil {
				mode = n
			}
		case "DeviceFileModify":
			modify = value != "0"
		}
	}
	if minor < 0 {
		return fmt.Errorf("%s: no minor", access)
	}
	if !modify {
		if _, err := os.Stat(filepath.Join(c.dev, nodeName(minor))); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("/dev/%s is missing, and is not created, because %s contains DeviceFileModify: 0", nodeName(minor), access)
		}
		return nil
	}
	err = c.mknod(c.dev, major, minor, mode)
	if errors.Is(err, syscall.EROFS) {
		err = c.mknod("/dev", major, minor, mode) // the chart's directory for NVML
	}
	return err
}

// nodeName returns the name of a capability's node below /dev.
func nodeName(minor int) string { return fmt.Sprintf("nvidia-caps/nvidia-cap%d", minor) }

// mknod creates the node of a capability, unless it exists.
func (c *partitioner) mknod(dev string, major uint32, minor int, mode uint64) error {
	node := filepath.Join(dev, nodeName(minor))
	if err := os.MkdirAll(filepath.Dir(node), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	device := int(major)<<8&0xfff00 | minor&0xff | minor&^0xff<<12 // the encoding of makedev(3)
	if err := syscall.Mknod(node, syscall.S_IFCHR|uint32(mode), device); err != nil && !errors.Is(err, fs.ErrExist) {
		return &fs.PathError{Op: "mknod", Path: node, Err: err}
	}
	return nil
}

// major returns the major number of a character device driver.
func (c *partitioner) major(driver string) (uint32, error) {
	text, err := os.ReadFile(filepath.Join(c.proc, "devices"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) == 2 && fields[1] == driver {
			major, err := strconv.ParseUint(fields[0], 10, 12)
			return uint32(major), err
		}
	}
	return 0, fmt.Errorf("the kernel has no driver %s", driver)
}
