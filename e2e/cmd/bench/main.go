// Command bench starts a real Kubernetes on this machine, measures Chandler and dra-example-driver
// on the same node, and prints the results as tables. The command cleans up afterwards. The section
// churn alone needs neither a cluster nor root.
//
// Both drivers run as programs on the node. The benchmark calls their sockets as the kubelet does,
// with claims that are in the API server. Compare figures only with figures of the same machine and
// the same run.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
	"chandler.dev/e2e/kubectl"
)

// patience is the time limit of each single step.
const patience = 3 * time.Minute

// exampleProgram is the driver that Chandler is compared with. It is built in a module of its own,
// because its dependencies differ from those of e2e.
const (
	exampleModule  = "exampledriver"
	exampleProgram = "sigs.k8s.io/dra-example-driver/cmd/dra-example-kubeletplugin"
)

// nodeKubeconfig is the kubeconfig of programs on the node.
const nodeKubeconfig = "/etc/kubernetes/bench.kubeconfig"

// A bench is a cluster to measure on. Sections that need no cluster run without one.
type bench struct {
	dir     string // the checkout of Chandler
	project chandler.Project
	example string // the program of the example driver
	cluster *cluster.Cluster
	kube    *kubectl.Client
	rounds  int
	tables  io.Writer
	begin   time.Time
}

// A section is one part of the benchmark.
type section struct {
	name      string
	onCluster bool
	run       func(*bench, context.Context) error
}

// sections lists the sections in the order of measurement.
var sections = []section{
	{"memory", true, (*bench).measureMemory},
	{"server", true, (*bench).measureServer},
	{"calls", true, (*bench).measureCalls},
	{"held", true, (*bench).measureHeld},
	{"earlier", true, (*bench).measureEarlier},
	{"rest", true, (*bench).measureRest},
	{"slices", true, (*bench).measureSlices},
	{"pods", true, (*bench).measurePods},
	{"churn", false, (*bench).measureChurn},
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == metricsCommand {
		exit(writeMetrics(context.Background()))
	}
	if len(os.Args) > 1 && os.Args[1] == getCommand {
		exit(getOnNode(context.Background(), os.Args[2:]))
	}
	var names []string
	for _, s := range sections {
		names = append(names, s.name)
	}
	project := flag.String("project", "..", "the checkout of Chandler")
	only := flag.String("only", strings.Join(names, ","), "what to measure")
	rounds := flag.Int("rounds", 5, "how often each is measured, drivers taking turns")
	flag.Parse()
	wanted := strings.Split(*only, ",")
	for _, name := range wanted {
		if !slices.Contains(names, name) {
			exit(fmt.Errorf("-only %s: there are %s", name, strings.Join(names, ", ")))
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *project, wanted, *rounds)
	stop()
	exit(err)
}

func exit(err error) {
	switch {
	case errors.Is(err, context.Canceled):
		fmt.Fprintln(os.Stderr, "\nInterrupted; everything that was started has been stopped.")
		os.Exit(130)
	case err != nil:
		fmt.Fprintf(os.Stderr, "\nbench: %v\n", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// run measures the wanted sections, on a cluster that it starts and stops if a section needs one.
func run(ctx context.Context, dir string, wanted []string, rounds int) (err error) {
	dir, err = filepath.Abs(dir)
	if err != nil {
		return err
	}
	b := &bench{dir: dir, rounds: rounds, tables: os.Stdout, begin: time.Now()}
	if slices.ContainsFunc(sections, func(s section) bool { return s.onCluster && slices.Contains(wanted, s.name) }) {
		if os.Getuid() != 0 {
			return errors.New("this needs root, for the namespaces, mounts and cgroups that Kubernetes runs in")
		}
		if err := b.build(ctx); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, b.cluster.Stop()) }()
	}
	fmt.Fprintf(b.tables, "Of %s, %d CPUs, load average %s at the start, Kubernetes %s, %d rounds.\n",
		time.Now().Format(time.DateOnly), runtime.NumCPU(), loadAverage(), build.Version, rounds)
	for _, s := range sections {
		if !slices.Contains(wanted, s.name) {
			continue
		}
		b.say("measuring %s", s.name)
		if err := s.run(b, ctx); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	fmt.Fprintf(b.tables, "\nAll of it took %s; load average %s at the end.\n", time.Since(b.begin).Round(time.Second), loadAverage())
	return nil
}

// build builds all programs and starts the cluster.
func (b *bench) build(ctx context.Context) error {
	b.say("building Kubernetes, Chandler and the example driver (a first time takes about ten minutes, later ones seconds)")
	module := filepath.Join(b.dir, "e2e")
	builder := build.Builder{Module: module, Progress: os.Stderr}
	programs, err := builder.Cluster(ctx)
	if err != nil {
		return err
	}
	if b.project, err = chandler.Build(ctx, builder, programs, b.dir); err != nil {
		return err
	}
	if b.example, err = builder.Static(ctx, filepath.Join(module, exampleModule), exampleProgram); err != nil {
		return err
	}
	if b.cluster, err = cluster.Start(ctx, cluster.Config{Programs: programs, Progress: os.Stderr}); err != nil {
		return err
	}
	b.kube, err = kubectl.New(b.cluster.RESTConfig())
	if err == nil {
		err = b.writeKubeconfig()
	}
	if err != nil {
		return errors.Join(err, b.cluster.Stop())
	}
	return nil
}

// writeKubeconfig writes a kubeconfig with the endpoint that the cluster's own components use.
func (b *bench) writeKubeconfig() error {
	const name = "bench"
	rest := b.cluster.RESTConfig()
	return clientcmd.WriteToFile(api.Config{
		Clusters:       map[string]*api.Cluster{name: {Server: "https://" + cluster.APIServer, CertificateAuthorityData: rest.CAData}},
		AuthInfos:      map[string]*api.AuthInfo{name: {ClientCertificateData: rest.CertData, ClientKeyData: rest.KeyData}},
		Contexts:       map[string]*api.Context{name: {Cluster: name, AuthInfo: name}},
		CurrentContext: name,
	}, b.cluster.NodePath(nodeKubeconfig))
}

// say prints progress.
func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%6.1fs  "+format+"\n", append([]any{time.Since(b.begin).Seconds()}, args...)...)
}

// table prints a table below a heading.
func (b *bench) table(heading string, columns []string, rows [][]string) {
	fmt.Fprintf(b.tables, "\n%s\n\n| %s |\n|%s\n", heading, strings.Join(columns, " | "), strings.Repeat("---|", len(columns)))
	for _, row := range rows {
		fmt.Fprintf(b.tables, "| %s |\n", strings.Join(row, " | "))
	}
}

// loadAverage returns the machine's load average over the last minute, since other work of the
// machine affects the results.
func loadAverage() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	first, _, _ := strings.Cut(string(data), " ")
	return first
}
