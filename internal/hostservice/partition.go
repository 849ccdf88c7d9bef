package hostservice

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"

	"chandler.dev/discovery"
	"chandler.dev/internal/hostservice/wire"
)

// PartitionProgram is a program that creates and removes partitions of PCI functions.
type PartitionProgram struct {
	Args func(discovery.PartitionChange) ([]string, error) // see [discovery.Program]

	// Run runs the program, which inherits the held files, and returns when the program has ended.
	Run func(args []string, held []*os.File) (*wire.Output, error)
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
func (s *Server) changePartition(ctx context.Context, c *wire.PartitionChange) (*wire.Output, error) {
	write := &wire.Write{Session: c.Session, Lease: c.Lease, Function: c.Function, Inode: c.Inode, Attribute: "partitions"}
	if err := s.beginWrite(write); err != nil {
		return nil, err
	}
	defer s.endWrite(write)
	args, err := s.checkPartition(c)
	if err != nil {
		return nil, err
	}
	held, release, err := s.holdRequest(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	output, err := s.config.Partitions[c.Program].Run(args, held)
	change := "created"
	if c.Remove {
		change = "removed"
	}
	s.config.Log.Printf("%s partition %s of function %s, lease %q: %v", change, c.Place, c.Function, c.Lease, err)
	return output, err
}

// connectionKey is the key of a request's connection in its context.
type connectionKey struct{}

// holdRequest returns a copy of a request's connection, and the lock of the directory, for a program
// that makes a change. If this process is killed, the agent keeps its lease and the next service
// waits, until the program has ended too.
func (s *Server) holdRequest(ctx context.Context) (held []*os.File, release func(), err error) {
	release = func() {}
	if connection, ok := ctx.Value(connectionKey{}).(*net.UnixConn); ok {
		file, err := connection.File()
		if err != nil {
			return nil, nil, fmt.Errorf("hold the request of the agent: %w", err)
		}
		held, release = append(held, file), func() { file.Close() }
	}
	if s.lock != nil {
		held = append(held, s.lock)
	}
	return held, release, nil
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
