// Command fleet runs many agents in one process against a real Kubernetes on this machine, and
// measures what they cost the API server and etcd, and what claims cost the scheduler. It prints the
// results as tables and cleans up afterwards.
//
// Each node is a model of a kubelet with a whole agent on a recorded host with eight GPUs. Each agent
// has its own connection and the identity of its service account.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"k8s.io/client-go/informers"
	resourcelisters "k8s.io/client-go/listers/resource/v1"
	"k8s.io/client-go/rest"

	"chandler.dev/cmd/chandler/agent"
	"chandler.dev/discovery"
	"chandler.dev/e2e/build"
	"chandler.dev/e2e/chandler"
	"chandler.dev/e2e/cluster"
	"chandler.dev/e2e/kubectl"
)

const (
	// patience is the time limit of each single step.
	patience = 10 * time.Minute

	// fleetLabel marks the nodes and pods of the fleet.
	fleetLabel = "fleet.chandler.dev/node"
)

// A fleet is a cluster with many simulated nodes.
type fleet struct {
	dir      string // the checkout
	cluster  *cluster.Cluster
	config   *rest.Config
	kube     *kubectl.Client
	slices   resourcelisters.ResourceSliceLister
	host     fs.FS
	settings agent.Settings // of agents that start
	nodes    []*node
	traffic  *traffic
	idle     usage // in idleTime without agents
	results  []result
	begin    time.Time
}

func main() {
	project := flag.String("project", "..", "the checkout of Chandler")
	sizes := flag.String("sizes", "50,100", "numbers of nodes; \"\" for none")
	only := flag.String("only", "", "measure only the situations with this text, after the start")
	pods := flag.Int("pods", 200, "number of pods with claims for the scheduler; 0 for none")
	flag.Parse()
	var numbers []int
	for size := range strings.SplitSeq(*sizes, ",") {
		if size == "" {
			continue
		}
		n, err := strconv.Atoi(size)
		if err != nil || n < 1 {
			exit(fmt.Errorf("-sizes %s: %q is not a number of nodes", *sizes, size))
		}
		numbers = append(numbers, n)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *project, *only, numbers, *pods)
	stop()
	exit(err)
}

func exit(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "\nfleet: %v\n", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// run starts a cluster, measures, and stops the cluster.
func run(ctx context.Context, dir, only string, sizes []int, pods int) (err error) {
	if os.Getuid() != 0 {
		return errors.New("this needs root, for the namespaces, mounts and cgroups that Kubernetes runs in")
	}
	f := &fleet{traffic: &traffic{}, begin: time.Now()}
	if f.dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	f.traffic.reset()
	if f.host, err = readHost(filepath.Join(f.dir, eightGPUs)); err != nil {
		return err
	}
	if f.settings, err = settingsFor(discovery.ModeDRA); err != nil {
		return err
	}
	if err := f.startCluster(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.cluster.Stop()) }()
	fmt.Printf("Of %s, %d CPUs, load average %s at the start, Kubernetes %s.\n", time.Now().Format(time.DateOnly), runtime.NumCPU(), loadAverage(), build.Version)
	for _, size := range sizes {
		if err := f.measure(ctx, size, only); err != nil {
			return err
		}
	}
	if len(sizes) > 0 {
		table("Situations:", resultColumns, resultRows(f.results))
		columns := []string{"situation"}
		for _, q := range quantities {
			columns = append(columns, q.name)
		}
		table(fmt.Sprintf("Exponents of the number of nodes, and the quantities of %d nodes:", largeFleet), columns, lawRows(f.results))
	}
	if pods > 0 {
		if err := f.measureScheduler(ctx, pods); err != nil {
			return err
		}
	}
	fmt.Printf("\nAll of it took %s; load average %s at the end.\n", time.Since(f.begin).Round(time.Second), loadAverage())
	return nil
}

// startCluster starts Kubernetes with Chandler's objects and without agents. The nodes of the fleet
// renew no leases, so that the grace period is long.
func (f *fleet) startCluster(ctx context.Context) error {
	programs, err := build.Builder{Module: filepath.Join(f.dir, "e2e"), Progress: os.Stderr}.Cluster(ctx)
	if err != nil {
		return err
	}
	f.cluster, err = cluster.Start(ctx, cluster.Config{Programs: programs, Progress: os.Stderr, ControllerManager: []string{"--node-monitor-grace-period=24h"}})
	if err != nil {
		return err
	}
	f.config = f.cluster.RESTConfig()
	if f.kube, err = kubectl.New(f.config); err == nil {
		err = f.install(ctx)
	}
	if err != nil {
		return errors.Join(err, f.cluster.Stop())
	}
	return nil
}

// install applies Chandler's objects except the DaemonSet, and follows the ResourceSlices.
func (f *fleet) install(ctx context.Context) error {
	project := chandler.Project{Dir: f.dir}
	if err := project.ApplyObjects(ctx, f.kube, project.Manifest("config.yaml")); err != nil {
		return err
	}
	if err := f.kube.Apply(ctx, fmt.Sprintf(cordon, f.cluster.NodeName())); err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(f.kube, 0)
	f.slices = factory.Resource().V1().ResourceSlices().Lister()
	factory.Start(ctx.Done())
	for kind, synced := range factory.WaitForCacheSync(ctx.Done()) {
		if !synced {
			return fmt.Errorf("follow %s: %w", kind, ctx.Err())
		}
	}
	return nil
}

// cordon keeps pods away from the node that runs Kubernetes.
const cordon = `
apiVersion: v1
kind: Node
metadata: {name: %s}
spec: {unschedulable: true}
`

// until calls the function is every half second until the function returns no error.
func (f *fleet) until(ctx context.Context, what string, is func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := is()
		if err == nil {
			return nil
		}
		if waited := sleep(ctx, 500*time.Millisecond); waited != nil {
			return fmt.Errorf("wait for %s: %w; last: %w", what, waited, err)
		}
	}
}

// sleep waits, and returns an error if the context ends first.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// say prints progress.
func (f *fleet) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%6.1fs  "+format+"\n", append([]any{time.Since(f.begin).Seconds()}, args...)...)
}

// String returns the result for progress, with the requests of each kind and the mean bytes of their
// bodies.
func (r result) String() string {
	text := strings.Join(resultRows([]result{r})[0], " | ")
	var names []string
	for name := range r.byName {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		text += fmt.Sprintf("\n\t%6d %s, %d bytes each", r.byName[name], name, r.bodies[name]/r.byName[name])
	}
	return text
}

// table prints a table below a heading.
func table(heading string, columns []string, rows [][]string) {
	fmt.Printf("\n%s\n\n| %s |\n|%s\n", heading, strings.Join(columns, " | "), strings.Repeat("---|", len(columns)))
	for _, row := range rows {
		fmt.Printf("| %s |\n", strings.Join(row, " | "))
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
