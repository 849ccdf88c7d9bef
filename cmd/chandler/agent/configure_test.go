package agent

import (
	"context"
	"errors"
	"testing"

	"chandler.dev/cmd/chandler/agent/changes"
	"chandler.dev/cmd/chandler/agent/placement"
	"chandler.dev/discovery"
	"chandler.dev/internal/hostservice"
	"chandler.dev/internal/ledger"
	"chandler.dev/internal/passthrough/passthroughtest"
)

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
	service := &hostService{config: hostservice.Config{Host: k.Host(), Families: []*discovery.Family{family(func(want string) error { has = want; return nil })}}}
	service.start()
	l := ledger.New(ledger.Config{Dir: t.TempDir(), Boot: "boot"})
	if problems, err := l.Open(t.Context()); err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	own := family(func(string) error { return errors.New("the agent changes the device itself") })
	configure := changes.New(changes.Config{
		Host: k.Host(), Families: []*discovery.Family{own}, Ledger: l, HostService: hostservice.NewClient("/run/chandler/host", service),
		Placed: func() *placement.Placed { return nil },
	}).Configurer()
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
	if err := program("sys/devices/platform/port", "1f"); !errors.Is(err, changes.ErrNoLease) || has != "0f" {
		t.Errorf("a device of no function: %v", err)
	}
	service.kill()
	if err := program(port, "1f"); !errors.Is(err, hostservice.ErrAway) || has != "0f" {
		t.Errorf("without the service: %v", err)
	}
}
