package kubelet

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/test/bufconn"
)

// network holds the sockets of a node in memory, by path. Real sockets would stop the time of a
// simulation.
type network struct {
	mu        sync.Mutex
	listeners map[string]*listener
	serial    int
}

// listener is a socket. Closing removes the socket.
type listener struct {
	*bufconn.Listener
	network *network
	process *Process
	path    string
	serial  int
}

// bufferSize is the size of a connection's buffer, in bytes.
const bufferSize = 64 << 10

func (n *network) listen(path string, process *Process) *listener {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners == nil {
		n.listeners = make(map[string]*listener)
	}
	n.serial++
	l := &listener{bufconn.Listen(bufferSize), n, process, path, n.serial}
	n.listeners[path] = l
	return l
}

// Close implements [net.Listener].
func (l *listener) Close() error {
	l.network.mu.Lock()
	if l.network.listeners[l.path] == l {
		delete(l.network.listeners, l.path)
	}
	l.network.mu.Unlock()
	return l.Listener.Close()
}

// dial connects to a socket.
func (n *network) dial(ctx context.Context, path string) (net.Conn, error) {
	n.mu.Lock()
	l := n.listeners[path]
	n.mu.Unlock()
	if l == nil {
		return nil, &net.OpError{Op: "dial", Net: "unix", Err: net.ErrClosed}
	}
	return l.DialContext(ctx)
}

// registrationSockets returns the registration sockets of plugins.
func (n *network) registrationSockets() (found []*listener) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for path, l := range n.listeners {
		if strings.HasSuffix(path, "-reg.sock") {
			found = append(found, l)
		}
	}
	slices.SortFunc(found, func(a, b *listener) int { return strings.Compare(a.path, b.path) })
	return found
}

// has reports whether a socket exists.
func (n *network) has(path string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.listeners[path] != nil
}
