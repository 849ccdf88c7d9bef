package legacy

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/legacy/list"
	"chandler.dev/legacy/list/listtest"
)

func TestResponse(t *testing.T) {
	got, err := newResponse(specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/ctl", HostPath: "/dev/ctl", Permissions: "r"},
			{Path: "/dev/a"},
			{Path: "/dev/ctl", HostPath: "/dev/ctl", Permissions: "rw"},
		},
		Mounts: []*specs.Mount{
			{ContainerPath: "/lib/a", HostPath: "/opt/a", Options: []string{"ro", "nosuid", "rbind"}},
			{ContainerPath: "/run/b", HostPath: "/run/b", Type: "bind"},
			{ContainerPath: "/run/b", HostPath: "/run/b", Options: []string{"ro"}},
		},
		Env: []string{"A=1", "B=x=y", "EMPTY", "A=2"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := &pluginapi.ContainerAllocateResponse{
		Devices: []*pluginapi.DeviceSpec{
			{ContainerPath: "/dev/ctl", HostPath: "/dev/ctl", Permissions: "rw"},
			{ContainerPath: "/dev/a", HostPath: "/dev/a", Permissions: "rw"},
		},
		Mounts: []*pluginapi.Mount{
			{ContainerPath: "/lib/a", HostPath: "/opt/a", ReadOnly: true},
			{ContainerPath: "/run/b", HostPath: "/run/b"},
		},
		Envs: map[string]string{"A": "2", "B": "x=y", "EMPTY": ""},
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
}

func TestResponseCannotSay(t *testing.T) {
	for want, edits := range map[string]specs.ContainerEdits{
		"needs CDI: net devices":                         {NetDevices: []*specs.LinuxNetDevice{{HostInterfaceName: "eth1", Name: "eth1"}}},
		"needs CDI: additional GIDs":                     {AdditionalGIDs: []uint32{44}},
		"needs CDI: Intel RDT":                           {IntelRdt: &specs.IntelRdt{}},
		"needs CDI: mount /tmp of type tmpfs":            {Mounts: []*specs.Mount{{ContainerPath: "/tmp", HostPath: "tmpfs", Type: "tmpfs"}}},
		"mount /m: both /a and /b are to be it":          {Mounts: []*specs.Mount{{ContainerPath: "/m", HostPath: "/a"}, {ContainerPath: "/m", HostPath: "/b"}}},
		"device node /dev/x: both /dev/0 and /dev/1 are": {DeviceNodes: []*specs.DeviceNode{{Path: "/dev/x", HostPath: "/dev/0"}, {Path: "/dev/x", HostPath: "/dev/1"}}},
	} {
		if _, err := newResponse(edits); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// Hooks make a device easier to use. The plain device plugin API omits them.
func TestResponseWithoutHooks(t *testing.T) {
	got, err := newResponse(specs.ContainerEdits{Env: []string{"A=1"}, Hooks: []*specs.Hook{{HookName: "createContainer", Path: "/bin/hook"}}})
	want := &pluginapi.ContainerAllocateResponse{Envs: map[string]string{"A": "1"}}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// A container gets the devices of a pool that have their device nodes.
func TestDevicesOfAPool(t *testing.T) {
	down := listtest.WithHealth(listtest.GPU("b"), discovery.Unhealthy, "port eth0 has no carrier")
	gone := listtest.WithHealth(listtest.GPU("c"), discovery.Unhealthy, "device node /dev/c is missing")
	gone.Health.Condition = discovery.ConditionNodeMissing
	pool := &list.Unit{Pool: true, Devices: []rules.Offered{listtest.GPU("a"), down, gone}}
	if diff := cmp.Diff(pool.Devices[:2], devicesOf([]*list.Unit{pool})); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// The administrator's environment variables do not replace those of the devices.
func TestVariablesOfAnAllocation(t *testing.T) {
	p := New(Config{Grant: func([]discovery.Device, discovery.Grant) specs.ContainerEdits {
		return specs.ContainerEdits{Env: []string{"VISIBLE=gpu-a"}}
	}})
	allocation := rules.Allocation{Env: []string{"NVIDIA_GDS=enabled", "VISIBLE=all"}}
	r, err := p.containerResponse(t.Context(), allocation, []rules.Offered{listtest.GPU("a")}, discovery.Grant{}, []string{"UNITS=4"})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"GPU_LIBRARY": "/usr/lib/gpu", "NVIDIA_GDS": "enabled", "UNITS": "4", "VISIBLE": "gpu-a"}
	if diff := cmp.Diff(want, r.Envs); diff != "" {
		t.Errorf("variables (-want +got):\n%s", diff)
	}
}
