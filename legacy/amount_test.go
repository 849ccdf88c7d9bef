package legacy

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/legacy/kubelettest"
	"chandler.dev/legacy/list/listtest"
)

func TestAllocateAmounts(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	config := configFor(k)
	config.Grant = func(_ []discovery.Device, grant discovery.Grant) specs.ContainerEdits {
		memory := grant.Consumed["gpu-b"]["memory"]
		return specs.ContainerEdits{Env: []string{fmt.Sprintf("LIMIT=%s of %d", memory.String(), len(grant.Consumed))}}
	}
	p := New(config)
	publish(p, listtest.Snapshot(listtest.InUnits("a", 8), listtest.InUnits("b", 8)))
	run(t, p)
	registered := k.AwaitPlugin(listtest.MemoryResource, 1)
	ask := func(ids ...string) (*pluginapi.AllocateResponse, error) {
		return registered.API.Allocate(t.Context(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}})
	}
	r, err := ask(listtest.UnitIDs("b", 0, 3)...)
	if err != nil {
		t.Fatal(err)
	}
	got := r.ContainerResponses[0]
	for name, want := range map[string]string{
		"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "3", "ALIYUN_COM_GPU_MEM_CONTAINER": "3", "ALIYUN_COM_GPU_MEM_DEV": "8",
		"LIMIT": "3Gi of 1", // the amount that the family receives
	} {
		if got.Envs[name] != want {
			t.Errorf("%s is %q, want %q", name, got.Envs[name], want)
		}
	}
	if n := len(got.Devices); n != 2 || got.Devices[1].HostPath != "/dev/b" {
		t.Errorf("device nodes %v", got.Devices)
	}
	// Another container gets the rest of the same device.
	if _, err := ask(listtest.UnitIDs("b", 3, 8)...); err != nil {
		t.Errorf("the other units: %v", err)
	}
	_, err = ask(slices.Concat(listtest.UnitIDs("a", 0, 2), listtest.UnitIDs("b", 0, 1))...)
	if want := "3 units of memory requested, and no device has that many left; it would be 2 of gpu-a and 1 of gpu-b"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("units of two devices: %v; want %q", err, want)
	}
}
