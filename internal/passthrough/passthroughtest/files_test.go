package passthroughtest

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"chandler.dev/internal/provision"
)

// A write of another process to the files takes effect, as on a real kernel.
func TestFiles(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, for device nodes")
	}
	k := At(t, t.TempDir())
	const disk, adapter = "0000:04:00.0", "0000:03:00.0"
	k.Add(disk, "nvme", "3")
	k.AddPhysical(&Physical{Address: adapter, Total: 4, Makes: 2})
	write, err := provision.Writer(k.Dir)
	if err != nil {
		t.Fatal(err)
	}
	writes := func(name, value string) {
		t.Helper()
		if err := write(name, value); err != nil {
			t.Fatal(err)
		}
	}
	until := func(what string, is func() bool) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); !is(); time.Sleep(look) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: driver %q, override %q, %d virtual functions", what, k.Driver(disk), k.DriverOverride(disk), k.VirtualCount(adapter))
			}
		}
	}
	node := filepath.Join(k.Dir, "dev/vfio/3")
	for range 20 {
		writes(Source(disk)+"/driver_override", "vfio-pci")
		writes("sys/bus/pci/drivers/nvme/unbind", disk)
		writes("sys/bus/pci/drivers_probe", disk)
		until("taken", func() bool {
			info, err := os.Stat(node)
			return k.Driver(disk) == "vfio-pci" && err == nil && info.Mode()&os.ModeCharDevice != 0
		})
		writes(Source(disk)+"/driver_override", "")
		writes("sys/bus/pci/drivers/vfio-pci/unbind", disk)
		writes("sys/bus/pci/drivers/nvme/bind", disk)
		until("given back", func() bool { return k.Driver(disk) == "nvme" && k.DriverOverride(disk) == "(null)" })
	}
	for range 5 {
		writes(Source(adapter)+"/sriov_numvfs", "2")
		until("made", func() bool { return k.VirtualCount(adapter) == 2 && k.Driver(VirtualAddress(1)) == "igbvf" })
		writes(Source(adapter)+"/sriov_numvfs", "0")
		until("undone", func() bool { return k.VirtualCount(adapter) == 0 })
	}
}
