package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"chandler.dev/e2e/chandler"
)

// An agent is a DRA driver as the benchmark runs it: a program on the node that serves the same
// socket as for the kubelet.
type agent struct {
	name    string // in tables
	driver  string
	program string
	args    []string
	device  func(number int) string // returns the name of a device
	devices int                     // the number of devices to publish
	slow    bool                    // Its claims wait for the request limit of its own client.
}

// chandlerAgent returns the agent of this project with the flags of its DaemonSet, on the simulated
// host with n devices.
func (b *bench) chandlerAgent(name string, n int, args ...string) *agent {
	return &agent{
		name: name, driver: chandler.Driver, program: b.project.Agent, devices: n,
		args: append([]string{
			"run", "--kubeconfig=" + nodeKubeconfig, "--node-name=" + b.cluster.NodeName(),
			"--host-root=" + chandler.HostDir, "--runtime-root=" + chandler.HostDir, "--healthz-bind-address=" + metricsAddress,
		}, args...),
		device: func(number int) string { return newGPU(number).device() },
	}
}

// exampleAgent returns dra-example-driver with the flags of its chart. The driver publishes n
// made-up devices.
func (b *bench) exampleAgent(name string, n int, args ...string) *agent {
	return &agent{
		name: name, driver: "gpu.example.com", program: b.example, devices: n,
		args: append([]string{
			"--kubeconfig=" + nodeKubeconfig, "--node-name=" + b.cluster.NodeName(), "--cdi-root=" + chandler.CDIDir,
			"--num-devices=" + strconv.Itoa(n), "--healthcheck-port=51515", "--metrics-port=8080",
		}, args...),
		device: func(number int) string { return "gpu-" + strconv.Itoa(number) },
	}
}

// Flags of agents. The flags for the request limit of the API client are the same in both drivers.
var (
	liftedLimit     = []string{"--kube-api-qps=10000", "--kube-api-burst=10000"}
	withoutMetadata = "--device-metadata=false"
)

// A running agent is a process on the node.
type running struct {
	*agent
	bench  *bench
	cmd    *exec.Cmd
	log    bytes.Buffer // read once the process has ended
	ended  chan struct{}
	conn   *grpc.ClientConn
	client drapb.DRAPluginClient
}

// soon is the backoff while a socket does not listen yet. gRPC's default would wait for a second.
var soon = backoff.Config{BaseDelay: time.Millisecond, Multiplier: 1, MaxDelay: time.Millisecond}

// launch starts the agent without waiting until the agent can serve calls.
func (b *bench) launch(ctx context.Context, a *agent) (*running, error) {
	r := &running{agent: a, bench: b, ended: make(chan struct{})}
	r.cmd = b.cluster.Command(context.WithoutCancel(ctx), a.program, a.args...)
	r.cmd.Stdout, r.cmd.Stderr = &r.log, &r.log
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C reaches only the benchmark, which then stops the agent.
	if err := r.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", a.name, err)
	}
	go func() {
		_ = r.cmd.Wait() // The result is in ProcessState.
		close(r.ended)
	}()
	var err error
	r.conn, err = grpc.NewClient("unix://"+b.cluster.NodePath(a.stateDir())+"/dra.sock",
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(grpc.ConnectParams{Backoff: soon}))
	if err != nil {
		return nil, errors.Join(err, r.stop())
	}
	r.client = drapb.NewDRAPluginClient(r.conn)
	return r, nil
}

// start starts the agent. It returns when the devices are in the API server and the agent answers
// calls.
func (b *bench) start(ctx context.Context, a *agent) (*running, error) {
	r, err := b.launch(ctx, a)
	if err != nil {
		return nil, err
	}
	err = r.until(ctx, "devices in the API server", func(ctx context.Context) error {
		published, err := b.published(ctx, a.driver)
		if err == nil && published != a.devices {
			err = fmt.Errorf("there are %d of %d", published, a.devices)
		}
		return err
	})
	if err == nil {
		err = r.until(ctx, "an answer", func(ctx context.Context) error {
			_, err := r.client.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{})
			return err
		})
	}
	if err != nil {
		return nil, errors.Join(err, r.stop())
	}
	return r, nil
}

// published returns the number of a driver's devices in the API server.
func (b *bench) published(ctx context.Context, driver string) (int, error) {
	slices, err := b.kube.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + driver})
	if err != nil {
		return 0, err
	}
	n := 0
	for _, slice := range slices.Items {
		n += len(slice.Spec.Devices)
	}
	return n, nil
}

// until calls the function is every millisecond until the function returns no error. It returns an
// error if the agent ends first or patience elapses.
func (r *running) until(ctx context.Context, what string, is func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := is(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-r.ended:
			return fmt.Errorf("%s ended: %s\n%s", r.name, r.cmd.ProcessState, lastLines(r.log.Bytes()))
		case <-ctx.Done():
			return fmt.Errorf("%s: wait for %s: %w; last: %w", r.name, what, context.Cause(ctx), err)
		case <-time.After(time.Millisecond):
		}
	}
}

func lastLines(log []byte) []byte {
	lines := bytes.Split(bytes.TrimSpace(log), []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-15):], []byte("\n"))
}

// stop ends the agent. The claims stay prepared for the next agent.
func (r *running) stop() error {
	var err error
	if r.conn != nil {
		err = r.conn.Close()
	}
	_ = r.cmd.Process.Signal(syscall.SIGTERM) // fails only if the process has ended
	select {
	case <-r.ended:
	case <-time.After(patience):
		_ = r.cmd.Process.Kill()
		<-r.ended
		return errors.Join(err, fmt.Errorf("%s did not end", r.name))
	}
	return err
}

// forget removes the agent's state on the node and in the API server, so that the next agent starts
// from nothing.
func (b *bench) forget(ctx context.Context, a *agent) error {
	err := b.kube.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + a.driver})
	return errors.Join(err, os.RemoveAll(b.cluster.NodePath(a.stateDir())))
}

// stateDir returns the agent's directory on the node.
func (a *agent) stateDir() string { return "/var/lib/kubelet/plugins/" + a.driver }
