//go:build !cgo

package main

import (
	"context"

	"github.com/spf13/cobra"
	"k8s.io/kubernetes/cmd/kubelet/app"
)

// kubelet returns the kubelet's command. In this version, the constructor takes no context.
func kubelet(context.Context) *cobra.Command { return app.NewKubeletCommand() }
