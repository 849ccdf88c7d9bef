package legacy

import (
	"io/fs"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"chandler.dev/discovery"
	"chandler.dev/discovery/rules"
	"chandler.dev/legacy/list/listtest"
)

const checkpointPath = "var/lib/kubelet/device-plugins/" + checkpointFile

func TestHeld(t *testing.T) {
	known := []rules.Offered{
		{Device: discovery.Device{Name: "gpu-0"}, Offers: []discovery.Offer{{Resource: "a.b/gpu", IDs: []string{"one", "other"}}}},
		{Device: discovery.Device{Name: "gpu-1"}, Offers: []discovery.Offer{{Resource: "a.b/gpu", IDs: []string{"two"}}}},
		{Device: discovery.Device{Name: "gpu-9", Edits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/gpu9"}}}}},
		{Device: discovery.Device{Name: "group"}, Offers: []discovery.Offer{{IDs: []string{"42"}}}},
	}
	host := fstest.MapFS{
		checkpointPath: {Data: []byte(`{"Data":{"PodDeviceEntries":[
			{"PodUID":"here","ContainerName":"c","ResourceName":"a.b/gpu","DeviceIDs":{"0":["other"],"-1":[]}},
			{"PodUID":"here","ContainerName":"d","ResourceName":"named/x","DeviceIDs":{"-1":["42","0000:6b:00.1"]}},
			{"PodUID":"here","ContainerName":"e","ResourceName":"named/shared","DeviceIDs":{"-1":["two::1"]}},
			{"PodUID":"here","ContainerName":"f","ResourceName":"a.b/gpu","DeviceIDs":{"0":["SN17"]},"AllocResp":"GhgKBy9kZXYvaW4SCS9kZXYvZ3B1ORoCcnc="},
			{"PodUID":"gone","ContainerName":"c","ResourceName":"a.b/gpu","DeviceIDs":{"0":["one"]}}],
			"RegisteredDevices":{"a.b/gpu":["one","other","two"]}},"Checksum":1}`)},
		"kubelet/pods/here/etc-hosts": {},
	}
	want := map[string]string{
		"gpu-0":            "container c of the pod with UID here",
		"gpu-9":            "container f of the pod with UID here",
		"gpu-1":            "container e of the pod with UID here",
		"group":            "container d of the pod with UID here",
		"pci-0000-6b-00-1": "container d of the pod with UID here",
	}
	held, err := HeldDevices(host, "kubelet", "var/lib/kubelet/device-plugins", listtest.FoundDevices(known))
	if diff := cmp.Diff(want, held); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	if held, err := HeldDevices(fstest.MapFS{}, "kubelet", "var/lib/kubelet/device-plugins", listtest.FoundDevices(known)); len(held) > 0 || err != nil {
		t.Errorf("without a kubelet: %v, %v", held, err)
	}
	plugins, err := fs.Sub(host, path.Dir(checkpointPath))
	if err != nil {
		t.Fatal(err)
	}
	ids, err := AllocatedIDs(plugins)
	for _, some := range ids {
		slices.Sort(some)
	}
	wantIDs := map[string][]string{"a.b/gpu": {"SN17", "one", "other"}, "named/x": {"0000:6b:00.1", "42"}, "named/shared": {"two::1"}}
	if diff := cmp.Diff(wantIDs, ids); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	if ids, err := AllocatedIDs(fstest.MapFS{}); len(ids) > 0 || err != nil {
		t.Errorf("without a kubelet: %v, %v", ids, err)
	}
	broken := fstest.MapFS{checkpointPath: {Data: []byte("{")}}
	if _, err := HeldDevices(broken, "kubelet", "var/lib/kubelet/device-plugins", listtest.FoundDevices(known)); err == nil || !strings.Contains(err.Error(), "read ") {
		t.Errorf("damaged: %v", err)
	}
}

// HeldDevices and AllocatedIDs return for any checkpoint.
func FuzzHeld(f *testing.F) {
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[{"PodUID":"u","ResourceName":"a.b/c","DeviceIDs":{"0":["0000:6b:00.1"]}}]}}`))
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[{"DeviceIDs":["old"]}]}}`))
	f.Fuzz(func(t *testing.T, checkpoint []byte) {
		host := fstest.MapFS{checkpointPath: {Data: checkpoint}, "kubelet/pods/u/f": {}}
		if held, err := HeldDevices(host, "kubelet", "var/lib/kubelet/device-plugins", nil); held == nil {
			t.Errorf("nothing at all, %v", err)
		}
		_, _ = AllocatedIDs(fstest.MapFS{checkpointFile: {Data: checkpoint}})
	})
}
