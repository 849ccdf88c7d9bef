package kernel

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/nvidia"
	"chandler.dev/discovery/scan"
)

func host(t *testing.T) *Host {
	t.Helper()
	text, err := os.ReadFile("../../../discovery/families/nvidia/testdata/a100-root.host")
	if err != nil {
		t.Fatal(err)
	}
	return New(text)
}

const (
	address = "0000:00:05.0"
	name    = "pci-0000-00-05-0"
	facts   = "proc/driver/nvidia/gpus/" + address + "/information"
)

func scanHost(h *Host) *discovery.Snapshot {
	return scan.ReadHost(&discovery.Host{FS: h}, []*discovery.Family{nvidia.Family})
}

func TestHost(t *testing.T) {
	h := host(t)
	s := scanHost(h)
	if len(s.Devices) != 1 || len(s.Problems) != 0 {
		t.Errorf("%d devices, problems %v", len(s.Devices), s.Problems)
	}
	if numbers, found := h.Node("/dev/nvidia0"); numbers != "195:0" || !found {
		t.Errorf("/dev/nvidia0 is %q", numbers)
	}
}

// A function that returns is another one for the kernel. Its directory has another inode number.
func TestReturnedFunctionHasAnotherKey(t *testing.T) {
	h := host(t)
	key := func() discovery.DeviceKey {
		d, found := scanHost(h).Lookup(name)
		if !found {
			t.Fatal("the card is missing")
		}
		return discovery.KeyOf(&discovery.Host{FS: h}, &d)
	}
	before := key()
	if again := key(); before.Inode == 0 || !again.MayEqual(before) {
		t.Errorf("the key of one function is %v, and then %v", before, again)
	}
	h.VanishFunction(address, "dev/nvidia0")
	h.ReturnFunction(address, nil)
	if after := key(); after.Inode == 0 || after.MayEqual(before) {
		t.Errorf("the key is %v before, and %v afterwards", before, after)
	}
}

func TestVanishAndReturn(t *testing.T) {
	h := host(t)
	before, _ := scanHost(h).Lookup(name)
	if !h.VanishFunction(address, "dev/nvidia0") || h.VanishFunction(address) {
		t.Error("Vanish does not say what vanished")
	}
	if _, found := scanHost(h).Lookup(name); found {
		t.Error("the card is still there")
	}
	if _, found := h.Node("/dev/nvidia0"); found {
		t.Error("its node is still there")
	}
	h.ReturnFunction(address, func(_ string, data []byte) []byte { return bytes.Replace(data, []byte("GPU-c"), []byte("GPU-d"), 1) })
	after, found := scanHost(h).Lookup(name)
	if !found || after.Identity == before.Identity || !strings.HasPrefix(after.Identity, "GPU-d") {
		t.Errorf("after its return it is %q and was %q", after.Identity, before.Identity)
	}
}

func TestUnreadable(t *testing.T) {
	h := host(t)
	h.MakeUnreadable("/information")
	if _, err := fs.ReadFile(h, facts); !errors.Is(err, syscall.EIO) {
		t.Errorf("a file that cannot be read: %v", err)
	}
	h.MakeUnreadable("")
	if _, err := fs.ReadFile(h, facts); err != nil {
		t.Error(err)
	}
}

func TestHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := host(t)
		h.HangReads(address)
		read := false
		go func() { _, _ = fs.ReadFile(h, facts); read = true }()
		synctest.Wait()
		if read {
			t.Error("a read that hangs has ended")
		}
		h.Release()
		synctest.Wait()
		if !read {
			t.Error("a read still hangs")
		}
	})
}
