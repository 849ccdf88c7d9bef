package driver

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

// The sockets of a killed agent are removed. Sockets in use and sockets of other programs remain.
func TestSweepSockets(t *testing.T) {
	root, err := os.MkdirTemp("", "sockets-") // the path of t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	d := &Driver{config: Config{KubeletRoot: root}}
	for _, dir := range []string{d.dataDir(), d.registryDir()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	leave := func(socket string) string {
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		listener.SetUnlinkOnClose(false)
		listener.Close()
		return socket
	}
	gone := []string{
		leave(filepath.Join(d.registryDir(), "chandler.dev-1-reg.sock")),
		leave(filepath.Join(d.dataDir(), "dra-1.sock")),
	}
	others := leave(filepath.Join(d.registryDir(), "example.com-1-reg.sock"))
	served := filepath.Join(d.registryDir(), "chandler.dev-2-reg.sock")
	listener, err := net.Listen("unix", served)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if err := d.sweepSockets(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, socket := range gone {
		if _, err := os.Lstat(socket); err == nil {
			t.Errorf("%s is still there", socket)
		}
	}
	for _, socket := range []string{others, served} {
		if _, err := os.Lstat(socket); err != nil {
			t.Errorf("%s was removed", socket)
		}
	}
}
