package discoverytest

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"chandler.dev/discovery"
)

// Fuzz scans the recorded hosts with one file or link of theirs replaced, and
// expects that no family panics and that what is said of the devices that are
// found keeps the contract of all families.
func Fuzz(f *testing.F, families []*discovery.Family, hosts []string) {
	f.Helper()
	dir := f.TempDir()
	laidOut := make([]*fuzzedHost, len(hosts))
	for i := range hosts {
		for j, seed := range []string{"", "\xff\x00", "0x", "-1\n", "18446744073709551615", "226:", "../../../devices/pci0000:00"} {
			if (i+j)%3 == 0 {
				f.Add(uint(i), uint(i+101*j), j%2 == 1, []byte(seed))
			}
		}
	}
	f.Fuzz(func(t *testing.T, which, file uint, link bool, content []byte) {
		i := which % uint(len(hosts))
		if laidOut[i] == nil {
			laidOut[i] = layoutFuzzed(t, hosts[i], filepath.Join(dir, strconv.Itoa(int(i))))
		}
		laidOut[i].check(t, families, file, link, content)
	})
}

// fuzzedHost is a recorded host that was laid out once for many runs.
type fuzzedHost struct {
	*discovery.Host

	dir   string
	aside string
	files []string
}

func layoutFuzzed(t *testing.T, file, dir string) *fuzzedHost {
	t.Helper()
	root := filepath.Join(dir, "root")
	host := layout(t, file, root)
	return &fuzzedHost{host, root, filepath.Join(dir, "aside"), files(t, root)}
}

// check replaces a file by another content, or by a link with that text. A text
// that no link can have leaves nothing in its place.
func (h *fuzzedHost) check(t *testing.T, families []*discovery.Family, file uint, link bool, content []byte) {
	t.Helper()
	name := h.files[file%uint(len(h.files))]
	at := filepath.Join(h.dir, name)
	if err := os.Rename(at, h.aside); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := os.RemoveAll(at); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(h.aside, at); err != nil {
			t.Fatal(err)
		}
	}()
	if link {
		_ = os.Symlink(string(content), at)
	} else if err := os.WriteFile(at, content, 0o644); err != nil {
		t.Fatal(err)
	}
	checkContract(t, h.Host, families, discovery.Scan(h.Host, families))
	if t.Failed() {
		t.Logf("with %s of %s replaced, as a link: %v", name, h.dir, link)
	}
}
