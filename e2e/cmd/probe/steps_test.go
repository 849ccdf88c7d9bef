package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestEnv(t *testing.T) {
	var out strings.Builder
	err := env(&out, []string{"PATH=/bin", "KUBERNETES_PORT=tcp://10.96.0.1:443", "ZED=1", "WEB_SERVICE_HOST=10.96.0.7", "ACCEL=0,1"})
	if want := "env ACCEL=0,1\nenv ZED=1\n"; err != nil || out.String() != want {
		t.Errorf("got %q, %v; want %q", out.String(), err, want)
	}
}

func TestDevices(t *testing.T) {
	dir := t.TempDir()
	for name, device := range map[string]uint64{"null": unix.Mkdev(1, 3), "dri/card0": unix.Mkdev(226, 0), "pts/0": unix.Mkdev(136, 0)} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(device)); err != nil {
			t.Skipf("make %s: %v", name, err)
		}
	}
	var out strings.Builder
	err := devices(&out, dir)
	if want := "device c 226:0 0600 " + dir + "/dri/card0\n"; err != nil || out.String() != want {
		t.Errorf("got %q, %v; want %q", out.String(), err, want)
	}
}

func TestUsualMount(t *testing.T) {
	for target, want := range map[string]bool{"/": true, "/dev/shm": true, "/sys": true, "/sysroot": false, "/opt/vendor": false} {
		if got := usualMount(target); got != want {
			t.Errorf("%s: got %v", target, got)
		}
	}
}
