package families_test

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/scan"
)

// rewritten lays out a recorded host after rewriting its text.
func rewritten(t *testing.T, file string, rewrite func(string) string) *discovery.Host {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "other.host")
	if err := os.WriteFile(other, []byte(rewrite(string(data))), 0o644); err != nil {
		t.Fatal(err)
	}
	return discoverytest.ReadHost(t, other)
}

// domain matches the domain of a PCI address or root in the files of a host.
var domain = regexp.MustCompile(`(?m)(^|[^0-9a-f:])0000:([0-9a-f]{2})\b`)

// A PCI domain of 32 bits, as behind VMD and Hyper-V bridges, changes only the names of devices.
func TestWideDomains(t *testing.T) {
	hosts, err := filepath.Glob("*/testdata/*.host")
	if err != nil || len(hosts) == 0 {
		t.Fatalf("no recorded hosts (%v)", err)
	}
	// Some IDs omit the domain 0000 and include any other domain.
	same := strings.NewReplacer(`"0000:`, `"`)
	narrow := strings.NewReplacer("pci-1f000-", "pci-0000-", `"1f000:`, `"`, "1f000:", "0000:")
	for i, file := range hosts {
		if discoverytest.IsBrief() && i%4 != 0 {
			continue
		}
		want := byName(t, scan.ReadHost(discoverytest.ReadHost(t, file), families.All), same)
		host := rewritten(t, file, func(text string) string {
			text = domain.ReplaceAllString(text, "${1}1f000:$2")
			return strings.ReplaceAll(text, "\ndomain 0\n", "\ndomain 126976\n") // in the KFD topology
		})
		got := byName(t, scan.ReadHost(host, families.All), narrow)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-in domain 0000 +in 1f000):\n%s", file, diff)
		}
	}
}

// byName returns the text of each device, and the problems, with some replacements.
func byName(t *testing.T, s *discovery.Snapshot, replacer *strings.Replacer) map[string]string {
	t.Helper()
	said := make(map[string]string)
	for _, d := range s.Devices {
		said[replacer.Replace(d.Name)] = replacer.Replace(format(t, d))
	}
	for _, p := range s.Problems {
		said["problem "+replacer.Replace(p.Error())] = ""
	}
	return said
}

// If two GPUs have the same identity, neither DRA nor the device plugin API uses the identity for
// either GPU. Other GPUs are not affected.
func TestTwoOfOneIdentity(t *testing.T) {
	for _, file := range []string{"nvidia/testdata/h100x8.host", "amdgpu/testdata/mi210x8.host"} {
		whole := scan.ReadHost(discoverytest.ReadHost(t, file), families.All)
		var first, second discovery.Device
		for _, d := range whole.Devices {
			switch {
			case d.Identity == "" || d.PartOf != nil:
			case first.Name == "":
				first = d
			default:
				second = d
			}
		}
		host := rewritten(t, file, func(text string) string { return strings.ReplaceAll(text, second.Identity, first.Identity) })
		snapshot := scan.ReadHost(host, families.All)
		var problems []string
		for _, p := range snapshot.Problems {
			problems = append(problems, p.Error())
		}
		want := []string{fmt.Sprintf("%s and %s: identity %q is not unique, so it is ignored", first.Name, second.Name, first.Identity)}
		if diff := cmp.Diff(want, problems); diff != "" {
			t.Errorf("%s: problems (-want +got):\n%s", file, diff)
		}
		for _, d := range whole.Devices {
			got, found := snapshot.Lookup(d.Name)
			switch {
			case !found:
				t.Errorf("%s: %s is lost", file, d.Name)
			case d.Name != first.Name && d.Name != second.Name:
				if diff := cmp.Diff(format(t, d), format(t, got)); diff != "" {
					t.Errorf("%s: %s (-before +after):\n%s", file, d.Name, diff)
				}
			case strings.Contains(format(t, got), first.Identity):
				t.Errorf("%s: %s is still known by %s:\n%s", file, d.Name, first.Identity, format(t, got))
			}
		}
	}
}

// Two functions in one IOMMU group are one unit, regardless of the family that describes them.
func TestOneIOMMUGroup(t *testing.T) {
	for _, file := range []string{"qat/testdata/4xxx.host", "idxd/testdata/vfio.host", "sriovnet/testdata/e810.host", "vfio/testdata/kubevirt.host"} {
		var alone []discovery.Device
		for _, d := range scan.ReadHost(discoverytest.ReadHost(t, file), families.All).Devices {
			if d.Attributes["iommuGroup"].IntValue != nil && strings.Contains(format(t, d.Edits), "/dev/vfio/") && !strings.HasPrefix(d.Silicon(), "iommu-group-") {
				alone = append(alone, d)
			}
		}
		if len(alone) < 2 {
			t.Errorf("%s: not two functions under vfio", file)
			continue
		}
		first, second := *alone[0].Attributes["iommuGroup"].IntValue, *alone[1].Attributes["iommuGroup"].IntValue
		groupOf := regexp.MustCompile(fmt.Sprintf(`(?m)(/iommu_group -> .*/)%d --$`, second))
		host := rewritten(t, file, func(text string) string { return groupOf.ReplaceAllString(text, fmt.Sprintf("${1}%d --", first)) })
		snapshot := scan.ReadHost(host, families.All)
		want := fmt.Sprintf("iommu-group-%d", first)
		for _, before := range alone {
			d, _ := snapshot.Lookup(before.Name)
			joined := d.Silicon() == want && len(d.Takes) == 1 && !slices.ContainsFunc(d.PluginOffers, func(o discovery.Offer) bool { return o.Unit != want })
			if should := before.Name == alone[0].Name || before.Name == alone[1].Name; joined != should {
				t.Errorf("%s: %s is one with the group: %t\n%s", file, d.Name, joined, format(t, d))
			}
		}
	}
}

// A host with 10,000 functions under vfio, each in its own group, has 10,000 devices. One
// unreadable function causes one problem.
func TestTenThousandFunctions(t *testing.T) {
	const count, bad = 10_000, 4711
	host := memory{}
	for i := range count {
		// Bus, device and function, in a domain of 32 bits.
		dir := fmt.Sprintf("sys/bus/pci/devices/10000:%02x:%02x.%d", i>>8, i>>3&0x1f, i&7)
		host.add(dir+"/modalias", "pci:v000015B3d0000101Esv000015B3sd00000058bc02sc00i00\n", 0)
		host.add(dir+"/driver", "../../drivers/vfio-pci", fs.ModeSymlink)
		host.add(dir+"/subsystem", "../..", fs.ModeSymlink)
		host.add(dir+"/iommu_group", fmt.Sprintf("../../../../kernel/iommu_groups/%d", i), fs.ModeSymlink)
		host.add(fmt.Sprintf("sys/class/vfio/%d/dev", i), fmt.Sprintf("243:%d\n", i), 0)
		host.add(fmt.Sprintf("dev/vfio/%d", i), "", fs.ModeDevice|fs.ModeCharDevice)
		if i == bad {
			host.add(dir+"/modalias", "pci:v0000", 0)
			host.add(dir+"/vendor", "0x", 0)
		}
	}
	host.add("sys/class/misc/vfio/dev", "10:196\n", 0)
	host.add("dev/vfio/vfio", "", fs.ModeDevice|fs.ModeCharDevice)
	snapshot := scan.ReadHost(&discovery.Host{FS: host}, families.All)
	if len(snapshot.Devices) != count-1 || len(snapshot.Problems) != 1 || snapshot.Problems[0].Device != "pci-10000-12-0c-7" {
		t.Errorf("%d devices, %d problems, such as %v; want %d devices", len(snapshot.Devices), len(snapshot.Problems), snapshot.Problems[:min(3, len(snapshot.Problems))], count-1)
	}
	for _, d := range snapshot.Devices {
		if d.Health.Status != discovery.Healthy {
			t.Fatalf("%s: %+v", d.Name, d.Health)
		}
	}
}

// memory is a file system of many files. fstest.MapFS is too slow here, because a lookup of a
// missing name examines all files. Links can be read but are not followed.
type memory map[string]*memoryFile

type memoryFile struct {
	fstest.MapFile

	entries []fs.DirEntry
}

func (m memory) add(name, data string, mode fs.FileMode) {
	if m[name] == nil {
		dir := path.Dir(name)
		if dir != "." && m[dir] == nil {
			m.add(dir, "", fs.ModeDir)
		}
		if dir != "." {
			m[dir].entries = append(m[dir].entries, fs.FileInfoToDirEntry(info(path.Base(name), &fstest.MapFile{Mode: mode})))
		}
	}
	m[name] = &memoryFile{MapFile: fstest.MapFile{Data: []byte(data), Mode: mode | 0o555}}
}

// info returns the FileInfo of a file.
func info(name string, file *fstest.MapFile) fs.FileInfo {
	info, err := fstest.MapFS{name: file}.Lstat(name)
	if err != nil {
		panic(err)
	}
	return info
}

func (m memory) find(op, name string) (*memoryFile, error) {
	if f := m[name]; f != nil {
		return f, nil
	}
	return nil, &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
}

func (m memory) Open(name string) (fs.File, error) {
	f, err := m.find("open", name)
	if err != nil {
		return nil, err
	}
	return fstest.MapFS{"f": &f.MapFile}.Open("f")
}

func (m memory) Lstat(name string) (fs.FileInfo, error) {
	f, err := m.find("lstat", name)
	if err != nil {
		return nil, err
	}
	return info(path.Base(name), &f.MapFile), nil
}

func (m memory) Stat(name string) (fs.FileInfo, error) { return m.Lstat(name) }

func (m memory) ReadLink(name string) (string, error) {
	f, err := m.find("readlink", name)
	if err == nil && f.Mode.Type() != fs.ModeSymlink {
		err = &fs.PathError{Op: "readlink", Path: name, Err: fs.ErrInvalid}
	}
	if err != nil {
		return "", err
	}
	return string(f.Data), nil
}

func (m memory) ReadDir(name string) ([]fs.DirEntry, error) {
	f, err := m.find("readdir", name)
	if err != nil {
		return nil, err
	}
	return f.entries, nil
}
