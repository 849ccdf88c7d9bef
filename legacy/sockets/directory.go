package sockets

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"chandler.dev/internal/disk"
	"chandler.dev/internal/socket"
)

const (
	socketPrefix = "chandler-"
	socketSuffix = ".sock"

	// kubeletSocket is the kubelet's socket for registrations.
	kubeletSocket = "kubelet.sock"

	// maxSocketPath is the longest path in sun_path, without the final zero (unix(7)).
	maxSocketPath = 107
)

// directory is the path of the kubelet's device-plugins directory. A starting kubelet removes all
// sockets in the directory and then creates its own
// (pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go, Start, in 1.31 to 1.37).
type directory string

// errUnwritable is wrapped by errors about creating a socket in an unwritable directory.
var errUnwritable = errors.New("not writable")

// explainError adds the directory to an error, and wraps errUnwritable if the directory is not
// writable.
func (dir directory) explainError(err error) error {
	for _, unwritable := range []error{fs.ErrPermission, syscall.EROFS, syscall.ENOTDIR} {
		if errors.Is(err, unwritable) {
			return fmt.Errorf("device-plugins directory %s: %w: %w", string(dir), errUnwritable, err)
		}
	}
	return fmt.Errorf("device-plugins directory %s: %w", string(dir), err)
}

// path returns the path of a socket in the directory.
func (dir directory) path(name string) string { return filepath.Join(string(dir), name) }

// kubeletInfo returns the file info of the kubelet's socket, or nil. The file info differs between
// instances of the kubelet.
func (dir directory) kubeletInfo() os.FileInfo {
	info, err := os.Lstat(dir.path(kubeletSocket))
	if err != nil {
		return nil
	}
	return info
}

// sameSocket reports whether a and b are the same socket, or both nil. A new file often gets the
// inode number of a removed one, so the modification times must agree too.
func sameSocket(a, b os.FileInfo) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime())
}

// probeKubelet returns an error if the kubelet does not listen on its socket.
func (dir directory) probeKubelet(ctx context.Context) error {
	err := checkListening(ctx, dir.path(kubeletSocket))
	if errors.Is(err, syscall.ENOTDIR) {
		return dir.explainError(err)
	}
	return err
}

// checkListening returns an error if no process listens on a socket. The file of a socket exists
// before its process listens (bind(2) and listen(2) are two calls), and after the process was
// killed.
func checkListening(ctx context.Context, socket string) error {
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", socket)
	if err != nil {
		return err
	}
	return conn.Close()
}

// listen creates a socket for a resource under a new name, since the kubelet refuses to connect to
// a socket again (pkg/kubelet/cm/devicemanager/manager.go, PluginConnected, in 1.37).
func (dir directory) listen(resource string) (*net.UnixListener, error) {
	path := dir.prefix(resource) + uniqueName() + socketSuffix
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, dir.explainError(err)
	}
	return listener, nil
}

// uniqueName returns a new name, which sorts after all earlier names.
func uniqueName() string { return strconv.FormatInt(time.Now().UnixNano(), 36) }

// prefix returns the beginning of the paths of all sockets for a resource. A unique name follows
// the prefix.
func (dir directory) prefix(resource string) string {
	room := max(0, maxSocketPath-len(dir.path(socketPrefix))-len("-"+uniqueName()+socketSuffix))
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' {
			return r
		}
		return '-'
	}, resource)
	return dir.path(socketPrefix+name[:min(room, len(name))]) + "-"
}

// newestSocket returns the newest socket for a resource, or "".
func (dir directory) newestSocket(resource string) string {
	last := ""
	for _, path := range dir.sockets(resource) {
		last = max(last, path)
	}
	return last
}

// sockets returns the sockets for a resource.
func (dir directory) sockets(resource string) []string {
	prefix := dir.prefix(resource)
	paths, _ := filepath.Glob(dir.path(socketPrefix + "*" + socketSuffix)) // the pattern is valid
	return slices.DeleteFunc(paths, func(path string) bool {
		unique, is := strings.CutPrefix(path, prefix)
		return !is || strings.Contains(unique, "-") // a longer resource name with the same beginning
	})
}

// removeStale removes Chandler's sockets without a listening process, which killed instances leave
// behind, and empty files from earlier versions of the agent, which tested with them whether the
// directory is writable.
func (dir directory) removeStale(ctx context.Context) error {
	return errors.Join(socket.RemoveStale(ctx, dir.path(socketPrefix+"*"+socketSuffix)), disk.Files{}.SweepTemporary(string(dir), 0))
}

// watchSockets calls changed when the kubelet's socket is created and when one of Chandler's
// sockets vanishes, until the context ends.
func (dir directory) watchSockets(ctx context.Context, changed func()) {
	logger := klog.FromContext(ctx)
	for ctx.Err() == nil {
		again := maxUnavailable // the directory does not exist yet
		if err := dir.watchOnce(ctx, changed); err != nil && !errors.Is(err, fs.ErrNotExist) {
			logger.V(2).Info("The device-plugins directory is checked at intervals", "directory", string(dir), "reason", err.Error())
			again = time.Minute
		}
		select {
		case <-ctx.Done():
		case <-time.After(again):
		}
	}
}

func (dir directory) watchOnce(ctx context.Context, changed func()) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return err
	}
	defer watcher.Close()
	if err := watcher.Add(string(dir)); err != nil {
		return err
	}
	changed()
	for {
		select {
		case <-ctx.Done():
			return nil
		case event, ok := <-watcher.Events:
			if !ok || event.Name == string(dir) && event.Has(fsnotify.Remove) {
				return fs.ErrNotExist
			}
			name := filepath.Base(event.Name)
			if name == kubeletSocket || strings.HasPrefix(name, socketPrefix) && !event.Has(fsnotify.Create) {
				changed()
			}
		case err := <-watcher.Errors:
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				return err
			}
			changed()
		}
	}
}
