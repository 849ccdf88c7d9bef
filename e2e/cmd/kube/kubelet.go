//go:build !cgo

package main

import (
	"context"

	"github.com/spf13/cobra"
	"k8s.io/kubernetes/cmd/kubelet/app"
)

// kubelet returns the command of the kubelet.
func kubelet(ctx context.Context) *cobra.Command { return app.NewKubeletCommand(ctx) }
