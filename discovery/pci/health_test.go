package pci_test

import (
	"errors"
	"io/fs"
	"maps"
	"strings"
	"testing"
	"testing/fstest"

	"chandler.dev/discovery"
	"chandler.dev/discovery/pci"
	"chandler.dev/discovery/scan"
	"chandler.dev/discovery/sysfs"
)

// silence is the configuration space of a silent function.
var silence = strings.Repeat("\xff", 64)

// functionHost is a host with a function below a port.
func functionHost(files map[string]string) *discovery.Host {
	const bus, port = "sys/bus/pci/devices/", "sys/devices/pci0000:00/0000:00:01.0"
	const function = port + "/0000:03:00.0"
	host := fstest.MapFS{bus + "0000:03:00.0": {Data: []byte("../../../devices/pci0000:00/0000:00:01.0/0000:03:00.0"), Mode: fs.ModeSymlink}}
	all := map[string]string{
		"class": "0x120000", "vendor": "0x1e52", "device": "0xb140",
		"current_link_width": "16", "max_link_width": "16", "../max_link_width": "16",
		"current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "16.0 GT/s PCIe", "../max_link_speed": "16.0 GT/s PCIe",
		"aer_dev_fatal":            "Undefined 0\nDLP 0\nTOTAL_ERR_FATAL 0",
		"hwmon/hwmon3/temp2_input": "40000", "hwmon/hwmon3/temp2_crit": "100000",
	}
	maps.Copy(all, files)
	for name, text := range all {
		dir := function
		if len(name) > 3 && name[:3] == "../" {
			dir, name = port, name[3:]
		}
		host[dir+"/"+name] = &fstest.MapFile{Data: []byte(text + "\n")}
	}
	return &discovery.Host{FS: host}
}

func TestPCIHealth(t *testing.T) {
	sick := discovery.Health{Status: discovery.Unhealthy, Reason: "sick"}
	tests := map[string]struct {
		files   map[string]string
		health  discovery.Health // reading of the family
		problem bool
		want    discovery.Condition
		others  int // number of further readings
	}{
		"all is well":                   {},
		"too hot":                       {files: map[string]string{"hwmon/hwmon3/temp2_input": "100000"}, want: discovery.ConditionOverTemperature},
		"hot, but no limit":             {files: map[string]string{"hwmon/hwmon3/temp1_input": "300000"}},
		"a limit of zero":               {files: map[string]string{"hwmon/hwmon3/temp2_crit": "0"}},
		"a sensor that does not answer": {files: map[string]string{"hwmon/hwmon3/temp2_input": "N/A"}},
		"hot, but asleep":               {files: map[string]string{"hwmon/hwmon3/temp2_input": "100000", "power/runtime_status": "suspended"}},
		"hot and awake":                 {files: map[string]string{"hwmon/hwmon3/temp2_input": "100000", "power/runtime_status": "active"}, want: discovery.ConditionOverTemperature},
		"fatal errors":                  {files: map[string]string{"aer_dev_fatal": "Undefined 0\nTLP 2\nTOTAL_ERR_FATAL 2"}, want: discovery.ConditionFatalErrors},
		"narrow":                        {files: map[string]string{"current_link_width": "8"}, want: discovery.ConditionLinkDegraded},
		"narrow port":                   {files: map[string]string{"current_link_width": "8", "../max_link_width": "8"}},
		"narrow card":                   {files: map[string]string{"current_link_width": "8", "max_link_width": "8"}},
		"no link":                       {files: map[string]string{"current_link_width": "0"}},
		"all ones":                      {files: map[string]string{"current_link_width": "63", "current_link_speed": "Unknown", "config": silence}, want: discovery.ConditionNotResponding},
		"all ones, but asleep":          {files: map[string]string{"current_link_width": "63", "config": silence, "power/runtime_status": "suspended"}},
		"only the link reads as ones":   {files: map[string]string{"current_link_width": "63", "config": "\x86\x80" + silence}},
		"only the vendor reads as ones": {files: map[string]string{"current_link_width": "63", "config": "\xff\xff\xff\xff" + strings.Repeat("\x00", 60)}},
		"a header that is cut short":    {files: map[string]string{"current_link_width": "63", "config": "\xff\xff"}},
		"errors of the port above":      {files: map[string]string{"../aer_dev_fatal": "SDES 1\nTOTAL_ERR_FATAL 1"}, want: discovery.ConditionFatalErrors},
		"errors that only the root port has": {
			files: map[string]string{"../aer_rootport_total_err_fatal": "1"}, want: discovery.ConditionFatalErrors,
		},
		"errors that a sibling has": {
			files: map[string]string{"../aer_rootport_total_err_fatal": "1", "../0000:03:00.1/aer_dev_fatal": "TOTAL_ERR_FATAL 1"},
		},
		"width not known":         {files: map[string]string{"current_link_width": "8", "max_link_width": "255"}},
		"width unreadable":        {files: map[string]string{"current_link_width": "8", "../max_link_width": "x"}},
		"slow accelerator":        {files: map[string]string{"current_link_speed": "2.5 GT/s PCIe"}},
		"slow network controller": {files: map[string]string{"class": "0x020000", "current_link_speed": "8.0 GT/s PCIe"}, want: discovery.ConditionLinkDegraded},
		"slow port":               {files: map[string]string{"class": "0x020000", "current_link_speed": "8.0 GT/s PCIe", "../max_link_speed": "8 GT/s"}},
		"what is so now before what was": {
			files: map[string]string{"current_link_width": "8", "hwmon/hwmon3/temp2_input": "100000", "aer_dev_fatal": "TOTAL_ERR_FATAL 2"},
			want:  discovery.ConditionOverTemperature, others: 2,
		},
		"the family's reading comes first": {files: map[string]string{"current_link_width": "8"}, health: sick, want: discovery.ConditionUnhealthy, others: 1},
		"a problem comes first":            {files: map[string]string{"current_link_width": "8"}, problem: true, want: discovery.ConditionUnknown, others: 1},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			f := &discovery.Family{Name: "one", Doc: "test", Match: []discovery.Match{{Bus: "pci", Vendor: "1e52"}},
				Describe: func(host *discovery.Host, found []sysfs.Device) ([]discovery.Device, []discovery.Problem) {
					d, err := pci.DescribeFunction(host, found[0])
					d.Health = test.health
					if test.problem {
						err = errors.New("EIO")
					}
					return []discovery.Device{d}, discovery.Problems(d.Name, err)
				}}
			s := scan.ReadHost(functionHost(test.files), []*discovery.Family{f})
			if len(s.Devices) != 1 {
				t.Fatalf("found %+v, problems %v", s.Devices, s.Problems)
			}
			d := s.Devices[0]
			others := d.Readings
			if len(others) > 0 && others[0] == d.Health {
				others = others[1:]
			}
			if got := d.Health.Key(); got != test.want || len(others) != test.others {
				t.Errorf("got %q and %+v, want %q and %d others", got, others, test.want, test.others)
			}
			if !test.problem && len(s.Problems) > 0 {
				t.Errorf("problems: %v", s.Problems)
			}
		})
	}
}

// A part that is a class directory has the readings of the target function of its device link. A
// device merely connected to the function does not have the readings.
func TestPCIHealthOfParts(t *testing.T) {
	const function = "sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0"
	host := functionHost(map[string]string{"aer_dev_fatal": "TOTAL_ERR_FATAL 2", "infiniband/mlx5_0/port": "1", "usb1/1-1/tty/ttyUSB0/dev": "188:0"})
	link := func(name, target string) {
		host.FS.(fstest.MapFS)[name] = &fstest.MapFile{Data: []byte(target), Mode: fs.ModeSymlink}
	}
	link(function+"/infiniband/mlx5_0/device", "../../../0000:03:00.0")
	link(function+"/usb1/1-1/tty/ttyUSB0/device", "../../../1-1")
	link("sys/class/accel/copied/device", "../../../devices/pci0000:00/0000:00:01.0/0000:03:00.0")
	sources := map[string]string{
		"function": function,
		"part":     function + "/infiniband/mlx5_0",
		"copied":   "sys/class/accel/copied",
		"usb":      function + "/usb1/1-1",
		"serial":   function + "/usb1/1-1/tty/ttyUSB0",
		"gone":     function + "/infiniband/mlx5_9",
	}
	f := &discovery.Family{Name: "one", Doc: "test", Match: []discovery.Match{{Bus: "pci", Vendor: "1e52"}},
		Describe: func(*discovery.Host, []sysfs.Device) (devices []discovery.Device, problems []discovery.Problem) {
			for name, source := range sources {
				devices = append(devices, discovery.Device{Name: name, Source: source})
			}
			return devices, nil
		}}
	want := map[string]discovery.Condition{
		"function": discovery.ConditionFatalErrors, "part": discovery.ConditionFatalErrors, "copied": discovery.ConditionFatalErrors,
		"usb": "", "serial": "", "gone": "",
	}
	got := make(map[string]discovery.Condition)
	for _, d := range scan.ReadHost(host, []*discovery.Family{f}).Devices {
		got[d.Name] = d.Health.Key()
	}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
