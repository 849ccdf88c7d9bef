package changes

import (
	"errors"
	"io/fs"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/inuse"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// noSnapshot is the state before the first scan.
func noSnapshot() *discovery.Snapshot { return nil }

// A check for processes that hangs delays calls by ten seconds once, and then not until it ends.
func TestHangingUseCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &useChecker{snapshot: noSnapshot}
		function, other := sysfs.At(nil, "sys/f"), sysfs.At(nil, "sys/other")
		hangs := make(chan struct{})
		used := errors.New("in use")
		look := func(inuse.Options) error { <-hangs; return used }
		for _, want := range []time.Duration{useCheckLimit, 0, 0} {
			began := time.Now()
			if err := c.checkLimited(function, look); err == nil || errors.Is(err, used) || time.Since(began) != want {
				t.Errorf("after %s: %v, want %s", time.Since(began), err, want)
			}
		}
		if err := c.checkLimited(other, func(inuse.Options) error { return nil }); err != nil {
			t.Error(err)
		}
		close(hangs)
		synctest.Wait()
		if err := c.checkLimited(function, look); !errors.Is(err, used) {
			t.Error(err)
		}
	})
}

// countingProc is a host that counts how often the open files of a process are listed.
type countingProc struct {
	fs.FS

	listed int
}

func (c *countingProc) ReadDir(name string) ([]fs.DirEntry, error) {
	if name == "proc/47/fd" {
		c.listed++
	}
	return fs.ReadDir(c.FS, name)
}
func (c *countingProc) ReadLink(name string) (string, error)   { return fs.ReadLink(c.FS, name) }
func (c *countingProc) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(c.FS, name) }
func (c *countingProc) Stat(name string) (fs.FileInfo, error)  { return fs.Stat(c.FS, name) }

// The open files of all processes are read once for all functions that are removed together, or
// that are bound to vfio together.
func TestFunctionsAreCheckedTogether(t *testing.T) {
	k := passthroughtest.New(t)
	var functions []sysfs.Device
	for _, address := range []string{"0000:03:00.0", "0000:03:00.1", "0000:03:00.2"} {
		k.Add(address, "vfio-pci", address[len(address)-1:])
		functions = append(functions, sysfs.At(nil, passthroughtest.Source(address)))
	}
	k.OpenNode("47", "qemu", "/dev/vfio/2")
	counting := &countingProc{FS: k.FS()}
	c := &useChecker{finder: inuse.HostFinder{Host: &discovery.Host{FS: counting}}, snapshot: noSnapshot}
	if err := c.checkUse(false, functions[:2]...); err != nil {
		t.Error(err)
	}
	if err := c.checkUse(false, functions...); err == nil || !strings.HasPrefix(err.Error(), "0000:03:00.2: in use: /dev/vfio/2: process 47 (qemu)") {
		t.Error(err)
	}
	if counting.listed != 2 {
		t.Errorf("the open files were listed %d times for two calls", counting.listed)
	}
}
