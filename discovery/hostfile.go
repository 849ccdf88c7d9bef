package discovery

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

// resourceMark stands for the classic resource name in the name of a [HostFile].
const resourceMark = "{resource}"

// HostFile is a file of the host that others than the container read while a
// container has a device: what the device is, for the network plugin that the
// container runtime calls. It is written before the container can start, and
// removed once nothing has the device.
type HostFile struct {
	// Path is where the file is, in one of the directories that the family
	// lists. "{resource}" in its name stands for the classic resource name with
	// "-" in place of "/"; a device that has none has no such file.
	Path string `json:"path"`

	Text string `json:"text"`
}

// hostFileName are names that no reader takes for a directory, an option or a
// hidden file.
var hostFileName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:-]*$`)

// CheckIn reports why the file is not one to be written in one of the
// directories, nil if it is.
func (f HostFile) CheckIn(dirs []string) error {
	dir, name := path.Split(f.Path)
	switch {
	case !slices.Contains(dirs, path.Clean(dir)) || path.Clean(f.Path) != f.Path:
		return fmt.Errorf("host file %q: in none of the directories %q", f.Path, dirs)
	case !hostFileName.MatchString(name) || len(name) > 255:
		return fmt.Errorf("host file %q: %q is no name for it", f.Path, name)
	}
	return nil
}

// FilesAs returns the files of the host that go with the device while a
// container has it under the classic resource name, "" if it has none.
func (d *Device) FilesAs(resource string) []HostFile {
	var files []HostFile
	for _, f := range d.Files {
		if strings.Contains(f.Path, resourceMark) {
			if resource == "" {
				continue
			}
			f.Path = strings.ReplaceAll(f.Path, resourceMark, strings.ReplaceAll(resource, "/", "-"))
		}
		files = append(files, f)
	}
	return files
}

// FileDirs returns the directories of the host in which the files of families'
// devices are.
func FileDirs(families []*Family) []string {
	var dirs []string
	for _, f := range families {
		dirs = append(dirs, f.FileDirs...)
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

// checkFiles reports which files of the device are in no directory of its
// family's.
func (d *Device) checkFiles(dirs []string) error {
	for _, f := range d.FilesAs("example.com/resource") {
		if err := f.CheckIn(dirs); err != nil {
			return err
		}
	}
	return nil
}
