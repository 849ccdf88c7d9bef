package provision

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// Writer returns what writes attributes of the host whose root is a directory.
// It writes below the directory's sys only, whatever links there are, makes no
// file, and follows no link out of the directory.
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
	// On a host that was laid out, a device node or a FIFO may lie there.
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
	// In one piece, since the kernel takes each write for a value.
	_, err = file.WriteString(value + "\n")
	return cause(errors.Join(err, file.Close()))
}

// cause returns the error without the path, which is the caller's to say.
func cause(err error) error {
	if failed := (*fs.PathError)(nil); errors.As(err, &failed) {
		return failed.Err
	}
	return err
}
