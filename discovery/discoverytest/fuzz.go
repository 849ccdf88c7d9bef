package discoverytest

import (
	"bytes"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
)

// Fuzz replaces one file or link of a recorded host and scans the host. No family may panic, and
// the snapshot must fulfil the contract of all families.
func Fuzz(f *testing.F, families []*discovery.Family, hosts []string) {
	f.Helper()
	read := make([]*fuzzedHost, len(hosts))
	every := 3
	if IsBrief() {
		every = 7 // one seed for each host
	}
	for i := range hosts {
		for j, seed := range []string{"", "\xff\x00", "0x", "-1\n", "18446744073709551615", "226:", "../../../devices/pci0000:00"} {
			if (i+j)%every == 0 {
				f.Add(uint(i), uint(i+101*j), j%2 == 1, []byte(seed))
			}
		}
	}
	f.Fuzz(func(t *testing.T, which, file uint, link bool, content []byte) {
		i := which % uint(len(hosts))
		if read[i] == nil {
			read[i] = readFuzzed(t, hosts[i])
		}
		read[i].check(t, families, file, link, content)
	})
}

// fuzzedHost is a recorded host that is read once for many runs.
type fuzzedHost struct {
	*discovery.Host

	tree  *Tree
	files []string
}

func readFuzzed(t *testing.T, file string) *fuzzedHost {
	t.Helper()
	host := ReadHost(t, file)
	tree := host.FS.(*Tree)
	return &fuzzedHost{host, tree, tree.Files()}
}

// check replaces a file by other content, or by a link. If the text is not a valid link target, the
// file is removed.
func (h *fuzzedHost) check(t *testing.T, families []*discovery.Family, file uint, link bool, content []byte) {
	t.Helper()
	name := h.files[file%uint(len(h.files))]
	host := *h.Host
	switch {
	case !link:
		host.FS = h.tree.WithFile(name, content)
	case len(content) > 0 && !bytes.Contains(content, []byte{0}):
		host.FS = h.tree.WithLink(name, string(content))
	default:
		host.FS = h.tree.WithoutFile(name)
	}
	checkContract(t, &host, families, scan.ReadHost(&host, families))
	if t.Failed() {
		t.Logf("with %s replaced, as a link: %v", name, link)
	}
}
