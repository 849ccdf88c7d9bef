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
	"time"

	"chandler.dev/discovery"
	"chandler.dev/discovery/families/fpgaintel"
	"chandler.dev/discovery/families/nvidia/facts"
	"chandler.dev/discovery/families/nvidia/userspace"
	"chandler.dev/discovery/hostfs"
	"chandler.dev/internal/child"
	"chandler.dev/internal/hostservice"
	"chandler.dev/internal/hostservice/wire"
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
	self, err := os.Executable()
	if err != nil {
		return err
	}
	config := hostservice.Config{
		Host:    &discovery.Host{FS: host},
		Program: cmp.Or(version, "development"),
		Allowed: allowed,
		Write:   write,
		Log:     log.New(os.Stderr, "host service: ", 0),
	}
	o.setPrograms(&config, self)
	if o.bitstreams != "" {
		config.Families = []*discovery.Family{fpgaintel.Family}
		config.Host.Roots = map[string]string{fpgaintel.Family.Roots[0]: o.bitstreams}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return hostservice.Run(ctx, o.hostService, hostservice.NewServer(config))
}

// setPrograms sets the programs that the service may run: this one, with arguments from the flags of
// the service.
func (o *options) setPrograms(config *hostservice.Config, self string) {
	config.Programs = make(map[string]func() (hostservice.Program, error))
	if o.serveFiles {
		config.Programs[userspace.ServiceProgram] = func() (hostservice.Program, error) {
			return child.Start(self, "--files", "--watch", "--interval="+userspace.ScanInterval.String(), "--host-root="+o.hostRoot, "--driver-root="+o.driverRoot)
		}
	}
	if !o.serveNVML {
		return
	}
	places := []string{"--host-root=" + o.hostRoot, "--driver-root=" + o.driverRoot, "--gpus=" + o.gpus}
	config.Programs[facts.Program] = func() (hostservice.Program, error) {
		return child.Start(self, append([]string{"--watch", "--interval=" + o.interval.String()}, places...)...)
	}
	config.Partitions = map[string]hostservice.PartitionProgram{
		facts.Program: {Args: facts.ChangeArgs, Run: func(args []string, held []*os.File) (*wire.Output, error) {
			ctx, cancel := context.WithTimeoutCause(context.Background(), changeLimit, fmt.Errorf("the program has not ended within %s", changeLimit))
			defer cancel()
			output, warning, err := child.Run(ctx, held, self, append(args, places...)...)
			return &wire.Output{Text: string(output), Warning: warning}, err
		}},
	}
}

// changeLimit limits the time for a change of a MIG instance, as the agent does without a service.
const changeLimit = time.Minute

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
