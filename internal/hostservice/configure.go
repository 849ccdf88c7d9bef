package hostservice

import (
	"context"
	"slices"

	"chandler.dev/discovery"
	"chandler.dev/internal/hostservice/wire"
)

// Configure gives a device the wanted parameters, for the holder of a lease on the device's PCI
// function. It returns only after the change has ended, unless the context ends before the request.
func (c *Client) Configure(ctx context.Context, lease string, function discovery.DeviceKey, d *discovery.Device, want discovery.Parameters) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	request := &wire.Configuration{
		Session: c.session, Lease: lease, Function: function.Function, Inode: function.Inode,
		Family: d.Family, Device: d.Name, Parameters: make(map[string]string),
	}
	for p, value := range want {
		request.Parameters[string(p)] = value
	}
	return c.change(context.WithoutCancel(ctx), wire.ConfigurePath, request, nil)
}

// configure executes a configuration. It returns when the device has the parameters. A change
// continues if the agent is gone.
func (s *Server) configure(ctx context.Context, c *wire.Configuration) error {
	write := &wire.Write{Session: c.Session, Lease: c.Lease, Function: c.Function, Inode: c.Inode, Attribute: "the configuration"}
	if err := s.beginWrite(write); err != nil {
		return err
	}
	defer s.endWrite(write)
	work, err := s.planConfiguration(c)
	if err != nil || work == nil {
		return err
	}
	err = work(context.WithoutCancel(ctx))
	s.config.Log.Printf("configured device %s of function %s with %v, lease %q: %v", c.Device, c.Function, c.Parameters, c.Lease, err)
	return err
}

// planConfiguration returns the work for a configuration, nil if the device has the parameters, or
// why the configuration is refused.
func (s *Server) planConfiguration(c *wire.Configuration) (discovery.Work, error) {
	i := slices.IndexFunc(s.config.Families, func(f *discovery.Family) bool { return f.Name == c.Family })
	if i < 0 {
		return nil, refuseRequest("devices of family %.64q are not what the host service configures on this node", c.Family)
	}
	if len(c.Device) > maxParameter || !isPlain(c.Device) {
		return nil, refuseRequest("%.64q is not the name of a device", c.Device)
	}
	family, want := s.config.Families[i], make(discovery.Parameters)
	for name, value := range c.Parameters {
		p := discovery.Parameter(name)
		if !slices.Contains(family.Parameters, p) || len(value) > maxParameter || !isPlain(value) {
			return nil, refuseRequest("%.64q is not a value of a parameter %.64q", value, name)
		}
		want[p] = value
	}
	function, err := findFunction(s.config.Host, c.Lease, c.Function, c.Inode)
	if err != nil {
		return nil, err
	}
	d := discovery.Device{Name: c.Device, Family: family.Name, Source: function.Path}
	_, work, err := discovery.JoinConfigurers(s.config.Host, s.config.Families)(d, want, c.Lease)
	if err != nil {
		return nil, refuseRequest("%.512v", err)
	}
	return work, nil
}

// maxParameter limits the value of a parameter and the name of a device, in bytes.
const maxParameter = 64
