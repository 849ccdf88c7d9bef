package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	"chandler.dev/internal/reviewed"
)

// server returns the function that serves health checks and metrics, or nil if there is no address
// for them. If metrics have their own address, they are served only there, and only to clients that
// the API server authorizes.
func (o *runOptions) server(review reviewed.Clients) (func(context.Context, http.Handler) error, error) {
	if o.metricsAddress == "" {
		if o.healthAddress == "" {
			return nil, nil
		}
		return func(ctx context.Context, handler http.Handler) error {
			return serve(ctx, o.healthAddress, handler, nil)
		}, nil
	}
	secure, err := reviewed.TLSConfig(o.nodeName, o.metricsCertificate, o.metricsKey)
	if err != nil {
		return nil, fmt.Errorf("serve metrics: %w", err)
	}
	return func(ctx context.Context, handler http.Handler) error {
		group, ctx := errgroup.WithContext(ctx)
		if o.healthAddress != "" {
			group.Go(func() error { return serve(ctx, o.healthAddress, servePaths(handler, "/healthz", "/readyz"), nil) })
		}
		group.Go(func() error {
			return serve(ctx, o.metricsAddress, reviewed.New(review, servePaths(handler, "/metrics")), secure)
		})
		return group.Wait()
	}, nil
}

// servePaths serves some paths of a handler.
func servePaths(handler http.Handler, paths ...string) http.Handler {
	mux := http.NewServeMux()
	for _, path := range paths {
		mux.Handle(path, handler)
	}
	return mux
}

// serve serves until the context ends, with TLS if configured.
func serve(ctx context.Context, address string, handler http.Handler, secure *tls.Config) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("serve health and metrics: %w", err)
	}
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve health and metrics: %w", err)
	}
	return nil
}
