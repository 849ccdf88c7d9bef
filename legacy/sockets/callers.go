package sockets

import (
	"context"
	"sync"

	"google.golang.org/grpc/stats"
)

// callers counts the connections of a server. It implements [stats.Handler].
type callers struct {
	mu    sync.Mutex
	count int
	none  chan struct{} // closed when the count reaches 0; nil until gone is called
}

// goneChannel returns a channel that is closed when there is no connection.
func (c *callers) goneChannel() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	none := make(chan struct{})
	if c.count == 0 {
		close(none)
		return none
	}
	c.none = none
	return none
}

// HandleConn implements stats.Handler.
func (c *callers) HandleConn(_ context.Context, event stats.ConnStats) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch event.(type) {
	case *stats.ConnBegin:
		c.count++
	case *stats.ConnEnd:
		if c.count--; c.count == 0 && c.none != nil {
			close(c.none)
			c.none = nil
		}
	}
}

// TagConn implements stats.Handler.
func (*callers) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// TagRPC implements stats.Handler.
func (*callers) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements stats.Handler.
func (*callers) HandleRPC(context.Context, stats.RPCStats) {}
