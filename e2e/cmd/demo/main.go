// Command demo shows Chandler at work on a real Kubernetes that it starts on
// this machine, and cleans up after itself.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
	"chandler.dev/e2e/kubectl"
)

func main() {
	keep := flag.Bool("keep", false, "leave the cluster running, with Chandler on it, until Ctrl-C")
	project := flag.String("project", "..", "the checkout of Chandler")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	begin := time.Now()
	err := run(ctx, *project, *keep, begin)
	stop()
	switch {
	case errors.Is(err, context.Canceled):
		fmt.Fprintln(os.Stderr, "\nInterrupted; everything that was started has been stopped.")
		os.Exit(130)
	case err != nil:
		fmt.Fprintf(os.Stderr, "\nThe demo did not come to its end: %v\n", err)
		os.Exit(1)
	case !*keep:
		fmt.Printf("\nAll of it worked, in %s. Nothing is left running.\n", time.Since(begin).Round(time.Second))
	}
}

func run(ctx context.Context, dir string, keep bool, begin time.Time) (err error) {
	dir, err = filepath.Abs(dir)
	if err != nil {
		return err
	}
	heading("Building Kubernetes and Chandler (a first time takes about ten minutes, later ones seconds)")
	builder := build.Builder{Module: filepath.Join(dir, "e2e"), Progress: os.Stdout}
	programs, err := builder.Cluster(ctx)
	if err != nil {
		return err
	}
	project, err := chandler.Build(ctx, builder, programs, dir)
	if err != nil {
		return err
	}
	built := time.Since(begin)
	fmt.Printf("Built in %s.\n", built.Round(time.Second))

	heading("Starting Kubernetes " + build.Version)
	c, err := cluster.Start(ctx, cluster.Config{Programs: programs, Progress: os.Stdout})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Stop()) }()
	k, err := kubectl.New(c.RESTConfig())
	if err != nil {
		return err
	}
	d := &demo{project: project, cluster: c, kubectl: k}
	if err := d.prepare(ctx); err != nil {
		return err
	}
	if keep {
		return d.keep(ctx)
	}
	for _, step := range []func(context.Context) error{d.pair, d.kvm, d.turns, d.nothingLeft} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	fmt.Printf("\nBuilding took %s, Kubernetes and the demo %s.\n", built.Round(time.Second), (time.Since(begin) - built).Round(time.Second))
	return nil
}

func heading(format string, args ...any) {
	fmt.Printf("\n\x1b[1m== "+format+"\x1b[0m\n", args...)
}
