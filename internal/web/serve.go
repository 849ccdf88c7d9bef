package web

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"chandler.dev/internal/inventory"
)

// Server serves the web UI of a host.
type Server struct {
	// Read returns the present inventory, nil while it is unknown.
	Read func() *inventory.Inventory

	// Hosts are names that browsers may use for this server, in addition to "localhost" and IP
	// addresses. Requests for other names are refused. Otherwise another site could let its own
	// name resolve to this address, and read the allocations.
	Hosts []string

	mu       sync.Mutex
	revision string
	changed  time.Time
}

// interval is the interval of checks for changes while a browser is connected.
const interval = time.Second

// Handler serves the document at /, its data at /inventory.json, and a stream of revisions at
// /events.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", s.servePage)
	mux.HandleFunc("GET /inventory.json", s.data)
	mux.HandleFunc("GET /events", s.serveEvents)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("Content-Security-Policy", Policy)
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("Referrer-Policy", "no-referrer")
		header.Set("Cross-Origin-Resource-Policy", "same-origin")
		header.Set("Cache-Control", "no-store")
		if !s.isKnownHost(r.Host) {
			http.Error(w, "open the web UI by localhost or an IP address", http.StatusMisdirectedRequest)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// isKnownHost reports whether browsers may use the name.
func (s *Server) isKnownHost(host string) bool {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	name = strings.Trim(name, "[]")
	if net.ParseIP(name) != nil || strings.EqualFold(name, "localhost") {
		return true
	}
	for _, known := range s.Hosts {
		if strings.EqualFold(name, known) {
			return true
		}
	}
	return false
}

// readInventory returns the inventory with its revision.
func (s *Server) readInventory() (*inventory.Inventory, Live) {
	inv := s.Read()
	if inv == nil {
		return nil, Live{}
	}
	if inv.Recorded != "" {
		return inv, Live{}
	}
	revision := revisionOf(inv)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.revision == "":
		s.changed = newestEvent(inv)
	case s.revision != revision:
		s.changed = inv.At
	}
	s.revision = revision
	return inv, Live{Events: "events", Revision: revision, Changed: s.changed}
}

// revisionOf returns a hash of an inventory, independent of its time.
func revisionOf(inv *inventory.Inventory) string {
	timeless := *inv
	timeless.At = time.Time{}
	data, err := json.Marshal(&timeless)
	if err != nil {
		data = []byte(err.Error())
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:8])
}

// newestEvent returns the time of the last event in an inventory.
func newestEvent(inv *inventory.Inventory) (newest time.Time) {
	note := func(at time.Time) {
		if at.After(newest) {
			newest = at
		}
	}
	for i := range inv.Holders {
		note(inv.Holders[i].Since)
	}
	for i := range inv.Attention {
		note(inv.Attention[i].Since)
	}
	return newest
}

func (s *Server) servePage(w http.ResponseWriter, r *http.Request) {
	inv, live := s.readInventory()
	if inv == nil {
		w.Header().Set("Refresh", "1")
		http.Error(w, "The first scan of this machine has not finished.", http.StatusServiceUnavailable)
		return
	}
	var out bytes.Buffer
	if err := RenderPage(&out, inv, live); err != nil {
		http.Error(w, fmt.Sprintf("render: %v", err), http.StatusInternalServerError)
		return
	}
	send(w, r, "text/html; charset=utf-8", out.Bytes())
}

func (s *Server) data(w http.ResponseWriter, r *http.Request) {
	inv := s.Read()
	if inv == nil {
		http.Error(w, "The first scan of this machine has not finished.", http.StatusServiceUnavailable)
		return
	}
	data, err := json.MarshalIndent(inv, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	send(w, r, "application/json", append(data, '\n'))
}

// send writes an answer, compressed if the browser supports compression.
func send(w http.ResponseWriter, r *http.Request, kind string, data []byte) {
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Vary", "Accept-Encoding")
	if !strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		_, _ = w.Write(data) // the browser may have disconnected
		return
	}
	w.Header().Set("Content-Encoding", "gzip")
	compressed := gzip.NewWriter(w)
	_, _ = compressed.Write(data)
	_ = compressed.Close()
}

// serveEvents sends the revision of the host, now and after each change.
func (s *Server) serveEvents(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	controller := http.NewResponseController(w)
	said, quiet := "", 0
	for ctx := r.Context(); ; {
		if _, live := s.readInventory(); live.Revision != "" && live.Revision != said {
			said, quiet = live.Revision, 0
			if _, err := fmt.Fprintf(w, "event: revision\ndata: %s\n\n", said); err != nil {
				return
			}
		} else if quiet++; quiet%15 == 0 { // keeps the stream alive
			if _, err := fmt.Fprint(w, ": alive\n\n"); err != nil {
				return
			}
		}
		if err := controller.Flush(); err != nil {
			return
		}
		if !sleep(ctx, interval) {
			return
		}
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
