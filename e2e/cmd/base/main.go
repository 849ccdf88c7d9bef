//go:build !cgo

// Command base combines the programs below Kubernetes in one file: etcd, containerd, and ctr to
// inspect containerd. The first argument selects the program. Command base adds nothing to the
// programs.
//
// The containerd shim is a separate program: if it were linked into this file, it would start the
// plugins of the containerd daemon too.
//
// The package is only built without cgo, as a static program. Otherwise commands on all packages,
// such as go vet ./..., would compile containerd a second time.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	_ "github.com/containerd/containerd/v2/cmd/containerd/builtins" // the plugins of containerd
	containerd "github.com/containerd/containerd/v2/cmd/containerd/command"
	ctr "github.com/containerd/containerd/v2/cmd/ctr/app"
)

func main() {
	if len(os.Args) > 1 {
		os.Args = os.Args[1:] // The programs read their name and arguments from os.Args.
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
