//go:build !cgo

// Command kube is every program of a one-node Kubernetes in one file: the API server and its etcd, the scheduler, the
// controller manager, the kubelet and containerd, with kubectl and ctr to look at them. Which one it is, its own name
// or its first argument says. It adds nothing to them.
//
// The containerd shim is not here: linked into the same file it would start the daemon's plugins too.
//
// It is only built without cgo, as a static program: with it, commands on all packages would compile Kubernetes anew.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	_ "github.com/containerd/containerd/v2/cmd/containerd/builtins" // containerd's plugins
	containerd "github.com/containerd/containerd/v2/cmd/containerd/command"
	ctr "github.com/containerd/containerd/v2/cmd/ctr/app"
	"github.com/spf13/cobra"
	"github.com/urfave/cli/v3"
	componentcli "k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // metrics of every client
	_ "k8s.io/component-base/metrics/prometheus/version"  // metrics of the version
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// programs holds what kube can be. Each gets the arguments after its name and returns its exit status.
var programs = map[string]func(ctx context.Context, args []string) int{
	"containerd":              cliProgram("containerd", containerd.App),
	"ctr":                     cliProgram("ctr", ctr.New),
	"etcd":                    runEtcd,
	"kube-apiserver":          cobraProgram(func(context.Context) *cobra.Command { return apiserver.NewAPIServerCommand() }),
	"kube-controller-manager": cobraProgram(func(context.Context) *cobra.Command { return controllermanager.NewControllerManagerCommand() }),
	"kube-scheduler":          cobraProgram(func(context.Context) *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubectl":                 cobraProgram(func(context.Context) *cobra.Command { return kubectl.NewDefaultKubectlCommand() }),
	"kubelet":                 cobraProgram(kubelet.NewKubeletCommand),
}

func main() {
	args := os.Args
	run := programs[filepath.Base(args[0])]
	if run == nil && len(args) > 1 {
		args = args[1:]
		run = programs[args[0]]
	}
	if run == nil {
		fmt.Fprintf(os.Stderr, "usage: kube PROGRAM [ARGUMENT...]\nprograms: %s\n",
			strings.Join(slices.Sorted(maps.Keys(programs)), ", "))
		os.Exit(2)
	}
	os.Args = args // the programs read their own name and arguments from there
	os.Exit(run(context.Background(), args[1:]))
}

func cobraProgram(build func(context.Context) *cobra.Command) func(context.Context, []string) int {
	return func(ctx context.Context, args []string) int {
		cmd := build(ctx)
		cmd.SetArgs(args)
		return componentcli.Run(cmd)
	}
}

// cliProgram is cobraProgram for the library that containerd's programs use.
func cliProgram(name string, build func() *cli.Command) func(context.Context, []string) int {
	return func(ctx context.Context, args []string) int {
		if err := build().Run(ctx, append([]string{name}, args...)); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
			return 1
		}
		return 0
	}
}
