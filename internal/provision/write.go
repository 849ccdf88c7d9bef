package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// Writer returns a function that writes attributes of the host whose root is dir. It writes
// below the directory's sys only, follows no link out of the directory, and creates no file.
func Writer(dir string) (func(name, value string) error, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("host root: %w", err)
	}
	return func(name, value string) error { return write(root, name, value) }, nil
}

func write(root *os.Root, name, value string) error {
	if !fs.ValidPath(name) || !strings.HasPrefix(name, "sys/") {
		return errors.New("is no attribute")
	}
	// In the copy of a host, the path may be a device node or a FIFO.
	switch info, err := root.Stat(name); {
	case err != nil:
		return cause(err)
	case !info.Mode().IsRegular():
		return errors.New("is no attribute")
	}
	file, err := root.OpenFile(name, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return cause(err)
	}
	// Write in one piece, since the kernel treats each write as a value.
	_, err = file.WriteString(value + "\n")
	return cause(errors.Join(err, file.Close()))
}

// cause returns the error without the path, which the caller adds.
func cause(err error) error {
	if failed := (*fs.PathError)(nil); errors.As(err, &failed) {
		return failed.Err
	}
	return err
}
