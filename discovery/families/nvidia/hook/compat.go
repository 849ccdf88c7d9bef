package hook

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"

	"chandler.dev/cdi/hook"
)

// enableCUDACompat makes the loader prefer the image's CUDA libraries if they are built to run on
// the host's older driver (NVIDIA, "CUDA Compatibility", "Forward Compatibility"). The hook runs
// before update-ldcache, which adds the libraries to the loader's cache.
var enableCUDACompat = hook.Hook{
	Name:  "enable-cuda-compat",
	Short: "make the loader prefer the image's CUDA libraries if they support the host's older driver",
	Flags: map[string]string{
		"host-driver-version":        "version of the driver on the host, such as 570.124.06",
		"host-cuda-version":          "the newest CUDA that this driver knows, such as 12.8",
		"cuda-compat-container-root": "the directory of these libraries in the container; " + compatDir + " unless given",
	},
	Run: func(c *hook.Container, flags map[string][]string) error {
		dir := lastValue(flags["cuda-compat-container-root"])
		if dir == "" {
			dir = compatDir
		}
		use, err := useCompat(c, dir, lastValue(flags["host-driver-version"]), lastValue(flags["host-cuda-version"]))
		if err != nil || !use {
			return err
		}
		return hook.PreferLibraries(c, dir)
	},
}

const compatDir = "/usr/local/cuda/compat"

func lastValue(values []string) string {
	if len(values) == 0 {
		return ""
	}
	return values[len(values)-1]
}

// useCompat reports whether the image has CUDA compatibility libraries that support the host's
// driver. An image without such libraries, or with several, uses the host's libraries.
func useCompat(c *hook.Container, dir, hostDriver, hostCUDA string) (bool, error) {
	entries, err := c.ListDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	var libraries []string
	for _, entry := range entries {
		if matched, _ := path.Match("libcuda.so.*.*", entry.Name()); matched && entry.Type().IsRegular() {
			libraries = append(libraries, entry.Name())
		}
	}
	if len(libraries) != 1 {
		return false, nil
	}
	file, err := c.Open(path.Join(dir, libraries[0]))
	if err != nil {
		return false, err
	}
	defer file.Close()
	own := strings.TrimPrefix(libraries[0], "libcuda.so.")
	return madeFor(noteOf(file), own, hostDriver, hostCUDA), nil
}

// compatNote is the ELF note .note.cuda.fwd_compatibility of a compatibility library.
type compatNote struct {
	CUDA   string `json:"CUDA Version"`
	Driver []uint // majors of the supported drivers
}

// madeFor reports whether a host should use a library: the library is newer than the host's driver
// and its note lists the driver's major. If a driver version is unknown, the CUDA versions decide.
// Without a note the driver majors decide.
func madeFor(note *compatNote, own, hostDriver, hostCUDA string) bool {
	ours, ownErr := version.ParseGeneric(own)
	hosts, hostErr := version.ParseGeneric(hostDriver)
	known := ownErr == nil && hostErr == nil
	switch {
	case note == nil:
		return known && hostCUDA == "" && hosts.Major() < ours.Major()
	case known:
		return slices.Contains(note.Driver, hosts.Major()) && hosts.LessThan(ours)
	default:
		ours, ownErr = version.ParseGeneric(note.CUDA)
		hosts, hostErr = version.ParseGeneric(hostCUDA)
		return ownErr == nil && hostErr == nil && hosts.LessThan(ours)
	}
}

const (
	noteSection = ".note.cuda.fwd_compatibility"
	noteName    = "NVIDIA Corporation"
	maxNote     = 1 << 20 // bytes
)

// noteOf returns the note of a library, nil if there is no readable note.
func noteOf(file io.ReaderAt) *compatNote {
	library, err := elf.NewFile(file)
	if err != nil {
		return nil
	}
	section := library.Section(noteSection)
	if section == nil || section.Type != elf.SHT_NOTE || section.Size > maxNote {
		return nil
	}
	data, err := section.Data()
	if err != nil {
		return nil
	}
	note, err := parseNote(data, library.ByteOrder, section.Addralign)
	if err != nil {
		return nil
	}
	return note
}

// parseNote reads a note: three words, a name and a content, each aligned (elf(5), "Notes").
func parseNote(data []byte, order binary.ByteOrder, align uint64) (*compatNote, error) {
	const header = 12
	if len(data) < header {
		return nil, errors.New("cut off")
	}
	nameSize, size := uint64(order.Uint32(data)), uint64(order.Uint32(data[4:]))
	if align = max(align, 4); align != 4 && align != 8 {
		return nil, fmt.Errorf("aligned to %d bytes", align)
	}
	start := header + (nameSize+align-1)/align*align // the alignment of NVIDIA libraries
	if nameSize > maxNote || size > maxNote || header+nameSize > uint64(len(data)) || start+size > uint64(len(data)) {
		return nil, errors.New("cut off")
	}
	if name := string(bytes.TrimRight(data[header:header+nameSize], "\x00")); name != noteName {
		return nil, fmt.Errorf("of %q", name)
	}
	note := &compatNote{}
	err := json.Unmarshal(bytes.TrimRight(data[start:start+size], "\x00"), note)
	return note, err
}
