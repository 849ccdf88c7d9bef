package nvidia

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/discovery/discoverytest"
	"chandler.dev/discovery/scan"
)

// keptGPUs returns the GPUs of a host. The administrator allows the given kinds of sharing daemons.
func keptGPUs(t *testing.T, kinds ...discovery.SharingDaemonKind) (a100, l40s discovery.Device) {
	t.Helper()
	host := discoverytest.ReadHost(t, "testdata/mps.host")
	host.SharingDaemons = make(map[discovery.SharingDaemonKind][]discovery.Selection[struct{}])
	for _, kind := range kinds {
		host.SharingDaemons[kind] = []discovery.Selection[struct{}]{
			{Selects: func(discovery.Device) (bool, error) { return false, errors.New("no such attribute") }},
			{Selects: func(discovery.Device) (bool, error) { return true, nil }},
		}
	}
	s := scan.ReadHost(host, []*discovery.Family{Family})
	a100, _ = s.Lookup("pci-0000-01-00-0")
	l40s, both := s.Lookup("pci-0000-41-00-0")
	if !both {
		t.Fatalf("%+v", s)
	}
	return a100, l40s
}

// Daemons and time slices require whole GPUs and the permission of the administrator.
func TestAcceptSharingDaemons(t *testing.T) {
	both, other := keptGPUs(t, discovery.SharingDaemonMPS, discovery.SharingDaemonTimeSlices)
	slices, _ := keptGPUs(t, discovery.SharingDaemonTimeSlices)
	none, _ := keptGPUs(t)
	shared, _ := sharedBy(t, byFour)
	shared.Facts = both.Facts
	unnamed := both
	unnamed.Identity = ""
	mps, turns := discovery.Parameters{MPS: "true", ComputePercentage: "50", MPSMemory: "10"}, discovery.Parameters{TimeSlice: "Short"}
	for name, test := range map[string]struct {
		given      []discovery.Device
		parameters discovery.Parameters
		want       string
	}{
		"daemon":             {[]discovery.Device{both, other}, mps, ""},
		"time slice":         {[]discovery.Device{slices}, turns, ""},
		"not allowed":        {[]discovery.Device{slices}, mps, "mps: device " + slices.Name + " is not a whole GPU that the configuration selects by onDemand.mps"},
		"nothing is allowed": {[]discovery.Device{none}, turns, "timeSlice: device " + none.Name + " is not a whole GPU that the configuration selects by onDemand.timeSlices"},
		"both":               {[]discovery.Device{both}, discovery.Parameters{MPS: "true", TimeSlice: "Long"}, "timeSlice: cannot be combined with mps"},
		"no UUID":            {[]discovery.Device{unnamed}, mps, "the UUID of device " + both.Name + " is not known yet"},
		"shared":             {[]discovery.Device{shared}, mps, "is shared, and used by the daemon of driverRoots[nvidia-mps]"},
	} {
		err := discovery.JoinAcceptors([]*discovery.Family{Family})(test.given, test.parameters)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want %q", name, err, test.want)
		}
	}
}

// The order for chandler-host names the GPUs of a request, and containers get the matching edits.
func TestOrder(t *testing.T) {
	a, l := keptGPUs(t, discovery.SharingDaemonMPS, discovery.SharingDaemonTimeSlices)
	given := []discovery.Device{l, a}
	uuids := a.Identity + "," + l.Identity
	if l.Identity < a.Identity {
		uuids = l.Identity + "," + a.Identity
	}
	const daemon = "map[CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps] /state/nvidia/uid/pipe:/tmp/nvidia-mps /state/nvidia/uid/shm:/dev/shm"
	for name, test := range map[string]struct {
		parameters  discovery.Parameters
		order, edit string
	}{
		"nothing":    {discovery.Parameters{discovery.EnvironmentParameter("NCCL_DEBUG"): "INFO"}, "", "map[]"},
		"daemon":     {discovery.Parameters{MPS: "true"}, "map[gpus:" + uuids + " mps:true]", daemon},
		"limits":     {discovery.Parameters{MPS: "true", MPSMemory: "4096", ComputePercentage: "40"}, "map[gpus:" + uuids + " memory:4096 mps:true threads:40]", daemon},
		"time slice": {discovery.Parameters{TimeSlice: "Medium"}, "map[gpus:" + uuids + " timeSlice:2]", "map[]"},
		"default":    {discovery.Parameters{TimeSlice: "Default"}, "map[gpus:" + uuids + " timeSlice:0]", "map[]"},
	} {
		orders := discovery.JoinOrderers([]*discovery.Family{Family})(given, test.parameters)
		got := ""
		for _, order := range orders {
			got += fmt.Sprint(order.How)
		}
		if got != test.order {
			t.Errorf("%s: %s; want %s", name, got, test.order)
		}
		edits := daemonEdits(discovery.Grant{UID: "uid", SharingDir: "/state", Parameters: test.parameters})
		text := "map" + fmt.Sprint(edits.Env)
		for _, m := range edits.Mounts {
			text += " " + m.HostPath + ":" + m.ContainerPath
		}
		if text != test.edit {
			t.Errorf("%s: %s; want %s", name, text, test.edit)
		}
	}
	if _, err := discovery.JoinOrders([]discovery.Order{{Family: "nvidia"}}, []discovery.Order{{Family: "nvidia"}}); err == nil {
		t.Error("two requests")
	}
}
