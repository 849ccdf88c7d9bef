package pci_test

import (
	"io/fs"
	"maps"
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
)

// The paths of a PCI tree: a root port with a switch that has two ports. Below the first port is a
// physical function with a virtual one, and below the second port a single function.
const (
	rootPort = "sys/devices/pci0000:00/0000:00:01.0"
	firstWay = rootPort + "/0000:01:00.0/0000:02:00.0"
	physical = firstWay + "/0000:03:00.0"
	virtual  = firstWay + "/0000:03:00.1"
	other    = rootPort + "/0000:01:00.0/0000:02:01.0/0000:04:00.0"
)

// healthOf returns the conditions and reasons of the three functions of the tree.
func healthOf(files map[string]string) map[string]string {
	host := fstest.MapFS{virtual + "/physfn": {Data: []byte("../0000:03:00.0"), Mode: fs.ModeSymlink}}
	for _, function := range []string{physical, virtual, other} {
		host[function+"/class"] = &fstest.MapFile{Data: []byte("0x120000\n")}
	}
	for name, text := range files {
		host[name] = &fstest.MapFile{Data: []byte(text + "\n")}
	}
	sources := map[string]string{"physical": physical, "virtual": virtual, "other": other}
	f := &discovery.Family{Name: "one", Doc: "test", Always: true,
		Describe: func(*discovery.Host, []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
			for name, source := range sources {
				devices = append(devices, discovery.Device{Name: name, Source: source})
			}
			return devices, nil
		}}
	said := make(map[string]string)
	for _, d := range scan.ReadHost(&discovery.Host{FS: host}, []*discovery.Family{f}).Devices {
		for _, reading := range d.Readings {
			said[d.Name] += string(reading.Condition) + ": " + reading.Reason + "; "
		}
	}
	return said
}

func TestPCIHealthOfTrees(t *testing.T) {
	const stray = "fatal-errors: 1 fatal PCIe error below root port 0000:00:01.0; the kernel does not say of which device; "
	const ofPhysical = "its physical function 0000:03:00.0: "
	tests := map[string]struct{ files, want map[string]string }{
		"all is well": {},
		"a physical function that does not answer": {
			files: map[string]string{physical + "/current_link_width": "63", physical + "/config": silence},
			want: map[string]string{
				"physical": "not-responding: it does not answer: its configuration space reads all ones; ",
				"virtual":  "not-responding: " + ofPhysical + "it does not answer: its configuration space reads all ones; ",
			},
		},
		"a physical function with errors": {
			files: map[string]string{physical + "/aer_dev_fatal": "TOTAL_ERR_FATAL 2"},
			want:  map[string]string{"physical": "fatal-errors: 2 fatal PCIe errors; ", "virtual": "fatal-errors: " + ofPhysical + "2 fatal PCIe errors; "},
		},
		"a virtual function with errors of its own": {
			files: map[string]string{physical + "/aer_dev_fatal": "TOTAL_ERR_FATAL 2", virtual + "/aer_dev_fatal": "TOTAL_ERR_FATAL 1"},
			want:  map[string]string{"physical": "fatal-errors: 2 fatal PCIe errors; ", "virtual": "fatal-errors: 1 fatal PCIe error; "},
		},
		// A virtual function has no link and no sensors, and its width reads as zero.
		"a narrow link": {
			files: map[string]string{
				physical + "/current_link_width": "8", physical + "/max_link_width": "16", firstWay + "/max_link_width": "16",
				virtual + "/current_link_width": "0", virtual + "/max_link_width": "0",
			},
			want: map[string]string{"physical": "link-degraded: its link has 8 lanes of 16; ", "virtual": "link-degraded: " + ofPhysical + "its link has 8 lanes of 16; "},
		},
		"errors of a port of a switch": {
			files: map[string]string{firstWay + "/aer_dev_fatal": "TOTAL_ERR_FATAL 1", rootPort + "/aer_rootport_total_err_fatal": "1"},
			want: map[string]string{
				"physical": "fatal-errors: 1 fatal PCIe error of the port above it, 0000:02:00.0; ",
				"virtual":  "fatal-errors: 1 fatal PCIe error of the port above it, 0000:02:00.0; ",
			},
		},
		"errors that no device has": {
			files: map[string]string{other + "/aer_dev_fatal": "TOTAL_ERR_FATAL 3", rootPort + "/aer_rootport_total_err_fatal": "4"},
			want:  map[string]string{"physical": stray, "virtual": stray, "other": "fatal-errors: 3 fatal PCIe errors; "},
		},
		"errors that were told together": {
			files: map[string]string{other + "/aer_dev_fatal": "TOTAL_ERR_FATAL 3", rootPort + "/aer_rootport_total_err_fatal": "2"},
			want:  map[string]string{"other": "fatal-errors: 3 fatal PCIe errors; "},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if got := healthOf(test.files); !maps.Equal(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
