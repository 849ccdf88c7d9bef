package scan_test

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/scan"
)

// asked counts the calls of a host's file system. Each call takes at least an openat2(2).
type asked struct {
	fs.FS

	times atomic.Int64
}

func (a *asked) Open(name string) (fs.File, error) {
	a.times.Add(1)
	return a.FS.Open(name)
}
func (a *asked) Stat(name string) (fs.FileInfo, error) {
	a.times.Add(1)
	return fs.Stat(a.FS, name)
}

func (a *asked) Lstat(name string) (fs.FileInfo, error) {
	a.times.Add(1)
	return fs.Lstat(a.FS, name)
}

func (a *asked) ReadLink(name string) (string, error) {
	a.times.Add(1)
	return fs.ReadLink(a.FS, name)
}

func (a *asked) ReadDir(name string) ([]fs.DirEntry, error) {
	a.times.Add(1)
	return fs.ReadDir(a.FS, name)
}

// BenchmarkRest watches 2,048 virtual functions of network adapters while nothing happens. Without
// the kernel's events each scan is complete; with events, every tenth scan is. The benchmark
// reports the file system calls per function and the processor time of a scan, in user space and in
// the kernel, and the memory in use while the first snapshot is kept, as in an agent.
func BenchmarkRest(b *testing.B) {
	const count = 2048
	dir := b.TempDir()
	layVirtualFunctions(b, dir, count)
	for name, hears := range map[string]bool{"complete": false, "hearing": true} {
		b.Run(name, func(b *testing.B) {
			hostFS, err := hostfs.Open(dir)
			if err != nil {
				b.Fatal(err)
			}
			host := &asked{FS: hostFS}
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			var kept *discovery.Snapshot
			scans, before := 0, memoryInUse()
			var began time.Duration
			scan.Watch{
				Host: &discovery.Host{FS: host}, Families: families.All, Interval: 2 * time.Second, EventsArrive: func() bool { return hears },
				Observe: func(scan.Result) {
					if scans == 0 {
						host.times.Store(0)
						began = processorTime(b)
					}
					if scans++; scans > 10 {
						b.ReportMetric(float64(processorTime(b)-began)/float64(10*time.Millisecond), "ms/scan")
						b.ReportMetric(float64(memoryInUse()-before)/(1<<20), "MiB-in-use")
						cancel()
					}
				},
			}.Run(ctx, func(s *discovery.Snapshot) {
				if kept == nil || !discovery.SameSnapshots(kept, s) {
					kept = s
				}
			})
			if len(kept.Devices) != count {
				b.Fatalf("%d devices", len(kept.Devices))
			}
			b.ReportMetric(float64(host.times.Load())/10/count, "asked/function")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// memoryInUse returns the live heap of the process.
func memoryInUse() uint64 {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

// processorTime returns the used processor time of the process.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// layVirtualFunctions creates virtual functions with a bound driver, 64 per physical function.
func layVirtualFunctions(tb testing.TB, dir string, count int) {
	tb.Helper()
	link := func(name, target string) {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			tb.Fatal(err)
		}
		if err := os.Symlink(target, name); err != nil {
			tb.Fatal(err)
		}
	}
	lay := func(address, device, driver string, more map[string]string) string {
		root := "devices/pci" + address[:7] + "/" + address
		path := filepath.Join(dir, "sys", root)
		files := map[string]string{
			"vendor": "0x8086", "device": "0x" + device, "class": "0x020000", "numa_node": "-1", "uevent": "PCI_SLOT_NAME=" + address,
			"modalias":           "pci:v00008086d0000" + device + "sv00008086sd00000000bc02sc00i00",
			"current_link_speed": "16.0 GT/s PCIe", "current_link_width": "16", "max_link_speed": "16.0 GT/s PCIe", "max_link_width": "16", "power/runtime_status": "active",
		}
		maps.Copy(files, more)
		layFiles(tb, path, files)
		link(filepath.Join(dir, "sys/bus/pci/devices", address), "../../../"+root)
		link(filepath.Join(path, "subsystem"), "../../../bus/pci")
		link(filepath.Join(path, "driver"), "../../../bus/pci/drivers/"+driver)
		return path
	}
	for i := range count {
		bus := 0x10 + i/64*4
		physical := fmt.Sprintf("0000:%02x:00.0", bus)
		if i%64 == 0 {
			lay(physical, "1592", "ice", map[string]string{fmt.Sprintf("net/p%d/type", bus): "1", fmt.Sprintf("net/p%d/carrier", bus): "1"})
		}
		// A bus has no more than 256 functions.
		address := fmt.Sprintf("0000:%02x:%02x.%d", bus+1, i%64/8, i%8)
		net := fmt.Sprintf("v%d", i)
		path := lay(address, "1889", "iavf", map[string]string{"net/" + net + "/type": "1", "net/" + net + "/address": fmt.Sprintf("02:00:00:00:%02x:%02x", i/256, i%256)})
		link(filepath.Join(path, "physfn"), "../../pci"+physical[:7]+"/"+physical)
		link(filepath.Join(dir, "sys/devices/pci"+physical[:7], physical, fmt.Sprintf("virtfn%d", i%64)), "../../pci"+address[:7]+"/"+address)
		link(filepath.Join(dir, "sys/class/net", net), "../../devices/pci"+address[:7]+"/"+address+"/net/"+net)
		link(filepath.Join(path, "net", net, "subsystem"), "../../../../../class/net")
	}
	layFiles(tb, filepath.Join(dir, "proc/1/net"), map[string]string{"route": "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT", "ipv6_route": ""})
}
