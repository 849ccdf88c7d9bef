package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Answers holds the result of each step to use a group: an error's text, or "" for a step that
// succeeded or was not reached.
type Answers struct {
	Group     string // opening the group's node
	Viable    bool   // the flag in the group's status
	Container string // adding the group to a container, which gives the process the group
	IOMMU     string // choosing the IOMMU type

	Functions map[string]string // by address: vendor and device from the function's configuration space, or the error
}

// The calls of include/uapi/linux/vfio.h.
const (
	setIOMMU         = 0x3b66
	getStatus        = 0x3b67
	setContainer     = 0x3b68
	getDevice        = 0x3b6a
	getRegion        = 0x3b6c
	typeOneVersion2  = 3
	flagViable       = 1
	configSpaceIndex = 7
)

// openGroup opens functions as a virtual machine does.
func openGroup(group string, addresses []string) (answers Answers) {
	say := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	fd, err := unix.Open(group, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if answers.Group = say(err); err != nil {
		return answers
	}
	status := struct{ size, flags uint32 }{size: 8}
	if err := ioctl(fd, getStatus, uintptr(unsafe.Pointer(&status))); err != nil {
		answers.Group = say(fmt.Errorf("its status: %w", err))
		return answers
	}
	answers.Viable = status.flags&flagViable != 0
	container, err := unix.Open("/dev/vfio/vfio", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		number := int32(container)
		err = ioctl(fd, setContainer, uintptr(unsafe.Pointer(&number)))
	}
	if answers.Container = say(err); err != nil {
		return answers
	}
	err = ioctl(container, setIOMMU, typeOneVersion2)
	if answers.IOMMU = say(err); err != nil {
		return answers
	}
	answers.Functions = make(map[string]string)
	for _, address := range addresses {
		id, err := readID(fd, address)
		if err != nil {
			id = err.Error()
		}
		answers.Functions[address] = id
	}
	return answers
}

// readID returns the vendor and the device of a function from its configuration space.
func readID(group int, address string) (string, error) {
	name, err := unix.BytePtrFromString(address)
	if err != nil {
		return "", err
	}
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(group), getDevice, uintptr(unsafe.Pointer(name)))
	if errno != 0 {
		return "", fmt.Errorf("its descriptor: %w", errno)
	}
	region := struct {
		size, flags, index, capabilities uint32
		length, offset                   uint64
	}{size: 32, index: configSpaceIndex}
	if err := ioctl(int(fd), getRegion, uintptr(unsafe.Pointer(&region))); err != nil {
		return "", fmt.Errorf("its configuration space: %w", err)
	}
	id := make([]byte, 4)
	n, err := unix.Pread(int(fd), id, int64(region.offset))
	if err == nil && n != len(id) {
		err = errors.New("too short")
	}
	if err != nil {
		return "", fmt.Errorf("read its configuration space: %w", err)
	}
	return fmt.Sprintf("%04x:%04x", binary.LittleEndian.Uint16(id), binary.LittleEndian.Uint16(id[2:])), nil
}

func ioctl(fd int, request, argument uintptr) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, argument); errno != 0 {
		return errno
	}
	return nil
}
