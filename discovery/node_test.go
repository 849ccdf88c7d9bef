package discovery_test

import (
	"io/fs"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
)

// A node with other numbers belongs to another device.
func TestNodeHealth(t *testing.T) {
	node := func(mode fs.FileMode, major, minor uint32) *fstest.MapFile {
		return &fstest.MapFile{Mode: mode, Sys: &syscall.Stat_t{Rdev: unix.Mkdev(major, minor)}}
	}
	host := &discovery.Host{FS: fstest.MapFS{
		"dev/right": node(fs.ModeDevice|fs.ModeCharDevice, 195, 1), "dev/wrong": node(fs.ModeDevice|fs.ModeCharDevice, 195, 2),
		"dev/disk": node(fs.ModeDevice, 195, 1), "dev/stand-in": &fstest.MapFile{},
	}}
	for name, want := range map[string]discovery.Health{
		"right":    {Status: discovery.Healthy},
		"stand-in": {Status: discovery.Healthy},
		"wrong":    {Status: discovery.Unhealthy, Condition: discovery.ConditionNodeMissing, Reason: "device node /dev/wrong is 195:2 on the host, want 195:1"},
		"disk":     {Status: discovery.Unhealthy, Condition: discovery.ConditionNodeMissing, Reason: `device node /dev/disk is of type D--------- on the host, want "c"`},
		"none":     {Status: discovery.Unhealthy, Condition: discovery.ConditionNodeMissing, Reason: "device node /dev/none is missing", MissingNode: "/dev/none"},
	} {
		got := discovery.NodeHealth(host, []*specs.DeviceNode{{Path: "/dev/x", HostPath: "/dev/" + name, Type: "c", Major: 195, Minor: 1}})
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
