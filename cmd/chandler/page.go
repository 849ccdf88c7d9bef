package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"chandler.dev/deployments"
	"chandler.dev/discovery/families"
	"chandler.dev/discovery/rules"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/page"
)

// pageAddress is where pages are served unless another address is named. Only this
// machine reaches it.
const pageAddress = "127.0.0.1:8083"

// inventoryOf returns the inventory of a snapshot whose devices nobody was asked about.
// The file is that of a recorded host, "" for this machine.
func inventoryOf(snapshot *rules.Snapshot, file string) (*inventory.Inventory, error) {
	classes, err := page.Classes(deployments.DeviceClasses)
	if err != nil {
		return nil, err
	}
	facts := inventory.Facts{Version: buildVersion(), Families: len(families.All), Snapshot: snapshot, Classes: classes, At: time.Now()}
	if file != "" {
		facts.Recorded = filepath.Base(file)
		facts.Name = strings.TrimSuffix(facts.Recorded, ".host")
	} else if facts.Name, err = os.Hostname(); err != nil {
		return nil, fmt.Errorf("host name: %w", err)
	}
	return inventory.Make(facts), nil
}

// servePage serves a page until the context ends, and says where.
func servePage(ctx context.Context, out io.Writer, address string, read func() *inventory.Inventory) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("serve page: %w", err)
	}
	fmt.Fprintf(out, "The page is at http://%s/ until you press Ctrl-C.\n", listener.Addr())
	return serveOn(ctx, listener, pageServer(address, read).Handler())
}

// pageServer serves pages at an address.
func pageServer(address string, read func() *inventory.Inventory) *page.Server {
	server := &page.Server{Read: read}
	if name, _, err := net.SplitHostPort(address); err == nil && name != "" {
		server.Hosts = []string{name}
	}
	return server
}

// serveOn serves until the context ends.
func serveOn(ctx context.Context, listener net.Listener, handler http.Handler) error {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve page: %w", err)
	}
	return nil
}
