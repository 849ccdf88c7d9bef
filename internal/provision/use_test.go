package provision

import (
	"strings"
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
)

// FuzzTables gives any text to what reads the host's tables: each ends, and no
// interface is in use that no table names.
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
