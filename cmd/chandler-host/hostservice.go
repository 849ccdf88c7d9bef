//go:build cgo

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"chandler.dev/discovery"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/internal/hostservice"
	"chandler.dev/internal/provision"
)

// version is set by the linker: -ldflags "-X main.version=v1.2.3".
var version = ""

// runHostService serves the agent's requests to change and examine the host, until it receives a
// signal to end.
func (o *options) runHostService(io.Writer) error {
	allowed, err := parseAllowed(o.allow)
	if err != nil {
		return err
	}
	host, err := hostfs.Open(o.hostRoot)
	if err != nil {
		return err
	}
	write, err := provision.Writer(o.hostRoot)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return hostservice.Run(ctx, o.hostService, hostservice.NewServer(hostservice.Config{
		Host:    &discovery.Host{FS: host},
		Program: cmp.Or(version, "development"),
		Allowed: allowed,
		Write:   write,
		Log:     log.New(os.Stderr, "host service: ", 0),
	}))
}

// parseAllowed returns the attributes of a list with commas.
func parseAllowed(list string) (allowed []string, err error) {
	for name := range strings.SplitSeq(list, ",") {
		switch {
		case list == "":
		case !slices.Contains(hostservice.ListAttributes(), name):
			return nil, fmt.Errorf("--allow: %q is none of %s", name, strings.Join(hostservice.ListAttributes(), ", "))
		default:
			allowed = append(allowed, name)
		}
	}
	return allowed, nil
}
