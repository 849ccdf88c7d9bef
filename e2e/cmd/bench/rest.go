package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/e2e/cluster"
)

// watched is the time over which an idle agent is measured.
const watched = 2 * time.Minute

// sharesOfEach is the number of shares of each GPU in the device plugin API.
const sharesOfEach = 48

// sharedConfig offers shares of each GPU by the device plugin API.
var sharedConfig = fmt.Sprintf(`apiVersion: chandler.dev/v1alpha1
kind: DriverConfig
mode: DevicePlugin
sharing:
- cel: 'true'
  replicas: %d
`, sharesOfEach)

// measureRest measures the processor time of an idle agent.
func (b *bench) measureRest(ctx context.Context) error {
	if err := b.simulate(comparedDevices, 0); err != nil {
		return err
	}
	const config = "/var/lib/shared.yaml"
	if err := os.WriteFile(b.cluster.NodePath(config), []byte(sharedConfig), 0o644); err != nil {
		return err
	}
	shared := b.chandlerAgent(fmt.Sprintf("%d GPUs, %d IDs by the device-plugin API", comparedDevices, comparedDevices*sharesOfEach), comparedDevices, "--config="+config)
	shared.devices = 0 // none in the API server
	claimed := b.chandlerAgent(fmt.Sprintf("%d GPUs by DRA", comparedDevices), comparedDevices)
	var rows [][]string
	for _, a := range []*agent{claimed, shared} {
		used, err := b.restOf(ctx, a, comparedDevices*sharesOfEach)
		if err != nil {
			return err
		}
		rows = append(rows, []string{a.name, fmt.Sprintf("%.2f %%", 100*used.Seconds()/watched.Seconds())})
	}
	b.table(fmt.Sprintf("Of one core, within %s in which nothing happens:", watched), []string{"", "processor time"}, rows)
	return nil
}

// restOf starts an agent and returns the processor time of the agent while idle. For an agent
// without devices in the API server, restOf first waits until the kubelet has the given number of
// IDs.
func (b *bench) restOf(ctx context.Context, a *agent, ids int) (used time.Duration, err error) {
	r, err := b.start(ctx, a)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, r.stop(), b.forget(ctx, a)) }()
	if a.devices == 0 {
		if err := r.until(ctx, "IDs at the kubelet", func(ctx context.Context) error { return b.allocatable(ctx, ids) }); err != nil {
			return 0, err
		}
	}
	time.Sleep(settled)
	before, err := cluster.UsageOf(r.cmd)
	if err != nil {
		return 0, err
	}
	time.Sleep(watched)
	after, err := cluster.UsageOf(r.cmd)
	return after.CPU - before.CPU, err
}

// allocatable returns an error unless the node has the wanted number of allocatable amd.com/gpu.
func (b *bench) allocatable(ctx context.Context, want int) error {
	node, err := b.kube.CoreV1().Nodes().Get(ctx, b.cluster.NodeName(), metav1.GetOptions{})
	if err != nil {
		return err
	}
	if got := node.Status.Allocatable["amd.com/gpu"]; got.Value() != int64(want) {
		return fmt.Errorf("%s of %d are allocatable", got.String(), want)
	}
	return nil
}
