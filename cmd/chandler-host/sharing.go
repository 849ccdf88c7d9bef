//go:build cgo

package main

import (
	"context"
	"io"
	"log"
	"os"
	"os/signal"
	"syscall"

	"chandler.dev/cmd/chandler-host/sharing"
)

// runSharing runs the service for claims until it receives a signal to end.
func (o *options) runSharing(io.Writer) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return sharing.Run(ctx, sharing.Config{
		Dir:     o.sharing,
		Root:    o.driverRoot,
		Private: true,
		Log:     log.New(os.Stderr, "chandler-host: ", 0),
	})
}
