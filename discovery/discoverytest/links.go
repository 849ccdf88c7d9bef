package discoverytest

import (
	"io/fs"
	"path"
	"strings"
	"sync"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
)

// checkLinks checks that the family reads sysfs through no links except those of classes and buses.
// A kernel event names the device at the end of a link, so the watch could not relate the event to
// the family.
func checkLinks(t testing.TB, host *discovery.Host, f *discovery.Family) {
	t.Helper()
	n := &noted{Tree: host.FS.(*Tree), names: make(map[string]bool)}
	seen := *host
	seen.FS = n
	scan.ReadHost(&seen, []*discovery.Family{f})
	for name := range n.names {
		if !strings.HasPrefix(name, "sys/") {
			continue
		}
		for dir := path.Dir(name); dir != "sys" && dir != "."; dir = path.Dir(dir) {
			if info, err := n.Tree.Lstat(dir); err == nil && info.Mode()&fs.ModeSymlink != 0 && !isListed(dir) {
				t.Errorf("%s is read through the link %s; see sysfs.Device.LinkTo", name, dir)
			}
		}
	}
}

// isListed reports whether a link is an entry of a device in a class or bus directory.
func isListed(link string) bool {
	elements := strings.Split(link, "/")
	return len(elements) == 4 && elements[1] == "class" || len(elements) == 5 && elements[1] == "bus" && elements[3] == "devices"
}

// noted is a tree that records the accessed names.
type noted struct {
	*Tree

	mu    sync.Mutex
	names map[string]bool
}

func (n *noted) noteName(name string) *Tree {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.names[name] = true
	return n.Tree
}

// Open implements [fs.FS].
func (n *noted) Open(name string) (fs.File, error) { return n.noteName(name).Open(name) }

// Stat implements [fs.StatFS].
func (n *noted) Stat(name string) (fs.FileInfo, error) { return n.noteName(name).Stat(name) }

// Lstat implements [fs.ReadLinkFS].
func (n *noted) Lstat(name string) (fs.FileInfo, error) { return n.noteName(name).Lstat(name) }

// ReadLink implements [fs.ReadLinkFS].
func (n *noted) ReadLink(name string) (string, error) { return n.noteName(name).ReadLink(name) }

// ReadDir implements [fs.ReadDirFS].
func (n *noted) ReadDir(name string) ([]fs.DirEntry, error) { return n.noteName(name).ReadDir(name) }
