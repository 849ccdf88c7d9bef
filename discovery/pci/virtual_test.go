package pci

import (
	"io/fs"
	"slices"
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
)

// An agent removes virtual functions that an agent created, even if that agent was killed before it
// recorded their number. Functions of another program stay.
func TestUnmakeVirtual(t *testing.T) {
	const physical = "sys/devices/pci0000:00/0000:03:00.0"
	for name, test := range map[string]struct {
		how    map[string]string
		undone bool
	}{
		"as many as were wanted":   {map[string]string{virtualCount: "2", virtualCame: "2"}, true},
		"fewer, and it is said":    {map[string]string{virtualCount: "4", virtualCame: "2"}, true},
		"fewer, and killed":        {map[string]string{virtualCount: "4"}, true},
		"killed":                   {map[string]string{virtualCount: "2"}, true},
		"of an administrator":      {map[string]string{virtualCount: "4", virtualCame: "4"}, false},
		"more than an agent wants": {map[string]string{virtualCount: "1"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			link := func(to string) *fstest.MapFile { return &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte(to)} }
			host := &discovery.Host{FS: fstest.MapFS{
				physical + "/virtfn0":                        link("../0000:03:10.0"),
				physical + "/virtfn1":                        link("../0000:03:10.2"),
				"sys/devices/pci0000:00/0000:03:10.0/vendor": {},
				"sys/devices/pci0000:00/0000:03:10.2/vendor": {},
			}}
			var asked []int // the number of functions in each call
			tools := discovery.Tools{CheckBusy: func(_ bool, functions ...sysfs.Device) error { asked = append(asked, len(functions)); return nil }}
			work, err := UnmakeVirtual(host, tools, discovery.Creation{Of: physical, How: test.how})
			if err != nil || (work != nil) != test.undone {
				t.Errorf("work %v, error %v", work != nil, err)
			}
			if test.undone && !slices.Equal(asked, []int{2}) {
				t.Errorf("who uses the functions was asked for %v functions", asked)
			}
		})
	}
}
