package discovery

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

// resourceMark is the placeholder for the extended resource name in the name of a [HostFile].
const resourceMark = "{resource}"

// HostFile is a file of the host for programs outside the container, present while a container has
// a device. An example is the device description for the container runtime's network plugin. The
// agent writes the file before the container can start, and removes it when the device is released.
type HostFile struct {
	// Path is in one of the family's FileDirs. "{resource}" in the file's name stands for the
	// extended resource name with "-" in place of "/". A device without an extended resource
	// has no such file.
	Path string `json:"path"`

	Text string `json:"text"`
}

// hostFileName matches names that no reader mistakes for a directory, an option or a hidden file.
var hostFileName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:-]*$`)

// CheckIn returns an error if the file is outside the directories or its name is invalid.
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

// FilesAs returns the files of the host for a device allocated by the extended resource name.
// resource is "" if the device has none.
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

// FileDirs returns the directories of the host for the files of the families' devices.
func FileDirs(families []*Family) []string {
	var dirs []string
	for _, f := range families {
		dirs = append(dirs, f.FileDirs...)
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

// ValidateFiles returns an error if a file of the device is outside its family's directories.
func (d *Device) ValidateFiles(dirs []string) error {
	for _, f := range d.FilesAs("example.com/resource") {
		if err := f.CheckIn(dirs); err != nil {
			return err
		}
	}
	return nil
}
