//go:build !cgo

// Command base is every program that Kubernetes stands on in one file: etcd and containerd, with ctr to look at the
// latter. Which one it is, its first argument says. It adds nothing to them.
//
// The containerd shim is not here: linked into the same file it would start the daemon's plugins too.
//
// It is only built without cgo, as a static program: with it, commands on all packages would compile containerd anew.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	_ "github.com/containerd/containerd/v2/cmd/containerd/builtins" // containerd's plugins
	containerd "github.com/containerd/containerd/v2/cmd/containerd/command"
	ctr "github.com/containerd/containerd/v2/cmd/ctr/app"
)

func main() {
	if len(os.Args) > 1 {
		os.Args = os.Args[1:] // the programs read their own name and arguments from there
	}
	if err := run(context.Background(), os.Args); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", os.Args[0], err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	switch args[0] {
	case "containerd":
		return containerd.App().Run(ctx, args)
	case "ctr":
		return ctr.New().Run(ctx, args)
	case "etcd":
		return runEtcd(ctx, args[1:])
	}
	return errors.New("usage: base containerd | ctr | etcd [ARGUMENT...]")
}
