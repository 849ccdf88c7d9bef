package hostservice

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"chandler.dev/discovery"
	"chandler.dev/internal/hostservice/wire"
)

// PartitionProgram is a program that creates and removes partitions of PCI functions.
type PartitionProgram struct {
	Args func(discovery.PartitionChange) ([]string, error) // see [discovery.Program]
	Run  func(args []string) (*wire.Output, error)         // returns when the program has ended
}

// checkPartition returns the arguments of the program for a change, or why the change is refused.
func (s *Server) checkPartition(c *wire.PartitionChange) (args []string, err error) {
	program, found := s.config.Partitions[c.Program]
	if !found {
		return nil, refuseRequest("partitions by program %.64q are not what the host service changes on this node", c.Program)
	}
	args, err = program.Args(discovery.PartitionChange{Function: c.Function, Place: c.Place, Remove: c.Remove, UUID: c.UUID, HasBegun: c.HasBegun})
	if err != nil {
		return nil, refuseRequest("%.512v", err)
	}
	_, err = findFunction(s.config.Host, c.Lease, c.Function, c.Inode)
	return args, err
}

// changePartition makes a change. It returns when the program has ended.
func (s *Server) changePartition(c *wire.PartitionChange) (*wire.Output, error) {
	write := &wire.Write{Session: c.Session, Lease: c.Lease, Function: c.Function, Inode: c.Inode, Attribute: "partitions"}
	if err := s.beginWrite(write); err != nil {
		return nil, err
	}
	defer s.endWrite(write)
	args, err := s.checkPartition(c)
	if err != nil {
		return nil, err
	}
	output, err := s.config.Partitions[c.Program].Run(args)
	change := "created"
	if c.Remove {
		change = "removed"
	}
	s.config.Log.Printf("%s partition %s of function %s, lease %q: %v", change, c.Place, c.Function, c.Lease, err)
	return output, err
}

// Lease is the lease of an agent on a PCI function.
type Lease struct {
	Name     string
	Function discovery.DeviceKey
}

type leaseKey struct{}

// WithLease returns a context for [Client.ChangePartition] under a lease.
func WithLease(ctx context.Context, lease Lease) context.Context {
	return context.WithValue(ctx, leaseKey{}, lease)
}

// ChangePartition creates or removes a partition by a program of the service, under the lease of the
// context. It returns the program's output, and the warning of a program that has succeeded.
func (c *Client) ChangePartition(ctx context.Context, program string, change discovery.PartitionChange) (output []byte, warning string, err error) {
	lease, _ := ctx.Value(leaseKey{}).(Lease)
	if lease.Name == "" || change.Function != lease.Function.Function {
		return nil, "", fmt.Errorf("change of partitions of function %s: the lease is on function %q", change.Function, lease.Function.Function)
	}
	request := &wire.PartitionChange{
		Session: c.session, Lease: lease.Name, Function: change.Function, Inode: lease.Function.Inode,
		Program: program, Place: change.Place, Remove: change.Remove, UUID: change.UUID, HasBegun: change.HasBegun,
	}
	var out wire.Output
	err = c.change(ctx, wire.PartitionsPath, request, &out)
	return []byte(out.Text), out.Warning, err
}

// change sends a request of this agent's session, and begins the session again if the service has
// started since.
func (c *Client) change(ctx context.Context, path string, request, into any) error {
	err := c.call(ctx, http.MethodPut, path, request, into)
	if a := (*answer)(nil); errors.As(err, &a) && a.status == statusNoSession {
		if err = c.BeginSession(ctx); err == nil {
			err = c.call(ctx, http.MethodPut, path, request, into)
		}
	}
	return err
}
