package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"chandler.dev/deployments"
	"chandler.dev/internal/inventory"
	"chandler.dev/internal/web"
)

// pageAddress is the default address of the web UI, reachable only from this machine.
const pageAddress = "127.0.0.1:8083"

// servePage serves the web UI until the context ends, and prints its address.
func servePage(ctx context.Context, out io.Writer, address string, read func() *inventory.Inventory) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("serve page: %w", err)
	}
	fmt.Fprintf(out, "The page is at http://%s/ until you press Ctrl-C.\n", listener.Addr())
	host, _, _ := net.SplitHostPort(address) //nolint:errcheck // Listen accepted the address
	return servePageOn(ctx, listener, read, host)
}

// servePageOn serves the web UI on a listener until the context ends. names are the host names that
// browsers may use.
func servePageOn(ctx context.Context, listener net.Listener, read func() *inventory.Inventory, names ...string) error {
	pages := &web.Server{Read: read, Hosts: names}
	server := &http.Server{Handler: pages.Handler(), ReadHeaderTimeout: 5 * time.Second, MaxHeaderBytes: 16 << 10}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve page: %w", err)
	}
	return nil
}

// pageRetry is the interval between attempts to listen on an address in use, for example by the
// previous agent.
const pageRetry = 10 * time.Second

// shippedClasses returns the DeviceClasses that come with Chandler. The web UI uses them to show
// how to request a device.
func shippedClasses() ([]inventory.Class, error) {
	classes, err := deployments.DeviceClasses()
	if err != nil {
		return nil, err
	}
	return web.CompileClasses(classes)
}

// pageServer returns the function that serves the agent's web UI, or nil without an address. The
// agent continues if the web UI cannot be served.
func (o *runOptions) pageServer(client kubernetes.Interface) func(context.Context, func() (inventory.Facts, bool)) {
	if o.pageAddress == "" {
		return nil
	}
	return func(ctx context.Context, facts func() (inventory.Facts, bool)) {
		version := versionReader(ctx, client)
		read := pageReader(facts, func() []inventory.Class {
			classes, err := shippedClasses()
			if err != nil {
				klog.FromContext(ctx).Error(err, "The web UI cannot show how to request devices")
			}
			return classes
		}, version)
		said := false
		for ctx.Err() == nil {
			listener, err := new(net.ListenConfig).Listen(ctx, "tcp", o.pageAddress)
			if err == nil {
				host, _, _ := net.SplitHostPort(o.pageAddress) //nolint:errcheck // Listen accepted the address
				err = servePageOn(ctx, listener, read, host, o.nodeName)
			}
			if err != nil && ctx.Err() == nil && !said {
				said = true
				klog.FromContext(ctx).Error(err, "The web UI cannot be served; retrying", "address", o.pageAddress)
			}
			select {
			case <-ctx.Done():
			case <-time.After(pageRetry):
			}
		}
	}
}

// pageReader returns the function that reads the inventory for the web UI. The function calls
// compile at the first read only: the compiled classes take 2 MB, and few web UIs are ever opened.
func pageReader(facts func() (inventory.Facts, bool), compile func() []inventory.Class, version func() string) func() *inventory.Inventory {
	classes := sync.OnceValue(compile)
	return func() *inventory.Inventory {
		found, known := facts()
		if !known {
			return nil
		}
		found.Classes, found.Kubernetes = classes(), version()
		return inventory.Make(found)
	}
}

// versionReader returns a function that reads the version of the API server for the web UI, "" until the
// server has answered. The first call requests the version, because few web UIs are ever opened.
func versionReader(ctx context.Context, client kubernetes.Interface) func() string {
	var version atomic.Value
	version.Store("")
	request := sync.OnceFunc(func() {
		go func() {
			for ctx.Err() == nil {
				if said := serverVersion(client); said != "" {
					version.Store(said)
					return
				}
				select {
				case <-ctx.Done():
				case <-time.After(pageRetry):
				}
			}
		}()
	})
	return func() string {
		request()
		return version.Load().(string)
	}
}

// serverVersion returns the version of the API server, "" if the server does not answer.
func serverVersion(client kubernetes.Interface) string {
	version, err := client.Discovery().ServerVersion()
	if err != nil {
		return ""
	}
	return strings.TrimPrefix(version.GitVersion, "v")
}
