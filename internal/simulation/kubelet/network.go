package kubelet

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/test/bufconn"
)

// network is the sockets of a node, by path, in memory. Real ones would keep the
// time of a simulation from advancing.
type network struct {
	mu        sync.Mutex
	listeners map[string]*listener
	serial    int
}

// listener is a socket. It is gone when it is closed.
type listener struct {
	*bufconn.Listener
	network *network
	process *Process
	path    string
	serial  int
}

// bufferSize is how much of a connection is under way.
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

// registrars returns the sockets at which plugins register.
func (n *network) registrars() (found []*listener) {
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

// has reports whether there is a socket.
func (n *network) has(path string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.listeners[path] != nil
}
