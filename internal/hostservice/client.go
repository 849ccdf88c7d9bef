package hostservice

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"k8s.io/apimachinery/pkg/types"

	"chandler.dev/discovery"
	"chandler.dev/discovery/sysfs"
	"chandler.dev/internal/hostservice/wire"
	"chandler.dev/internal/inuse"
)

// Client sends the requests of one agent to the host service of its node. A missing service is not
// permanent: each request tries again.
type Client struct {
	dir       string
	transport http.RoundTripper
	session   string
}

var _ inuse.Finder = (*Client)(nil)

// DefaultDir is the directory of the service's socket in the chart.
const DefaultDir = "/run/chandler/host"

// NewClient returns a client for the socket in a directory. A transport that is not nil replaces
// the socket.
func NewClient(dir string, transport http.RoundTripper) *Client {
	if transport == nil {
		transport = SocketTransport(filepath.Join(dir, wire.Socket))
	}
	return &Client{dir: dir, transport: transport, session: rand.Text()}
}

// ErrAway is wrapped by the error of a request that the host service has not answered.
var ErrAway = errors.New("the host service does not answer")

// BeginSession makes this agent the one that may write. It returns when all writes of earlier
// agents have ended, or with an error that wraps [ErrAway] if there is no service and so no write.
func (c *Client) BeginSession(ctx context.Context) error {
	return c.call(ctx, http.MethodPut, wire.SessionsPath+"/"+c.session, nil, nil)
}

// DescribeService returns the version and the permissions of the service.
func (c *Client) DescribeService(ctx context.Context) (service wire.Service, err error) {
	err = c.ask(ctx, http.MethodGet, wire.ServicePath, nil, &service)
	return service, err
}

// Write writes an attribute for the holder of a lease on a PCI function. It has no time limit, and
// returns only after the kernel has ended the write: see the package's documentation. An error of
// the kernel is a [syscall.Errno].
func (c *Client) Write(lease string, function discovery.DeviceKey, name, value string) error {
	w, err := parseWrite(name, value)
	if err != nil {
		return err
	}
	if w.Function != function.Function {
		return fmt.Errorf("the lease is on function %s", function.Function)
	}
	w.Session, w.Lease, w.Inode = c.session, lease, function.Inode
	return c.change(context.Background(), wire.WritePath, w, nil)
}

// parseWrite returns the request for the write of an attribute, by its name in fs.FS.
func parseWrite(name, value string) (*wire.Write, error) {
	dir := path.Dir(name)
	switch {
	case dir == "sys/bus/pci":
		return &wire.Write{Attribute: path.Base(name), Function: value}, nil
	case path.Dir(dir) == "sys/bus/pci/drivers":
		return &wire.Write{Attribute: path.Base(name), Driver: path.Base(dir), Function: value}, nil
	case sysfs.IsPCIAddress(path.Base(dir)):
		return &wire.Write{Attribute: path.Base(name), Function: path.Base(dir), Value: value}, nil
	}
	return nil, errors.New("the host service writes only attributes of PCI functions and drivers")
}

// FunctionUses implements [inuse.Finder].
func (c *Client) FunctionUses(o inuse.Options, functions ...sysfs.Device) []inuse.Uses {
	query := wire.FunctionQuery{Except: o.Except}
	for _, function := range functions {
		f := wire.Device{Source: function.Path}
		for i := range o.Known {
			if inuse.IsWithin(o.Known[i].Source, function) {
				f.Nodes = append(f.Nodes, nodesOf(&o.Known[i])...)
			}
		}
		query.Functions = append(query.Functions, f)
	}
	var answers [][]wire.Use
	err := c.call(context.Background(), http.MethodPost, wire.FunctionUsersPath, query, &answers)
	if err == nil && len(answers) != len(functions) {
		err = errors.New("the host service has not answered for all functions")
	}
	all := make([]inuse.Uses, len(functions))
	for i := range all {
		if err != nil {
			all[i] = reportUnanswered("function "+functions[i].Name(), err)
			continue
		}
		all[i] = fromWire(answers[i])
	}
	return all
}

// PodUses implements [inuse.Finder].
func (c *Client) PodUses(d discovery.Device, pods []types.UID) inuse.Uses {
	return c.podUses(&d, wire.PodQuery{Pods: pods})
}

// UnlistedPodUses implements [inuse.Finder].
func (c *Client) UnlistedPodUses(d discovery.Device, listed []types.UID) inuse.Uses {
	return c.podUses(&d, wire.PodQuery{Pods: listed, Unlisted: true})
}

func (c *Client) podUses(d *discovery.Device, query wire.PodQuery) inuse.Uses {
	if sysfs.IsPCIAddress(path.Base(d.Source)) {
		query.Device.Source = d.Source
	}
	query.Device.Nodes = nodesOf(d)
	var uses []wire.Use
	if err := c.call(context.Background(), http.MethodPost, wire.PodUsersPath, query, &uses); err != nil {
		return reportUnanswered("device "+d.Name, err)
	}
	return fromWire(uses)
}

// reportUnanswered returns the use of an object about which the service has given no answer.
func reportUnanswered(object string, err error) inuse.Uses {
	return inuse.Uses{{Object: object, ReadError: fmt.Errorf("%w: %w", inuse.ErrUnanswered, err)}}
}

// nodesOf returns the nodes that belong to a device alone.
func nodesOf(d *discovery.Device) (nodes []wire.Node) {
	for _, n := range d.OwnNodes() {
		nodes = append(nodes, wire.Node{Path: cmp.Or(n.HostPath, n.Path), Block: n.Type == "b", Major: n.Major, Minor: n.Minor})
	}
	return nodes
}

func fromWire(answered []wire.Use) (uses inuse.Uses) {
	for _, a := range answered {
		use := inuse.Use{Object: a.Object, How: a.How, BlocksUnbind: a.BlocksUnbind}
		if a.ReadError != "" {
			use.ReadError = readError{a.ReadError, a.Forbidden}
		}
		uses = append(uses, use)
	}
	return uses
}

// readError is an error of the service while it read the host.
type readError struct {
	text      string
	forbidden bool
}

// Error implements error.
func (e readError) Error() string { return e.text }

// Is reports whether the target is [fs.ErrPermission], and the service had no permission.
func (e readError) Is(target error) bool { return e.forbidden && target == fs.ErrPermission } //nolint:errorlint // Is compares one error

// call checks that the service has a version of this client, and sends a request.
func (c *Client) call(ctx context.Context, method, path string, body, into any) error {
	if _, err := c.describeCompatible(ctx); err != nil {
		return err
	}
	return c.ask(ctx, method, path, body, into)
}

// describeCompatible describes a service that has a version of this client. Another service is as
// good as none.
func (c *Client) describeCompatible(ctx context.Context) (service wire.Service, err error) {
	service, err = c.DescribeService(ctx)
	if err == nil && (service.Oldest > wire.NewestVersion || service.Newest < wire.OldestVersion) {
		err = discovery.TransientError(fmt.Errorf("%w: it is %s with versions %d to %d of the protocol, and this agent has %d to %d; update the older of the two",
			ErrAway, service.Program, service.Oldest, service.Newest, wire.OldestVersion, wire.NewestVersion))
	}
	return service, err
}

func (c *Client) ask(ctx context.Context, method, path string, body, into any) error {
	response, err := Send(ctx, c.transport, "http://host"+path, method, body)
	if err != nil {
		return c.awayError(err)
	}
	return response.Decode(into)
}

// SocketTransport returns a transport to a Unix socket, with a connection for each request.
func SocketTransport(socket string) http.RoundTripper {
	return &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
}

// Response is the complete response to a request.
type Response struct {
	status int
	errno  syscall.Errno
	text   []byte
}

// maxResponse limits a response, in bytes.
const maxResponse = 4 << 20

// Send sends a request with a JSON body to a program beside the agent, and reads its response. An
// error means that there is no complete response. Its text omits the URL.
func Send(ctx context.Context, transport http.RoundTripper, url, method string, body any) (*Response, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, maxResponse))
	if err != nil {
		return nil, err
	}
	errno, _ := strconv.ParseUint(response.Header.Get(wire.ErrnoHeader), 10, 12) // 0 without the header
	return &Response{status: response.StatusCode, errno: syscall.Errno(errno), text: text}, nil
}

// Decode decodes the result, unless into is nil, or returns the error of the response. An error of
// the kernel is a [syscall.Errno].
func (r *Response) Decode(into any) error {
	switch {
	case r.errno != 0:
		return r.errno
	case r.status == statusBusy:
		return discovery.TransientError(errors.New(strings.TrimSpace(string(r.text))))
	case r.status >= http.StatusBadRequest:
		return &answer{status: r.status, text: strings.TrimSpace(string(r.text))}
	case into == nil:
		return nil
	}
	if err := json.Unmarshal(r.text, into); err != nil {
		return fmt.Errorf("response: %w", err)
	}
	return nil
}
