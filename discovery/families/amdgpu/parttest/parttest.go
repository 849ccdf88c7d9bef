// Package parttest simulates, for tests, a host with GPUs whose compute partitions come and go as
// in amdgpu: one write partitions a whole GPU, and the render nodes of all possible partitions
// always exist. The fields of [Host] make the simulated kernel fail.
package parttest

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing/fstest"
	"time"
)

// Modes maps the modes of an MI300X, in the driver's form, to their numbers of partitions.
var Modes = map[string]int{"SPX": 1, "DPX": 2, "QPX": 4, "CPX": 8}

// Host is a host with GPUs. The first GPU is [Device]. The methods are safe for concurrent use.
type Host struct {
	// Refuse returns the kernel's error for a write of a mode, nil for success. After EIO, the GPU
	// has the mode, but KFD does not list the GPU. Refuse may block; readers of the mode then block
	// too. It may be nil.
	Refuse func(device, mode string) error

	Late      time.Duration // delay until KFD lists partitions other than the first
	Few       int           // the number of partitions that KFD lists, 0 for all
	Backwards bool          // KFD nodes and partition nodes are numbered in reverse order
	Strict    bool          // as in older kernels, writes fail while any process has /dev/kfd open

	mu     sync.Mutex
	gpus   []*gpu
	opens  map[string]string // process to its open node
	writes []string
	seen   fstest.MapFS // the cached files, nil after a change
}

type gpu struct {
	index  int
	mode   string
	listed int           // partitions that KFD lists
	lock   chan struct{} // full while the kernel writes or reads the mode
}

// Names of the first GPU.
const (
	Address = "0000:05:00.0"
	Device  = "pci-0000-05-00-0"
)

// New returns a host with the given number of GPUs, all unpartitioned.
func New(gpus int) *Host {
	h := &Host{opens: make(map[string]string)}
	for i := range gpus {
		h.gpus = append(h.gpus, &gpu{index: i, mode: "SPX", listed: 1, lock: make(chan struct{}, 1)})
	}
	return h
}

// Len returns the number of GPUs.
func (h *Host) Len() int { return len(h.gpus) }

func (g *gpu) pciAddress() string { return fmt.Sprintf("0000:%02x:00.0", 5+g.index) }

func (g *gpu) device() string { return fmt.Sprintf("pci-0000-%02x-00-0", 5+g.index) }

func (g *gpu) dir() string { return "sys/devices/pci0000:00/0000:00:02.0/" + g.pciAddress() }

func (g *gpu) attribute() string { return g.dir() + "/current_compute_partition" }

// render returns the number of the render node of a partition.
func (h *Host) render(g *gpu, partition int) int {
	if partition == 0 {
		return 128 + 8*g.index
	}
	if h.Backwards {
		partition = 8 - partition
	}
	return 128 + 8*g.index + partition
}

// Node returns the path of the render node of a partition of the first GPU.
func (h *Host) Node(partition int) string {
	return fmt.Sprintf("/dev/dri/renderD%d", h.render(h.gpus[0], partition))
}

// Mode returns the mode of a GPU by index.
func (h *Host) Mode(gpu int) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.gpus[gpu].mode
}

// ListWrites returns all writes, such as "pci-0000-05-00-0 CPX", including refused writes.
func (h *Host) ListWrites() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.writes)
}

// OpenNode makes a process open a node and close its earlier node. With node "" the process ends.
func (h *Host) OpenNode(process, node string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.seen = nil
	delete(h.opens, process)
	if node != "" {
		h.opens[process] = node
	}
}

// AcceptWrites makes the kernel accept all writes from now on, even during a write.
func (h *Host) AcceptWrites() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.Refuse = nil
}

// Set sets the mode of a GPU manually, like amd-smi.
func (h *Host) Set(gpu int, mode string) error {
	return h.Write(h.gpus[gpu].attribute(), mode)
}

// Write writes an attribute. The only writable attribute is the mode of a GPU.
func (h *Host) Write(name, mode string) error {
	i := slices.IndexFunc(h.gpus, func(g *gpu) bool { return g.attribute() == name })
	if i < 0 {
		return syscall.ENOENT
	}
	g := h.gpus[i]
	h.mu.Lock()
	h.writes = append(h.writes, g.device()+" "+mode)
	h.mu.Unlock()
	g.lock <- struct{}{}
	defer func() { <-g.lock }()
	if Modes[mode] == 0 {
		return syscall.EINVAL
	}
	if h.Mode(i) == mode {
		return nil
	}
	h.mu.Lock()
	refuse := h.Refuse
	h.mu.Unlock()
	var refused error
	if refuse != nil {
		refused = refuse(g.device(), mode)
	}
	if refused != nil && !errors.Is(refused, syscall.EIO) {
		return refused
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.Strict && slices.Contains(slices.Collect(maps.Values(h.opens)), "/dev/kfd") {
		return syscall.EBUSY
	}
	g.mode, g.listed, h.seen = mode, Modes[mode], nil
	switch {
	case refused != nil:
		g.listed = 0
	case h.Few > 0:
		g.listed = min(h.Few, g.listed)
	case h.Late > 0:
		g.listed = 1
		time.AfterFunc(h.Late, func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			if g.mode == mode {
				g.listed, h.seen = Modes[mode], nil
			}
		})
	}
	return refused
}

// Open opens a file of the host in the present state of the kernel. Opening the mode blocks while
// the kernel changes the mode.
func (h *Host) Open(name string) (fs.File, error) {
	for _, g := range h.gpus {
		if g.attribute() == name {
			g.lock <- struct{}{}
			<-g.lock
		}
	}
	return h.Files().Open(name)
}

// ReadLink returns the target of a link. ReadLink and Lstat implement [fs.ReadLinkFS].
func (h *Host) ReadLink(name string) (string, error) { return h.Files().ReadLink(name) }

// Lstat describes a file or link.
func (h *Host) Lstat(name string) (fs.FileInfo, error) { return h.Files().Lstat(name) }

// Files returns the files of the host.
func (h *Host) Files() fstest.MapFS {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.seen == nil {
		h.seen = h.files()
	}
	return h.seen
}

// With returns the files with a different text in an attribute of the first GPU.
func (h *Host) With(attribute, text string) fstest.MapFS {
	files := maps.Clone(h.Files())
	files[path.Join(h.gpus[0].dir(), attribute)] = &fstest.MapFile{Data: []byte(text)}
	return files
}

// WithDies returns files with a different number of compute dies.
func (h *Host) WithDies(files fstest.MapFS, dies int) fstest.MapFS {
	for name, file := range files {
		if strings.HasSuffix(name, "/properties") {
			files[name] = &fstest.MapFile{Data: []byte(strings.Replace(string(file.Data), "num_xcc 8", fmt.Sprintf("num_xcc %d", dies), 1))}
		}
	}
	return files
}

// tree is a file system under construction.
type tree fstest.MapFS

func (t tree) text(name, text string) { t[name] = &fstest.MapFile{Data: []byte(text + "\n")} }

func (t tree) link(name, target string) {
	t[name] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte(target)}
}

func (t tree) drm(dir string, minor int, name string) {
	t.text(path.Join(dir, "drm", name, "dev"), fmt.Sprintf("226:%d", minor))
	t.text(path.Join(dir, "drm", name, "uevent"), fmt.Sprintf("MAJOR=226\nMINOR=%d\nDEVNAME=dri/%s", minor, name))
	t["dev/dri/"+name] = &fstest.MapFile{Mode: fs.ModeDevice | fs.ModeCharDevice | 0o666}
}

func (h *Host) files() fstest.MapFS {
	t := tree{
		"dev/kfd": {Mode: fs.ModeDevice | fs.ModeCharDevice | 0o666},
	}
	t.link("sys/class/kfd/kfd", "../../devices/virtual/kfd/kfd")
	t.text("sys/devices/virtual/kfd/kfd/dev", "234:0")
	t.text("sys/devices/virtual/kfd/kfd/uevent", "MAJOR=234\nMINOR=0\nDEVNAME=kfd")
	t.text("sys/devices/virtual/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 96\nsimd_count 0\nlocation_id 0\ndomain 0")
	number := 1
	for _, g := range h.gpus {
		h.add(t, g, &number)
	}
	t.text("sys/bus/pci/drivers/amdgpu/bind", "")
	t.text("proc/1/mountinfo", "22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/root rw")
	t.text("proc/1/net/route", "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT")
	t.link("proc/1/ns/pid", "pid:[4026531836]")
	t.link("proc/1/ns/mnt", "mnt:[4026531841]")
	t.link("proc/1/fd/0", "/dev/null")
	t["dev/null"] = &fstest.MapFile{Mode: fs.ModeDevice | fs.ModeCharDevice | 0o666}
	for process, node := range h.opens {
		t.text("proc/"+process+"/comm", "someone")
		t.link("proc/"+process+"/ns/mnt", "mnt:[4026531841]")
		t.link("proc/"+process+"/fd/3", node)
	}
	return fstest.MapFS(t)
}

func (h *Host) add(t tree, g *gpu, number *int) {
	dir := g.dir()
	t.link("sys/bus/pci/devices/"+g.pciAddress(), "../../../devices/pci0000:00/0000:00:02.0/"+g.pciAddress())
	t.link(dir+"/driver", "../../../../bus/pci/drivers/amdgpu")
	for name, text := range map[string]string{
		"vendor": "0x1002", "device": "0x74a1", "class": "0x120000", "numa_node": "0", "product_name": "AMD Instinct MI300X OAM",
		"unique_id": fmt.Sprintf("5e000000000000%02x", g.index), "mem_info_vram_total": "206158430208", "current_compute_partition": g.mode,
		"available_compute_partition": "SPX, DPX, QPX, CPX", "current_memory_partition": "NPS1",
	} {
		t.text(path.Join(dir, name), text)
	}
	t.drm(dir, h.render(g, 0), fmt.Sprintf("renderD%d", h.render(g, 0)))
	for i := 1; i < 8; i++ {
		name := fmt.Sprintf("amdgpu_xcp_%d", 7*g.index+i-1)
		t.link("sys/bus/platform/devices/"+name, "../../../devices/platform/"+name)
		t.drm("sys/devices/platform/"+name, h.render(g, i), fmt.Sprintf("renderD%d", h.render(g, i)))
	}
	for i := range g.listed {
		partition := i
		if h.Backwards {
			partition = g.listed - 1 - i
		}
		node := fmt.Sprintf("sys/devices/virtual/kfd/kfd/topology/nodes/%d", *number)
		*number++
		t.text(node+"/properties", strings.Join([]string{
			"cpu_cores_count 0", fmt.Sprintf("simd_count %d", 1216/Modes[g.mode]), "simd_per_cu 4", "gfx_target_version 90402",
			fmt.Sprintf("location_id %d", partition<<28|(5+g.index)<<8), "domain 0", fmt.Sprintf("drm_render_minor %d", h.render(g, partition)),
			fmt.Sprintf("unique_id %d", 0x5e00000000000000+g.index), fmt.Sprintf("num_xcc %d", 8/Modes[g.mode]),
		}, "\n"))
	}
}
