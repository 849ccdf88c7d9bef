package hostservice

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"

	"chandler.dev/discovery"
	"chandler.dev/internal/hostservice/wire"
)

// Forms of the values of a [wire.PartitionChange]: MIG instances of NVIDIA GPUs. Before R470, the
// UUID of an instance consists of the UUID of the GPU and the numbers of the instance.
var (
	placePattern = regexp.MustCompile(`^[1-8]g\.[1-9][0-9]{0,3}gb([+-][a-z]{1,8}(\.[a-z]{1,8})?)?@[0-9]{1,3}$`)
	uuidPattern  = regexp.MustCompile(`^MIG-(GPU-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(/[0-9]{1,2}/[0-9]{1,2})?$`)
)

// checkPartition returns why a change is refused, nil if the service may make it.
func (s *Server) checkPartition(c *wire.PartitionChange) error {
	switch {
	case s.config.Partitions[c.Program] == nil:
		return refuseRequest("partitions by program %.64q are not what the host service changes on this node", c.Program)
	case !placePattern.MatchString(c.Place):
		return refuseRequest("%.64q is not the place of a partition", c.Place)
	case c.UUID != "" && (!c.Remove || !uuidPattern.MatchString(c.UUID)):
		return refuseRequest("%.64q is not the UUID of a partition to remove", c.UUID)
	}
	_, err := findFunction(s.config.Host, c.Lease, c.Function, c.Inode)
	return err
}

// changePartition makes a change. It returns when the program has ended.
func (s *Server) changePartition(c *wire.PartitionChange) (*wire.Output, error) {
	write := &wire.Write{Session: c.Session, Lease: c.Lease, Function: c.Function, Inode: c.Inode, Attribute: "partitions"}
	if err := s.beginWrite(write); err != nil {
		return nil, err
	}
	defer s.endWrite(write)
	if err := s.checkPartition(c); err != nil {
		return nil, err
	}
	output, err := s.config.Partitions[c.Program](c)
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
// context. The arguments are those of the program; see parsePartition. It returns the program's
// output, and the warning of a program that has succeeded.
func (c *Client) ChangePartition(ctx context.Context, program string, args []string) (output []byte, warning string, err error) {
	change, err := parsePartition(args)
	if err != nil {
		return nil, "", err
	}
	lease, _ := ctx.Value(leaseKey{}).(Lease)
	if lease.Name == "" || change.Function != lease.Function.Function {
		return nil, "", fmt.Errorf("change of partitions of function %s: the lease is on function %q", change.Function, lease.Function.Function)
	}
	change.Session, change.Lease, change.Inode, change.Program = c.session, lease.Name, lease.Function.Inode, program
	var out wire.Output
	err = c.change(ctx, wire.PartitionsPath, change, &out)
	return []byte(out.Text), out.Warning, err
}

// parsePartition returns the request for the arguments of a program that changes partitions.
func parsePartition(args []string) (*wire.PartitionChange, error) {
	change := &wire.PartitionChange{}
	for _, arg := range args {
		switch name, value, _ := strings.Cut(arg, "="); name {
		case "--gpu":
			change.Function = value
		case "--create":
			change.Place = value
		case "--remove":
			change.Place, change.Remove = value, true
		case "--uuid":
			change.UUID = value
		case "--begun":
			change.HasBegun = true
		default:
			return nil, fmt.Errorf("the host service has no argument %s for a change of partitions", name)
		}
	}
	return change, nil
}

// PartitionArgs returns the arguments of a program for the change of a partition. The inverse is
// parsePartition.
func PartitionArgs(change *wire.PartitionChange) []string {
	args := []string{"--gpu=" + change.Function, "--create=" + change.Place}
	if change.Remove {
		args[1] = "--remove=" + change.Place
	}
	if change.UUID != "" {
		args = append(args, "--uuid="+change.UUID)
	}
	if change.HasBegun {
		args = append(args, "--begun")
	}
	return args
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
