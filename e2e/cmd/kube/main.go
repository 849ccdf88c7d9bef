//go:build !cgo

// Command kube is every program of Kubernetes for one node in one file: the API server, the scheduler, the controller
// manager and the kubelet, with kubectl to look at them. Which one it is, its first argument says. It adds nothing to
// them.
//
// This file is built of other versions of Kubernetes too, by the modules kube-1.31 and kube-1.34, which have it as a
// link. So it imports nothing of this module.
//
// It is only built without cgo, as a static program: with it, commands on all packages would compile Kubernetes anew.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	componentcli "k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // metrics of every client
	_ "k8s.io/component-base/metrics/prometheus/version"  // metrics of the version
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

// command returns the program of that name, nil if there is none.
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
		os.Args = os.Args[1:] // the programs read their own name and arguments from there
	}
	cmd := command(context.Background(), os.Args[0])
	if cmd == nil {
		fmt.Fprintln(os.Stderr, "usage: kube kube-apiserver | kube-controller-manager | kube-scheduler | kubectl | kubelet [ARGUMENT...]")
		os.Exit(2)
	}
	cmd.SetArgs(os.Args[1:])
	os.Exit(componentcli.Run(cmd))
}
