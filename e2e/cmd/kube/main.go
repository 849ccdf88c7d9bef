//go:build !cgo

// Command kube combines the programs of Kubernetes for one node in one file: the API server, the
// scheduler, the controller manager and the kubelet, and kubectl to inspect the cluster. The first
// argument selects the program. Command kube adds nothing to the programs.
//
// The modules kube-1.31 and kube-1.34 have this file as a link and build it with other versions of
// Kubernetes. The file must therefore import nothing of this module.
//
// The package is only built without cgo, as a static program. Otherwise commands on all packages,
// such as go vet ./..., would compile Kubernetes a second time.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	componentcli "k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // metrics of all clients
	_ "k8s.io/component-base/metrics/prometheus/version"  // version metrics
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

// command returns the named program, or nil for an unknown name.
func command(ctx context.Context, name string) *cobra.Command {
	switch name {
	case "kube-apiserver":
		return apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		return controllermanager.NewControllerManagerCommand()
	case "kube-scheduler":
		return scheduler.NewSchedulerCommand()
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand()
	case "kubelet":
		return kubelet(ctx)
	}
	return nil
}

func main() {
	if len(os.Args) > 1 {
		os.Args = os.Args[1:] // The programs read their name and arguments from os.Args.
	}
	cmd := command(context.Background(), os.Args[0])
	if cmd == nil {
		fmt.Fprintln(os.Stderr, "usage: kube kube-apiserver | kube-controller-manager | kube-scheduler | kubectl | kubelet [ARGUMENT...]")
		os.Exit(2)
	}
	cmd.SetArgs(os.Args[1:])
	os.Exit(componentcli.Run(cmd))
}
