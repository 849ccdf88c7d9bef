// Package discoverytest checks the contract of families. It is for tests only and depends on no
// family. Each family has recorded hosts, and golden files with the expected snapshots, in its
// testdata folder.
package discoverytest

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/discovery/recorded"
	"chandler.dev/discovery/scan"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// Run tests the family on every recorded host testdata/*.host of the caller's folder. The snapshot
// must equal testdata/NAME.golden.json, which -update rewrites, and fulfil the contract of all
// families. If any single file of the host is damaged, only the device that the file belongs to may
// change.
//
// Lines in the comment of a recorded host set fields of [discovery.Host]: "root: FAMILY DIRECTORY"
// adds a root, "paths: JSON" a [discovery.PathResource], and "hooks: PATH" the hook program.
// "pools" sets Pools for the SR-IOV plugin. "passthrough: CLASS" allows passthrough by PCI class,
// "partitioning: MODEL" partitions by model, and "virtual functions: COUNT" virtual functions.
func Run(t *testing.T, f *discovery.Family) {
	t.Helper()
	if err := discovery.Validate([]*discovery.Family{f}); err != nil {
		t.Error(err)
	}
	hosts, err := filepath.Glob(filepath.Join("testdata", "*.host"))
	if err != nil || len(hosts) == 0 {
		t.Fatalf("no recorded hosts in testdata (%v)", err)
	}
	families := []*discovery.Family{f}
	if !slices.ContainsFunc(hosts, func(file string) bool { return len(scan.ReadHost(ReadHost(t, file), families).Devices) > 0 }) {
		t.Error("no recorded host has a device of this family")
	}
	for _, file := range hosts {
		name := strings.TrimSuffix(file, ".host")
		t.Run(filepath.Base(name), func(t *testing.T) {
			t.Parallel()
			host := ReadHost(t, file)
			snapshot := scan.ReadHost(host, families)
			CompareGolden(t, name+".golden.json", marshal(t, abbreviateIDs(snapshot)))
			checkContract(t, host, families, snapshot)
			checkVendors(t, snapshot)
			CheckNodes(t, snapshot)
			checkRecord(t, host, f, snapshot)
			checkLinks(t, host, f)
			checkDamage(t, host, f, snapshot)
		})
	}
}

// ReadHost returns a recorded host in memory, with the configuration from its comment.
func ReadHost(t testing.TB, file string) *discovery.Host {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	h, err := recorded.Parse(data)
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	tree, err := ReadTree(h.FS())
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	host := &discovery.Host{FS: tree, Roots: map[string]string{}}
	for line := range strings.Lines(h.Comment()) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "root:" {
			host.Roots[fields[1]] = fields[2]
		}
		if program, ok := strings.CutPrefix(line, "hooks: "); ok {
			host.Hooks = strings.TrimSpace(program)
		}
		host.Pools = host.Pools || strings.TrimSpace(line) == "pools"
		if class, ok := strings.CutPrefix(line, "passthrough: "); ok {
			host.Passthroughs = append(host.Passthroughs, allowPassthrough(strings.TrimSpace(class)))
		}
		if model, ok := strings.CutPrefix(line, "partitioning: "); ok {
			host.Partitionings = append(host.Partitionings, allowPartitions(strings.TrimSpace(model)))
		}
		if count, ok := strings.CutPrefix(line, "virtual functions: "); ok {
			most, err := strconv.Atoi(strings.TrimSpace(count))
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			host.VirtualFunctions = append(host.VirtualFunctions, discovery.Selection[int]{Value: most, Selects: func(discovery.Device) (bool, error) { return true, nil }})
		}
		if resource, ok := strings.CutPrefix(line, "paths: "); ok {
			host.Paths = append(host.Paths, parsePaths(t, resource))
		}
	}
	return host
}

// allowPassthrough allows vfio-pci for functions by the prefix of their PCI class.
func allowPassthrough(class string) discovery.Selection[string] {
	return discovery.Selection[string]{Value: "vfio-pci", Expression: class, Selects: func(d discovery.Device) (bool, error) {
		return strings.HasPrefix(d.Attributes.String("pciClass"), class), nil
	}}
}

// allowPartitions allows partitions for devices by the prefix of their model.
func allowPartitions(model string) discovery.Selection[struct{}] {
	return discovery.Selection[struct{}]{Expression: model, Selects: func(d discovery.Device) (bool, error) {
		return strings.HasPrefix(d.Attributes.String("model"), model), nil
	}}
}

func parsePaths(t testing.TB, text string) (resource discovery.PathResource) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&resource); err != nil {
		t.Fatalf("paths %s: %v", text, err)
	}
	return resource
}

// CompareGolden compares text with a golden file, which -update rewrites.
func CompareGolden(t *testing.T, file string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("no golden file, run with -update: %v", err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("not as in %s (-want +got):\n%s", file, diff)
	}
}

// abbreviateIDs shortens long lists of IDs to the first ID, the count and the last ID, so that the
// golden files are readable.
func abbreviateIDs(s *discovery.Snapshot) *discovery.Snapshot {
	short := &discovery.Snapshot{Problems: s.Problems}
	for _, d := range s.Devices {
		offers := make([]discovery.Offer, len(d.PluginOffers))
		for i, offer := range d.PluginOffers {
			if n := len(offer.IDs); n > 8 {
				offer.IDs = []string{offer.IDs[0], fmt.Sprintf("and %d more to", n-2), offer.IDs[n-1]}
			}
			offers[i] = offer
		}
		d.PluginOffers = offers
		short.Devices = append(short.Devices, d)
	}
	return short
}

// checkRecord records the host, lays the record out on disk, and expects the same snapshot.
func checkRecord(t *testing.T, host *discovery.Host, f *discovery.Family, snapshot *discovery.Snapshot) {
	t.Helper()
	data, err := recorded.RecordHost(host, []*discovery.Family{f}, "")
	if err != nil {
		t.Fatal(err)
	}
	h, err := recorded.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := h.WriteHost(dir); err != nil {
		t.Fatal(err)
	}
	fsys, err := hostfs.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	compareScans(t, "as it was recorded", host, fsys, f, snapshot)
}

// compareScans scans the host with another file system and expects the same snapshot.
func compareScans(t *testing.T, where string, host *discovery.Host, fsys fs.FS, f *discovery.Family, snapshot *discovery.Snapshot) {
	t.Helper()
	other := *host
	other.FS = fsys
	again := scan.ReadHost(&other, []*discovery.Family{f})
	if diff := cmp.Diff(string(marshal(t, snapshot)), string(marshal(t, again))); diff != "" {
		t.Errorf("snapshot of the host %s differs (-host +%s):\n%s", where, where, diff)
	}
}

func marshal(t testing.TB, v any) []byte {
	t.Helper()
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(v); err != nil {
		t.Fatal(err)
	}
	return text.Bytes()
}
