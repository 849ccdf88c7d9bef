package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// traffic counts what the agents exchange with the API server.
type traffic struct {
	bytes   atomic.Int64 // sent and received, with TLS
	watches atomic.Int64 // open

	mu       sync.Mutex
	requests map[string]int // answered, by verb and resource
	bodies   map[string]int // bytes of the bodies of these requests and of their answers, without compression
	refused  int            // answers with the status 400 or above, included in requests
	failed   int            // requests without an answer
	seconds  map[int64]int  // answered requests by second
	last     time.Time      // of the last request
}

// reset forgets all requests. Open watches stay counted.
func (t *traffic) reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.bytes.Store(0)
	t.requests, t.bodies, t.seconds = make(map[string]int), make(map[string]int), make(map[int64]int)
	t.refused, t.failed, t.last = 0, 0, time.Now()
}

// sinceLast returns the time since the last request.
func (t *traffic) sinceLast() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return time.Since(t.last)
}

// read copies the counts since the last reset into a result.
func (t *traffic) read(r *result) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r.byName, r.bodies, r.refused, r.failed = maps.Clone(t.requests), maps.Clone(t.bodies), t.refused, t.failed
	for _, n := range t.requests {
		r.requests += n
	}
	for _, n := range t.seconds {
		r.perSecond = max(r.perSecond, n)
	}
	r.bytes, r.watches = int(t.bytes.Load()), int(t.watches.Load())
}

// noteRequest counts a request, and returns the name under which it is counted. The status is 0 without
// an answer.
func (t *traffic) noteRequest(name string, status int) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last = time.Now()
	if status == 0 {
		t.failed++
		return name
	}
	t.seconds[t.last.Unix()]++
	if status >= http.StatusBadRequest {
		t.refused++
		name += fmt.Sprintf(" refused with %d", status)
	}
	t.requests[name]++
	return name
}

// noteBody counts bytes of a body.
func (t *traffic) noteBody(name string, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.bodies[name] += n
}

// transport counts the requests of a client.
type transport struct {
	*traffic

	next http.RoundTripper
}

var requestInfos = request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}

// RoundTrip implements [http.RoundTripper].
func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	info, err := requestInfos.NewRequestInfo(r)
	if err != nil {
		return nil, err
	}
	name := strings.TrimSuffix(info.Verb+" "+info.Resource+"/"+info.Subresource, "/")
	if !info.IsResourceRequest {
		name = info.Verb + " " + info.Path
	}
	if r.URL.Query().Has("dryRun") {
		name += " in a dry run"
	}
	response, err := t.next.RoundTrip(r)
	if err != nil {
		t.noteRequest(name, 0)
		return nil, err
	}
	name = t.noteRequest(name, response.StatusCode)
	t.noteBody(name, int(max(0, r.ContentLength)))
	end := func() {}
	if info.Verb == "watch" && response.StatusCode == http.StatusOK {
		t.watches.Add(1)
		end = sync.OnceFunc(func() { t.watches.Add(-1) })
	}
	response.Body = &answerBody{response.Body, func(n int) { t.noteBody(name, n) }, end}
	return response, nil
}

// answerBody is the body of an answer.
type answerBody struct {
	io.ReadCloser

	note func(n int) // called with the number of bytes that were read
	end  func()      // called at the end, once or more
}

// Read implements [io.Reader].
func (b *answerBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.note(n)
	if err != nil {
		b.end()
	}
	return n, err
}

// Close implements [io.Closer].
func (b *answerBody) Close() error {
	b.end()
	return b.ReadCloser.Close()
}

// dialer counts the bytes of the connections of one client, and closes them.
type dialer struct {
	*traffic

	mu    sync.Mutex
	conns []net.Conn
}

func (d *dialer) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.conns = append(d.conns, conn)
	return countedConn{conn, d.traffic}, nil
}

func (d *dialer) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, conn := range d.conns {
		_ = conn.Close() // the process that had it has ended
	}
}

type countedConn struct {
	net.Conn

	traffic *traffic
}

// Read implements [net.Conn].
func (c countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.traffic.bytes.Add(int64(n))
	return n, err
}

// Write implements [net.Conn].
func (c countedConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.traffic.bytes.Add(int64(n))
	return n, err
}
