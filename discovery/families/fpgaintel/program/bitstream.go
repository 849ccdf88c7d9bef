// Package program writes accelerator functions into Intel FPGAs: it reads bitstreams and makes the
// kernel load them. The package is the part of the family that changes the host. Only the family's
// Configure uses it.
package program

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
)

const (
	magic       = "XeonFPGA\xb7GBSv001" // a readable GUID
	headerSize  = len(magic) + 4        // the magic number and the length of the metadata
	maxMetadata = 4096                  // bytes, the limit of Intel's own reader
	maxFile     = 256 << 20             // bytes; limits the cost of a file that is not a bitstream
)

// Bitstream is the content of a bitstream file for a port.
type Bitstream struct {
	Interface string // the interface that the bitstream requires: 32 lower-case hexadecimal digits
	Function  string // the accelerator function, in the same form

	raw []byte
}

// Load reads a bitstream in the GBS format of Intel's Open Programmable Acceleration Engine (OPAE).
// The name is a path of fs.FS.
func Load(fsys fs.FS, name string) (*Bitstream, error) {
	if info, err := fs.Stat(fsys, name); err == nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("bitstream %s: not a regular file", name)
	}
	file, err := fsys.Open(name)
	if err != nil {
		return nil, fmt.Errorf("bitstream: %w", err)
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("bitstream: %w", err)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("bitstream %s: longer than %d bytes", name, maxFile)
	}
	b, err := parse(data)
	if err != nil {
		return nil, fmt.Errorf("bitstream %s: %w", name, err)
	}
	return b, nil
}

// parse splits a file: the magic number, the length of the metadata in four little-endian bytes,
// the metadata in JSON, and the data for the FPGA.
func parse(data []byte) (*Bitstream, error) {
	rest, ok := bytes.CutPrefix(data, []byte(magic))
	if !ok || len(data) < headerSize {
		return nil, errors.New("not in GBS format")
	}
	length := uint64(binary.LittleEndian.Uint32(rest))
	rest = rest[4:]
	if length >= maxMetadata || length > uint64(len(rest)) {
		return nil, fmt.Errorf("metadata of %d bytes in a file of %d", length, len(data))
	}
	b := &Bitstream{raw: rest[length:]}
	if len(b.raw) == 0 {
		return nil, errors.New("nothing follows the metadata")
	}
	if err := b.readIDs(rest[:length]); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	return b, nil
}

// readIDs reads the IDs of the bitstream from the metadata.
func (b *Bitstream) readIDs(metadata []byte) error {
	var said struct {
		Image struct {
			Interface string `json:"interface-uuid"`
			Clusters  []struct {
				Function string `json:"accelerator-type-uuid"`
			} `json:"accelerator-clusters"`
		} `json:"afu-image"`
	}
	if err := json.Unmarshal(metadata, &said); err != nil {
		return err
	}
	if n := len(said.Image.Clusters); n != 1 {
		return fmt.Errorf("%d accelerator functions, want one", n)
	}
	b.Interface, b.Function = digits(said.Image.Interface), digits(said.Image.Clusters[0].Function)
	return nil
}

// digits returns a UUID in the kernel's form.
func digits(uuid string) string { return strings.ToLower(strings.ReplaceAll(uuid, "-", "")) }
