package agent

import (
	"context"
	"errors"
	"testing"

	"chandler.dev/discovery"
	"chandler.dev/internal/hostservice"
	"chandler.dev/internal/ledger"
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
	write := (&agent{ledger: l, host: host}).guardWrites(func(string, string) error { written++; return nil })
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
		if err := write(name, value); !errors.Is(err, errNoLease) {
			t.Errorf("%q to %s: %v", value, name, err)
		}
	}
	lease, blocked := l.Leases.LeaseDevices(ledger.Change{Name: "test", Functions: []discovery.DeviceKey{discovery.FunctionKey(host, function)}}, &ledger.Present{})
	if blocked != nil || written > 0 {
		t.Fatal(blocked, written)
	}
	for name, value := range writes {
		if err := write(name, value); err != nil {
			t.Errorf("under a lease: %q to %s: %v", value, name, err)
		}
	}
	for _, name := range []string{"sys/bus/pci/drivers_probe", "sys/bus/pci/drivers/nvme/unbind"} {
		if err := write(name, other); !errors.Is(err, errNoLease) {
			t.Errorf("another function, by %s: %v", name, err)
		}
	}
	k.ReturnFunction("0000:03:00.0", "nvme", "3")
	for name, value := range writes {
		if err := write(name, value); !errors.Is(err, errNoLease) {
			t.Errorf("the kernel has registered the function again: %q to %s: %v", value, name, err)
		}
	}
	lease.Release()
	if err := write(function+"/reset", "1"); !errors.Is(err, errNoLease) {
		t.Errorf("after the lease: %v", err)
	}
	if err := write("sys/kernel/mm/hugepages", "1"); err != nil {
		t.Errorf("what is of no function: %v", err)
	}
}

// With a host service, the service configures a device under the agent's lease, and the family's work
// does nothing in the agent. While the service is missing, the reason names it.
func TestConfigureByHostService(t *testing.T) {
	k := passthroughtest.New(t)
	k.Add("0000:03:00.0", "nvme", "3")
	const acceleratorFunction discovery.Parameter = "acceleratorFunction"
	has := ""
	family := func(work func(want string) error) *discovery.Family {
		return &discovery.Family{
			Name: "fpga", Parameters: []discovery.Parameter{acceleratorFunction},
			Configure: func(_ *discovery.Host, d discovery.Device, want discovery.Parameters) (discovery.Device, discovery.Work, error) {
				if has == want[acceleratorFunction] {
					return d, nil, nil
				}
				return d, func(context.Context) error { return work(want[acceleratorFunction]) }, nil
			},
		}
	}
	service := &hostService{moments: -1, config: hostservice.Config{Host: k.Host(), Families: []*discovery.Family{family(func(want string) error { has = want; return nil })}}}
	service.start()
	l := ledger.New(ledger.Config{Dir: t.TempDir(), Boot: "boot"})
	if problems, err := l.Open(t.Context()); err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	a := &agent{ledger: l, host: k.Host(), Config: Config{HostService: hostservice.NewClient("/run/chandler/host", service)}}
	own := family(func(string) error { return errors.New("the agent changes the device itself") })
	configure := a.requireLease(discovery.JoinConfigurers(a.host, []*discovery.Family{own}))
	program := func(source, want string) error {
		d, work, err := configure(discovery.Device{Name: "port", Family: "fpga", Source: source}, discovery.Parameters{acceleratorFunction: want}, "claim")
		if err != nil || work == nil {
			t.Fatalf("%s: no work, %v", d.Name, err)
		}
		return work(t.Context())
	}
	port := passthroughtest.Source("0000:03:00.0") + "/fpga_region/region0/dfl-port.0"
	if err := program(port, "0f"); err != nil || has != "0f" {
		t.Errorf("the device has %q, %v", has, err)
	}
	if err := program("sys/devices/platform/port", "1f"); !errors.Is(err, errNoLease) || has != "0f" {
		t.Errorf("a device of no function: %v", err)
	}
	service.kill()
	if err := program(port, "1f"); !errors.Is(err, hostservice.ErrAway) || has != "0f" {
		t.Errorf("without the service: %v", err)
	}
}
