package discovery

import (
	"slices"
	"strings"
	"testing"
)

func TestHostFileCheckIn(t *testing.T) {
	for name, ok := range map[string]bool{
		"/var/run/x/dp/intel.com-net-0000:16:01.0-device.json": true,
		"/var/run/x/dp/../a":    false,
		"/var/run/x/dp/..":      false,
		"/var/run/x/dp/":        false,
		"/var/run/x/dp/.a":      false,
		"/var/run/x/dp/-a":      false,
		"/var/run/x/dp/a b":     false,
		"/var/run/x/dp/a/b":     false,
		"/var/run/x/dp//a":      false,
		"/var/run/x/a":          false,
		"var/run/x/dp/a":        false,
		"":                      false,
		"/var/run/x/dp/a\x00":   false,
		"/var/run/x/dp/a\n.txt": false,
		"/var/run/x/dp/" + strings.Repeat("a", 256): false,
	} {
		if err := (HostFile{Path: name}).CheckIn([]string{"/etc/y", "/var/run/x/dp"}); (err == nil) != ok {
			t.Errorf("%q: %v; want ok %v", name, err, ok)
		}
	}
}

func TestFilesAs(t *testing.T) {
	d := Device{Files: []HostFile{{"/a/{resource}-1", "x"}, {"/a/2", "y"}}}
	if got, want := d.FilesAs("intel.com/net"), []HostFile{{"/a/intel.com-net-1", "x"}, {"/a/2", "y"}}; !slices.Equal(got, want) {
		t.Errorf("got %v; want %v", got, want)
	}
	if got, want := d.FilesAs(""), []HostFile{{"/a/2", "y"}}; !slices.Equal(got, want) {
		t.Errorf("without a resource: got %v; want %v", got, want)
	}
}
