package families_test

import (
	"archive/tar"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/scan"
)

// capture lists the known facts of a captured host.
type capture struct {
	Devices []struct {
		PCI, Vendor, Device, Class, Driver string
		NUMA                               *int64
		Devnodes                           []string
		VirtFns                            []string
	}
	KFD []kfdNode `json:"kfd_gpu_nodes"`
}

// kfdNode is a GPU, or a partition of a GPU, in a KFD topology.
type kfdNode struct {
	Function string `json:"pci_function0"`
	Device   string
	Minor    int `json:"drm_render_minor"`
}

// ours maps vendors to the drivers of functions that our families describe. The functions of the
// NVIDIA mock have no driver.
var ours = map[string][]string{
	"0x1002": {"amdgpu"},
	"0x1077": {"ib_qib"},
	"0x10de": {"nvidia", ""},
	"0x15b3": {"mlx4_core"}, // the functions on mlx5_core have no RDMA device
	"0x1bcf": {"ve_drv"},
	"0x8086": {"i915", "igbvf", "mic", "xe"},
}

// unbound lists the QAT functions that our families describe without a driver, by vendor and
// device.
var unbound = []string{"0x80860x37c8"}

// TestCaptures scans captured hosts of other projects, which are not part of this repository: the
// folder in CHANDLER_CAPTURES contains a NAME.tar.gz and a NAME.json for each host.
func TestCaptures(t *testing.T) {
	dir := os.Getenv("CHANDLER_CAPTURES")
	if dir == "" {
		t.Skip("CHANDLER_CAPTURES names no folder")
	}
	archives, err := filepath.Glob(filepath.Join(dir, "*.tar.gz"))
	if err != nil || len(archives) == 0 {
		t.Skipf("no captures in %s", dir)
	}
	for _, archive := range archives {
		name := strings.TrimSuffix(filepath.Base(archive), ".tar.gz")
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			unpack(t, archive, root)
			host := &discovery.Host{FS: os.DirFS(root)}
			snapshot := scan.ReadHost(host, families.All)
			for _, p := range snapshot.Problems {
				if strings.Contains(p.Error(), "panic") {
					t.Error(p)
				}
			}
			known := readCapture(t, filepath.Join(dir, name+".json"))
			checkCapture(t, known, snapshot)
			checkRoundTrip(t, root, host, snapshot)
			if len(known.KFD) > 8 { // captures with a single GPU are from an old kernel
				checkPartitions(t, root, known)
			}
		})
	}
}

func readCapture(t *testing.T, file string) (c capture) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(data, &c)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// checkCapture compares addresses, IDs, drivers, NUMA nodes and device nodes.
func checkCapture(t *testing.T, known capture, snapshot *discovery.Snapshot) {
	t.Helper()
	want, got := make(map[string]string), make(map[string]string)
	for _, d := range known.Devices {
		ofClass := slices.ContainsFunc([]string{"0x02", "0x03", "0x0b40", "0x0c06", "0x12"}, func(class string) bool { return strings.HasPrefix(d.Class, class) })
		known := (slices.Contains(ours[d.Vendor], d.Driver) || d.Driver == "" && slices.Contains(unbound, d.Vendor+d.Device)) && ofClass || strings.Contains(d.Driver, "vfio")
		if !known || len(d.VirtFns) > 0 {
			continue // the virtual functions hide the physical function
		}
		numa := int64(-1)
		if d.NUMA != nil {
			numa = *d.NUMA
		}
		want[d.PCI] = fmt.Sprint(d.Vendor, d.Device, d.Driver, numa, d.Devnodes)
	}
	for _, d := range snapshot.Devices {
		address := d.Attributes.String("resource.kubernetes.io/pciBusID")
		if address == "" {
			continue
		}
		numa := int64(-1)
		if node := d.Attributes["resource.kubernetes.io/numaNode"].IntValue; node != nil {
			numa = *node
		}
		var nodes []string
		for _, node := range d.Edits.DeviceNodes {
			if !strings.HasPrefix(node.HostPath, "/dev/vfio/") && d.Family != "generic" { // the capture has no facts about these nodes
				nodes = append(nodes, strings.TrimPrefix(node.HostPath, "/dev/"))
			}
		}
		got[address] = fmt.Sprint(hex(d, "pciVendor"), hex(d, "pciDevice"), d.Attributes.String("driver"), numa, nodes)
	}
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-known +found):\n%s", diff)
	}
}

// hex returns an attribute in the kernel's form.
func hex(d discovery.Device, attribute resourceapi.QualifiedName) string {
	if digits := d.Attributes.String(attribute); digits != "" {
		return "0x" + digits
	}
	return ""
}

func checkRoundTrip(t *testing.T, root string, host *discovery.Host, snapshot *discovery.Snapshot) {
	t.Helper()
	data, err := recorded.RecordHost(host, families.All, "")
	if err != nil {
		t.Fatal(err)
	}
	replay, err := recorded.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := replay.WriteHost(dir); err != nil {
		t.Fatal(err)
	}
	again := scan.ReadHost(&discovery.Host{FS: os.DirFS(dir)}, families.All)
	if diff := gocmp.Diff(format(t, snapshot), strings.ReplaceAll(format(t, again), dir, root)); diff != "" {
		t.Errorf("snapshot of the record (-host +record):\n%s", diff)
	}
}

// checkPartitions adds the missing PCI functions and amdgpu_xcp devices to a captured KFD topology,
// and expects a device for each of the topology's nodes.
func checkPartitions(t *testing.T, root string, known capture) {
	t.Helper()
	slices.SortFunc(known.KFD, func(a, b kfdNode) int { return cmp.Compare(a.Minor, b.Minor) })
	var entries strings.Builder
	seen := make(map[string]bool)
	for i, node := range known.KFD {
		drm := fmt.Sprintf("sys/devices/platform/amdgpu_xcp_%d", i)
		if !seen[node.Function] {
			drm = "sys/devices/pci0000:00/" + node.Function
			fmt.Fprintf(&entries, "-- sys/bus/pci/devices/%s -> ../../../devices/pci0000:00/%s --\n", node.Function, node.Function)
			fmt.Fprintf(&entries, "-- %s/vendor --\n0x1002\n-- %s/device --\n%s\n-- %s/class --\n0x120000\n", drm, drm, node.Device, drm)
			fmt.Fprintf(&entries, "-- %s/driver -> ../../../bus/pci/drivers/amdgpu --\n-- %s/numa_node --\n-1\n", drm, drm)
		} else {
			fmt.Fprintf(&entries, "-- sys/bus/platform/devices/amdgpu_xcp_%d -> ../../../devices/platform/amdgpu_xcp_%d --\n", i, i)
		}
		seen[node.Function] = true
		fmt.Fprintf(&entries, "-- %s/drm/renderD%d/dev --\n226:%d\n-- dev/dri/renderD%d --\n", drm, node.Minor, node.Minor, node.Minor)
	}
	entries.WriteString("-- dev/kfd --\n-- end --\n")
	host, err := recorded.Parse([]byte(entries.String()))
	if err != nil {
		t.Fatal(err)
	}
	if err := host.WriteHost(root); err != nil {
		t.Fatal(err)
	}
	snapshot := scan.ReadHost(&discovery.Host{FS: os.DirFS(root)}, families.All)
	if len(snapshot.Devices) != len(known.KFD) || len(snapshot.Problems) > 0 {
		t.Errorf("%d devices and the problems %v, want %d devices", len(snapshot.Devices), snapshot.Problems, len(known.KFD))
	}
	for i, node := range known.KFD {
		want := "pci-" + strings.NewReplacer(":", "-", ".", "-").Replace(node.Function)
		j := slices.IndexFunc(snapshot.Devices, func(d discovery.Device) bool {
			return d.Edits.DeviceNodes[1].HostPath == fmt.Sprintf("/dev/dri/renderD%d", node.Minor)
		})
		if j < 0 || snapshot.Devices[j].PartOf.Name != want || snapshot.Devices[j].Health.Status != discovery.Healthy {
			t.Errorf("KFD node %d: no healthy partition of %s with renderD%d", i, want, node.Minor)
		}
	}
}

// unpack unpacks a capture below dir. No link leads an entry out of dir.
func unpack(t *testing.T, archive, dir string) {
	t.Helper()
	file, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	reader := tar.NewReader(unzipped)
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err == nil {
			err = unpackEntry(root, header, reader)
		}
		if err != nil {
			t.Fatalf("unpack: %v", err)
		}
	}
}

func unpackEntry(root *os.Root, header *tar.Header, content io.Reader) error {
	name := path.Clean(header.Name)
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	switch header.Typeflag {
	case tar.TypeDir:
		return root.MkdirAll(name, 0o755)
	case tar.TypeSymlink:
		return root.Symlink(header.Linkname, name)
	}
	data, err := io.ReadAll(content)
	if err != nil {
		return err
	}
	return root.WriteFile(name, data, 0o644)
}
