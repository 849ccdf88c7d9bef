package changes

import (
	"context"
	"errors"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/ledger/allocation"
	"chandler.dev/internal/ledger/exclusion"
	"chandler.dev/internal/passthrough/passthroughtest"
)

// No part of the agent writes to a PCI function without a lease, whichever attribute names the
// function. Passthrough, creation and resets use this guard in all tests of a whole agent.
func TestWritesNeedALease(t *testing.T) {
	const other = "0000:04:00.0"
	function := passthroughtest.Source("0000:03:00.0")
	l := ledger.New(ledger.Config{Dir: t.TempDir(), Boot: "boot"})
	if _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	written := 0
	k := passthroughtest.New(t)
	k.Add("0000:03:00.0", "nvme", "3")
	k.Add(other, "nvme", "4")
	host := k.Host()
	guard := leaseGuard{host: host, leases: l.Leases}
	write := guard.guardWrites(func(string, string) error { written++; return nil })
	programs := guard.guardPrograms(map[string]func(context.Context, discovery.PartitionChange) ([]byte, error){
		"family": func(context.Context, discovery.PartitionChange) ([]byte, error) { written++; return nil, nil },
	})
	change := func(function string) error {
		_, err := programs["family"](t.Context(), discovery.PartitionChange{Function: function})
		return err
	}
	writes := map[string]string{ // values by attribute
		function + "/sriov_numvfs":               "4",
		function + "/driver_override":            "vfio-pci",
		function + "/reset":                      "1",
		function + "/drm/card0/gt/gt0/mode":      "1",
		"sys/bus/pci/devices/0000:03:00.0/reset": "1",
		"sys/bus/pci/drivers/nvme/unbind":        "0000:03:00.0",
		"sys/bus/pci/drivers/vfio-pci/bind":      "0000:03:00.0\n",
		"sys/bus/pci/drivers_probe":              "0000:03:00.0",
	}
	for name, value := range writes {
		if err := write(name, value); !errors.Is(err, ErrNoLease) {
			t.Errorf("%q to %s: %v", value, name, err)
		}
	}
	if err := change("0000:03:00.0"); !errors.Is(err, ErrNoLease) {
		t.Errorf("a program of a family: %v", err)
	}
	lease, blocked := l.Leases.LeaseDevices(allocation.Change{Name: "test", Functions: []discovery.DeviceKey{discovery.FunctionKey(host, function)}}, &exclusion.Present{})
	if blocked != nil || written > 0 {
		t.Fatal(blocked, written)
	}
	for name, value := range writes {
		if err := write(name, value); err != nil {
			t.Errorf("under a lease: %q to %s: %v", value, name, err)
		}
	}
	if err := change("0000:03:00.0"); err != nil {
		t.Errorf("a program of a family under a lease: %v", err)
	}
	if err := change(other); !errors.Is(err, ErrNoLease) {
		t.Errorf("a program of a family, for another function: %v", err)
	}
	for _, name := range []string{"sys/bus/pci/drivers_probe", "sys/bus/pci/drivers/nvme/unbind"} {
		if err := write(name, other); !errors.Is(err, ErrNoLease) {
			t.Errorf("another function, by %s: %v", name, err)
		}
	}
	k.ReturnFunction("0000:03:00.0", "nvme", "3")
	for name, value := range writes {
		if err := write(name, value); !errors.Is(err, ErrNoLease) {
			t.Errorf("the kernel has registered the function again: %q to %s: %v", value, name, err)
		}
	}
	lease.Release()
	if err := write(function+"/reset", "1"); !errors.Is(err, ErrNoLease) {
		t.Errorf("after the lease: %v", err)
	}
	if err := write("sys/kernel/mm/hugepages", "1"); err != nil {
		t.Errorf("what is of no function: %v", err)
	}
}
