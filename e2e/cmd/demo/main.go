// Command demo starts a real Kubernetes on this machine, shows Chandler on it, and cleans up
// afterwards.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
	"chandler.dev/e2e/kubectl"
)

func main() {
	keep := flag.Bool("keep", false, "leave the cluster running in the background, with Chandler on it")
	end := flag.Bool("stop", false, "end the cluster that was left running")
	keeper := flag.Bool("keeper", false, "be the process in the background that keeps the cluster (for -keep)")
	project := flag.String("project", "..", "the checkout of Chandler")
	flag.Parse()
	if flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	begin := time.Now()
	var err error
	switch {
	case *end:
		err = stopKeeper(ctx)
	case *keep:
		err = startKeeper(ctx, *project)
	case *keeper:
		err = keepCluster(ctx, *project, begin)
	default:
		err = show(ctx, *project, begin)
	}
	stop()
	switch {
	case errors.Is(err, context.Canceled):
		fmt.Fprintln(os.Stderr, "\nInterrupted; everything that was started has been stopped.")
		os.Exit(130)
	case err != nil:
		fmt.Fprintf(os.Stderr, "\nThis did not come to its end: %v\n", err)
		os.Exit(1)
	}
}

// show runs the demo from beginning to end.
func show(ctx context.Context, project string, begin time.Time) error {
	err := run(ctx, project, begin, func(ctx context.Context, d *demo, built time.Duration) error {
		for _, step := range []func(context.Context) error{d.pair, d.kvm, d.turns, d.nothingLeft} {
			if err := step(ctx); err != nil {
				return err
			}
		}
		fmt.Printf("\nBuilding took %s, Kubernetes and the demo %s.\n", built.Round(time.Second), (time.Since(begin) - built).Round(time.Second))
		return nil
	})
	if err == nil {
		fmt.Println("All of it worked. Nothing is left running.")
	}
	return err
}

// keepCluster starts a cluster with Chandler and leaves it running until ctx ends.
func keepCluster(ctx context.Context, project string, begin time.Time) error {
	release, err := becomeKeeper()
	if err != nil {
		return err
	}
	defer release()
	return run(ctx, project, begin, func(ctx context.Context, d *demo, _ time.Duration) error {
		heading("The cluster runs, with Chandler on it")
		fmt.Print(toType(d.cluster.Kubeconfig(), d.cluster.Node.Command(ctx, "bash").Args))
		if err := tellReady(); err != nil {
			return err
		}
		<-ctx.Done()
		return nil
	})
}

// toType returns the commands that the user of a cluster may type. The last one opens a shell on
// the node. There, the user's KUBECONFIG must not be set, because the address in it is only valid
// outside the node.
func toType(kubeconfig string, shell []string) string {
	return fmt.Sprintf(`export KUBECONFIG=%s

Try:         kubectl get resourceslices
             kubectl apply -f deployments/examples/gpu-pair.yaml
             kubectl -n chandler exec daemonset/chandler -- /chandler doctor
             kubectl -n chandler exec daemonset/chandler -- /chandler inventory
On the node: env -u KUBECONFIG %s
End it:      make cluster-stop
`, kubeconfig, strings.Join(shell, " "))
}

// run starts a cluster, installs Chandler on it, calls use, and stops the cluster.
func run(ctx context.Context, dir string, begin time.Time, use func(ctx context.Context, d *demo, built time.Duration) error) (err error) {
	if os.Getuid() != 0 {
		return errors.New("this needs root, for the namespaces, mounts and cgroups that Kubernetes runs in")
	}
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
	helm, err := builder.Helm(ctx)
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
	home, err := os.MkdirTemp("", "chandler-helm-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(home)) }()
	d := &demo{project: project, cluster: c, kubectl: k, helm: chandler.Helm{Program: helm, Kubeconfig: c.Kubeconfig(), Home: home}}
	if err := d.prepare(ctx); err != nil {
		return err
	}
	return use(ctx, d, built)
}

func heading(format string, args ...any) {
	bold, plain := "", ""
	if info, err := os.Stdout.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
		bold, plain = "\x1b[1m", "\x1b[0m"
	}
	fmt.Printf("\n%s== %s%s\n", bold, fmt.Sprintf(format, args...), plain)
}
