package inuse

import (
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/sysfs"
)

// A node is in use under any name: a container may use any path.
func TestOpenByAnotherName(t *testing.T) {
	const function = "sys/devices/pci0000:00/0000:03:00.0"
	host := &discovery.Host{FS: fstest.MapFS{
		function + "/block/nvme0n1/dev":       {Data: []byte("259:1\n")},
		function + "/block/nvme0n1/subsystem": {Data: []byte("../../../../../../class/block"), Mode: fs.ModeSymlink},
	}}
	for key, want := range map[string]bool{"b 259:1": true, "/dev/nvme0n1": true, "c 259:1": false, "b 259:2": false, "": false} {
		v := &View{host: host, disks: readDisks(host), opened: &opened{users: map[string]string{key: "process 47 (qemu)"}}}
		if uses := v.open(sysfs.At(host.FS, function)); (uses != nil) != want {
			t.Errorf("%q is open: %v", key, uses)
		}
	}
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	root, err := hostfs.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	mine := func(process string) bool { return process != strconv.Itoa(os.Getpid()) }
	opened := openNodes(&discovery.Host{FS: root}, mine)
	if opened.users["c 1:3"] == "" || opened.users["/dev/null"] == "" || opened.users[""] != "" || opened.err != nil {
		t.Errorf("the process itself has /dev/null open: %v, %v", opened.users, opened.err)
	}
	if opened := openNodes(&discovery.Host{FS: root}, func(string) bool { return true }); len(opened.users) > 0 || opened.err != nil {
		t.Errorf("no process counts: %v, %v", opened.users, opened.err)
	}
}

// An unreadable open file may be any node.
func TestOpenFileThatCannotBeRead(t *testing.T) {
	host := unreadable{fstest.MapFS{
		"proc/1/fd/3": {Data: []byte("/data/node"), Mode: fs.ModeSymlink},
		"data/node":   {Mode: fs.ModeDevice},
	}}
	if opened := openNodes(&discovery.Host{FS: host}, inPods(host, nil)); !errors.Is(opened.err, syscall.EIO) {
		t.Errorf("opened %v, %v", opened.users, opened.err)
	}
}

// unreadable is a host without file information.
type unreadable struct{ fstest.MapFS }

func (unreadable) Stat(name string) (fs.FileInfo, error) {
	return nil, &fs.PathError{Op: "stat", Path: name, Err: syscall.EIO}
}

// Broken links end the search and have no target.
func TestFollow(t *testing.T) {
	r := &reader{FS: fstest.MapFS{
		"dev/alias": {Data: []byte("alias"), Mode: fs.ModeSymlink},
		"dev/gone":  {Data: []byte("/dev/sda"), Mode: fs.ModeSymlink},
	}}
	if name := r.resolveLinks("dev/gone"); name != "dev/sda" || r.err != nil {
		t.Errorf("a link to what is missing: %s, %v", name, r.err)
	}
	if name := r.resolveLinks("dev/alias"); r.err == nil {
		t.Errorf("a link to itself: %s", name)
	}
}

// FuzzTables passes any text to the readers of the host's tables. Each reader must end, and no
// interface is in use unless a table names the interface.
func FuzzTables(f *testing.F) {
	f.Add("36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue", "eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0",
		"00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe80 00000400 00000001 00000000 00000003     eth0", "/dev/sda2 partition 1 0 -2")
	f.Add("1 2 3 4 5 6 - - - -", "a", "b c", "/dev/")
	f.Add("", "", "", "")
	f.Fuzz(func(t *testing.T, mounts, four, six, swaps string) {
		host := &discovery.Host{FS: fstest.MapFS{
			"proc/1/mountinfo": {Data: []byte(mounts)}, "proc/1/net/route": {Data: []byte(four)},
			"proc/1/net/ipv6_route": {Data: []byte(six)}, "proc/swaps": {Data: []byte(swaps)},
		}}
		readDisks(host)
		n := readNets(host)
		for name := range n.routed {
			if !strings.Contains(four, name) && !strings.Contains(six, name) {
				t.Errorf("interface %q is in no table", name)
			}
		}
	})
}
