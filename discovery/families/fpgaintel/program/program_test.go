package program

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"unsafe"

	"golang.org/x/sys/unix"

	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/sysfs"
)

const metadata = `{"version": 640, "afu-image": {"power": 50, "interface-uuid": "69528DB6-eb31-577a-8c36-68f9faa081f6",
	"accelerator-clusters": [{"name": "nlb", "accelerator-type-uuid": "d8424dc4-a4a3-c413-f89e-433683f9040b"}]}, "platform-name": "MCP"}`

// gbs returns a file with the given length of the metadata in the header.
func gbs(length int, metadata, raw string) []byte {
	data := binary.LittleEndian.AppendUint32([]byte(magic), uint32(length))
	return append(data, metadata+raw...)
}

func TestLoad(t *testing.T) {
	host := fstest.MapFS{"srv/a.gbs": {Data: gbs(len(metadata), metadata, "bits")}}
	b, err := Load(host, "srv/a.gbs")
	if err != nil {
		t.Fatal(err)
	}
	if b.Interface != "69528db6eb31577a8c3668f9faa081f6" || b.Function != "d8424dc4a4a3c413f89e433683f9040b" || string(b.raw) != "bits" {
		t.Errorf("read as %+v", b)
	}
	// The magic number as in the Intel plugin, in two words.
	first, second := binary.LittleEndian.Uint64([]byte(magic)), binary.LittleEndian.Uint64([]byte(magic[8:]))
	if first != 0x414750466e6f6558 || second != 0x31303076534247b7 {
		t.Errorf("the magic number is %#x %#x", first, second)
	}
}

func TestLoadRefuses(t *testing.T) {
	two := strings.Replace(metadata, "[{", `[{"accelerator-type-uuid": ""}, {`, 1)
	long := metadata + strings.Repeat(" ", maxMetadata)
	for name, test := range map[string]struct {
		data []byte
		want string
	}{
		"missing":              {nil, "not exist"},
		"empty":                {[]byte{}, "not in GBS format"},
		"of another format":    {[]byte("\x7fELF and so on, longer than a header"), "not in GBS format"},
		"no length":            {[]byte(magic + "\x00"), "not in GBS format"},
		"longer than the file": {gbs(4000, metadata, "bits"), "metadata of 4000 bytes in a file of"},
		"too much metadata":    {gbs(len(long), long, "bits"), "metadata of"},
		"length below zero":    {gbs(-1, metadata, "bits"), "metadata of 4294967295 bytes"},
		"no JSON":              {gbs(4, metadata, "bits"), "metadata: "},
		"nothing to program":   {gbs(len(metadata), metadata, ""), "nothing follows"},
		"no function":          {gbs(2, "{}", "bits"), "0 accelerator functions"},
		"two functions":        {gbs(len(two), two, "bits"), "2 accelerator functions"},
	} {
		host := fstest.MapFS{}
		if test.data != nil {
			host["srv/a.gbs"] = &fstest.MapFile{Data: test.data}
		}
		_, err := Load(host, "srv/a.gbs")
		if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "srv/a.gbs") {
			t.Errorf("%s: error %v; want one that names the file and %q", name, err, test.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(gbs(len(metadata), metadata, "bits"))
	f.Add(gbs(2, "{}", "bits"))
	f.Add(gbs(1<<31, "", ""))
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := parse(data)
		if err == nil && (len(b.raw) == 0 || !bytes.HasSuffix(data, b.raw)) {
			t.Errorf("%q is for the FPGA of %q", b.raw, data)
		}
	})
}

// asked is a kernel that records requests.
type asked struct {
	request  uint
	argument []byte
	bits     uint64
	err      error
}

func (a *asked) ask(request uint, argument []byte) error {
	a.request, a.argument = request, bytes.Clone(argument)
	if len(argument) > 24 {
		binary.NativeEndian.PutUint64(argument[24:], a.bits)
	}
	return a.err
}

// TestRequest uses the numbers and the bytes of the kernel's headers: _IO(0xB6, 0x80) and struct
// dfl_fpga_fme_port_pr of include/uapi/linux/fpga-dfl.h, _IO(0xB5, 0x80) and struct
// fpga_fme_port_pr of OPAE's intel-fpga.h.
func TestRequest(t *testing.T) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the bytes are those of a little-endian machine")
	}
	raw := []byte("12345678")
	address := binary.NativeEndian.AppendUint64(nil, uint64(uintptr(unsafe.Pointer(&raw[0]))))
	for i, want := range []struct {
		request  uint
		argument string
	}{
		{0xb680, "\x18\x00\x00\x00" + "\x00\x00\x00\x00" + "\x03\x00\x00\x00" + "\x08\x00\x00\x00" + string(address)},
		{0xb580, "\x20\x00\x00\x00" + "\x00\x00\x00\x00" + "\x03\x00\x00\x00" + "\x08\x00\x00\x00" + string(address) + "\x00\x00\x00\x00\x00\x00\x00\x00"},
	} {
		var k asked
		if err := drivers[i].programPort(&k, 3, raw); err != nil {
			t.Errorf("%s: %v", drivers[i].engine, err)
		}
		if k.request != want.request || string(k.argument) != want.argument {
			t.Errorf("%s: request %#x, argument %x; want %#x, %x", drivers[i].engine, k.request, k.argument, want.request, want.argument)
		}
	}
}

func TestRequestIsOfWholeWords(t *testing.T) {
	for length, want := range map[int]uint32{1: 4, 4: 4, 5: 8, 7: 8} {
		var k asked
		if err := drivers[0].programPort(&k, 0, make([]byte, length)); err != nil {
			t.Error(err)
		}
		if size := binary.NativeEndian.Uint32(k.argument[12:]); size != want {
			t.Errorf("of %d bytes the FPGA gets %d, want %d", length, size, want)
		}
	}
	if err := drivers[0].programPort(&asked{}, 1<<32, make([]byte, 4)); err == nil {
		t.Error("a port of a number that does not fit passes for another")
	}
}

func TestRequestFails(t *testing.T) {
	for i, want := range []string{"input/output error", "input/output error: the FPGA's error bits are 0x6"} {
		err := drivers[i].programPort(&asked{bits: 6, err: syscall.EIO}, 0, make([]byte, 4))
		if !errors.Is(err, syscall.EIO) || err.Error() != want {
			t.Errorf("%s: %v; want %s", drivers[i].engine, err, want)
		}
	}
}

// Port makes requests only to the node of a management engine.
func TestPortRefuses(t *testing.T) {
	root := t.TempDir()
	host, err := hostfs.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	layOut(t, root, map[string]string{
		"sys/dfl-fme.0/dev": "243:0", "dev/dfl-fme.0": "a file",
		"sys/dfl-fme.1/dev": "243:1",
		"sys/other.0/dev":   "243:2",
	})
	for engine, want := range map[string]string{
		"dfl-fme.0": "dev/dfl-fme.0: not the character device 243:0",
		"dfl-fme.1": "no such file",
		"other.0":   "of no known driver",
	} {
		err := Port(host, sysfs.At(host, "sys/"+engine), 0, &Bitstream{raw: []byte("bits")})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), engine) {
			t.Errorf("%s: error %v; want one that names it and %q", engine, err, want)
		}
	}
}

// layOut writes files below a directory.
func layOut(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// Port makes a request to a node with the expected device numbers. This node is /dev/null, which
// does not support the request.
func TestPortAsksTheKernel(t *testing.T) {
	root := t.TempDir()
	host, err := hostfs.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	layOut(t, root, map[string]string{"sys/dfl-fme.0/dev": "1:3", "dev/other": ""})
	if err := unix.Mknod(filepath.Join(root, "dev/dfl-fme.0"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil {
		t.Skipf("device nodes cannot be made here: %v", err)
	}
	err = Port(host, sysfs.At(host, "sys/dfl-fme.0"), 2, &Bitstream{raw: []byte("bits")})
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES) {
		t.Skipf("device nodes cannot be opened here: %v", err)
	}
	if !errors.Is(err, syscall.ENOTTY) || !strings.Contains(err.Error(), "management engine dfl-fme.0: program port 2") {
		t.Errorf("error %v; want the kernel's, with the port's number", err)
	}
}
