package program

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/sysfs"
)

// driver is one of the two kernel drivers. Their requests for partial reconfiguration differ only
// in the numbers: DFL_FPGA_FME_PORT_PR (include/uapi/linux/fpga-dfl.h) and FPGA_FME_PORT_PR (OPAE's
// intel-fpga.h).
type driver struct {
	engine   string // the name prefix of management engines
	request  uint
	argument int // bytes; the argument of OPAE ends with the hardware's error bits
}

var drivers = [...]driver{
	{engine: "dfl-fme.", request: 0xb680, argument: 24},
	{engine: "intel-fpga-fme.", request: 0xb580, argument: 32},
}

// Port programs a port with a bitstream. Programming takes seconds and cannot be interrupted. Port
// identifies the port by its number on the card and by the card's management engine. The kernel
// disables the port meanwhile.
func Port(host fs.FS, engine sysfs.Device, port uint64, b *Bitstream) error {
	for _, d := range drivers {
		if !strings.HasPrefix(engine.Name(), d.engine) {
			continue
		}
		node, err := open(host, engine)
		if err != nil {
			return fmt.Errorf("management engine %s: %w", engine.Name(), err)
		}
		defer node.Close()
		if err := d.programPort(ioctl{node}, port, b.raw); err != nil {
			return fmt.Errorf("management engine %s: program port %d: %w", engine.Name(), port, err)
		}
		return nil
	}
	return fmt.Errorf("management engine %s: of no known driver", engine.Name())
}

// open opens the node of a management engine after checking the device numbers.
func open(host fs.FS, engine sysfs.Device) (*os.File, error) {
	node, err := engine.Node("/dev")
	if err != nil {
		return nil, err
	}
	return hostfs.OpenDevice(host, strings.TrimPrefix(node.Path, "/"), node.Major, node.Minor)
}

// kernel accepts requests for one open node.
type kernel interface {
	// ask makes a request. The argument is a structure of these bytes; the kernel may write into
	// it.
	ask(request uint, argument []byte) error
}

// programPort makes the request. The FPGA takes a multiple of four bytes, and ignores padding at
// the end.
func (d driver) programPort(k kernel, port uint64, raw []byte) error {
	if port > math.MaxUint32 {
		return errors.New("no such number")
	}
	if over := len(raw) % 4; over != 0 {
		raw = append(slices.Clip(raw), make([]byte, 4-over)...)
	}
	var pinned runtime.Pinner
	defer pinned.Unpin()
	pinned.Pin(&raw[0])
	argument := d.encode(uint32(port), uint32(len(raw)), uint64(uintptr(unsafe.Pointer(&raw[0]))))
	err := k.ask(d.request, argument)
	if bits := argument[24:]; errors.Is(err, syscall.EIO) && len(bits) > 0 {
		return fmt.Errorf("%w: the FPGA's error bits are %#x", err, binary.NativeEndian.Uint64(bits))
	}
	return err
}

// encode returns the argument: its size in bytes, no flags, the port's number, and the size and
// address of the data for the FPGA.
func (d driver) encode(port, size uint32, address uint64) []byte {
	argument := make([]byte, 0, d.argument)
	for _, word := range []uint32{uint32(d.argument), 0, port, size} {
		argument = binary.NativeEndian.AppendUint32(argument, word)
	}
	return binary.NativeEndian.AppendUint64(argument, address)[:d.argument]
}

// ioctl makes requests to the real kernel.
type ioctl struct{ node *os.File }

func (i ioctl) ask(request uint, argument []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, i.node.Fd(), uintptr(request), uintptr(unsafe.Pointer(&argument[0])))
	runtime.KeepAlive(i.node)
	if errno != 0 {
		return errno
	}
	return nil
}
